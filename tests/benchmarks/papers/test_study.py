"""Runs over seeds: what is kept, what is done anew, and what counts as a difference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.papers.clock import Site, simulate
from benchmarks.papers.study import Results, Sample, Setting
from benchmarks.zoo import TASKS
from lightning_hiercomm.planning.cluster import Cluster, Link, Workload
from lightning_hiercomm.planning.simulate.simulation import Experiment
from lightning_hiercomm.schemes import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, StepsDelay

# 4 MB between nodes at 10 MB/s: a synchronization of two nodes takes 0.4 s
SITE = Site(Cluster(2, 1, Link(math.inf), Link(1e7)), Workload.of_step(1e6, 1.0))


def experiment(seed=0, **others):
    arguments = {"scheme": PeriodicAveraging(2), "nodes": 2, "steps": 4, "learning_rate": 0.1, "batch": 8}
    return Experiment("it", **{**arguments, "task": TASKS["characters"], "seed": seed, **others})


@pytest.mark.parametrize("scheme", [AllReduce(), Gossip()], ids=repr)
def test_a_run_that_diverges_is_a_result(scheme):
    run = Setting("it", lambda seed: experiment(seed, scheme=scheme, learning_rate=1e30, steps=20), SITE, looks=2).run(
        0
    )
    assert run["error"] == "diverged"
    results = Results({"it": {0: run}})
    assert results.accuracy("it").text() == "diverged"


def test_a_difference_is_of_runs_with_the_same_seed():
    low, near, far = Sample({0: 60.0, 1: 62.0}), Sample({1: 64.5, 0: 61.5}), Sample({0: 70.0, 1: 72.1, 2: 0.0})
    assert low.text() == "61.0 ± 1.4"
    assert not low.differs_from(near)
    assert near.against(low) == "+2.0, from -4.4 to 8.4"
    assert far.against(low) == "**+10.0**, from 9.4 to 10.7"
    assert Sample({0: 70.0}).against(Sample({0: 60.0})) == "+10.0 (one run)"
    assert not Sample({0: 70.0}).differs_from(Sample({0: 60.0}))
    assert Sample({0: 1.0, 1: None}).text() == "1.0 ± 0.0 (1 of 2 diverged)"
    assert Sample({}).text() == Sample({}).against(low) == ""


def test_the_best_accuracy_is_averaged_over_seeds():
    run = {"error": None, "points": [[1, 1.0, 0.4, 2.0], [2, 2.0, 0.6, 1.0]]}
    results = Results({"it": {0: run, 1: {**run, "points": run["points"][:1]}}})
    assert results.best("it").mean == pytest.approx(50.0)


def test_the_best_of_several_settings_is_one_that_never_diverged():
    def run(accuracy, error=None):
        return {"error": error, "points": [[1, 1.0, accuracy, 1.0]]}

    results = Results({"safe": {0: run(0.5)}, "risky": {0: run(0.9), 1: run(0.1, "diverged")}, "unknown": {}})
    assert results.best_of(["safe", "risky", "unknown"]) == "safe"


@pytest.mark.parametrize(
    ("scheme", "seconds"),
    [
        (AllReduce(), 12 * 1.3),  # the backward pass hides the first bucket, of 1 MB; the other has 3 MB
        (PeriodicAveraging(4), 12 * 1.0 + 3 * 0.4),
        (PeriodicAveraging(None), 12 * 1.0 + 0.4),
        (PeriodicAveraging(5), 12 * 1.0 + 3 * 0.4),  # twice, and at the end
        (DiLoCo(6), 12 * 1.0 + 2 * 0.4),
        (DASO(4, 1, warmup_epochs=0, cooldown_epochs=0), 12 * 1.0),
        (DASO(4, 1, cooldown_epochs=0, warmup_steps=5), 12 * 1.0 + 5 * 0.4),
        (StepsDelay(2, warmup_steps=4), 12 * 1.0 + 4 * 0.3),
    ],
)
def test_predicted_times_follow_the_phases_of_a_scheme(scheme, seconds):
    curve = simulate(experiment(scheme=scheme, steps=12), SITE)
    assert curve.points[-1].seconds == pytest.approx(seconds, rel=0.05)
    assert curve.points[0].seconds < curve.points[-1].seconds


@pytest.mark.parametrize(
    ("scheme", "kilobytes"),
    [
        (PeriodicAveraging(12), 12 + 0.5),  # of gradients, in each step; then a rank has half of what is averaged on
        (PeriodicAveraging(12, gradients="none"), 1),  # of parameters, in a synchronization
        (PeriodicAveraging(12, gradients="none", node_sync_every=4), 1 + 2),
        (DASO(12, 0, warmup_epochs=0, cooldown_epochs=0, reducer="sharded"), 12 + 0.5),
        (DASO(12, 0, warmup_epochs=0, cooldown_epochs=0, reducer="sharded", gradients="none"), 1),
        (DASO(12, 0, warmup_steps=12, cooldown_epochs=0, gradients="none"), 12),
    ],
    ids=repr,
)
def test_predicted_times_include_traffic_inside_nodes(scheme, kilobytes):
    slow_inside = replace(SITE, cluster=Cluster(2, 2, Link(1e3), Link(math.inf)))
    curve = simulate(
        experiment(scheme=scheme, steps=12, ranks_per_node=2),
        replace(slow_inside, workload=Workload.of_step(250, 1e-6)),
    )
    # two ranks send each other a kilobyte in a second
    assert curve.points[-1].seconds == pytest.approx(kilobytes, abs=0.01)
