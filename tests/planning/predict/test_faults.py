"""What is kept where nodes die, against what happens when they are drawn to die."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from lightning_hiercomm.planning.cluster import Cluster, Workload
from lightning_hiercomm.planning.predict.accuracy import Accuracy
from lightning_hiercomm.planning.predict.candidates import Candidate, Row
from lightning_hiercomm.planning.predict.cost import predict
from lightning_hiercomm.planning.predict.faults import (
    Faults,
    checkpoint_interval,
    elastic_goodput,
    restarts_goodput,
    state_bytes,
    survive,
)
from lightning_hiercomm.schemes import AllReduce, DiLoCo, PeriodicAveraging

DEAD_AFTER, HEAL = 5.0, 2.0


def drawn_elastic_goodput(nodes: int, period: float, mtbf: float, restart: float, periods: int = 20000) -> float:
    """Nodes that are played one period after the other."""
    draw = random.Random(1)
    dies = [draw.expovariate(1 / mtbf) for _ in range(nodes)]  # seconds of training from now on
    away = [0] * nodes  # periods
    late = [False] * nodes
    kept = clock = 0.0
    for _ in range(periods):
        waits = [HEAL if late[node] else 0.0 for node in range(nodes)]
        for node in range(nodes):
            late[node] = False
            if away[node]:
                away[node] -= 1
                late[node] = not away[node]
            elif dies[node] >= period:
                kept += 1
                dies[node] -= period
            else:
                waits.append(DEAD_AFTER - (period - dies[node]))
                back = dies[node] + restart
                away[node] = math.ceil(back / period) - 1
                late[node] = not away[node]
                dies[node] = draw.expovariate(1 / mtbf)
        clock += period + max(waits)
    return kept * period / (nodes * clock)


@pytest.mark.parametrize(
    ("nodes", "period", "mtbf", "restart"),
    [
        (8, 4.0, 180.0, 6.0),
        (8, 40.0, 1800.0, 600.0),
        (2, 10.0, 400.0, 1.0),
        (32, 20.0, 5000.0, 120.0),
        (4, 60.0, 90.0, 30.0),
    ],
)
def test_elastic_goodput_matches_random_failures(nodes, period, mtbf, restart):
    expected = drawn_elastic_goodput(nodes, period, mtbf, restart)
    kept = elastic_goodput(nodes, period, mtbf, restart, DEAD_AFTER, HEAL)
    assert kept == pytest.approx(expected, rel=0.02)
    assert kept < 0.99


def drawn_restarts_goodput(
    interval: float, mtbf: float, restart: float, checkpoint: float, faults: int = 3000
) -> float:
    """A run that is played from fault to fault."""
    draw = random.Random(2)
    kept = clock = 0.0
    for _ in range(faults):
        lives = draw.expovariate(1 / mtbf)
        clock += lives
        kept += interval * max(0, math.floor((lives - restart) / (interval + checkpoint)))
    return kept / clock


@pytest.mark.parametrize(
    ("interval", "mtbf", "restart", "checkpoint"),
    [(300.0, 3600.0, 600.0, 10.0), (60.0, 1000.0, 20.0, 5.0), (500.0, 700.0, 100.0, 60.0)],
)
def test_what_restarts_keep_is_what_a_run_keeps_that_is_drawn_to_fail(interval, mtbf, restart, checkpoint):
    # a run that restarts is one in which each life of all nodes together begins with the restart
    expected = drawn_restarts_goodput(interval, mtbf, restart, checkpoint)
    assert restarts_goodput(interval, mtbf, restart, checkpoint) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("hours", "minutes"), [(24.0, 117.0), (6.0, 57.0), (0.25, 9.1)])
def test_checkpoints_are_as_far_apart_as_daly_says(hours, minutes):
    """His Figures 3 to 5: a checkpoint takes 5 minutes."""
    assert checkpoint_interval(3600 * hours, 300.0) / 60 == pytest.approx(minutes, rel=0.006)


@pytest.mark.parametrize(("mtbf", "checkpoint"), [(3600.0, 10.0), (3600.0, 300.0), (100.0, 1.0), (50.0, 40.0)])
def test_no_other_interval_keeps_noticeably_more(mtbf, checkpoint):
    chosen = restarts_goodput(checkpoint_interval(mtbf, checkpoint), mtbf, 60.0, checkpoint)
    others = [restarts_goodput(mtbf * 1.1**power, mtbf, 60.0, checkpoint) for power in range(-80, 20)]
    assert chosen >= max(others) * 0.998


def test_the_more_seldom_nodes_die_the_more_is_kept_up_to_all_of_it():
    mtbfs = [10.0, 1e3, 1e5, 1e7, 1e12, 1e20]
    for kept in (
        [elastic_goodput(64, 30.0, mtbf, 600.0, 5.0, 10.0) for mtbf in mtbfs],
        [restarts_goodput(checkpoint_interval(mtbf / 64, 5.0), mtbf / 64, 600.0, 5.0) for mtbf in mtbfs],
    ):
        assert kept == sorted(kept)
        assert kept[0] < 0.1
        assert kept[-1] == pytest.approx(1.0, abs=1e-4)
    assert elastic_goodput(64, 1e6, 1.0, 600.0, 5.0) == 0.0
    assert restarts_goodput(1.0, 1e-4, 600.0, 1.0) == 0.0


def row(scheme, cluster: Cluster, workload: Workload) -> Row:
    candidate = Candidate(type(scheme), {"sync_every": scheme.sync_every} if hasattr(scheme, "sync_every") else {})
    return Row(candidate, predict(scheme, cluster, workload), 1.0, 0.0, 0.0, True, Accuracy("not measured"))


def test_cost_is_that_of_nodes_and_bytes_of_1000_steps(fast_cluster, gigabyte):
    cluster = fast_cluster(4)
    made = row(PeriodicAveraging(10), cluster, gigabyte)
    faults = Faults(mtbf=1e6, restart=100.0, checkpoint=10.0, price=2.0)
    survival = survive(made, cluster, gigabyte, faults)
    hours = 1000 * made.prediction.seconds / 3600
    assert survival.elastic_cost == pytest.approx(4 * 2.0 * hours / survival.elastic_goodput)
    assert survival.restarts_cost == pytest.approx(4 * 2.0 * hours / survival.restarts_goodput)
    sends = survive(made, cluster, gigabyte, replace(faults, price=0.0, egress=0.05))
    undisturbed = 1000 * 4 * 0.05 * made.prediction.inter_bytes / 1e9
    lives = 1000 * made.prediction.seconds / 1e6  # that each of four nodes ends in that time, and gets three gigabytes
    healed = 4 * lives * 0.05 * state_bytes(made.candidate.scheme, gigabyte) / 1e9
    assert sends.elastic_cost == pytest.approx(undisturbed + healed, rel=1e-3)
    assert sends.elastic_cost > undisturbed + 0.9 * healed
    assert undisturbed < sends.restarts_cost < 1.01 * undisturbed


def test_who_cannot_be_elastic_restarts(fast_cluster, gigabyte):
    cluster = fast_cluster(4)
    survival = survive(row(AllReduce(), cluster, gigabyte), cluster, gigabyte, Faults(mtbf=1e5))
    assert (survival.elastic_goodput, survival.elastic_cost) == (None, None)
    assert 0 < survival.restarts_goodput < 1


def test_a_joining_node_receives_the_model_and_all_optimizer_state(gigabyte):
    assert state_bytes(None, gigabyte) == 3e9
    assert state_bytes(DiLoCo(100), gigabyte) == 5e9
    assert state_bytes(DiLoCo(100, torch.optim.Adam), gigabyte) == 6e9


def test_a_lost_node_is_missed_at_the_next_fragment(fast_cluster, gigabyte):
    """They come four times as often, so that all wait longer for it."""
    cluster, faults = fast_cluster(16), Faults(mtbf=1e5, restart=10.0, heal=0.0, dead_after=20.0)
    whole = survive(row(DiLoCo(8), cluster, gigabyte), cluster, gigabyte, faults)
    candidate = Candidate(DiLoCo, {"sync_every": 8, "fragments": 4})
    made = Row(candidate, predict(candidate.scheme, cluster, gigabyte), 1.0, 0.0, 0.0, True, Accuracy("not measured"))
    parts = survive(made, cluster, gigabyte, faults)
    assert parts.elastic_goodput < whole.elastic_goodput
