"""All ranks know before an exchange whether they are at one step, and whether one of them cannot send."""

from __future__ import annotations

import math

import pytest
import torch
from harness import on_ranks, place

from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.base import CommunicationError
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes.nonfinite import NonfiniteError
from lightning_hiercomm.schemes.preflight import launch
from lightning_hiercomm.schemes.reducers.sharded import ShardedAllReduce

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

NODES = {"2 + 2": ((0, 1), (2, 3)), "3 + 1": ((0, 1, 2), (3,)), "1 + 1 + 1 + 1": ((0,), (1,), (2,), (3,))}


def number(value: int) -> torch.Tensor:
    return torch.tensor(value, device=place.device)


def waiting(topology, step, unfit):
    return launch(topology, step, number(unfit))


def in_background(topology, step, unfit):
    background = Background(place.device, topology.meter)
    try:
        preflight = launch(topology, step, number(unfit), 0, topology.duplicate(), background)
        preflight.wait()
    finally:
        background.close()
    return preflight


@pytest.mark.parametrize("begin", [waiting, in_background])
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("victim", [None, 0, 1, 2, 3])
def test_every_rank_knows_whether_any_rank_cannot_send(nodes, victim, begin):
    def work(topology):
        preflight = begin(topology, 7, int(topology.rank == victim))
        return preflight.is_unfit, int(preflight.flag), preflight.is_done()

    expected = (victim is not None, int(victim is not None), True)
    assert on_ranks(work, NODES[nodes]) == [expected] * 4


@pytest.mark.parametrize("begin", [waiting, in_background])
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("steps", [(10**9, 10**9 + 1, 10**9 + 1, 10**9), (3, 3, 3, 2), (0, 4096, 8, 9)])
def test_every_rank_names_its_own_step_and_the_range_of_all(nodes, steps, begin):
    def work(topology):
        with pytest.raises(CommunicationError) as raised:
            begin(topology, steps[topology.rank], 0)
        return str(raised.value)

    for rank, message in enumerate(on_ranks(work, NODES[nodes])):
        where = f"rank {rank} (node {[rank in ranks for ranks in NODES[nodes]].index(True)})"
        difference = f"after {steps[rank]} optimizer steps, others after {min(steps)} to {max(steps)}"
        assert message.startswith(f"{where} synchronizes {difference}")


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("victim", range(4))  # alone in its node, as after a fault of its memory
def test_a_flagged_exchange_moves_no_bucket_and_changes_nothing(nodes, victim):
    def work(topology):
        x = torch.full((1000,), float(topology.rank), device=place.device)
        if topology.rank == victim:
            x[3] = math.inf
        before = x.clone()
        with pytest.raises(NonfiniteError, match=rf"after 5 optimizer steps these are NaN or infinite: rank {victim} "):
            ShardedAllReduce(Replica([x]), topology).begin(5)
        meter = topology.meter.snapshot()
        return torch.equal(x, before), meter["inter_bytes"] + meter["intra_bytes"] <= 4 * 2 * 24

    assert on_ranks(work, NODES[nodes]) == [(True, True)] * 4


@pytest.mark.parametrize(
    ("value", "wire", "is_carried"),
    [
        (30000.0, Wire(torch.float16), True),
        (33000.0, Wire(torch.float16), False),  # from -33000 the difference would be too large
        (65000.0, Wire(torch.float16, raw=True), True),
        (66000.0, Wire(torch.float16, raw=True), False),
        (66000.0, Wire(torch.bfloat16), True),
        (66000.0, None, True),
    ],
)
def test_values_that_may_be_too_large_for_the_wire_do_not_leave(value, wire, is_carried):
    def work(topology):
        x = torch.full((4,), -value, device=place.device)
        reducer = ShardedAllReduce(Replica([x]), topology, wire)
        x.fill_(value if topology.node == 1 else -value)
        if not is_carried:
            with pytest.raises(NonfiniteError, match="these are too large for"):
                reducer.begin(1)
        else:
            reducer(reducer.begin(1).round)
            assert x.abs().max() < 0.01 * value  # their mean is zero, except for rounding

    on_ranks(work, ((0,), (1,)))
