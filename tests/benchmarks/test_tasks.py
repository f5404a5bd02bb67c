"""The larger tasks: what they share with the workloads and the example they come from."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from benchmarks.tasks import TASKS, _example
from benchmarks.workloads import WORKLOADS
from lightning_hiercomm.planning.cluster import Cluster, Link, Workload
from lightning_hiercomm.planning.simulate.simulation import Experiment, Site, simulate
from lightning_hiercomm.planning.simulate.tasks import Batches
from lightning_hiercomm.schemes import PeriodicAveraging

SITE = Site(Cluster(2, 1, Link(1e9), Link(1e9)), Workload.of_step(1e6, 1.0))


@pytest.mark.parametrize("name", ["characters_adamw", "segmentation"])
def test_two_nodes_learn_it(name):
    if name == "segmentation":
        pytest.importorskip("torchvision")
    task = TASKS[name]
    made = Experiment("it", PeriodicAveraging(4), 2, 12, task.learning_rate, 4, task)
    first, *_, last = simulate(made, SITE, evaluations=6).points
    assert last.loss < first.loss
    assert 0 < last.accuracy < 1


def test_windows_of_text_are_those_of_the_workload():
    inputs, targets = Batches(TASKS["characters_adamw"], 0, 3).draw()
    theirs, _ = next(WORKLOADS["characters_adamw"].batches(0, 1, 0))
    assert inputs.shape == targets.shape == (3, theirs.shape[1])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_modules_of_different_examples_are_kept_apart(monkeypatch):
    pytest.importorskip("torchvision")
    another = ModuleType("model")
    monkeypatch.setitem(sys.modules, "model", another)
    _example.cache_clear()
    assert TASKS["segmentation"].model().head.out_channels == 5
    assert sys.modules["model"] is another
    assert not any(path.endswith("examples/segmentation") for path in sys.path)
