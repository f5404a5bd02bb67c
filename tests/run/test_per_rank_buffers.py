"""Buffers and frozen parameters of other shapes on other ranks, such as memory banks, stay each rank's own."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import on_ranks, place
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from problems import one_trainer
from torch import nn
from torch.multiprocessing.spawn import ProcessException
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    Gossip,
    HierarchicalFabricStrategy,
    HierarchicalStrategy,
    PeriodicAveraging,
    StepsDelay,
)
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import Replicas, per_rank_tensors
from lightning_hiercomm.run.shapes import unequal_tensors
from lightning_hiercomm.run.training_run import TrainingRun

SCHEMES = {
    "all_reduce": AllReduce,
    "periodic": partial(PeriodicAveraging, 2),
    "alone": partial(PeriodicAveraging, 2, gradients="none"),
    "daso": partial(DASO, 2, warmup_epochs=1, cooldown_epochs=0),
    "diloco": partial(DiLoCo, 2),
    "gossip": partial(Gossip, segments=2),
    "steps_delay": partial(StepsDelay, 2, warmup_steps=2),
}
LAYOUTS = {2: [(name, 2 if name == "alone" else 1) for name in SCHEMES], 4: [("all_reduce", 2), ("periodic", 2)]}
"""Schemes and ranks per node, by the number of ranks."""


class Plain(pl.LightningModule):
    """Has BatchNorm; ranks train on other samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) - self.global_rank).square().mean()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader:
        samples = torch.randn(16 * self.trainer.world_size, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(samples), batch_size=4)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.ones(2 * self.trainer.world_size, 4)), batch_size=2)


class Banks(Plain):
    """Fills banks at every moment of a fit; ``own`` is what this rank put into each, ``lost`` what changed since."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("set_up", "started", "grown", "cut", "one", "first", "validated", "saved_late", "ended"):
            self.register_buffer(name, torch.zeros(4))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("absent", None)
        self.register_buffer("labels", torch.zeros(4, dtype=torch.long))
        self.register_buffer("cached", torch.zeros(4), persistent=False)
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.own: dict[str, torch.Tensor] = {}
        self.lost: list[tuple[str, str]] = []

    def fill(self, name: str, length: int | None = None) -> None:
        """Put a bank of another length on every rank in the place of what was there."""
        rank = self.trainer.global_rank
        length = 2 + 3 * rank if length is None else length
        values = torch.full((length,), 10.0 + rank + len(self.own) / 8)
        if name == "labels":
            values = values.long()
        self.own[name] = values.clone()
        if name == "frozen":
            self.frozen = nn.Parameter(values, requires_grad=False)
        elif name in self._buffers:
            setattr(self, name, values)
        else:
            self.register_buffer(name, values)

    def compare(self, where: str) -> None:
        for name, values in self.own.items():
            held = getattr(self, name)
            if held.shape != values.shape or not torch.equal(held, values):
                self.lost.append((name, where))

    def setup(self, stage: str) -> None:
        self.fill("set_up")

    def on_fit_start(self) -> None:
        self.fill("started")

    def on_train_batch_start(self, *_: object) -> None:
        self.compare("a batch")

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        step = self.trainer.global_step
        self.fill("grown", (step + 1) * (self.global_rank + 1))
        self.fill("cut", 12 - step - self.global_rank)
        if step == 1:
            self.fill("late")
            self.fill("labels")
            self.fill("cached")
            if self.global_rank == 0:
                self.fill("first", 7)
            if self.global_rank == 1:
                self.fill("one", 7)
                self.fill("late_on_one", 3)
        elif step > 1 and self.global_rank != 0:
            self.first.fill_(step + self.global_rank)  # in place
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.fill("empty")
        self.fill("absent")
        self.fill("frozen")

    def on_validation_start(self) -> None:
        self.compare("a validation")
        self.fill("validated")

    def on_validation_end(self) -> None:
        self.fill("saved_late")

    def on_train_end(self) -> None:
        self.fill("ended")


def _of_net(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.net.state_dict().items()}


def _fit_with_and_without_banks(devices: int, folder: Path) -> dict[str, Any]:
    """Under every scheme: what became of the banks, of a file, and of the rest of the module; and the warnings."""
    said = {}
    for name, ranks_per_node in LAYOUTS[devices]:
        modules = {}
        for kind in (Plain, Banks):
            saves = ModelCheckpoint(folder / f"{name} {kind.__name__}", save_last=True, every_n_train_steps=2)
            strategy = HierarchicalStrategy(SCHEMES[name](), ranks_per_node=ranks_per_node)
            more = {"val_check_interval": 2, "callbacks": [saves], "enable_checkpointing": True, "max_epochs": 2}
            modules[kind] = module = kind()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                one_trainer(folder, devices=devices, strategy=strategy, **more).fit(module)
        module.compare("the end")
        saved = torch.load(saves.last_model_path, weights_only=True)["state_dict"]
        said[name] = {
            "lost": module.lost,
            "first": module.first.clone(),
            "net": _of_net(module),
            "net without banks": _of_net(modules[Plain]),
            "saved": {bank: value.clone() for bank, value in saved.items() if not bank.startswith("net")},
            "own": module.own,
            "warned": [str(each.message) for each in caught if "another shape on other ranks" in str(each.message)],
        }
    return said


@pytest.fixture(scope="module")
def ranks(borrow: Any) -> dict[int, list[dict[str, Any]]]:
    return {devices: borrow(partial(_fit_with_and_without_banks, devices), devices) for devices in LAYOUTS}


RUNS = [(devices, name) for devices, runs in LAYOUTS.items() for name, _ in runs]


@pytest.mark.parametrize(("devices", "name"), RUNS)
def test_banks_of_other_lengths_stay_each_ranks_own(ranks, devices, name):
    for rank in ranks[devices]:
        assert rank[name]["lost"] == []


@pytest.mark.parametrize(("devices", "name"), RUNS)
def test_banks_of_other_lengths_change_nothing_else(ranks, devices, name):
    first = ranks[devices][0][name]
    for rank in ranks[devices]:
        for key, value in rank[name]["net"].items():
            if "num_batches" not in key:
                torch.testing.assert_close(value, rank[name]["net without banks"][key])
                assert torch.equal(value, first["net"][key]), key


@pytest.mark.parametrize(("devices", "name"), RUNS)
def test_a_checkpoint_holds_the_banks_of_rank_0(ranks, devices, name):
    own, saved = (ranks[devices][0][name][which] for which in ("own", "saved"))
    assert saved.keys() >= own.keys() - {"cached", "ended"}
    for bank in own.keys() - {"cached", "ended", "empty", "absent", "frozen"}:
        assert torch.equal(saved[bank], own[bank]), bank


@pytest.mark.parametrize(("devices", "name"), RUNS)
def test_each_bank_of_another_length_is_named_once_on_rank_0(ranks, devices, name):
    first, *others = (rank[name]["warned"] for rank in ranks[devices])
    assert others == [[]] * (devices - 1)
    text = " ".join(first)
    quiet = {"labels", "cached"}  # counts, and what no checkpoint holds
    for bank in {*ranks[devices][0][name]["own"], "one", "late_on_one"} - quiet - {"late"}:
        assert text.count(f"{bank} (") - text.count(f"_{bank} (") == 1, (bank, text)
    for bank in quiet:
        assert f"{bank} (" not in text
    assert "late (float32[2] on rank 0, float32[5] on rank 1)" in text
    assert "checkpoint holds rank 0's" in text
