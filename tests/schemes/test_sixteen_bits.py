"""Parameters of 16 bits, and statistics: what is equal stays so to the bit, and a mean is rounded once."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from harness import on_nodes, on_ranks, place
from zoo import ZOO, without

from lightning_hiercomm import DiLoCo, PeriodicAveraging
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import ParameterSync
from lightning_hiercomm.schemes.reducers.sharded import LeaderAllReduce, ShardedAllReduce

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

TYPES = [torch.bfloat16, torch.float16]
NODES = {
    **{f"{count} nodes": tuple((rank,) for rank in range(count)) for count in range(2, 8)},
    "3+1": ((0, 1, 2), (3,)),
    "2x2": ((0, 1), (2, 3)),
    "3 of 2": ((0, 1), (2, 3), (4, 5)),
    "3 of 3 and 1": ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9,)),
    "one node of 3": ((0, 1, 2),),
}
SCHEMES = without("all_reduce", "steps_delay")


def numbers(dtype, count=185, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-4, 4, (count,), generator=generator)
    values[0] = -0.0
    return values.to(dtype)


def bits(values):
    return values.view(torch.int16)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("nodes_of", "dtype"), [*((nodes_of, torch.bfloat16) for nodes_of in NODES), ("3 nodes", torch.float16)], ids=str
)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_sync_of_equal_replicas_changes_no_bit(name, nodes_of, dtype):
    """A counter, a flag or a table may lie in a float buffer."""
    values, table = numbers(dtype), numbers(torch.float32)

    def work(rank):
        torch.nn.utils.vector_to_parameters(values.to(place.device, copy=True), rank.parameters)
        rank.scheme.follow(rank.scheme.replica)
        counter = rank.scheme.replica.buffers[0]
        for step in range(7):
            counter[0] = step
            rank.train(0.0)
        module = rank.replicas.module
        seen, held = [rank.averaged()], [module.buffer.clone()]
        rank.scheme.finish()
        return [*seen, rank.values], [*held, module.buffer]

    arguments = {"shapes": [(150,), (7, 5)], "dtype": dtype, "bucket_bytes": 128, "epochs": 1, "timeout": 10.0}
    table_at_end = torch.cat([torch.tensor([6.0]), table[1:]])
    for seen, held in on_nodes(work, ZOO[name], NODES[nodes_of], buffer=table, **arguments):
        assert all(torch.equal(bits(each), bits(values)) for each in seen)
        assert all(torch.equal(each.cpu().view(torch.int32), table_at_end.view(torch.int32)) for each in held)


def is_nearest(found, exact, slack=2**-20):
    """Whether there is no number of this type nearer to the exact ones; sums in float32 may turn a tie."""
    towards = torch.tensor(math.inf, dtype=found.dtype)
    error = (found.double() - exact).abs()
    others = [torch.nextafter(found, sign * towards).double() for sign in (1, -1)]
    return all(bool((error <= (other - exact).abs() + slack * exact.abs()).all()) for other in others)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("wire", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("kind", [ShardedAllReduce, LeaderAllReduce])
@pytest.mark.parametrize("nodes_of", [nodes_of for nodes_of in NODES if nodes_of != "one node of 3"])
def test_a_mean_is_that_in_float64_rounded_once(nodes_of, kind, wire, dtype):
    nodes = NODES[nodes_of]
    size = sum(map(len, nodes))
    weights = [1.0 + rank % 3 for rank in range(size)]
    of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    of_rank = [numbers(dtype, seed=of[rank]) for rank in range(size)]

    def work(topology):
        own = of_rank[topology.rank].to(place.device, copy=True)
        kind(Replica([own], bucket_bytes=128), topology, Wire(wire))(topology.new_round(3))
        return own

    exact = sum(weight * values.double() for weight, values in zip(weights, of_rank, strict=True)) / sum(weights)
    found = on_ranks(work, nodes, weights)
    assert is_nearest(found[0], exact)
    assert all(torch.equal(bits(other), bits(found[0])) for other in found)


@pytest.mark.parametrize("count", range(2, 8))
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_sixteen_bit_mean_sends_as_many_bytes_as_an_all_reduce(count, is_overlapped):
    def work(rank):
        for _ in range(2):
            rank.train(0.0)
        rank.scheme.state.settle()
        return rank.meter.snapshot()["inter_bytes"]

    exchanges, scheme = (1, ParameterSync(2, staleness=1)) if is_overlapped else (2, ParameterSync(1))
    sent = on_nodes(work, scheme, NODES[f"{count} nodes"], shapes=[(420,)], dtype=torch.bfloat16)
    numbers_and_preflight = 2 * 420 + 3 * 8
    expected = exchanges * 2 * (count - 1) / count * numbers_and_preflight
    assert sent == [pytest.approx(expected, rel=1e-12)] * count


@pytest.mark.parametrize("nodes_of", ["2 nodes", "3 nodes", "7 nodes", "2x2", "3 of 2", "3+1"])
def test_statistics_cost_as_many_bytes_between_nodes_as_parameters(nodes_of):
    def work(topology):
        sent = []
        for kinds in ([420], []), ([], [420]):
            replica = Replica(*([torch.ones(n, device=place.device) for n in kind] for kind in kinds))
            before = topology.meter.snapshot()["inter_bytes"]
            ShardedAllReduce(replica, topology)(topology.new_round(3))
            sent.append(topology.meter.snapshot()["inter_bytes"] - before)
        return sent

    of_parameters, of_statistics = map(sum, zip(*on_ranks(work, NODES[nodes_of]), strict=True))
    assert of_statistics == pytest.approx(of_parameters, rel=0.05)  # except the padding to equal chunks


@pytest.mark.parametrize("nodes_of", ["3 nodes", "7 nodes", "3+1"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_equal_nodes_under_an_outer_optimizer_go_the_way_of_one(dtype, nodes_of):
    before, after = numbers(dtype, 300, seed=1), numbers(dtype, 300, seed=2)

    def work(rank):
        torch.nn.utils.vector_to_parameters(before.to(place.device, copy=True), rank.parameters)
        rank.scheme.follow(rank.scheme.replica)
        rank.train(0.0)
        torch.nn.utils.vector_to_parameters(after.to(place.device, copy=True), rank.parameters)
        rank.train(0.0)
        return rank.values

    expected = torch.nn.Parameter(before.clone())
    outer = torch.optim.SGD([expected], lr=0.5, momentum=0.5)
    expected.grad = before - after
    outer.step()
    scheme = DiLoCo(2, partial(torch.optim.SGD, lr=0.5, momentum=0.5))
    for found in on_nodes(work, scheme, NODES[nodes_of], shapes=[(300,)], dtype=dtype):
        assert torch.equal(bits(found), bits(expected.detach()))


def test_unfrozen_16_bit_parameters_synchronize_asynchronously():
    values = numbers(torch.bfloat16, 400)

    def work(rank):
        short = torch.nn.Parameter(values.to(place.device, copy=True))
        rank.module["unfrozen"] = short
        rank.scheme.follow(rank.replica())
        for _ in range(8):
            rank.scheme.step(lambda: None)
        rank.scheme.finish()
        return short.detach()

    scheme = ParameterSync(2, staleness=1)
    for found in on_nodes(work, scheme, NODES["3 nodes"], shapes=[(30,)], bucket_bytes=64):
        assert torch.equal(bits(found), bits(values))


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_reference_values_are_kept_only_for_encoded_differences(wire):
    def work(rank):
        rank.train()
        state = rank.scheme.state_dict()
        rank.scheme.load_state_dict(
            {**state, "reducer": {"references": [torch.ones(1)]}} if wire == "bfloat16" else state
        )
        return len(state["reducer"].get("references", ()))

    held = on_nodes(work, PeriodicAveraging(2), dtype=torch.bfloat16, wire=wire)
    assert held == [0 if wire == "bfloat16" else 1] * 2
