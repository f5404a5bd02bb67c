"""What DDP lets a program pickle, ours does, too: before and after a run."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from fits import fit_here
from problems import Quadratic, one_trainer

from lightning_hiercomm import DiLoCo, HeterogeneousBatches, HierarchicalStrategy, PeriodicAveraging


def _pickled(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.usefixtures("spawns_forks")
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_trainer_with_a_pickled_strategy_can_be_pickled_after_a_run(tmp_path, start_method):
    strategy = HierarchicalStrategy(PeriodicAveraging(2), ranks_per_node=1, start_method=start_method)
    trainer = one_trainer(tmp_path, devices=2, max_epochs=1, strategy=pickle.loads(pickle.dumps(strategy)))
    trainer.fit(Quadratic())
    assert repr(_pickled(trainer).strategy.scheme) == repr(strategy.scheme)
    assert pickle.loads(pickle.dumps(trainer.strategy)).topology is None


def _copies(trainer):
    return pickle.loads(pickle.dumps(trainer.strategy)), copy.deepcopy(trainer.strategy)


def _program(folder):
    trainer = fit_here(folder, Quadratic(), DiLoCo(2), max_epochs=1)
    for copied in _copies(trainer):
        assert copied.topology is None
        assert copied.schemes == []
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Quadratic())  # the original goes on
    batches = HeterogeneousBatches(8, speeds=[3.0, 1.0])
    divided = fit_here(folder, Quadratic(), "all_reduce", batches=batches, max_epochs=1)
    for copied in _copies(divided):
        assert copied.batches is None
        assert "batches=HeterogeneousBatches(global_batch_size=8, speeds=[3.0, 1.0])" in repr(copied)
    _pickled(divided)
    return _pickled(trainer).global_step, divided.strategy.batches.division.sizes


def test_strategies_of_launched_ranks_can_be_pickled_after_a_run(launch):
    assert launch(_program, ranks=2) == [(8, [6, 2])] * 2
