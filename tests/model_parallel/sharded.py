"""Modules that shard themselves, and their like that do not."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

BATCH, STEPS = 8, 12
"""Samples per step over all ranks, steps per epoch."""


class Net(pl.LightningModule):
    """A network whose layers do not all split evenly over two ranks; its ``report`` is what each step left."""

    foreach: bool | None = None

    def __init__(self, optimizer: str = "sgd", replicas: int = 4) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.replicas = replicas
        self.net: Any = None
        self.report: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.build()
            if isinstance(self.trainer.strategy, ModelParallelStrategy):
                self.shard()

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 1))

    def shard(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.report.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=self.foreach)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, foreach=self.foreach)

    def loader(self, seed: int, steps: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(steps * BATCH, 6, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=BATCH // self.replicas)

    def train_dataloader(self) -> DataLoader:
        return self.loader(1, STEPS)

    def val_dataloader(self) -> DataLoader:
        return self.loader(2, 2)


class Dropped(Net):
    """Dropout from every rank's own random stream, statistics that differ, samples that follow from rank and step."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * self.trainer.global_step + self.global_rank)
        x = torch.randn(4, 6, generator=generator)
        return super().training_step((x, x.sum(1, keepdim=True).sin()), batch_idx)


class Meta(Net):
    """Made without memory, and given values by every rank on its own."""

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return super().build()

    def shard(self) -> None:
        super().shard()
        assert all(parameter.is_meta for parameter in self.parameters())
        torch.manual_seed(self.global_rank)


class FeedForward(nn.Module):
    """The block of Lightning's own example of tensor parallelism, with one output."""

    def __init__(self, width: int = 6, hidden: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, 1, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class TensorParallel(Net):
    """Parallelised as Lightning's examples do it: tensor parallel, then FSDP2, whichever has ranks."""

    foreach = False  # torch's fused steps do not mix DTensors with the plain parameters of the norm

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return FeedForward()

    def shard(self) -> None:
        tp_mesh = self.device_mesh["tensor_parallel"]
        if tp_mesh.size() > 1:
            plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
            parallelize_module(self.net, tp_mesh, plan)
        dp_mesh = self.device_mesh["data_parallel"]
        if dp_mesh.size() > 1:
            fully_shard(self.net, mesh=dp_mesh)
