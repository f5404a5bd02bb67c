"""What DDP lets a program pickle, ours does, too: before and after a run."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
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


def _program(folder):
    strategy = HierarchicalStrategy(DiLoCo(2), ranks_per_node=1)
    trainer = one_trainer(folder, devices=2, max_epochs=1, strategy=strategy)
    trainer.fit(Quadratic())
    for copied in (pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy)):
        assert copied.topology is None
        assert copied.schemes == []
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Quadratic())  # the original goes on
    return _pickled(trainer).global_step


def test_a_strategy_of_launched_ranks_can_be_pickled_after_a_run(launch):
    assert launch(_program, ranks=2) == [8, 8]


def _program_with_batches(folder):
    strategy = HierarchicalStrategy(batches=HeterogeneousBatches(8, speeds=[3.0, 1.0]), ranks_per_node=1)
    trainer = one_trainer(folder, devices=2, max_epochs=1, strategy=strategy)
    trainer.fit(Quadratic())
    for copied in (pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy)):
        assert copied.batches is None
        assert "batches=HeterogeneousBatches(global_batch_size=8, speeds=[3.0, 1.0])" in repr(copied)
    return strategy.batches.division.sizes


def test_a_strategy_with_unequal_batches_can_be_pickled_after_a_run(launch):
    assert launch(_program_with_batches, ranks=2) == [[6, 2]] * 2
