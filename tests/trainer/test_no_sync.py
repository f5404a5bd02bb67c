"""Gradients that programs accumulate in ``no_sync`` are exchanged once, and those that they keep stay as they are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fits import fit_here, weights_of
from lightning.pytorch.strategies import DDPStrategy
from problems import SHORT_SCHEMES, Manual, fitted

from lightning_hiercomm import HierarchicalStrategy


class Accumulates(Manual):
    """Steps after every second batch; the first of the two is not to be reduced."""

    through = "trainer.model"

    def on_train_start(self) -> None:
        self.report = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        ends = batch_idx % 2 == 1
        model = self.trainer.model if self.through == "trainer.model" else self.trainer.strategy.model
        with nullcontext() if ends or not self.through else model.no_sync():
            self.manual_backward(self.loss(batch[0]) / 2)
        if ends:
            self.report.append(self.head.weight.grad.flatten().tolist())
            optimizer.step()
            optimizer.zero_grad()


def _accumulated(folder):
    """By scheme, whether both ways to DDP do the same, after a comparison with a run without no_sync."""
    found = {}
    for name in ("all_reduce", "periodic", "steps_delay"):
        ends = []
        for module in (Accumulates(8, through=through) for through in ("", "trainer.model", "strategy.model")):
            fit_here(folder, module, SHORT_SCHEMES[name], max_epochs=1)
            ends.append((module.report, weights_of(module)))
        torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)
        found[name] = ends[1] == ends[2]
    return found


def test_no_sync_accumulates_on_nodes_of_one_rank(borrow):
    assert borrow(_accumulated, ranks=2) == [{"all_reduce": True, "periodic": True, "steps_delay": True}] * 2


class AccumulatesByTrainer(Accumulates):
    """The same steps in automatic optimization, where Lightning keeps DDP from reducing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.report.append(self.head.weight.grad.flatten().tolist())


def _with_feedback(folder):
    found = []
    for wire in ("int8", "int4"):
        by_trainer = AccumulatesByTrainer(8, automatic_optimization=True)
        for module, arguments in ((Accumulates(8), {}), (by_trainer, {"accumulate_grad_batches": 2})):
            fit_here(folder, module, "all_reduce", wire_dtype=wire, **arguments)
            found.append((wire, module.report, weights_of(module)))
    return found


def test_narrow_wires_send_gradients_accumulated_in_no_sync_once(borrow):
    for found in borrow(_with_feedback, ranks=2):
        assert found[0] == found[1]
        assert found[2] == found[3]
        assert found[0][2] != found[2][2], "wires differ"


class Surgery(Manual):
    """Combines gradients of two losses that it keeps, as PCGrad does, with one of the step before."""

    before: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        kept = []
        for samples in (batch[0], batch[0].square()):
            optimizer.zero_grad()
            self.manual_backward(self.loss(samples))
            kept.append([parameter.grad for parameter in self.parameters()])
        for parameter, one, two, before in zip(self.parameters(), *kept, self.before or kept[0], strict=True):
            parameter.grad = one - 0.3 * two + before / 2
        self.before = kept[0]
        optimizer.step()


@pytest.mark.parametrize("ranks_per_node", [1, 2], ids=["2x1", "2x2"])
def test_programs_that_keep_gradients_train_as_on_ddp(borrow, ranks_per_node):
    def both(folder):
        strategies = DDPStrategy(), HierarchicalStrategy("all_reduce", ranks_per_node=ranks_per_node)
        arguments = {"devices": 2 * ranks_per_node, "max_epochs": 1}
        return [fitted(folder, Surgery(), strategy, **arguments)["state_dict"] for strategy in strategies]

    for ddp, ours in borrow(both, ranks=2 * ranks_per_node):
        torch.testing.assert_close(ours, ddp, rtol=1e-6, atol=1e-7)
