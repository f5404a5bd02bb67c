"""What moves and training do to each other."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.planning.cluster import Beside, Cluster, Curve, Link, Workload
from lightning_hiercomm.planning.measure.beside import SIZE, Traffic, derived, measure_beside
from lightning_hiercomm.planning.measure.profile import Profile
from lightning_hiercomm.planning.measure.steps import StepTimes
from lightning_hiercomm.planning.measure.stopwatch import Share
from lightning_hiercomm.planning.predict.cost import predict
from lightning_hiercomm.planning.predict.timeline import Timeline
from lightning_hiercomm.schemes import DASO, PeriodicAveraging

CPU = torch.device("cpu")
# a step takes one processor for 0.1 s, a move of SIZE bytes 0.02 s of the link and 1 ms of a processor
WORKLOAD = Workload(1e6, 0.03, 0.07, threads=1.0)
ALONE = Curve(2, 1, ((16.0, 0.0, 0.0), (float(SIZE), 0.02, 0.001)))


def test_traffic_goes_on_until_the_first_member_has_had_enough():
    def work(rank, world):
        group = world.connect(rank)([range(2)], "inter")
        with Traffic(group, CPU) as traffic:
            time.sleep(0.02 if rank else 2.0)
        return traffic.moves, traffic.seconds

    (moves, seconds), (others, _) = ThreadWorld(2).run(work)
    assert moves == others >= 1
    assert 0 < seconds < 2.0


def test_what_training_lost_and_no_move_was_billed_for_is_lost_while_one_is_under_way():
    # two ranks on one processor train at 0.25 s a step, so they use 0.8 of it; a move takes 0.03 s, 1 ms of it billed
    beside = derived(ALONE, 0.03, 0.25, WORKLOAD, Share(1.0, 2))
    assert beside.later == pytest.approx(0.01)
    assert beside.unbilled == pytest.approx(0.2 / 2 - 0.001 / 0.03)


def test_nothing_gets_better_beside_something_else():
    assert derived(ALONE, 0.01, 0.2, WORKLOAD, Share(1.0, 2)) == Beside(0.0, 0.0)


def test_moves_that_took_all_processors_by_themselves_were_billed_in_full():
    crowded = Curve(2, 1, ((16.0, 0.0, 0.0), (float(SIZE), 0.002, 0.002)))
    assert derived(crowded, 0.102, 0.25, WORKLOAD, Share(1.0, 2)) == Beside(pytest.approx(0.1), 0.0)


def test_what_has_nothing_beside_it_waits_for_no_turn_even_if_it_wants_more_processors_than_there_are():
    timeline = Timeline(0.5)
    alone = timeline.add("link", 1.0, 1.0, longer=10.0)
    timeline.run()
    assert alone.end == pytest.approx(2.0)


def test_no_more_is_lost_than_a_rank_has():
    beside = derived(ALONE, 1.02, 1e9, WORKLOAD, Share(1.0, 2))
    assert beside.unbilled == pytest.approx(0.5, abs=1e-3)


def test_a_move_takes_what_it_is_billed_and_what_is_lost_while_it_is_under_way():
    link = Link(1e8, curves={"all_reduce": ALONE}, beside=Beside(0.0, 0.25))
    assert link.cost("all_reduce", 2, SIZE).processor_seconds == pytest.approx(0.001 + 0.25 * 0.02)


def test_all_ranks_find_the_same():
    step = StepTimes(0.1, 0.15, 0.0, 0.1, 0.1, 10, 4.0, 0.0)

    def work(rank, world):
        connect = world.connect(rank)
        groups = connect([range(2)], "inter"), connect([range(2)], "world")

        def train():
            time.sleep(0.05)
            return step

        return measure_beside(*groups, train, CPU, ALONE, WORKLOAD, Share(1.0, 2))

    first, second = ThreadWorld(2).run(work)
    assert first == second


def test_a_link_beside_training_takes_longer_and_what_it_took_is_missing_there():
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


def test_schemes_that_overlap_pay_for_it_and_those_that_wait_do_not():
    def cluster(beside):
        inter = Link(5e7, curves={"all_reduce": Curve(2, 1, ((16.0, 0.0, 0.0), (1e6, 0.02, 0.001)))}, beside=beside)
        return Cluster(2, 1, Link(float("inf")), inter, processors=1.0)

    none, some = cluster(Beside()), cluster(Beside(later=0.1))
    waiting, stale = PeriodicAveraging(4), DASO(4, 1)
    assert predict(waiting, some, WORKLOAD).seconds == pytest.approx(predict(waiting, none, WORKLOAD).seconds)
    assert predict(stale, some, WORKLOAD).seconds > 1.02 * predict(stale, none, WORKLOAD).seconds
    busy = cluster(Beside(unbilled=0.5))
    assert predict(stale, busy, WORKLOAD).seconds > 1.02 * predict(stale, none, WORKLOAD).seconds


def test_it_is_part_of_a_profile():
    profile = Profile(Cluster(2, 2, Link(1e9), Link(1e8, beside=Beside(0.01, 0.2))), WORKLOAD)
    assert Profile.from_dict(profile.to_dict()) == profile


def test_a_file_that_says_how_many_times_its_bill_a_move_takes_is_still_read():
    link = Link(1e8, curves={"all_reduce": ALONE}, beside=Beside(0.01, 0.2))
    values = Profile(Cluster(2, 2, Link(1e9), link, world=link), WORKLOAD).to_dict()
    for name in ("inter", "world"):
        values["cluster"][name]["beside"] = {"later": 0.01, "work": 3.0}  # of 1 ms, in 0.02 + 0.01 s
    read = Profile.from_dict(values).cluster
    assert read.inter.beside == read.world.beside == Beside(0.01, pytest.approx(0.002 / 0.03))
    for name in ("inter", "world"):  # of one node, say, on which nothing was measured between nodes
        values["cluster"][name].update(beside={"later": 0.0, "work": 1.0}, curves={})
    assert Profile.from_dict(values).cluster.inter.beside == Beside()
