"""Nodes with unequal numbers of batches: a module, and a calculation in plain Python of what it learns."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from fits import of_strategy
from lightning.pytorch.utilities import CombinedLoader
from problems import Stream
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hiercomm import AllReduce, DiLoCo, Health, PeriodicAveraging

LR = 0.125
BATCH = 2


class Resumable:
    """A loader that continues where a checkpoint left it."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.batches, self.begun, self.skip = batches, 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        self.begun, self.skip = self.skip, 0
        while self.begun < len(self.batches):
            self.begun += 1
            yield self.batches[self.begun - 1]

    def state_dict(self) -> dict[str, int]:
        return {"begun": self.begun}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["begun"]


def numbers_of(rank: int, batches: int) -> Tensor:
    """Return the samples of a rank: all samples of all ranks are different."""
    generator = torch.Generator().manual_seed(rank)
    return rank + torch.rand(batches * BATCH, generator=generator, dtype=torch.float64)


class Uneven(pl.LightningModule):
    """Minimises 0.5 (x - a)^2 over the samples a; ``report`` has what it has seen in each epoch.

    Args:
        batches: The number of every rank's batches.
        kind: How they are loaded: ``"map"``, ``"stream"`` or ``"resumable"``.
        momentum: Of SGD.
        tokens: Whether it logs a number of tokens, instead of samples: 3 for each sample of rank 1, otherwise 1.
    """

    def __init__(self, batches: Sequence[int], kind: str = "map", momentum: float = 0.0, tokens: bool = False) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.batches, self.kind, self.momentum, self.tokens = tuple(batches), kind, momentum, tokens
        self.report: Any = {"seen": [], "validated": [], "idle": [], "x": []}

    def on_train_epoch_start(self) -> None:
        self.report["seen"].append([])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not self.report["seen"]:  # after a resume
            self.report["seen"].append([])
        self.report["seen"][-1] += batch.tolist()
        if self.tokens:
            self.log("tokens", len(batch) * (3.0 if self.global_rank == 1 else 1.0))
        loss = 0.5 * (self.x - batch).square().mean()
        self.log("mean_sample", batch.mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        assert outputs["loss"] >= 0
        assert len(batch)
        self.report["idle"].append(self.trainer.strategy.is_idle)
        self.report["x"].append(self.x.item())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.report["validated"].append((self.trainer.global_step, self.x.item()))
        self.log("x", self.x.detach(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=self.momentum)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10**6), "interval": "step"}]

    def train_dataloader(self) -> Any:
        numbers = numbers_of(self.global_rank, self.batches[self.global_rank])
        if self.kind == "resumable":
            return Resumable(numbers.split(BATCH))
        if self.kind == "combined":
            return CombinedLoader(DataLoader(numbers, batch_size=BATCH), "min_size")
        return DataLoader(Stream(numbers) if self.kind == "stream" else numbers, batch_size=BATCH)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.zeros(1))


def calculated(scheme: Any, batches: Sequence[int], epochs: int = 1, accumulate: int = 1) -> float:
    """Return the parameter at the end of a run of nodes of one rank, step by step in plain Python."""
    loaded = [numbers_of(rank, own).split(BATCH) for rank, own in enumerate(batches)]
    nodes = [SimpleNamespace(x=0.0, batches=each, samples=0) for each in loaded]
    period = getattr(scheme, "sync_every", None)
    reference, velocity, steps = 0.0, 0.0, 0

    def synchronize() -> None:
        nonlocal reference, velocity
        total = sum(node.samples for node in nodes)
        if total:
            shares = [node.samples / total for node in nodes]
            change = sum(share * (node.x - reference) for share, node in zip(shares, nodes, strict=True))
        else:
            change = 0.0
        if isinstance(scheme, DiLoCo):  # SGD with learning rate 0.7 and Nesterov momentum 0.9
            velocity = 0.9 * velocity - change
            reference -= 0.7 * (-change + 0.9 * velocity)
        else:
            reference += change
        for node in nodes:
            node.x, node.samples = reference, 0

    for _ in range(epochs):
        for first in range(0, max(batches), accumulate):
            gradients = []
            for node in nodes:
                window = node.batches[first : first + accumulate]
                gradients.append(sum((node.x - batch.mean().item()) / accumulate for batch in window))
                node.samples += sum(map(len, window))
            windows = [len(node.batches[first : first + accumulate]) for node in nodes]
            if isinstance(scheme, AllReduce):
                # Lightning divides by the number of batches, also where the loader ends before
                total, most = sum(windows), max(windows)
                gradient = sum(g * most for g in gradients) / total
                for node in nodes:
                    node.x -= LR * gradient
                continue
            for node, gradient in zip(nodes, gradients, strict=True):
                node.x -= LR * gradient
            steps += 1
            in_epoch = first // accumulate + 1
            if period and (in_epoch if isinstance(scheme, PeriodicAveraging) else steps) % period == 0:
                synchronize()
        if isinstance(scheme, PeriodicAveraging):
            synchronize()
    if isinstance(scheme, DiLoCo):  # the run ends with the mean by samples
        total = sum(node.samples for node in nodes)
        return sum(node.x * node.samples for node in nodes) / total if total else nodes[0].x
    return nodes[0].x


def fit_uneven(fit: Any, module: pl.LightningModule, scheme: Any, **chosen: Any) -> Any:
    """Fit a module of so many ranks, nodes of one by default; ``chosen`` are the strategy's and ``fit``'s arguments."""
    own = {"ranks_per_node": 1, "unequal_data": True, "health": Health(hang_timeout=10.0), **of_strategy(chosen)}
    arguments = {"devices": len(module.batches), "use_distributed_sampler": False, "num_sanity_val_steps": 0, **chosen}
    return fit(module, {"scheme": scheme, **own}, **arguments)


def each_sample_once(reports: Sequence[Any], batches: Sequence[int], epochs: int = 1) -> None:
    for rank, report in enumerate(reports):
        expected = numbers_of(rank, batches[rank]).tolist()
        assert [sorted(seen) for seen in report["report"]["seen"]] == [sorted(expected)] * epochs


def ends_of(reports: Sequence[Any]) -> float:
    """Return the parameter, which is equal to the bit on all ranks."""
    (x,) = {report["state_dict"]["x"].item() for report in reports}
    return float(x)
