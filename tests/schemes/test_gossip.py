"""Gossip, against numbers worked by hand and its invariants, on ranks that are threads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import on_nodes, on_ranks, place

from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import Context, Gossip, Graph, RandomPermutation

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

FLAT = {"nodes": [[0], [1], [2], [3]]}


class Listed(Graph):
    """One list per step, over and over; a fragment s is s steps ahead."""

    def __init__(self, *rounds):
        self.rounds = rounds

    def send_to(self, size, step, fragment):
        return self.rounds[(step + fragment) % len(self.rounds)]


def simulate(work, scheme, starts=None, *, nodes=None, shapes=None, dtype=torch.float64, lr=0.5, **training):
    """Call ``work`` with a rank in training on every rank; its parameters are set to ``starts[rank]`` after binding."""
    nodes = nodes or [[rank] for rank in range(len(starts))]
    values = torch.as_tensor(0.0 if starts is None else starts, dtype=dtype)

    def body(rank):
        own = values if starts is None else values[rank.rank]
        torch.nn.utils.vector_to_parameters(own.expand_as(rank.values).to(place.device, copy=True), rank.parameters)
        rank.scheme.state.unsynchronized_steps = 1  # they differ
        return work(rank)

    shapes = shapes or {"x": values[0].numel() if starts is not None else 1}
    inner = partial(torch.optim.SGD, lr=lr)
    return on_nodes(body, scheme, nodes, shapes=shapes, dtype=dtype, inner=inner, **training)


@pytest.mark.parametrize("fragments", [1, 8])
def test_sgp_follows_the_table(run_oracle, fragments):
    traces = run_oracle(lambda: Gossip("directed_exponential", fragments), steps_per_epoch=4, **FLAT)
    table = [(2.5, 0.5, 1.5, 3.5), (2, 4, 2, 4), (4, 2, 3, 5), (2.75, 4.75, 2.75, 4.75)]
    assert list(zip(*(trace.after_step for trace in traces), strict=True)) == table


def test_push_sum_keeps_the_mean_on_a_graph_of_unequal_degrees():
    graph = Listed([[1, 2], [2], [0]])

    def work(rank):
        rank.train(0.0)
        x, w = rank.values * rank.scheme.own_weights[0], rank.scheme.own_weights[0]
        first = (x.item(), w, rank.values.item())
        for _ in range(60):
            rank.train(0.0)
        return first, rank.values.item(), rank.averaged().item()

    first, last, averaged = zip(*simulate(work, Gossip(graph, 1), [0, 3, 9]), strict=True)
    expected = [(9 / 2, 5 / 6, 5.4), (3 / 2, 5 / 6, 1.8), (6, 4 / 3, 4.5)]
    assert [pytest.approx(values) for values in expected] == list(first)
    assert last == pytest.approx((4, 4, 4))
    assert averaged == pytest.approx((4, 4, 4))


def test_a_narrow_wire_loses_no_update_from_the_sum():
    """A millionth is far below what bfloat16 resolves near 1; a thousand of them still arrive in the mean."""

    def work(rank):
        for _ in range(1000):
            rank.train(lambda x: torch.full_like(x, -1e-6 * (1 + rank.rank)))
        return rank.averaged().item(), rank.values.item()

    averaged, own = zip(*simulate(work, Gossip(), [1.0, 1.0, 1.0], lr=1.0, wire=Wire("bfloat16")), strict=True)
    assert averaged == pytest.approx([1 + 1000 * 2e-6] * 3, abs=1e-9)
    assert max(own) - min(own) < 2**-7


def test_the_ranks_of_a_node_share_the_bytes():
    def work(rank):
        before = rank.meter.snapshot()["inter_bytes"]
        rank.train(0.0)
        return rank.meter.snapshot()["inter_bytes"] - before

    nodes = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert simulate(work, Gossip(fragments=8), [[0.0] * 64] * 12, nodes=nodes) == [64 * 8 / 4] * 12
    wire = Wire("bfloat16")
    assert simulate(work, Gossip(fragments=8), [[0.0] * 64] * 12, nodes=nodes, wire=wire) == [64 * 2 / 4] * 12


SHAPES = {"stem": 10, "layer1": 6, "layer10": 6, "head": 2}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fragments": 1}, [24]),
        ({"fragments": 4}, [6, 6, 6, 6]),
        ({"fragments": 5}, [5, 5, 5, 5, 4]),
        ({"fragments": 100}, [1] * 24),
        ({"fragments": ["head", "layer1"]}, [2, 6, 16]),
        ({"fragments": ["stem", "layer1", "layer10", "head"]}, [10, 6, 6, 2]),
    ],
)
def test_fragments_come_by_count_and_module(options, expected):
    def work(rank):
        return [bucket.numel for bucket in rank.scheme._fragments]  # noqa: SLF001

    assert simulate(work, Gossip(**options), [0, 0], shapes=SHAPES) == [expected] * 2


def test_a_module_without_parameters_is_named():
    with pytest.raises(ValueError, match=r"no parameter is in 'layer2'.*head, layer1, layer10, stem"):
        simulate(lambda rank: None, Gossip(fragments=["layer1", "layer2"]), [0, 0], shapes=SHAPES)


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_state_saved_while_everything_is_frozen_loads(nodes):
    def work(rank):
        state = rank.scheme.state_dict()
        rank.scheme.load_state_dict(state)
        return state["weights"]

    saved = on_nodes(work, Gossip(push_sum=True), [[rank] for rank in range(nodes)], shapes={"a": 3}, frozen=["a"])
    assert saved == [[]] * nodes


def test_state_loads_with_weights_only_and_refuses_another_world(tmp_path):
    def save(rank):
        rank.train(0.0)
        rank.scheme.state.settle()
        return rank.scheme.state_dict()

    torch.save(simulate(save, Gossip(overlap=True), [0, 1, 2])[0], tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    with pytest.raises(ValueError, match="1 fragments on 3 nodes, this run 1 on 4"):
        simulate(lambda rank: rank.scheme.load_state_dict(state), Gossip(overlap=True), [0, 1, 2, 3])


def test_a_graph_that_differs_between_ranks_is_refused_by_all_of_them():
    schemes = [Gossip(RandomPermutation(seed=seed)) for seed in (0, 0, 1)]

    def body(topology):
        x = torch.nn.Parameter(torch.zeros(3))
        context = Context(Replica([x]), topology, torch.optim.SGD([x], lr=0.1))
        with pytest.raises(ValueError, match="gives rank 2 other fragments or peers"):
            schemes[topology.rank].build(context)

    on_ranks(body, [[0], [1], [2]])


def test_an_invalid_graph_is_refused_when_the_run_starts():
    with pytest.raises(ValueError, match="rank 2 sends to itself"):
        simulate(lambda rank: None, Gossip(Listed([[1], [0], [2]])), [0, 0, 0])
