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


class Surgery(pl.LightningModule):
    """Steps without what in one task's gradient is opposed to another's (PCGrad), and with that of the step before.

    It keeps gradients of two losses of one network, within a step and for the next one.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2))
        self.automatic_optimization = False
        self.before: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (samples,), optimizer, kept = batch, self.optimizers(), []
        first, second = self.layers(samples).unbind(1)
        for loss in ((first - samples.sum(1)).square().mean(), (second + samples[:, 0]).square().mean()):
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=not kept)
            kept.append([parameter.grad for parameter in self.parameters()])
        for parameter, one, two, before in zip(self.parameters(), *kept, self.before or kept[0], strict=True):
            opposed = (one * two).sum().clamp(max=0.0) / two.square().sum()
            parameter.grad = one - opposed * two + two + before / 2
        self.before = kept[0]
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        samples = torch.randn(8 * STEPS, FEATURES, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(samples), batch_size=8 // self.trainer.world_size)


@pytest.mark.parametrize("ranks_per_node", [1, 2], ids=["2x1", "2x2"])
def test_programs_that_keep_gradients_train_as_on_ddp(borrow, ranks_per_node):
    def both(folder):
        strategies = DDPStrategy(), HierarchicalStrategy("all_reduce", ranks_per_node=ranks_per_node)
        arguments = {"devices": 2 * ranks_per_node, "max_epochs": 1}
        return [fitted(folder, Surgery(), strategy, **arguments)["state_dict"] for strategy in strategies]

    for ddp, ours in borrow(both, ranks=2 * ranks_per_node):
        torch.testing.assert_close(ours, ddp, rtol=1e-6, atol=1e-7)
