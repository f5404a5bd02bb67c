"""Runs over seeds: what is kept, what is done anew, and what counts as a difference."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.papers.study import Results, Sample, Setting, Study, collect, described, known_results
from benchmarks.zoo import TASKS
from lightning_hiercomm.planning.cluster import Cluster, Link, Workload
from lightning_hiercomm.planning.simulate.simulation import Curve, Experiment, Point, Site
from lightning_hiercomm.schemes import AllReduce, Gossip, PeriodicAveraging

SITE = Site(Cluster(2, 1, Link(math.inf), Link(1e7)), Workload.of_step(1e6, 1.0))


def experiment(seed=0, **others):
    arguments = {"scheme": PeriodicAveraging(2), "nodes": 2, "steps": 4, "learning_rate": 0.1, "batch": 8}
    return Experiment("it", **{**arguments, "task": TASKS["characters"], "seed": seed, **others})


class Stage:
    """Plays runs without training, and may break down."""

    def __init__(self, breaks_at=None):
        self.played = []
        self.breaks_at = breaks_at
        self.__name__ = "stage"

    def __call__(self, experiment, site, looks):
        self.played.append((experiment.steps, experiment.seed))
        if len(self.played) == self.breaks_at:
            raise KeyboardInterrupt
        return Curve(experiment, [Point(experiment.steps, 1.0, 0.5 + 0.01 * experiment.seed, 2.0)], 0.0, 0.0)


def study_of(stage, steps=(4, 8)):
    settings = [
        Setting(f"{name}", lambda seed, steps=count: experiment(seed, steps=steps), SITE, stage)
        for name, count in zip("ab", steps, strict=True)
    ]
    return Study("try", "a try", "", lambda: settings, lambda results: "", lambda results, path: None)


def test_a_run_that_was_broken_off_goes_on_where_it_was(tmp_path):
    path = tmp_path / "try.json"
    with pytest.raises(KeyboardInterrupt):
        collect(study_of(Stage(breaks_at=4)), path, 3, 1, {})
    stage = Stage()
    results = collect(study_of(stage), path, 3, 1, {"when": "now"})
    assert stage.played == [(8, 1), (4, 2), (8, 2)]
    assert results.accuracy("a").values == pytest.approx((50.0, 51.0, 52.0))
    assert json.loads(path.read_text())["when"] == "now"


def test_changed_settings_run_again_and_removed_ones_are_dropped(tmp_path):
    path = tmp_path / "try.json"
    collect(study_of(Stage()), path, 2, 1, {})
    stage = Stage()
    collect(study_of(stage, steps=(4, 9)), path, 2, 1, {})
    assert stage.played == [(9, 0), (9, 1)]
    assert known_results(study_of(Stage()), path).accuracy("b").values == ()


def test_two_settings_of_one_key_are_refused():
    setting = Setting("a", experiment, SITE)
    twice = Study("try", "", "", lambda: [setting, setting], lambda results: "", lambda results, path: None)
    with pytest.raises(ValueError, match="two settings have one key"):
        _ = twice.by_key


def test_an_experiments_key_is_equal_in_every_process():
    text = repr(described(experiment(optimizer=TASKS["gan"].optimizer)))
    assert " at 0x" not in text
    assert described(experiment()) != described(experiment(scheme=PeriodicAveraging(3)))
    assert described(experiment()) != described(experiment(seed=1))
    assert "Linear" in text


def test_a_real_run_is_kept_as_json_has_it():
    run = Setting("it", experiment, SITE, looks=2).run(1)
    assert json.loads(json.dumps(run)) == run
    assert [point[0] for point in run["points"]] == [2, 4]
    assert run["error"] is None


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
