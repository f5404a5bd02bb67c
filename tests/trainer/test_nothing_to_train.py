"""Modules without an optimizer, or without trainable parameters, run under every scheme and layout."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import fit_here
from problems import SHORT_SCHEMES, SaveAfterEpoch
from torch.utils.data import DataLoader

pytestmark = pytest.mark.pooled
STEPS = 3


class Untrained(pl.LightningModule):
    """A buffer that is the same on all ranks counts batches; nothing is trained.

    Args:
        layers: Whether it has parameters, which get gradients.
        frozen: Whether they are frozen.
        optimizers: What ``configure_optimizers`` returns; None, an empty list, or ``"sgd"`` for one of all parameters.
        manual: Whether optimization is manual; ``self.optimizers()`` has nothing to step.
    """

    def __init__(self, layers: bool = True, frozen: bool = False, optimizers: Any = None, manual: bool = False) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)) if layers else None
        self.made, self.automatic_optimization = optimizers, not manual
        if frozen:
            self.layers.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        loss = torch.zeros((), requires_grad=True)
        if self.layers is not None:
            loss = self.layers(torch.cat([batch, batch])).sum() + loss
        return loss if self.automatic_optimization else self.manual_backward(loss)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", self.seen, sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.made == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        return self.made

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(STEPS * self.trainer.world_size, 3))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(self.trainer.world_size, 3))


PROGRAMS: list[dict[str, Any]] = [
    {"layers": False},
    {},
    {"manual": True},
    {"manual": True, "optimizers": []},
    {"frozen": True, "optimizers": "sgd"},
    {"frozen": True},
]


def _runs(folder, sizes):
    """Fits and resumed fits that ended otherwise than with their first weights, and the batches that they have seen."""
    wrong = []
    for program, name in zip(PROGRAMS, SHORT_SCHEMES, strict=True):
        module, path = Untrained(**program), folder / f"{name}.ckpt"
        before = {key: value.clone() for key, value in module.named_parameters()}
        settings = {"ranks_per_node": sizes, "checkpoint_replicas": True, "callbacks": [SaveAfterEpoch(path)]}
        for epochs, resume in ((1, None), (2, path)):
            trainer = fit_here(folder, module, SHORT_SCHEMES[name], resume, max_epochs=epochs, **settings)
        same = all(torch.equal(value, before[key]) for key, value in module.named_parameters())
        seen = module.seen.item(), trainer.callback_metrics["seen"].item()
        if not same or seen != (2 * STEPS, 2 * STEPS):
            wrong.append((program, name, same, seen))
    return wrong


@pytest.mark.long("6 fits and their resumes")
@pytest.mark.parametrize("sizes", [1, 2], ids=["2x1", "1x2"])
def test_modules_of_which_nothing_is_trained_run_and_resume(borrow, sizes):
    assert borrow(lambda folder: _runs(folder, sizes), ranks=2) == [[], []]
