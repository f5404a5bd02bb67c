"""A synchronous first phase under a Trainer: DDP spans all nodes in it, and the node afterwards."""

from __future__ import annotations

import pytest
import torch
from fits import fit_here, outcome
from problems import Normalized, Oracle, Quadratic, Stream, fitted
from torch.utils.data import DataLoader

from lightning_hiercomm import AllReduce, DiLoCo, HierarchicalFabricStrategy, HierarchicalStrategy, PeriodicAveraging


class TwoSteps(Oracle):
    """Steps twice in each batch; reports the parameter, and the size of DDP's process group."""

    def training_step(self, batch, batch_idx):
        for _ in range(2):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def on_train_batch_end(self, *_):
        self.report.append((self.x.item(), self.trainer.strategy.model.process_group.size()))


def test_a_phase_that_ends_within_a_batch_regroups_ranks_with_the_next(borrow):
    """Three synchronous steps go towards 4, and each further one half of the way to the node's 1 or 7."""

    def main(folder):
        module = TwoSteps(3, automatic_optimization=False)
        fit_here(folder, module, PeriodicAveraging(6, warmup_steps=3), ranks_per_node=2, devices=4, max_epochs=1)
        return module.report

    for rank, report in enumerate(borrow(main)):
        assert report == [(3.0, 4), ((3.5 + (1.0 if rank < 2 else 7.0)) / 2, 4), (3.9375, 2)]


class OnOneNode(Normalized):
    """Uses its head on the first node only, and normalizes what it gets."""

    def training_step(self, batch, batch_idx):
        layers = (self.backbone, self.head) if self.global_rank < 2 else (self.backbone,)
        return self.loss(self.norm(batch[0]), *layers)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def test_the_phase_equals_all_reduce_also_where_one_node_uses_a_layer(borrow):
    def main(folder):
        found = []
        for scheme in (AllReduce(), PeriodicAveraging(3, warmup_steps=4), DiLoCo(3, warmup_steps=4)):
            strategy = HierarchicalStrategy(scheme, ranks_per_node=2, find_unused_parameters=True)
            found.append(fitted(folder, OnOneNode(), strategy, max_epochs=1)["state_dict"])
        return found

    for expected, *others in borrow(main):
        for values in others:
            torch.testing.assert_close(values, expected, rtol=0, atol=0)


class Unsized(Quadratic):
    """Its epochs have an unknown length."""

    def train_dataloader(self):
        return DataLoader(Stream(torch.ones(4, 11)), batch_size=1, collate_fn=lambda rows: [torch.stack(rows)])


def test_a_share_of_an_unknown_number_of_steps_is_refused_by_name(borrow):
    def main(folder):
        found = []
        for module, arguments in (
            (Unsized(), {"max_epochs": 1}),
            (TwoSteps(2, automatic_optimization=False), {"max_epochs": 1}),
            (Quadratic(), {"max_epochs": -1}),
        ):
            error, *_ = outcome(folder, module, PeriodicAveraging(2, warmup_steps=0.5), **arguments)
            found.append((error, module.report or []))
        return found

    for found in borrow(main, ranks=2):
        assert len(found) == 3
        for message, report in found:
            assert "warmup_steps=0.5 is a fraction of the run, whose number of optimizer steps is unknown" in message
            assert report == []


def test_unsupported_uses_of_the_phase_are_refused_before_training():
    scheme = PeriodicAveraging(4, warmup_steps=8)
    with pytest.raises(ValueError, match="warmup_steps=8 averages gradients over all nodes at every step, so none may"):
        HierarchicalStrategy(scheme, elastic="localhost:29510")
    with pytest.raises(ValueError, match="warmup_steps=8 needs a Trainer"):
        HierarchicalFabricStrategy(scheme)
