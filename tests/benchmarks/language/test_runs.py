"""The order of runs, their results on disk, and the report."""

from __future__ import annotations

import pytest
import torch

from benchmarks.language import report, runs
from benchmarks.language.corpus import _part_of
from benchmarks.language.methods import METHODS
from benchmarks.language.model import SIZES, Transformer
from benchmarks.language.runs import Key, Run

TWO = ["all_reduce", "int4"]


def run(loss, sent=100.0, size="small", method="all_reduce"):
    points = [] if loss is None else [[100.0, loss + 1, loss + 1.1], [200.0, loss + 0.5, loss + 0.6]]
    points += [] if loss is None else [[300.0, loss + 0.2, loss + 0.3], [400.0, loss, loss + 0.1]]
    return Run(points, sent, 10.0, 11.0, 1, runs.fingerprint(size, method, 8))


def known_of(losses, methods=TWO):
    """Return short runs by method, from losses by rung."""
    return {Key(method, rung, None): run(loss, method=method) for method in methods for rung, loss in losses.items()}


def all_due(known, seeds=1):
    return [(key.method, key.rung, key.seed) for key in runs.due(known, TWO, seeds)]


def test_short_runs_of_all_methods_come_before_any_other_rate():
    assert all_due({}) == [(method, rung, None) for rung in (0, -1) for method in TWO]
    assert all_due(known_of({-1: 2.1, 0: 2.0}), seeds=0) == [(method, 1, None) for method in TWO]


def test_a_ladder_is_extended_until_its_best_rung_has_neighbors():
    assert all_due(known_of({-1: 2.0, 0: 2.1, 1: 2.2})) == [(method, -2, None) for method in TWO]
    assert all_due(known_of({-1: 2.1, 0: 2.0, 1: None}), seeds=0) == []


def test_whole_runs_are_at_the_best_rate_only():
    due = all_due(known_of({-1: 2.1, 0: 2.0, 1: 2.2}), seeds=3)
    assert due == [(method, 0, seed) for seed in (0, 1, 2) for method in TWO]


def test_a_rate_is_chosen_by_the_tuning_part():
    one, other = run(2.0), run(2.1)
    other.points[-1][2] = 1.0  # better, but on the judging part
    assert runs.peak({Key("int4", 0, None): one, Key("int4", 1, None): other}, "int4") == 0


def test_a_run_that_diverged_is_never_the_peak():
    assert runs.peak(known_of({0: None, 1: 3.0}), "int4") == 1


def test_results_of_another_method_of_the_same_name_are_forgotten(tmp_path, monkeypatch):
    runs.store("small", 8, known_of({0: 2.0}), tmp_path)
    monkeypatch.setitem(METHODS, "int4", METHODS["int8"])
    assert set(runs.load("small", 8, tmp_path)) == {Key("all_reduce", 0, None)}


def test_a_run_is_stored_when_it_ends_and_its_checkpoint_removed(tmp_path):
    key = Key("int4", 0, 0)
    made = runs.run_one("toy", 2, key, tmp_path, "cpu")
    assert runs.load("toy", 2, tmp_path) == {key: made}
    assert [path.name for path in (tmp_path / "toy-2-nodes").iterdir()] == ["int4.+0.0.json"]
    assert [int(step) for step, *_ in made.points] == list(range(2, 17, 2))


def test_time_until_a_loss_counts_what_does_not_hide_behind_the_backward_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "STORED", tmp_path)
    made = {
        "all_reduce": run(2.0),
        "int4": run(2.1, 12.5, method="int4"),
        "periodic4": run(2.0, 25.0, method="periodic4"),
    }
    known = {Key(method, 0, 0): of_method for method, of_method in made.items()}
    runs.store("small", 8, known | known_of({0: 2.0}, list(made)), tmp_path)
    rows = [line.split(" | ") for line in report.by_ratio("small").splitlines()]
    assert rows[0][:3] == ["| c until 2.600, at T / c", "1", "4"]
    assert rows[2][1:5] == ["267", "867", "1667", "2467"]  # 200 (T/c + 1/3)
    # 233.3 steps: a third of the way from 2.7 at step 200 to 2.4
    assert rows[3][1:] == ["**233**", "**233**", "**311**", "**428**", "**544**", "**778**", "**1011**", "**1944** |"]
    assert rows[4][1:3] == ["250", "400"]  # 200 (1 + T/c / 4)


def test_plan_quotes_methods_with_all_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "STORED", tmp_path)
    known = {Key(method, 0, seed): run(2.0, method=method) for method in TWO for seed in range(3)}
    known |= {Key("sparse2", 0, 0): run(2.0, method="sparse2")} | known_of({0: 2.0}, [*TWO, "sparse2"])
    runs.store("small", 8, known, tmp_path)
    found = list(report.accuracy_rows("small", 8, ["AllReduce, int4", "AllReduce, sparse2"]))
    assert found == [("AllReduce, int4", 8, "adamw", SIZES["small"].steps, "nats", 0.0, 0.0, 0.0)]


def test_parts_of_the_corpus_depend_on_names_only():
    parts = [_part_of(f"torch/{number}.py") for number in range(10_000)]
    assert 50 < parts.count("tuning") < 150 < parts.count("judging") < 250
    assert _part_of("torch/0.py") == parts[0]


@pytest.mark.parametrize(("size", "millions"), [("small", 1.45), ("medium", 25.7), ("large", 85.7)])
def test_sizes_have_as_many_parameters_as_they_say(size, millions):

    with torch.device("meta"):
        model = Transformer(SIZES[size])
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
