"""Toy problems that several tests train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from harness import TARGETS, run_to_end
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from ranks import collect_trainers
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    Gossip,
    HierarchicalFabricStrategy,
    PeriodicAveraging,
    StepsDelay,
)

BATCH = 8
"""Samples per step over all ranks: each takes ``BATCH / world_size``."""

QUIET: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_checkpointing": False}
QUIET |= {"enable_progress_bar": False, "enable_model_summary": False}
"""A Trainer's arguments."""

SHORT_SCHEMES = {
    "all_reduce": AllReduce(),
    "periodic": PeriodicAveraging(2),
    "daso": DASO(2, 1, warmup=1, cooldown=0),
    "diloco": DiLoCo(2),
    "gossip": Gossip(),
    "steps_delay": StepsDelay(delay=2, warmup_steps=2),
}
"""Every scheme, synchronizing at least once in a run of three steps."""


train_with_momentum = partial(
    run_to_end,
    dtype=torch.float64,
    targets=None,
    inner=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    timeout=10,
)
"""Every rank towards targets of its own, in float64, to the end of the run."""


class Problem(pl.LightningModule):
    """A module that takes so many steps an epoch; its other arguments are attributes of a test's own."""

    def __init__(self, steps: int = 4, **own: Any) -> None:
        super().__init__()
        self.steps = steps
        self.report: Any = None
        for name, value in own.items():
            setattr(self, name, value)


class Oracle(Problem):
    """Rank r minimises 0.5 (x - a_r)^2 from 0 with SGD, the a_r being ``targets``; ``report`` is x after each batch."""

    targets, learning_rate, momentum = TARGETS, 0.5, 0.0

    def __init__(self, steps: int = 4, **own: Any) -> None:
        super().__init__(steps, **own)
        self.x = torch.nn.Parameter(torch.zeros(1))
        self.report = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (0.5 * (self.x - self.targets[self.global_rank]) ** 2).sum()

    def on_train_batch_end(self, *_: object) -> None:
        self.report.append(self.x.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=self.momentum)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(float(self.steps * self.trainer.world_size)).unsqueeze(1))


class Quadratic(Problem):
    """The loss of a sample ``a`` is ``0.5 |x - a|^2``, with x all the parameters.

    The gradient is linear in x and in the samples. So while every rank trains on samples of its own, the mean of x over
    the ranks moves exactly as on one device that sees all samples, whatever the ranks exchange, and when, as long as
    the exchange keeps the mean.
    """

    lr, momentum = 0.1, 0.0

    def __init__(self, steps: int = 4, **own: Any) -> None:
        super().__init__(steps, **own)
        torch.manual_seed(0)
        self.backbone = nn.Linear(3, 2)
        self.head = nn.Linear(2, 1)

    def loss(self, samples: Tensor, *layers: nn.Module) -> Tensor:
        """Of one of the layers, or of all parameters."""
        parameters = [p.flatten() for layer in layers or (self,) for p in layer.parameters()]
        x = torch.cat(parameters)
        return 0.5 * (x - samples[:, : len(x)].to(x.dtype)).square().sum(1).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]), sync_dist=True, batch_size=len(batch[0]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch[0]), sync_dist=True, batch_size=len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch[0] - torch.cat([p.flatten() for p in self.parameters()])).sum(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)

    def samples(self, steps: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        return TensorDataset(1.0 + torch.randn(steps * BATCH, 11, generator=generator))

    def loader(self, data: Any, shuffle: bool = False) -> DataLoader:
        ranks = self.trainer.world_size
        # what Lightning gives to more than one rank: this one deals the same samples to every step
        sampler = DistributedSampler(data, 1, 0) if shuffle and ranks == 1 else None
        return DataLoader(data, batch_size=BATCH // ranks, sampler=sampler)

    def train_dataloader(self) -> Any:
        return self.loader(self.samples(self.steps, seed=1), shuffle=True)

    def val_dataloader(self) -> Any:
        return self.loader(self.samples(2, seed=2))

    def test_dataloader(self) -> Any:
        return self.loader(self.samples(2, seed=3))

    def predict_dataloader(self) -> Any:
        return self.loader(self.samples(2, seed=4))


class Drifting(pl.LightningModule):
    """Rank r goes from 0 towards r + 1, slowly; ``own`` is what it holds after a batch, ``seen`` what it validates."""

    def __init__(self, steps: int = 7) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        self.steps = steps
        self.own: list[Tensor] = []
        self.seen: list[Tensor] = []

    def values(self) -> Tensor:
        return torch.cat([parameter.detach() for parameter in self.parameters()])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0.5 * (self.x - self.global_rank - 1).square().sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.values())

    def on_train_batch_end(self, *_: object) -> None:
        self.own.append(self.values())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(self.steps * self.trainer.world_size, 1))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(self.trainer.world_size, 1))


