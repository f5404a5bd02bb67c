"""Modules without an optimizer, or without trainable parameters, run under every scheme and layout."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from problems import SHORT_SCHEMES, one_trainer
from torch.utils.data import DataLoader

from lightning_hiercomm import HierarchicalStrategy

pytestmark = pytest.mark.pooled
STEPS = 3


class Counts(pl.LightningModule):
    """Has no parameters; a buffer that is the same on all ranks counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return self.loss(batch)

    def loss(self, batch: Any) -> Any:
        return torch.zeros((), requires_grad=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", self.seen, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return None

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(STEPS * self.trainer.world_size, 3))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(self.trainer.world_size, 3))


class Unoptimized(Counts):
    """Has trainable parameters that get gradients, and no optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))

    def loss(self, batch: Any) -> Any:
        return self.layers(torch.cat([batch, batch])).sum()


class UnoptimizedByHand(Unoptimized):
    """In manual optimization, where ``self.optimizers()`` has nothing to step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def loss(self, batch: Any) -> None:
        self.manual_backward(super().loss(batch))


class NoOptimizers(UnoptimizedByHand):
    def configure_optimizers(self) -> Any:
        return []


class Frozen(Unoptimized):
    """Has frozen parameters only, which an optimizer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.requires_grad_(False)

    def loss(self, batch: Any) -> Any:
        super().loss(batch)
        return torch.zeros((), requires_grad=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class FrozenWithout(Frozen):
    def configure_optimizers(self) -> Any:
        return None


PROGRAMS = (Counts, Unoptimized, UnoptimizedByHand, NoOptimizers, Frozen, FrozenWithout)


def _runs(folder, sizes):
    """Fits and resumed fits that ended otherwise than with their first weights, and the batches that they have seen."""
    wrong = []
    for program, name in zip(PROGRAMS, SHORT_SCHEMES, strict=True):
        module, path = program(), folder / f"{program.__name__}-{name}.ckpt"
        before = {key: value.clone() for key, value in module.named_parameters()}
        for resume in (None, path):
            strategy = HierarchicalStrategy(SHORT_SCHEMES[name], ranks_per_node=sizes, checkpoint_replicas=True)
            epochs = 1 if resume is None else 2
            trainer = one_trainer(folder, devices=2, strategy=strategy, max_epochs=epochs, callbacks=[Save(path)])
            trainer.fit(module, ckpt_path=resume)
        same = all(torch.equal(value, before[key]) for key, value in module.named_parameters())
        seen = module.seen.item(), trainer.callback_metrics["seen"].item()
        if not same or seen != (2 * STEPS, 2 * STEPS):
            wrong.append((program.__name__, name, same, seen))
    return wrong


class Save(pl.Callback):
    """Saves when the first epoch's last batch is done."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.current_epoch == 0 and batch_idx == STEPS - 1:
            trainer.save_checkpoint(self.path)


@pytest.mark.long("6 fits and their resumes")
@pytest.mark.parametrize("sizes", [1, 2], ids=["2x1", "1x2"])
def test_modules_of_which_nothing_is_trained_run_and_resume(borrow, sizes):
    assert borrow(lambda folder: _runs(folder, sizes), ranks=2) == [[], []]
