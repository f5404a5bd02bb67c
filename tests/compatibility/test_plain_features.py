"""What a program may ask of Lightning, and has to do no more than train as on one device."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from problems import BATCH, Manual, Normalized, Quadratic
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Every rank takes its part of each step's samples; their number is unknown."""

    def __init__(self, data, rank, ranks):
        self.data, self.rank, self.ranks = data, rank, ranks

    def __iter__(self):
        return (self.data[i] for i in range(self.rank, len(self.data), self.ranks))


class Streaming(Quadratic):
    def train_dataloader(self):
        ranks = self.trainer.world_size
        return DataLoader(Stream(self.samples(self.steps, 1), self.global_rank, ranks), batch_size=BATCH // ranks)


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


BARE = {"logger": None, "enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None}


def weight_averaging() -> Any:
    return [StochasticWeightAveraging(0.05, swa_epoch_start=1)]


def other_accumulation() -> Any:
    return [GradientAccumulationScheduler({0: 3, 1: 1})]


feature, nightly = pytest.mark.feature, pytest.mark.nightly
ACCUMULATION, AVERAGING = feature("gradient accumulation"), feature("StochasticWeightAveraging")
UNUSED, SHARED = {"find_unused_parameters": True}, {"broadcast_buffers": False}


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        pytest.param(Manual, {}, marks=feature("manual optimization")),
        pytest.param(Quadratic, {"accumulate_grad_batches": 2}, marks=ACCUMULATION),
        pytest.param(Quadratic, {"accumulate_grad_batches": 4}, marks=[ACCUMULATION, nightly]),
        pytest.param(Quadratic, {"callbacks": other_accumulation}, marks=ACCUMULATION),
        pytest.param(SomeUnused, {"strategy": UNUSED}, marks=feature("unused parameters")),
        pytest.param(Quadratic, {"strategy": {"static_graph": True}}, marks=feature("DDP's static_graph")),
        pytest.param(Configured, {}, marks=feature("configure_model")),
        pytest.param(Streaming, {}, marks=feature("IterableDataset")),
        pytest.param(
            Reloading,
            {"reload_dataloaders_every_n_epochs": 1},
            marks=[feature("reload_dataloaders_every_n_epochs"), nightly],
        ),
        pytest.param(
            Quadratic,
            {"barebones": True, "num_sanity_val_steps": None, **BARE},
            marks=[feature("Trainer(barebones=True)"), nightly],
        ),
        # a push trains it with BatchNorm, whose statistics it collects again
        pytest.param(Quadratic, {"callbacks": weight_averaging, "max_epochs": 5}, marks=[AVERAGING, nightly]),
        pytest.param(Normalized, {"strategy": SHARED, "callbacks": weight_averaging, "max_epochs": 4}, marks=AVERAGING),
    ],
)
def test_training_follows_one_device(follows_one_device, make, arguments):
    follows_one_device(make, **arguments)
