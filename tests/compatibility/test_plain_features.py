"""What a program may ask of Lightning, and has to do no more than train as on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from problems import BATCH, Manual, Net, Normalized, Quadratic, Stream
from torch import nn
from torch.utils.data import DataLoader


class Streaming(Quadratic):
    """Every rank takes its part of each step's samples; their number is unknown."""

    def train_dataloader(self):
        ranks, samples = self.trainer.world_size, self.samples(self.steps, 1)
        own = [samples[index] for index in range(self.global_rank, len(samples), ranks)]
        return DataLoader(Stream(own), batch_size=BATCH // ranks)


class Reloading(Quadratic):
    def train_dataloader(self):
        return self.loader(self.samples(self.steps, 1 + self.trainer.current_epoch), shuffle=True)


class SomeUnused(Quadratic):
    """The head takes part in every third batch, and on rank 0's samples only in every sixth."""

    def training_step(self, batch, batch_idx):
        layers = (self.backbone, self.head) if batch_idx % 3 == 0 else (self.backbone,)
        return self.loss(batch[0], *layers)


class Configured(Quadratic):
    def __init__(self) -> None:
        super().__init__()
        self.state = {name: getattr(self, name).state_dict() for name in ("backbone", "head")}
        del self.backbone, self.head

    def configure_model(self):
        if not hasattr(self, "backbone"):
            self.backbone, self.head = nn.Linear(3, 2), nn.Linear(2, 1)
            self.backbone.load_state_dict(self.state["backbone"])
            self.head.load_state_dict(self.state["head"])


class Epochs(Quadratic):
    lr = 0.3

    def on_train_epoch_start(self):
        self.report = [*(self.report or []), self.trainer.current_epoch]


class Scheduled(Quadratic):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]

    def on_train_batch_start(self, *_):
        self.report = [*(self.report or []), self.trainer.optimizers[0].param_groups[0]["lr"]]


class OnPlateau(Quadratic):
    lr = 0.9

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    def on_train_epoch_end(self):
        self.report = [*(self.report or []), self.trainer.optimizers[0].param_groups[0]["lr"]]


class Watching(pl.Callback):
    """A callback of the user's sees the averaged parameters when an epoch's validation and the run end."""

    def on_validation_end(self, trainer, pl_module):
        pl_module.report = [*(pl_module.report or []), pl_module.head.bias.item()]

    def on_train_end(self, trainer, pl_module):
        pl_module.report.append(pl_module.head.bias.item())


BARE = {"logger": None, "enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None}
UNUSED, SHARED = {"find_unused_parameters": True}, {"broadcast_buffers": False}
ALIKE = {"use_distributed_sampler": False}  # ranks of Net train on the same samples
CLIP = {"gradient_clip_val": 0.05, **ALIKE}
feature, nightly = pytest.mark.feature, pytest.mark.nightly


def averaging() -> list[pl.Callback]:
    return [StochasticWeightAveraging(0.05, swa_epoch_start=1)]


def unfreezing() -> list[pl.Callback]:
    return [BackboneFinetuning(1, lambda_func=lambda _: 1.0, backbone_initial_lr=0.05, train_bn=False)]


def row(
    marks: Any, make: Any = Quadratic, acts: Callable[[dict[str, Any]], bool] = lambda one: True, **arguments: Any
) -> Any:
    """A module, what tells in the report of one device that the feature acts, and a Trainer's arguments."""
    return pytest.param(make, acts, arguments, marks=marks)


@pytest.mark.parametrize(
    ("make", "acts", "arguments"),
    [
        row(
            feature("automatic optimization"),
            acts=lambda one: not torch.equal(one["state_dict"]["head.bias"], Quadratic().head.bias),
        ),
        row(feature("manual optimization"), Manual),
        row(feature("gradient accumulation"), accumulate_grad_batches=2),
        row([feature("gradient accumulation"), nightly], accumulate_grad_batches=4),
        row(feature("gradient accumulation"), callbacks=lambda: [GradientAccumulationScheduler({0: 3, 1: 1})]),
        row(feature("gradient clipping by norm and by value"), Net, gradient_clip_algorithm="norm", **CLIP),
        row([feature("gradient clipping by norm and by value"), nightly], Net, gradient_clip_algorithm="value", **CLIP),
        row(
            [feature("learning rate schedulers, by step and by epoch"), nightly],
            partial(Scheduled, interval="step"),
            lambda one: len({*one["report"]}) == 8,
        ),
        row(
            feature("learning rate schedulers, by step and by epoch"),
            partial(Scheduled, interval="epoch"),
            lambda one: len({*one["report"]}) == 2,
        ),
        row(feature("ReduceLROnPlateau"), OnPlateau, lambda one: one["report"][-1] < 0.9, max_epochs=3),
        row(
            feature("EarlyStopping"),
            Epochs,
            lambda one: 2 < len(one["report"]) < 20,
            callbacks=lambda: [EarlyStopping("val_loss", 0.2)],
            max_epochs=20,
        ),
        row(
            feature("BackboneFinetuning (parameters unfrozen in mid-run)"),
            acts=lambda one: not torch.equal(one["state_dict"]["backbone.bias"], Quadratic().backbone.bias),
            strategy=UNUSED,
            callbacks=unfreezing,
            max_epochs=3,
        ),
        row(
            feature("callbacks of your own see the averaged model in validation and at the end"),
            acts=lambda one: len({*one["report"]}) > 3,
            callbacks=lambda: [Watching()],
            val_check_interval=2,
        ),
        row(
            feature("BatchNorm statistics are averaged"),
            Normalized,
            lambda one: bool(one["state_dict"]["norm.running_mean"].abs().min() > 0.1),
            strategy=SHARED,
        ),
        row(feature("unused parameters"), SomeUnused, strategy=UNUSED),
        row(feature("DDP's static_graph"), strategy={"static_graph": True}),
        row(feature("configure_model"), Configured),
        row(feature("IterableDataset"), Streaming),
        row(
            [feature("reload_dataloaders_every_n_epochs"), nightly],
            Reloading,
            reload_dataloaders_every_n_epochs=1,
        ),
        row([feature("Trainer(barebones=True)"), nightly], barebones=True, num_sanity_val_steps=None, **BARE),
        row([feature("detect_anomaly, deterministic"), nightly], detect_anomaly=True, deterministic=True, max_epochs=1),
        # a push trains it with BatchNorm, whose statistics it collects again
        row([feature("StochasticWeightAveraging"), nightly], callbacks=averaging, max_epochs=5),
        row(feature("StochasticWeightAveraging"), Normalized, strategy=SHARED, callbacks=averaging, max_epochs=4),
    ],
)
def test_training_follows_one_device(follows_one_device, make, acts, arguments):
    try:
        ours, one = follows_one_device(make, **arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    assert acts(one)
    for report in ours:
        assert report["report"] == pytest.approx(one["report"], abs=1e-5)
