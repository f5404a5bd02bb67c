"""Both sides climb to their peaks on what only tunes, and are judged on what only judges."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.papers import tuned
from benchmarks.papers.many import Arena
from benchmarks.papers.paired import difference
from benchmarks.papers.tuned import COMPARISONS, Climb, Comparison, Contender, climb, load, rate_of


def stage(monkeypatch, peaks):
    """Every method is best at a rung; the accuracy on judging data is 1 point lower, and higher by a tenth per seed."""
    played = []

    def train(arena, method, runs):
        played.append((method, runs))
        return [(method, rate, seed) for rate, seed in runs]

    def accuracies(arena, ended, examples):
        def one(method, rate, seed):
            rungs = round(2 * math.log2(rate / rate_of(peaks[method])))
            return 80 - rungs**2 - (examples == "judging") + 0.1 * (seed % 100) if rungs < 6 else None

        return [one(*run) for run in ended]

    monkeypatch.setattr(tuned, "train", train)
    monkeypatch.setattr(tuned, "accuracies", accuracies)
    monkeypatch.setattr(tuned, "data", lambda model: ("training", "tuning", "judging"))
    return played


def comparison(*methods, seeds=tuple(range(10))):
    contenders = tuple(Contender(name, lambda _, name=name: name, f"about {name}", -6) for name in methods)
    return Comparison(Arena("try", 2, 8, 1), contenders, seeds)


@pytest.mark.parametrize("peak", [-6, -9, -2])
def test_a_peak_has_lower_values_on_both_sides(tmp_path, monkeypatch, peak):
    stage(monkeypatch, {"a": peak})
    climb(comparison("a"), tmp_path)
    found = load(comparison("a"), tmp_path)["a"]
    assert found.peak == peak
    assert found.mean(peak) > max(found.mean(peak - 1), found.mean(peak + 1))
    assert list(found.judging) == [peak]


def test_seeds_that_tune_do_not_judge(tmp_path, monkeypatch):
    played = stage(monkeypatch, {"a": -6})
    climb(comparison("a"), tmp_path)
    found = load(comparison("a"), tmp_path)["a"]
    tuning = {seed for by_seed in found.tuning.values() for seed in by_seed}
    assert tuning.isdisjoint(found.judged)
    assert len(found.judged) == 10
    assert sum(len(runs) for _, runs in played) == 3 * len(tuning) + 10
    assert found.judged[3] == pytest.approx(80 - 1 + 0.3), "on judging data"


def test_a_rate_that_makes_a_run_diverge_is_no_peak():
    found = Climb(tuning={-6: {100: 50.0, 101: 50.0}, -5: {100: 90.0, 101: None}, -7: {100: 40.0, 101: 40.0}})
    assert found.peak == -6
    assert found.missing(-6) == []


def test_a_flat_curve_is_climbed_two_rungs_beyond_its_peak():
    found = Climb(tuning={rung: {100: accuracy} for rung, accuracy in ((-7, 40.0), (-6, 50.0), (-5, 49.0))})
    assert found.missing(-6) == []
    assert found.missing(-6, beyond=2) == [-8, -4]
    found.tuning |= {-8: {100: 40.0}, -4: {100: 52.0}}
    assert found.missing(-6, beyond=2) == [-3, -2]


def test_an_interval_is_students():
    scipy = pytest.importorskip("scipy.stats")
    own, other = {0: 3.0, 1: 5.0, 2: 4.0, 3: None}, {0: 2.0, 1: 3.5, 2: 4.5, 3: 1.0, 4: 9.0}
    found = difference(own, other)
    low, high = scipy.ttest_1samp([1.0, 1.5, -0.5], 0.0).confidence_interval(0.95)
    assert (found.low, found.high, found.pairs) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3), 3)
    assert not found.is_shown
    for count in range(2, 31):
        pairs = {seed: float(seed % 2) for seed in range(count)}
        expected = scipy.ttest_1samp(list(pairs.values()), 0.0).confidence_interval(0.95).high
        assert difference(pairs, dict.fromkeys(pairs, 0.0)).high == pytest.approx(expected, abs=1e-3)


def test_difference_counts_diverged_pairs_of_common_seeds():
    own, other = {0: 3.0, 1: 4.0, 2: None, 3: 5.0}, {0: 1.0, 1: 2.0, 2: 3.0, 3: None, 4: 1.0}
    assert difference(own, other).text() == "**+2.0**, from 2.0 to 2.0 (2 of 4 diverged)"
    assert difference({0: None}, {0: 1.0}).text() == "diverged"


def test_stored_results_belong_to_the_contenders():
    for name, comparison in COMPARISONS.items():
        path = tuned.STORED / f"{name}.json"
        stored = json.loads(path.read_text())["contenders"] if path.exists() else {}
        assert set(stored) == set(load(comparison, tuned.STORED)), name
