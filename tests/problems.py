"""Toy problems that several tests train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from harness import TARGETS
from torch import Tensor
from torch.utils.data import DataLoader


class Oracle(pl.LightningModule):
    """Rank r minimises 0.5 (x - a_r)^2 from 0 with SGD; ``report`` is x after each batch.

    Args:
        steps: Batches an epoch, on every rank.
        targets: The a_r.
        learning_rate: Of SGD.
        momentum: Of SGD.
    """

    def __init__(
        self,
        steps: int = 4,
        *,
        targets: Sequence[float] = TARGETS,
        learning_rate: float = 0.5,
        momentum: float = 0.0,
    ) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(1))
        self.steps, self.targets = steps, targets
        self.learning_rate, self.momentum = learning_rate, momentum
        self.report: Any = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (0.5 * (self.x - self.targets[self.global_rank]) ** 2).sum()

    def on_train_batch_end(self, *_: object) -> None:
        self.report.append(self.x.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=self.momentum)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(float(self.steps * self.trainer.world_size)).unsqueeze(1))
