"""How long a run will be, when training starts or goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from problems import Net, SaveAfter, one_trainer

from lightning_hiercomm import HierarchicalStrategy
from lightning_hiercomm.trainer.epoch_clock import length_of_run


class Foreseeing(Net):
    """Its ``report`` is how long the run will be, as its start says."""

    def on_train_start(self) -> None:
        self.report = length_of_run(self.trainer)


IN_EPOCH, AT_ITS_END = {"every_n_train_steps": 8}, {"every_n_epochs": 2, "save_on_train_epoch_end": True}


def saving(folder: Path, when: dict[str, Any]) -> dict[str, Any]:
    """A Trainer's arguments with which it saves once, to ``saved.ckpt``."""
    return {"callbacks": [ModelCheckpoint(folder, "saved", **when)], "enable_checkpointing": True}


@pytest.mark.pairwise
@pytest.mark.parametrize("when", [IN_EPOCH, AT_ITS_END], ids=str)
@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("now", [6, 10, 3])
def test_a_resume_with_another_epoch_length_knows_the_end(tmp_path, when, accumulated, now):
    path = tmp_path / "saved.ckpt"

    def trained(steps: int, **arguments: Any) -> pl.Trainer:
        run = one_trainer(tmp_path, strategy=HierarchicalStrategy(), accumulate_grad_batches=accumulated, **arguments)
        # the last step of an epoch accumulates fewer batches
        run.fit(Foreseeing(steps * accumulated - accumulated // 2), ckpt_path=path if path.exists() else None)
        return run

    trained(6, max_epochs=2, **saving(tmp_path, when))
    run = trained(now, max_epochs=4)
    assert run.lightning_module.report == (4, run.global_step)


def test_a_resume_that_ends_by_max_steps_knows_the_end(tmp_path):
    path = tmp_path / "saved.ckpt"
    one_trainer(tmp_path, strategy=HierarchicalStrategy(), **saving(tmp_path, AT_ITS_END)).fit(Foreseeing(6))
    run = one_trainer(tmp_path, strategy=HierarchicalStrategy(), max_epochs=None, max_steps=20)
    run.fit(Foreseeing(3), ckpt_path=path)
    assert run.lightning_module.report == (run.current_epoch, 20)


def test_a_resumed_epoch_accumulates_the_trainers_number_of_batches(tmp_path):
    path = tmp_path / "saved.ckpt"
    for saves in ([SaveAfter(4, path)], []):
        callbacks = [GradientAccumulationScheduler({0: 2, 1: 3}), *saves]
        run = one_trainer(tmp_path, strategy=HierarchicalStrategy(), max_epochs=3, callbacks=callbacks)
        run.fit(Foreseeing(6), ckpt_path=path if path.exists() else None)
    # here one: Lightning's callback is not asked before the next epoch begins
    assert run.lightning_module.report == (3, run.global_step)
