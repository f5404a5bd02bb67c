"""What moves and training do to each other."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.planning.cluster import Cluster, Contention, CostCurve, Link, Workload
from lightning_hiercomm.planning.measure.contention import SIZE, Traffic, derived, measure_contention
from lightning_hiercomm.planning.measure.profile import Profile
from lightning_hiercomm.planning.measure.steps import StepTimes
from lightning_hiercomm.planning.measure.stopwatch import ProcessorShare
from lightning_hiercomm.planning.predict.cost import predict
from lightning_hiercomm.planning.predict.timeline import Timeline
from lightning_hiercomm.schemes import DASO, PeriodicAveraging

CPU = torch.device("cpu")
# a step takes one processor for 0.1 s, a move of SIZE bytes 0.02 s of the link and 1 ms of a processor
WORKLOAD = Workload(1e6, 0.03, 0.07, threads=1.0)
ALONE = CostCurve(2, 1, ((16.0, 0.0, 0.0), (float(SIZE), 0.02, 0.001)))


def test_traffic_ends_with_the_first_member():
    def work(rank, world):
        group = world.connect(rank)([range(2)], "inter")
        with Traffic(group, CPU) as traffic:
            time.sleep(0.02 if rank else 2.0)
        return traffic.count, traffic.seconds

    (moves, seconds), (others, _) = ThreadWorld(2).run(work)
    assert moves == others >= 1
    assert 0 < seconds < 2.0


def test_unbilled_processors_are_those_training_lost():
    # two ranks on one processor train at 0.25 s a step, so they use 0.8 of it; a move takes 0.03 s, 1 ms of it billed
    found = derived(ALONE, 0.03, 0.25, WORKLOAD, ProcessorShare(1.0, 2))
    assert found.later == pytest.approx(0.01)
    assert found.unbilled == pytest.approx(0.2 / 2 - 0.001 / 0.03)


def test_contention_is_never_negative():
    assert derived(ALONE, 0.01, 0.2, WORKLOAD, ProcessorShare(1.0, 2)) == Contention(0.0, 0.0)


def test_collectives_on_all_processors_were_billed_in_full():
    crowded = CostCurve(2, 1, ((16.0, 0.0, 0.0), (float(SIZE), 0.002, 0.002)))
    assert derived(crowded, 0.102, 0.25, WORKLOAD, ProcessorShare(1.0, 2)) == Contention(pytest.approx(0.1), 0.0)


def test_a_task_alone_is_not_delayed():
    timeline = Timeline(0.5)
    alone = timeline.add("link", 1.0, 1.0, longer=10.0)
    timeline.run()
    assert alone.end == pytest.approx(2.0)


def test_unbilled_is_at_most_the_processors_of_a_rank():
    found = derived(ALONE, 1.02, 1e9, WORKLOAD, ProcessorShare(1.0, 2))
    assert found.unbilled == pytest.approx(0.5, abs=1e-3)


def test_a_collective_costs_billed_and_unbilled_time():
    link = Link(1e8, curves={"all_reduce": ALONE}, contention=Contention(0.0, 0.25))
    assert link.cost("all_reduce", 2, SIZE).processor_seconds == pytest.approx(0.001 + 0.25 * 0.02)


def test_all_ranks_measure_the_same_contention():
    step = StepTimes(0.1, 0.15, 0.0, 0.1, 0.1, 10, 4.0, 0.0)

    def work(rank, world):
        connect = world.connect(rank)
        groups = connect([range(2)], "inter"), connect([range(2)], "world")

        def train():
            time.sleep(0.05)
            return step

        return measure_contention(*groups, train, CPU, ALONE, WORKLOAD, ProcessorShare(1.0, 2))

    first, second = ThreadWorld(2).run(work)
    assert first == second


def test_an_overlapped_collective_takes_longer_and_slows_training():
    line = Timeline(processors=1.0)
    link = line.add("link", 2.0, processors=0.1, longer=2.0)
    training = line.add("training", 3.0, processors=1.0)
    line.run()
    assert training.end == pytest.approx(3 / 0.95)
    assert link.end == pytest.approx(3 / 0.95 + 2 - 1.5 / 0.95)  # half as fast until training has ended, then alone
    alone = Timeline(processors=1.0)
    link = alone.add("link", 2.0, processors=0.1, longer=2.0)
    alone.run()
    assert link.end == pytest.approx(2.0)


def test_contention_costs_overlapped_schemes_only():
    def cluster(contention):
        inter = Link(
            5e7, curves={"all_reduce": CostCurve(2, 1, ((16.0, 0.0, 0.0), (1e6, 0.02, 0.001)))}, contention=contention
        )
        return Cluster(2, 1, Link(float("inf")), inter, processors=1.0)

    none, some = cluster(Contention()), cluster(Contention(later=0.1))
    waiting, stale = PeriodicAveraging(4), DASO(4, 1)
    assert predict(waiting, some, WORKLOAD).seconds == pytest.approx(predict(waiting, none, WORKLOAD).seconds)
    assert predict(stale, some, WORKLOAD).seconds > 1.02 * predict(stale, none, WORKLOAD).seconds
    busy = cluster(Contention(unbilled=0.5))
    assert predict(stale, busy, WORKLOAD).seconds > 1.02 * predict(stale, none, WORKLOAD).seconds


def test_contention_is_part_of_a_profile():
    profile = Profile(Cluster(2, 2, Link(1e9), Link(1e8, contention=Contention(0.01, 0.2))), WORKLOAD)
    assert Profile.from_dict(profile.to_dict()) == profile
