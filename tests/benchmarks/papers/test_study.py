"""Studies over seeds: stored runs, repeated runs and differences."""

from __future__ import annotations

import math

import pytest

from benchmarks.papers.study import Results, Sample, Setting
from benchmarks.predict.cluster import Cluster, Link, Workload
from benchmarks.simulate.simulation import Experiment, Site
from benchmarks.zoo import TASKS
from lightning_hiercomm.schemes import AllReduce, Gossip, PeriodicAveraging

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


def test_the_best_of_several_settings_is_one_that_never_diverged():
    def run(accuracy, error=None):
        return {"error": error, "points": [[1, 1.0, accuracy, 1.0]]}

    results = Results({"safe": {0: run(0.5)}, "risky": {0: run(0.9), 1: run(0.1, "diverged")}, "unknown": {}})
    assert results.best_of(["safe", "risky", "unknown"]) == "safe"
