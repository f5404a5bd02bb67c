"""A fit loop runs again in the same fit, from the state of another Trainer between two batches."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_hiercomm._lightning.healing import (
    begin_as,
    note_stage_of_dataloaders,
    reload_train_data_when_due,
    rerun_after,
    restore_in_fit,
    state_of,
    stop_rerunning,
    take_state,
)


class Late(BaseException):
    """A late node continues."""


class Ahead(pl.Callback):
    """Takes the state of a Trainer before one of its batches."""

    def __init__(self, epoch: int, batch: int) -> None:
        self.at, self.state = (epoch, batch), {}

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if (trainer.current_epoch, index) == self.at:
            self.state = state_of(trainer, "batch" if index else "epoch")


class Jumps(pl.Callback):
    """Continues from that state before another batch, and counts hooks."""

    def __init__(self, epoch: int, batch: int, state: dict[str, Any]) -> None:
        self.at, self.state, self.calls = (epoch, batch), state, []
        self.is_due, self.has_jumped = False, False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress
        in_epoch = self.state["moment"] == "batch"
        note_stage_of_dataloaders(
            trainer, [None], lambda: progress.current.ready if in_epoch and self.has_jumped and self.is_due else 0
        )
        reload_train_data_when_due(trainer, lambda: self.is_due)

        def take_over(late: Late) -> None:
            take_state(trainer, self.state)
            restore_in_fit(trainer)
            self.is_due = True

        def begin() -> None:
            self.is_due = False
            begin_as(trainer, self.state)

        rerun_after(trainer, Late, take_over, begin)

    def on_train_start(self, *args: Any) -> None:
        self.calls.append("start")

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if (trainer.current_epoch, index) == self.at and not self.has_jumped:
            self.has_jumped = True
            raise Late
        self.calls.append((trainer.current_epoch, index))

    def on_train_end(self, *args: Any) -> None:
        self.calls.append("end")


def fit(folder: Any, callback: pl.Callback) -> pl.Trainer:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        max_epochs=3,
        callbacks=[callback],
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 5)))
    stop_rerunning(trainer)
    return trainer


@pytest.mark.parametrize("ahead", [(0, 3), (1, 2), (2, 0)], ids=["same epoch", "next epoch", "start of an epoch"])
def test_fit_loop_continues_at_the_batch_of_another_trainer(tmp_path: Any, ahead: tuple[int, int]) -> None:
    other = Ahead(*ahead)
    whole = fit(tmp_path, other)
    late = Jumps(0, 1, other.state)
    trainer = fit(tmp_path, late)
    following = [(e, b) for e in range(3) for b in range(5) if (e, b) >= ahead]
    assert late.calls == ["start", (0, 0), *following, "end"]
    assert trainer.global_step == whole.global_step == 15
    assert trainer.current_epoch == whole.current_epoch
    progress, expected = (each.fit_loop.epoch_loop.batch_progress for each in (trainer, whole))
    assert progress.total.completed == expected.total.completed
    for own, of_other in zip(trainer.model.parameters(), whole.model.parameters(), strict=True):
        assert own.shape == of_other.shape
