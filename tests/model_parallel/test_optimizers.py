"""Optimizers of sharded modules whose gradients are not averaged."""

from __future__ import annotations

import warnings

import torch

from lightning_hiercomm import AllReduce, HierarchicalModelParallelStrategy

from .conftest import trainer
from .sharded import Net


class Plain(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx).backward()
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_gradients_that_nodes_should_share_and_do_not_are_named(launch):
    def program(_):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(HierarchicalModelParallelStrategy(AllReduce(), ranks_per_node=2)).fit(Plain())
        return [str(warning.message) for warning in caught if "/lightning_hiercomm/" in warning.filename]

    said = launch(program)
    assert [len(each) for each in said] == [1, 1, 0, 0]
    assert "ranks 1, 3 should share" in said[1][0]
    assert "call self.manual_backward(loss)" in said[1][0]
