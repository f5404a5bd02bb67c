"""The papers' studies: their settings, and what they write of results, with the papers' numbers beside."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.__main__ import make_parser
from benchmarks.papers import command, hetgrad
from benchmarks.papers.asynchronous import asynchronous
from benchmarks.papers.command import papers
from benchmarks.papers.optimizers import AdaBelief
from benchmarks.papers.report import table
from benchmarks.papers.studies import STUDIES
from benchmarks.papers.study import Results, Setting, known_results
from benchmarks.zoo import TASKS
from lightning_hiercomm.planning.cluster import Cluster, Link, Workload
from lightning_hiercomm.planning.simulate.simulation import Experiment, Site, simulate
from lightning_hiercomm.schemes import AllReduce

PRINTED = {
    "tasks": [],
    "000": ["75.05 ± 0.40", "68.37 ± 0.95", "98.85 ± 0.04"],
    "001": ["91.129", "74.004", "73.226"],
    "002": ["4.56 / 76.77", "0.89 / 62.37"],
    "003": ["75.67 %"],
    "004": ["67.02 ± 0.31", "11.90"],
}


def invented(study, seeds=2):
    """Results of every setting, as if they had been played."""
    run = {"error": None, "took": 1.0, "points": [[step, float(step), 0.1 * step, 1.0] for step in (1, 2, 3)]}
    return Results({key: dict.fromkeys(range(seeds), run) for key in study.by_key}, study.compute())


@pytest.mark.parametrize("number", STUDIES)
def test_a_study_writes_its_tables_beside_the_papers_numbers(number, tmp_path):
    study = STUDIES[number]
    results = invented(study)
    text = study.report(results)
    for printed in PRINTED[number]:
        assert printed in text
    assert "30.0 ± 0.0" in text
    assert "nan" not in text
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1, block
    study.draw(results, tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 10_000


@pytest.mark.parametrize("number", STUDIES)
def test_a_study_that_has_just_begun_can_be_looked_at(number, tmp_path):
    study = STUDIES[number]
    nothing = Results({key: {} for key in study.by_key})
    assert study.report(nothing)
    study.draw(nothing, tmp_path / "it.png")


def test_all_five_papers_are_there():
    assert list(STUDIES) == ["tasks", "000", "001", "002", "003", "004"]


@pytest.mark.parametrize("number", STUDIES)
def test_every_setting_is_an_experiment_that_can_be_told_from_the_others(number):
    pytest.importorskip("sklearn")
    settings = [setting for key, setting in STUDIES[number].by_key.items() if hetgrad.LARGER not in key]
    assert len({setting.fingerprint(0) for setting in settings}) == len(settings)


@pytest.mark.parametrize("number", STUDIES)
def test_every_stored_run_belongs_to_the_settings_of_today(number):
    path = Path(command.__file__).parents[1] / "results" / "papers" / f"{number}.json"
    stored = sum(map(len, json.loads(path.read_text())["runs"].values()))
    assert sum(map(len, known_results(STUDIES[number], path).runs.values())) == stored > 0


@dataclass(frozen=True)
class LaterWorkload(Workload):
    energy: float = 0.0


def test_fingerprint_ignores_a_new_field_at_its_default():
    def fingerprint(workload):
        site = Site(Cluster(2, 1, Link(math.inf), Link(4e6)), workload)
        experiment = Experiment("it", AllReduce(), 1, 12, 0.1, 8, TASKS["characters"])
        return Setting("it", lambda seed: experiment, site).fingerprint(0)

    of_today = fingerprint(Workload(1e6, 0.3, 0.7))
    assert fingerprint(LaterWorkload(1e6, 0.3, 0.7)) == of_today
    assert fingerprint(LaterWorkload(1e6, 0.3, 0.7, energy=1.0)) != of_today
    assert fingerprint(Workload(1e6, 0.3, 0.7, update=0.1)) != of_today


def test_what_is_stored_of_other_settings_is_no_document_of_nothing(tmp_path, capsys):
    (tmp_path / "004.json").write_text(json.dumps({"runs": {"it": {"0": {"fingerprint": "of another"}}}}))
    assert "has no run of the settings of today" in papers([], 1, 1, tmp_path, stored=True)
    assert "1 runs are of settings that are no more" in capsys.readouterr().err


def test_a_table_leaves_out_what_was_not_played_yet():
    text = table(["", "a", "b", "c"], [["x", "1", "", "3"], ["y", "", "", ""], ["z", "", "", "4"]])
    assert text.splitlines() == ["|  | a | c |", "| --- | --: | --: |", "| x | 1 | 3 |", "| z |  | 4 |"]


def test_an_unknown_paper_gets_one_line(tmp_path):
    assert "there is no study 005: choose from tasks, 000" in papers(["005"], 1, 1, tmp_path, False)
    assert make_parser().parse_args(["papers", "003", "--seeds", "2"]).numbers == ["003"]


def test_what_is_stored_becomes_one_document(tmp_path, monkeypatch, capsys):
    study = STUDIES["004"]
    monkeypatch.setattr("benchmarks.papers.command.known_results", lambda study, path: invented(study))
    (tmp_path / "004.json").write_text(json.dumps({}))
    assert papers([], 1, 1, tmp_path, stored=True) is None
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# The papers' claims, played here")
    assert f"## 004: {study.title}" in text
    assert "![HetGrad](004.png)" in text
    assert "## 003" not in text
    assert "README.md" in capsys.readouterr().out


# ---- what the studies bring along ------------------------------------------------------------------------------


def test_an_asynchronous_server_with_one_node_is_plain_training():
    site = Site(Cluster(1, 1, Link(math.inf), Link(1e7)), Workload.of_step(1e6, 1.0))
    experiment = Experiment("it", AllReduce(), 1, 12, 0.1, 8, TASKS["characters"])
    alone, server = simulate(experiment, site, 3), asynchronous(experiment, site, 3)
    assert [point.loss for point in server.points] == [point.loss for point in alone.points]


def test_gradients_of_an_asynchronous_server_are_stale():
    site = Site(Cluster(2, 1, Link(math.inf), Link(4e6)), Workload.of_step(1e6, 1.0))
    experiment = Experiment("it", AllReduce(), 2, 12, 0.1, 8, TASKS["characters"])
    curve = asynchronous(experiment, site, 3)
    assert [point.step for point in curve.points] == [4, 8, 12]
    assert curve.points[-1].seconds == pytest.approx(12 * 2.0)  # 2 MB there, 2 MB back, at 4 MB/s
    assert curve.points[-1].loss < math.log(100)


def test_adabelief_does_what_its_paper_prints():
    parameter = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = AdaBelief([parameter], lr=0.1, betas=(0.9, 0.99), eps=1e-8)
    mean = belief = 0.0
    value = 1.0
    for step, gradient in enumerate((2.0, -1.0, 0.5), 1):
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        mean = 0.9 * mean + 0.1 * gradient
        belief = 0.99 * belief + 0.01 * (gradient - mean) ** 2 + 1e-8
        value -= 0.1 * (mean / (1 - 0.9**step)) / (math.sqrt(belief / (1 - 0.99**step)) + 1e-8)
        assert parameter.item() == pytest.approx(value, rel=1e-12)


def test_balanced_batches_save_what_arithmetic_says():
    assert hetgrad.batches_of(3) == [51, 10, 3]
    assert hetgrad.seconds_of_step(3, [51, 10, 3]) == 3.0
    assert hetgrad.seconds_of_step(3, [22, 21, 21]) == 21.0