class Manual(Quadratic):
    def __init__(self, steps: int = 4, **own: Any) -> None:
        super().__init__(steps, **{"automatic_optimization": False, **own})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch[0]))
        optimizer.step()


class Normalized(Quadratic):
    """BatchNorm straight on the samples: its running mean is linear in them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(11, affine=False)

    def training_step(self, batch, batch_idx):
        self.norm(batch[0])
        return self.loss(batch[0], self.backbone, self.head)

    def on_train_end(self):
        self.norm.running_var.zero_()  # that of a large batch is not the mean of those of small ones


class Net(Problem):
    """A classifier whose ranks all train on the same samples: then any exchange is between equals."""

    def __init__(self, steps: int = 4, **own: Any) -> None:
        super().__init__(steps, **own)
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(4 * self.steps, 6, generator=generator, dtype=torch.get_default_dtype())
        y = torch.randint(3, (4 * self.steps,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=4)


class Stream(IterableDataset):
    """Yields samples, an unknown number of them."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class SaveAfter(pl.Callback):
    """Saves a checkpoint after an optimizer step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class SaveAfterEpoch(pl.Callback):
    """Saves a checkpoint at the end of the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@contextmanager
def warnings_with(text: str, of: str = "") -> Iterator[list[str]]:
    """Collect the messages of all warnings that contain a text, and come from files with that in their path."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(each.message) for each in caught if text in str(each.message) and of in each.filename]


def on_fabric(loop: Callable[[Fabric], Any]) -> list[Any]:
    """Run a loop on two ranks under Fabric's DDP and under AllReduce of two nodes; returns what it has returned."""
    ours, found = HierarchicalFabricStrategy("all_reduce", ranks_per_node=1), []
    for strategy in (FabricDDP(), ours):
        found.append(Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(loop))
    for run in ours.runs:
        run.close(timeout=20.0)
    ours.topology.close()
    return found


def same_bits(reports: list[dict[str, Any]]) -> None:
    """All ranks hold the same state."""
    for report in reports[1:]:
        torch.testing.assert_close(report["state_dict"], reports[0]["state_dict"], rtol=0, atol=0)


def one_trainer(folder: Path | None, **arguments: Any) -> pl.Trainer:
    """A quiet Trainer on CPUs.

    What became of the last one is collected first.
    """
    collect_trainers()
    own = {"default_root_dir": folder, "devices": 1, "num_sanity_val_steps": 0}
    return pl.Trainer(**{**QUIET, **own, **arguments})


def report_of(trainer: pl.Trainer) -> dict[str, Any]:
    """What a rank has to say of its fit: the module's weights and ``report``, and what was logged."""
    module = trainer.lightning_module
    return {
        "rank": trainer.global_rank,
        "state_dict": module.state_dict(),
        "report": getattr(module, "report", None),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def fitted(folder: Path, module: pl.LightningModule, strategy: Any, **arguments: Any) -> dict[str, Any]:
    """Fit on ranks that are running already; return the report of this one."""
    trainer = one_trainer(folder, strategy=strategy, **{"devices": 4, **arguments})
    trainer.fit(module)
    return report_of(trainer)
