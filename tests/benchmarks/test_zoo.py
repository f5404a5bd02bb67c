"""What replicas learn."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.simulate.tasks import Batches
from benchmarks.zoo import TASKS

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
    with pytest.raises(ValueError, match=r"pip install (scikit-learn|mnist1d)"):
        TASKS[name].load()
