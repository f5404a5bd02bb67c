"""The papers' studies: their settings, and the tables that compare results with the papers' numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.papers import command, hetgrad
from benchmarks.papers.asynchronous import asynchronous
from benchmarks.papers.optimizers import AdaBelief
from benchmarks.papers.studies import STUDIES
from benchmarks.papers.study import known_results
from benchmarks.predict.cluster import Cluster, Link, Workload
from benchmarks.simulate.simulation import Experiment, Site, simulate
from benchmarks.zoo import TASKS
from lightning_hiercomm.schemes import AllReduce


@pytest.mark.parametrize("number", STUDIES)
def test_every_setting_has_a_unique_name(number):
    pytest.importorskip("sklearn")
    settings = STUDIES[number].by_key.values()
    assert len({setting.fingerprint(0) for setting in settings}) == len(settings)


@pytest.mark.parametrize("number", STUDIES)
def test_every_stored_run_belongs_to_the_settings_of_today(number):
    path = Path(command.__file__).parents[1] / "results" / "papers" / f"{number}.json"
    stored = sum(map(len, json.loads(path.read_text())["runs"].values()))
    assert sum(map(len, known_results(STUDIES[number], path).runs.values())) == stored > 0


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


def test_adabelief_follows_its_paper():
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


def test_balanced_batches_save_the_calculated_time():
    assert hetgrad.batches_of(3) == [51, 10, 3]
    assert hetgrad.seconds_of_step(3, [51, 10, 3]) == 3.0
    assert hetgrad.seconds_of_step(3, [22, 21, 21]) == 21.0
