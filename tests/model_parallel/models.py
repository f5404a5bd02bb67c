"""Modules that shard themselves, and their like that do not."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, STEPS = 8, 12
"""Samples per step over all ranks, steps per epoch."""


class Net(pl.LightningModule):
    """A network whose layers do not all split evenly over two ranks; its ``report`` is what each step left."""

    def __init__(self, optimizer: str = "sgd", clip: bool = False) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net: Any = None
        self.report: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.build()
            if isinstance(self.trainer.strategy, ModelParallelStrategy):
                self.shard()

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 1)
        )

    def shard(self) -> None:
        from torch.distributed.fsdp import fully_shard

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
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def loader(self, seed: int, steps: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(steps * BATCH, 6, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=BATCH // 4)

    def train_dataloader(self) -> DataLoader:
        return self.loader(1, STEPS)

    def val_dataloader(self) -> DataLoader:
        return self.loader(2, 2)
