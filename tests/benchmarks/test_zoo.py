"""What replicas learn."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from benchmarks.zoo import TASKS, _judge_points, _modes
from lightning_hiercomm.planning.cluster import PlanningError
from lightning_hiercomm.planning.simulate.tasks import Batches

NEEDS = {"digits": "sklearn", "mnist1d": "mnist1d", "rnn": "mnist1d", "gru": "mnist1d", "lstm": "mnist1d"}


@pytest.fixture(params=TASKS)
def task(request):
    if request.param in NEEDS:
        pytest.importorskip(NEEDS[request.param])
    return TASKS[request.param]


def test_a_model_of_any_task_can_be_trained_and_judged(task):
    model = task.model()
    for turn in task.turns:
        part = model.get_submodule(turn.part)
        optimizer = task.optimizer(part.parameters(), 0.1 * task.learning_rate)
        batch = Batches(task, 0, task.batch).draw()
        before = turn.loss(model, batch)
        before.backward()
        optimizer.step()
        assert turn.loss(model, batch) < before
    accuracy, loss = task.judge(model, task.load()[1])
    assert 0 <= accuracy < 1
    assert loss > 0


def test_a_models_weights_follow_from_the_seed_alone(task):
    first, again, other = (torch.cat([p.flatten() for p in task.model(seed).parameters()]) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("package", ["sklearn", "mnist1d"])
def test_a_missing_package_is_named_with_its_remedy(package, monkeypatch):
    name = next(task for task, needed in NEEDS.items() if needed == package)
    TASKS[name].load.cache_clear()
    monkeypatch.setitem(sys.modules, f"{package}.{'datasets' if package == 'sklearn' else 'data'}", None)
    with pytest.raises(PlanningError, match=r"pip install (scikit-learn|mnist1d)"):
        TASKS[name].load()


@pytest.mark.parametrize(("modes", "overlap"), [([0], 1 / 9), ([0, 4, 8], 1 / 3), (range(9), 1.0)])
def test_generated_points_are_judged_by_the_modes_they_cover(modes, overlap):
    points = _modes()[torch.tensor(list(modes))].repeat(90 // len(modes), 1)
    score, distance = _judge_points(torch.nn.Identity(), (points, _modes().repeat(10, 1)))
    assert score == pytest.approx(overlap, abs=1e-6)
    assert (distance < 1e-6) == (overlap == 1)


def test_points_between_the_modes_cover_none():
    points = _modes() + 0.5
    score, distance = _judge_points(torch.nn.Identity(), (points, _modes()))
    assert score == 0
    # each of the directions sees the move by 0.5 in x and y as the length of its shadow; over half a turn
    angles = torch.arange(32) * math.pi / 32
    assert distance == pytest.approx(float((0.5 * (angles.cos() + angles.sin())).abs().mean()), rel=1e-4)
