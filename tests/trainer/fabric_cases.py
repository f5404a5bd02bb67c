"""A module that loops on Fabric, and a Trainer, train alike."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from problems import one_trainer
from torch import nn
from torch.utils.data import DataLoader
from trainer.conftest import is_equal_on_all_ranks, step

from lightning_hiercomm import DASO, AllReduce, Epochs, Gossip, HierarchicalStrategy, PeriodicAveraging, StepsDelay

EPOCHS, STEPS = 2, 4
SCHEMES = {
    "all_reduce": AllReduce(),
    "periodic": PeriodicAveraging(3),
    "daso": DASO(2, 1, warmup=Epochs(1), cooldown=0),
    "steps_delay": StepsDelay(2, 2),
    "gossip": Gossip(hierarchical=False, overlap=True),
}


class Net(pl.LightningModule):
    """Without ``state``, a node's parameters are all that it has of its own between two synchronizations."""

    def __init__(self, state=True) -> None:
        super().__init__()
        self.state = state
        norm = nn.BatchNorm1d(4) if state else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 1))
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + index / 10)

    def forward(self, batch):
        return (self.layers(batch).squeeze(1) - batch.sum(1)).square().mean()

    def training_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9 if self.state else 0.0)

    def train_dataloader(self, shuffle=True):
        samples = torch.randn(4 * STEPS * 4, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(samples, batch_size=4, shuffle=shuffle)


def by_trainer(scheme, folder):
    module, strategy = Net(), HierarchicalStrategy(scheme, ranks_per_node=2)
    one_trainer(folder, devices=4, strategy=strategy, max_epochs=EPOCHS).fit(module)
    return module.state_dict()


def set_up(fabric, state=True, shuffle=True):
    module = Net(state)
    loader = fabric.setup_dataloaders(module.train_dataloader(shuffle))
    return *fabric.setup(module, module.configure_optimizers()), loader


def train_epoch(fabric, model, optimizer, loader):
    for batch in loader:
        step(fabric, model(batch), optimizer)


def loop(fabric, strategy):
    model, optimizer, loader = set_up(fabric)
    for _ in strategy.epochs(EPOCHS, steps=len(loader)):
        train_epoch(fabric, model, optimizer, loader)
        with strategy.averaged_model():
            assert is_equal_on_all_ranks(fabric, torch.cat([p.flatten() for p in model.parameters()]))
    return model.state_dict()
