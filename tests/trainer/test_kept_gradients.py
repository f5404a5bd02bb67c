"""Programs that keep gradients train as on DDP: nothing overwrites a gradient that a program holds."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from problems import fitted
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiercomm import HierarchicalStrategy

pytestmark = pytest.mark.pooled
STEPS, FEATURES = 4, 6


class TwoTasks(pl.LightningModule):
    """Two outputs of one network, whose losses pull in different directions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2))
        self.automatic_optimization = False

    def forward(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.layers(samples).unbind(1)
        return (first - samples.sum(1)).square().mean(), (second + samples[:, 0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        samples = torch.randn(8 * STEPS, FEATURES, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(samples), batch_size=8 // self.trainer.world_size)


def without_conflict(parameters: Any, first: list[Tensor], second: list[Tensor]) -> None:
    """Add up the gradients of two tasks, without what in the first is opposed to the second (PCGrad)."""
    for parameter, one, two in zip(parameters, first, second, strict=True):
        opposed = (one * two).sum().clamp(max=0.0) / two.square().sum()
        parameter.grad = one - opposed * two + two


class Surgery(TwoTasks):
    """Keeps the gradients of each task."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        kept = []
        for task, loss in enumerate(self(batch[0])):
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=task == 0)
            kept.append([parameter.grad for parameter in self.parameters()])
        without_conflict(self.parameters(), *kept)
        optimizer.step()


class KeepsForNextStep(TwoTasks):
    """Steps with the mean of the last two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True
        self.kept: dict[Tensor, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum(self(batch[0]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            present = parameter.grad
            parameter.grad = (present + self.kept.get(parameter, present)) / 2
            self.kept[parameter] = present


@pytest.mark.pairwise
@pytest.mark.parametrize("ranks_per_node", [1, 2], ids=["2x1", "2x2"])
@pytest.mark.parametrize("kind", [Surgery, KeepsForNextStep])
def test_programs_that_keep_gradients_train_as_on_ddp(borrow, kind, ranks_per_node):
    def both(folder):
        strategies = DDPStrategy(), HierarchicalStrategy("all_reduce", ranks_per_node=ranks_per_node)
        arguments = {"devices": 2 * ranks_per_node, "max_epochs": 1}
        return [fitted(folder, kind(), strategy, **arguments)["state_dict"] for strategy in strategies]

    for ddp, ours in borrow(both, ranks=2 * ranks_per_node):
        torch.testing.assert_close(ours, ddp, rtol=1e-6, atol=1e-7)
