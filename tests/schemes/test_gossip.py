"""Gossip, against numbers worked by hand and its invariants, on ranks that are threads."""

from __future__ import annotations

import copy
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from harness import on_nodes, on_ranks, place
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import same_bits

from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import AllReduce, Context, Gossip, Graph, PeriodicAveraging, RandomPermutation, Ring

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

FLAT = {"nodes": [[0], [1], [2], [3]]}
HOP_1, HOP_2 = [[1], [2], [3], [0]], [[2], [3], [0], [1]]


class Listed(Graph):
    """One list per step, over and over; a fragment s is s steps ahead."""

    def __init__(self, *rounds):
        self.rounds = rounds

    def send_to(self, size, step, fragment):
        return self.rounds[(step + fragment) % len(self.rounds)]


def received_from(*permutations):
    """The graph in which rank r receives from D[r], for a list of D."""
    return Listed(*([[d.index(rank)] for rank in range(len(d))] for d in permutations))


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


def mixed(steps):
    """The values before and after each of ``steps`` steps that only mix."""

    def work(rank):
        seen = [rank.values]
        for _ in range(steps):
            rank.train(0.0)
            rank.scheme.state.settle()
            seen.append(rank.values)
        return torch.stack(seen)

    return work


# ---- oracles ---------------------------------------------------------------------------------------------------------


def test_exponential_graph_of_four_averages_exactly_in_two_steps():
    seen = torch.stack(simulate(mixed(2), Gossip("directed_exponential"), [0, 2, 4, 10])).squeeze()
    assert seen[:, 1].tolist() == [5, 1, 3, 7]
    assert seen[:, 2].tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize("fragments", [1, 8])
def test_sgp_follows_the_table(run_oracle, fragments):
    traces = run_oracle(
        lambda: Gossip("directed_exponential", fragments, hierarchical=False), steps_per_epoch=4, **FLAT
    )
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


