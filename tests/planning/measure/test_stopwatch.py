"""Timing moves, on ranks that are threads; and what measured times mean on crowded processors."""

from __future__ import annotations

from typing import get_args

import torch

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.planning.cluster import Collective
from lightning_hiercomm.planning.measure import stopwatch
from lightning_hiercomm.planning.measure.stopwatch import ProcessorShare, Stopwatch, Timing

PLENTY = ProcessorShare(None, 2)


def test_every_collective_is_timed_with_the_bytes_of_a_member():
    sizes = (2**10, 2**14)

    def work(rank, world):
        topology = Topology([[0, 1], [2, 3]], rank, world.connect(rank), Meter())
        watch = Stopwatch(topology.world, torch.device("cpu"), seconds=0.001)
        return {kind: watch.curve(topology.inter, 2, 2, kind, sizes, PLENTY) for kind in get_args(Collective)}

    first, *others = ThreadWorld(4).run(work)
    for move, curve in first.items():
        sent = [point[0] for point in curve.points]
        share = {"all_reduce": 1, "reduce_scatter": 0.5, "all_gather": 0.5, "broadcast": 1, "exchange": 1}[move]
        assert sent == [share * size for size in (32, *sizes)]
        assert all(seconds > 0 for _, seconds, _ in curve.points)
        assert (curve.members, curve.sharing) == (2, 2)
    assert all(other == first for other in others)  # or ranks would decide differently what to measure next


def test_a_rank_outside_all_groups_takes_part_in_counting():
    def work(rank, world):
        topology = Topology([[0, 1], [2]], rank, world.connect(rank), Meter())
        return Stopwatch(topology.world, torch.device("cpu"), seconds=0.001).curve(
            topology.inter, 2, 1, "exchange", (64,), PLENTY
        )

    curves = ThreadWorld(3).run(work)
    assert curves[0] == curves[1] == curves[2]


def test_sizes_that_would_take_too_long_are_left_out(monkeypatch):
    monkeypatch.setattr(stopwatch, "_LONGEST", 0.0)

    def work(rank, world):
        topology = Topology([[0], [1]], rank, world.connect(rank), Meter())
        watch = Stopwatch(topology.world, torch.device("cpu"), seconds=0.001)
        return watch.curve(topology.inter, 2, 1, "exchange", (64, 2**20, 2**22), PLENTY)

    assert len(ThreadWorld(2).run(work)[0].points) == 2


# ---- crowded processors ----------------------------------------------------------------------------------------------


def steps(*of_ranks):
    return [Timing(*of_rank) for of_rank in of_ranks]


def test_plenty_of_processors_change_nothing():
    assert ProcessorShare.found(8, steps((1, 1, 0), (1, 1, 0)), threads=1) == ProcessorShare(None, 2)
    assert ProcessorShare(None, 2).uncrowded(Timing(1, 0.9)) == Timing(1, 0.9)
    assert ProcessorShare(None, 2).uncrowded_step(Timing(1, 0.9, 0.1), threads=1) == Timing(1, 0.9, 0.1)


def test_queueing_ranks_share_the_processors_they_used():
    # four ranks on two cores; other processes took a tenth of these
    assert ProcessorShare.found(1.0, steps((1, 0.45, 0.55), (1, 0.45, 0.55)), threads=1) == ProcessorShare(0.9, 2)
    # half of the time they wait for data
    assert ProcessorShare.found(1.0, steps((2, 0.45, 0.55), (2, 0.45, 0.55)), threads=1) == ProcessorShare(0.9, 2)


def test_queued_helper_threads_do_not_shrink_the_share():
    assert ProcessorShare.found(0.5, steps((1, 0.45, 0.9)), threads=1) == ProcessorShare(0.45, 1)


def test_ranks_that_never_queue_have_all_processors():
    assert ProcessorShare.found(1.5, steps((1, 0.1, 0), (1, 0.1, 0)), threads=1) == ProcessorShare(1.5, 2)


def test_a_crowded_step_loses_the_time_that_it_queued():
    share = ProcessorShare(0.9, 2)
    assert share.uncrowded_step(Timing(2.0, 0.45, 0.55), threads=1) == Timing(1.45, 0.45)
    assert share.uncrowded_step(Timing(2.0, 0.8, 1.4), threads=1) == Timing(0.8, 0.8)  # clocks differ a little
    assert share.uncrowded_step(Timing(2.0, 1.6, 1.6), threads=2) == Timing(1.2, 1.6)


def test_crowded_collectives_are_corrected_to_a_processor_each():
    share = ProcessorShare(1.0, 2)
    assert share.uncrowded(Timing(1.0, 0.45)) == Timing(0.5, 0.5)  # two ranks took turns
    assert share.uncrowded(Timing(1.0, 0.2)) == Timing(1.0, 0.2)  # the link was slow, not the processor
    assert ProcessorShare(3.0, 2).uncrowded(Timing(1.0, 0.95)) == Timing(1.0, 1.5)  # with helpers, more than one each


def test_queueing_time_is_read_from_the_system():
    assert stopwatch.queued_seconds() >= 0
