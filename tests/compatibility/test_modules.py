"""Modules whose weights a hook changes, and other habits of real programs, compared with one plain device.

All ranks see the same samples, so whatever is exchanged is between equals, and every scheme gives what one device does.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from problems import Net, one_trainer, report_of, same_bits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hiercomm.schemes import SCHEMES


class Validated(Net):
    """Looks at the weights twice an epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()


class Causal(Validated):
    """A mask of minus infinities is a float buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((6, 6), -math.inf).triu(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        seen = torch.softmax(batch[0].unsqueeze(1) + self.mask, -1)
        return nn.functional.cross_entropy(self.layers((seen @ batch[0].unsqueeze(-1)).squeeze(-1)), batch[1])


class Taught(Validated):
    """A frozen teacher follows its student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        likeness = (self.layers(batch[0]) - self.teacher(batch[0])).square().mean()
        return super().training_step(batch, batch_idx) + likeness

    def on_train_batch_end(self, *_: object) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


class Clamped(Validated):
    """WGAN's critic: no weight is larger than 0.2."""

    def on_train_batch_end(self, *_: object) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)


class Tied(Validated):
    """What goes in and what comes out share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        self.layers[2].weight = self.layers[0].weight


class Reborn(Validated):
    """Its head is initialized again in mid-epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.current_epoch == 1 and batch_idx == 2:
            with torch.no_grad():
                self.layers[2].weight.fill_(0.1)
                self.layers[2].bias.zero_()


class Swaps(pl.Callback):
    """Validates a moving average instead of the weights, as most hand-written callbacks do."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.trained: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        for name, value in pl_module.state_dict().items():
            self.average[name] = self.average.get(name, value).lerp(value, 0.1)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.trained = {name: value.clone() for name, value in pl_module.state_dict().items()}
        pl_module.load_state_dict(self.average)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.load_state_dict(self.trained)


PROGRAMS: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], list[pl.Callback]]]] = {
    "a causal mask": (Causal, list),
    "an EMA teacher": (Taught, list),
    "clamped weights": (Clamped, list),
    "tied weights": (Tied, list),
    "a head that is initialized again": (Reborn, list),
    "weights swapped for validation": (Validated, lambda: [Swaps()]),
}
REFUSED = {("steps_delay", "clamped weights"), ("steps_delay", "a head that is initialized again")}
"""Servers hold the weights, and what is written to a device's own would be lost: tests of StepsDelay have the error."""


def _fit(make_trainer: Callable[..., pl.Trainer], program: str) -> tuple[pl.Trainer, dict[str, Any]]:
    module, callbacks = PROGRAMS[program]
    trainer = make_trainer(callbacks=callbacks(), val_check_interval=0.5, use_distributed_sampler=False)
    trainer.fit(module())
    return trainer, report_of(trainer)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plain")
    return functools.cache(lambda program: _fit(partial(one_trainer, folder), program)[1])


@pytest.mark.parametrize(
    ("scheme_name", "program"), [pair for pair in itertools.product(SCHEMES, PROGRAMS) if pair not in REFUSED]
)
def test_real_modules_train_as_on_one_device(on_ranks, plain, tmp_path, scheme_name, program):
    def main(make_trainer: Callable[..., pl.Trainer], rank: int) -> dict[str, Any]:
        trainer, report = _fit(make_trainer, program)
        path = tmp_path / "saved.ckpt"
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=False)["state_dict"]
        for key, value in report["state_dict"].items():
            assert torch.equal(saved[key], value), f"{key} was not saved as it was after fit"
        return report

    ranks = on_ranks(main)
    same_bits(ranks)
    for key, value in plain(program)["state_dict"].items():
        message = f"{{}} of {key}".format
        torch.testing.assert_close(ranks[0]["state_dict"][key], value, rtol=1e-4, atol=1e-5, msg=message)