def test_crossover_mixes_each_fragment_with_another_rank():
    def work(rank):
        seen = rank.train(lambda x: x - (0, 2, 4, 10)[rank.rank])
        assert seen.tolist() == [0, 0]
        return rank.values.tolist()

    graph = received_from([3, 0, 1, 2], [1, 2, 3, 0])
    first, second = zip(*simulate(work, Gossip(graph, 2), [[0, 0]] * 4), strict=True)
    assert first == (2.5, 0.5, 1.5, 3.5)
    assert second == (0.5, 1.5, 3.5, 2.5)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_hierarchical_crossover_follows_the_table(run_oracle, ranks_per_node):
    nodes = [[0], [1], [2], [3]] if ranks_per_node == 1 else [[0, 1], [2, 3], [4, 5], [6, 7]]
    targets = [1, 7, 7, 5] if ranks_per_node == 1 else [0, 2, 4, 10, 7, 7, 5, 5]
    graph = received_from([3, 0, 1, 2], [2, 0, 3, 1])
    traces = run_oracle(lambda: Gossip(graph), nodes=nodes, targets=targets, steps_per_epoch=2)
    table = [(1.5, 2, 3.5, 3), (3.25, 2.875, 4.625, 4.25)]
    for rank, trace in enumerate(traces):
        assert trace.after_step == [row[rank // ranks_per_node] for row in table]


def test_rank_means_are_those_of_every_mean_preserving_scheme(run_oracle):
    traces = run_oracle(lambda: Gossip(RandomPermutation(seed=4)), nodes=[[0], [1], [2], [3]], steps_per_epoch=5)
    means = [sum(values) / 4 for values in zip(*(trace.after_step for trace in traces), strict=True)]
    assert means == [2, 3, 3.5, 3.75, 3.875]
    assert {trace.finished for trace in traces} == {3.875}


@pytest.mark.parametrize("weights", [None, (1, 3, 2, 2), (1, 1, 2, 4)])
@pytest.mark.parametrize("nodes", [[[0, 1], [2, 3]], [[0, 1, 2], [3]]])
def test_gossip_on_two_nodes_equals_averaging_at_every_step(run_oracle, nodes, weights):
    gossip = run_oracle(lambda: Gossip(), nodes=nodes, weights=weights, dtype=torch.float64)
    periodic = run_oracle(lambda: PeriodicAveraging(1), nodes=nodes, weights=weights, dtype=torch.float64)
    for ours, theirs in zip(gossip, periodic, strict=True):
        assert ours.after_step == pytest.approx(theirs.after_step, abs=1e-12)
        assert ours.finished == pytest.approx(theirs.finished, abs=1e-12)


def test_a_full_graph_averages_at_every_step(run_oracle):
    gossip = run_oracle(lambda: Gossip("full"), **FLAT)
    assert [t.after_step for t in gossip] == [t.after_step for t in run_oracle(lambda: PeriodicAveraging(1), **FLAT)]


def test_on_one_node_it_is_all_reduce(run_oracle):
    nodes = [[0, 1, 2, 3]]
    gossip, baseline = run_oracle(lambda: Gossip(overlap=True), nodes=nodes), run_oracle(AllReduce, nodes=nodes)
    assert [trace.after_step for trace in gossip] == [trace.after_step for trace in baseline]


@pytest.mark.parametrize("weights", [(1, 1, 2, 4), (3, 1, 1, 1)])
def test_flat_gossip_with_rank_weights_tends_to_the_weighted_minimum(run_oracle, weights):
    for options in ({}, {"graph": RandomPermutation("independent")}):
        trace = run_oracle(
            lambda: Gossip(hierarchical=False, **options),  # noqa: B023
            weights=weights,
            steps_per_epoch=200,
            learning_rate=0.02,
            dtype=torch.float64,
        )
        targets = (0.0, 2.0, 4.0, 10.0)
        minimum = sum(w * a for w, a in zip(weights, targets, strict=True)) / sum(weights)
        assert trace[0].finished == pytest.approx(minimum, rel=0.1)


def test_dp_sgd_takes_gradients_before_mixing(run_oracle):
    """x := W x - lr g(x) with W of the ring (1/3 self, 1/3 each neighbour), against the plain recursion."""
    traces = run_oracle(
        lambda: Gossip("ring", 1, hierarchical=False, overlap=True), dtype=torch.float64, steps_per_epoch=6, **FLAT
    )
    x, targets = torch.zeros(4, dtype=torch.float64), torch.tensor([0.0, 2, 4, 10], dtype=torch.float64)
    for step in range(6):
        x = (x + x.roll(1) + x.roll(-1)) / 3 - 0.5 * (x - targets)
        assert [trace.after_step[step] for trace in traces] == pytest.approx(x.tolist())
    assert [trace.finished for trace in traces] == pytest.approx([x.mean().item()] * 4)


# ---- invariants, for any graph, size and seed ------------------------------------------------------------------------

graphs = st.one_of(
    st.builds(
        RandomPermutation, st.sampled_from(["uniform", "cyclic", "roulette", "independent"]), st.integers(0, 999)
    ),
    st.sampled_from(["directed_exponential", "ring", "full"]),
)


# of up to 64 ranks, each a thread, it takes 2 to 30 s, by what is drawn
@pytest.mark.parametrize("most", [16, pytest.param(64, marks=pytest.mark.nightly)])
@settings(deadline=None, max_examples=15)
@given(graph=graphs, size=st.data(), fragments=st.integers(1, 4), overlap=st.booleans())
def test_mixing_keeps_sums_and_brings_replicas_together(most, graph, size, fragments, overlap):
    size = size.draw(st.integers(2, most) | st.integers(2, 8))
    starts = torch.randn(size, 4, generator=torch.Generator().manual_seed(size), dtype=torch.float64)

    def work(rank):
        for _ in range(5):
            rank.train(0.0)
        x = (
            rank.values
            * torch.tensor(rank.scheme.own_weights, dtype=torch.float64).repeat_interleave(-(-4 // fragments))[:4]
        )
        return x, rank.averaged(), rank.values

    x, averaged, z = map(
        torch.stack, zip(*simulate(work, Gossip(graph, fragments, overlap=overlap), starts.tolist()), strict=True)
    )
    torch.testing.assert_close(x.sum(0), starts.sum(0))
    torch.testing.assert_close(averaged, starts.mean(0).expand(size, 4))
    assert (z - z.mean(0)).norm() < (starts - starts.mean(0)).norm()


@settings(deadline=None, max_examples=25)
@given(
    graphs, st.integers(2, 16), st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([None, "bfloat16"])
)
def test_equal_replicas_stay_equal_to_the_bit(graph, size, dtype, wire):
    start = torch.randn(5, generator=torch.Generator().manual_seed(size)).tolist()
    if isinstance(graph, RandomPermutation) and graph.sampling == "independent":
        graph = RandomPermutation("uniform", graph.seed)  # push-sum weights round
    finals = simulate(mixed(3), Gossip(graph, 3), [start] * size, dtype=dtype, wire=Wire.named(wire))
    assert all(torch.equal(values, final[0]) for final in finals for values in final)


@settings(deadline=None, max_examples=15)
@given(graphs, st.lists(st.integers(1, 3), min_size=2, max_size=5), st.booleans())
def test_ranks_of_a_node_stay_equal_whichever_of_them_carries_a_fragment(graph, ranks_per_node, overlap):
    starts = [[node + 0.1, -node, 7.0, node**2] for node, ranks in enumerate(ranks_per_node) for _ in range(ranks)]
    first = [sum(ranks_per_node[:node]) for node in range(len(ranks_per_node))]
    nodes = [list(range(f, f + ranks)) for f, ranks in zip(first, ranks_per_node, strict=True)]

    def work(rank):
        for _ in range(4):
            rank.train(0.0)
        return rank.values.tolist(), rank.averaged().tolist()

    finals = simulate(work, Gossip(graph, 4, overlap=overlap), starts, nodes=nodes)
    for ranks in nodes:
        assert all(finals[rank] == finals[ranks[0]] for rank in ranks)
    assert len({str(averaged) for _, averaged in finals}) == 1


def test_a_narrow_wire_loses_no_update_from_the_sum():
    """A millionth is far below what bfloat16 resolves near 1; a thousand of them still arrive in the mean."""

    def work(rank):
        for _ in range(1000):
            rank.train(lambda x: torch.full_like(x, -1e-6 * (1 + rank.rank)))
        return rank.averaged().item(), rank.values.item()

    averaged, own = zip(*simulate(work, Gossip(), [1.0, 1.0, 1.0], lr=1.0, wire=Wire.named("bfloat16")), strict=True)
    assert averaged == pytest.approx([1 + 1000 * 2e-6] * 3, abs=1e-9)
    assert max(own) - min(own) < 2**-7


# ---- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["uniform", "cyclic", "roulette"])
def test_a_node_sends_the_model_once_a_step_however_many_nodes_there_are(sampling):
    def work(rank):
        before = rank.meter.snapshot()["inter_bytes"]
        for _ in range(3):
            rank.train(0.0)
        return (rank.meter.snapshot()["inter_bytes"] - before) / 3

    for size in (2, 3, 4, 8, 16):
        assert simulate(work, Gossip(RandomPermutation(sampling)), [[0.0] * 100] * size) == [800.0] * size


def test_the_ranks_of_a_node_share_the_bytes():
    def work(rank):
        before = rank.meter.snapshot()["inter_bytes"]
        rank.train(0.0)
        return rank.meter.snapshot()["inter_bytes"] - before

    nodes = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert simulate(work, Gossip(fragments=8), [[0.0] * 64] * 12, nodes=nodes) == [64 * 8 / 4] * 12
    wire = Wire.named("bfloat16")
    assert simulate(work, Gossip(fragments=8), [[0.0] * 64] * 12, nodes=nodes, wire=wire) == [64 * 2 / 4] * 12


# ---- fragments -------------------------------------------------------------------------------------------------------

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


# ---- overlap, skipped steps, resume ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["uniform", "independent"])
def test_averaging_during_an_exchange_counts_every_mass_once(sampling):
    def work(rank, look):
        averaged = []
        for step in range(6):
            rank.train(lambda x: x - rank.rank)
            if look and step % 2:
                averaged.append(rank.averaged().tolist())
        return averaged, rank.values.tolist()

    scheme, starts = (
        Gossip(RandomPermutation(sampling), overlap=True, fragments=2),
        [[1.0, 5.0], [2.0, 4.0], [3.0, 3.0], [9.0, 1.0]],
    )
    averaged, looked = zip(*simulate(lambda rank: work(rank, True), scheme, starts), strict=True)
    _, did_not = zip(*simulate(lambda rank: work(rank, False), scheme, starts), strict=True)
    assert looked == did_not
    assert all(values == averaged[0] for values in averaged)
    if sampling == "uniform":  # equal curvatures: the mean follows the mean gradient
        mean = torch.tensor(starts).mean(0).double()
        for values in averaged[0]:
            mean = 1.5 + (mean - 1.5) / 4
            assert values == pytest.approx(mean.tolist())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sampling", ["uniform", "independent"])
def test_a_step_that_a_scaler_skips_on_one_rank_still_mixes(sampling, overlap):
    def work(rank):
        for step in range(6):
            rank.train(0.0, skip=rank.rank == 1 and step % 2 == 0)
        return rank.averaged().item(), rank.scheme.state.steps

    averaged, steps = zip(
        *simulate(work, Gossip(RandomPermutation(sampling), overlap=overlap), [0.0, 3.0, 9.0]), strict=True
    )
    assert averaged == pytest.approx((4, 4, 4))
    assert steps == (6, 6, 6)


def test_push_sum_s_weights_are_saved_to_the_bit():
    weights = [[1 / 3, 5 / 3, 1.0]]

    def work(rank):
        rank.scheme.state.weights = copy.deepcopy(weights)
        state = rank.scheme.state_dict()
        rank.scheme._restart()  # noqa: SLF001
        rank.scheme.load_state_dict(state)
        return rank.scheme.state.weights

    assert simulate(work, Gossip(RandomPermutation("independent"), fragments=1), [0, 1, 2]) == [weights] * 3


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


def test_plain_checkpoint_restarts_gossip_from_the_average():
    def work(rank):
        for _ in range(3):
            rank.train(0.0)
        counts = {name: value for name, value in rank.scheme.state_dict(shared=True).items() if isinstance(value, int)}
        rank.scheme.state.settle()
        rank.scheme.synchronize()
        rank.scheme.load_state_dict({**counts, "unsynchronized_steps": 0})
        rank.train(0.0)
        return rank.values.item(), rank.scheme.state.steps

    assert simulate(work, Gossip("directed_exponential", overlap=True), [0, 3, 9]) == [(4, 4)] * 3


# ---- errors, disagreement --------------------------------------------------------------------------------------------


def test_a_graph_that_differs_between_ranks_is_refused_by_all_of_them():
    schemes = [Gossip(RandomPermutation(seed=seed)) for seed in (0, 0, 1)]

    def body(topology):
        with pytest.raises(ValueError, match="gives rank 2 other fragments or peers"):
            schemes[topology.rank].build(Context(Replica([torch.zeros(3)]), topology))

    on_ranks(body, [[0], [1], [2]])


def test_a_graph_is_asked_once_for_a_step_and_fragment():
    def work(rank):
        rank.scheme._peers.graph = graph = Counted()  # noqa: SLF001
        for _ in range(3):
            rank.train(0.0)
        return graph.asked

    class Counted(Ring):
        def __init__(self):
            self.asked = []

        def send_to(self, size, step, fragment):
            self.asked.append((step, fragment))
            return super().send_to(size, step, fragment)

    for asked in simulate(work, Gossip("ring", fragments=2), [[0, 0], [1, 1]]):
        assert asked
        assert len(asked) == len({*asked})


def test_an_invalid_graph_is_refused_when_the_run_starts():
    with pytest.raises(ValueError, match="rank 2 sends to itself"):
        simulate(lambda rank: None, Gossip(Listed([[1], [0], [2]])), [0, 0, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"graph": "star"}, "graph='star' must be one of"),
        ({"fragments": 0}, "fragments=0"),
        ({"fragments": -3}, "fragments=-3"),
        ({"fragments": []}, r"fragments=\[\]"),
        ({"fragments": "layer1"}, "fragments='layer1'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Gossip(**arguments)


def test_gossip_estimates_disagreement_without_sending():
    size, elements = 8, 50_000
    starts = 3 + torch.randn(size, elements, generator=torch.Generator().manual_seed(1))
    distance = (starts - starts.mean(0)).square().sum(1).mean().sqrt() / starts.square().sum(1).mean().sqrt()

    def work(rank):
        assert rank.scheme.scalars() == {}
        rank.train(0.0)
        sent = rank.meter.snapshot()["inter_bytes"]
        value = rank.scheme.scalars()["disagreement"]
        assert rank.meter.snapshot()["inter_bytes"] == sent
        for _ in range(20):
            rank.train(0.0)
        return value, rank.scheme.scalars()["disagreement"]

    before, after = zip(*simulate(work, Gossip(), starts.tolist()), strict=True)
    assert before == pytest.approx([distance.item()] * size, rel=0.05)
    assert max(after) < 0.02 * distance


# ---- over real processes ---------------------------------------------------------------------------------------------


class Adversaries(pl.LightningModule):
    """Two optimizers in turn, BatchNorm, a frozen layer; ``report`` is what validation saw."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4))
        self.second = torch.nn.Sequential(torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 2))
        self.report = []

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers()[: 1 + batch_idx % 2]:
            optimizer.zero_grad()
            self.manual_backward(self.second(self.first(batch)).sub(self.global_rank).square().mean())
            optimizer.step()

    def validation_step(self, batch, batch_idx):
        self.report.append(torch.cat([p.detach().flatten() for p in self.parameters()]).tolist())

    def configure_optimizers(self):
        return torch.optim.Adam(self.first.parameters()), torch.optim.SGD(self.second[1].parameters(), lr=0.1)

    def train_dataloader(self):
        values = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(values, batch_size=4)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=4)


@pytest.mark.pairwise
@pytest.mark.pooled
@pytest.mark.parametrize("hierarchical", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fragments": ["first.0", "second"], "overlap": True},
        {"graph": RandomPermutation("independent"), "overlap": True},
    ],
)
def test_two_optimizers_gossip_apart_and_end_on_the_same_bits_everywhere(fit, hierarchical, options):
    strategy = {"scheme": Gossip(hierarchical=hierarchical, **options), "ranks_per_node": [1, 1, 2]}
    reports = fit(Adversaries(), strategy, max_epochs=2, val_check_interval=1, num_sanity_val_steps=0)
    assert len(reports[0]["report"]) == 8
    assert [report["report"] for report in reports] == [reports[0]["report"]] * 4
    unseen = fit(Adversaries(), strategy, max_epochs=2, limit_val_batches=0)
    same_bits([*reports, unseen[0]])


def test_gossip_without_push_sum_takes_plain_means():
    # everybody receives from rank 0, which receives from 1: (0, 2, 4, 10) -> ((0 + 2) / 2, (2 + 0) / 2, 2, 5)
    scheme = Gossip(Listed([[1, 2, 3], [0], [], []]), fragments=1, hierarchical=False, push_sum=False)
    seen = torch.stack(simulate(mixed(1), scheme, [0, 2, 4, 10])).squeeze()
    assert seen[:, 1].tolist() == [1, 1, 2, 5]


@pytest.mark.parametrize("sampling", ["uniform", "cyclic", "roulette"])
def test_push_sum_makes_no_difference_to_fair_draws(sampling):
    starts = [0.0, 2.0, 4.0, 10.0]
    runs = [
        simulate(
            mixed(4), Gossip(RandomPermutation(sampling), fragments=1, hierarchical=False, push_sum=push_sum), starts
        )
        for push_sum in (True, False)
    ]
    assert torch.equal(torch.stack(runs[0]), torch.stack(runs[1]))
