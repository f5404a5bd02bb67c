"""The model and the examples that replicas of a simulation train on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

Examples = tuple[Tensor, Tensor]
"""Inputs and targets; the first dimension counts examples. For most tasks, targets are class numbers (int64)."""

OptimizerMaker = Callable[[Iterable[nn.Parameter], float], Optimizer]
"""Makes an optimizer from parameters and a learning rate."""


def momentum_sgd(parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
    """Make SGD with momentum 0.9."""
    return torch.optim.SGD(parameters, learning_rate, momentum=0.9)


def loss_of(model: nn.Module, batch: Examples) -> Tensor:
    """Return the cross entropy."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


@torch.no_grad()
def judge(model: nn.Module, examples: Examples) -> tuple[float, float]:
    """Return the share of correct predictions, and the loss."""
    inputs, targets = examples
    scores = model(inputs)
    return float((scores.argmax(1) == targets).float().mean()), float(functional.cross_entropy(scores, targets))


@dataclass(frozen=True)
class Turn:
    """The part of a step that belongs to one of several optimizers.

    Attributes:
        loss: Its loss, given the model and a batch.
        part: The submodule whose parameters it trains; ``""`` is the whole model.
    """

    loss: Callable[[nn.Module, Examples], Tensor] = loss_of
    part: str = ""


@dataclass(frozen=True)
class Task:
    """A model, its examples, and its optimizer.

    Attributes:
        name: Its name in results.
        build: Makes the model from the number of classes. Torch's random number generator is seeded before.
        load: Returns training examples and held-out examples. Every replica calls it: use ``functools.cache``.
        batch: Default number of examples that a replica uses per step.
        learning_rate: Of ``optimizer``, for one replica.
        optimizer: Makes the optimizer of each turn. Default: SGD with momentum 0.9.
        turns: Optimizers with their losses, in their order within a step. Each optimizer has its own scheme.
        judge: Returns an accuracy between 0 and 1, and a loss. Default: for classification.

    Example::

        task = Task("digits", build=lambda classes: nn.Linear(64, classes), load=examples, batch=16, learning_rate=0.1)
    """

    name: str
    build: Callable[[int], nn.Module]
    load: Callable[[], tuple[Examples, Examples]]
    batch: int
    learning_rate: float
    optimizer: OptimizerMaker = momentum_sgd
    turns: tuple[Turn, ...] = (Turn(),)
    judge: Callable[[nn.Module, Examples], tuple[float, float]] = judge

    def model(self, seed: int = 0) -> nn.Module:
        """Return a new model; equal seeds give equal models."""
        (_, targets), _ = self.load()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build(int(targets.max()) + 1)

    def steps_per_epoch(self, examples: int) -> int:
        """Return the optimizer steps of an epoch in which all replicas together use ``examples`` per step."""
        (_, targets), _ = self.load()
        return max(1, len(targets) // examples)


class Batches:
    """Draws the batches of one replica at random.

    Args:
        task: The source of examples.
        rank: Rank of the replica.
        size: Examples per batch.
        seed: Of the run.
        shard: ``(first, total)`` divides shuffled epochs as a distributed sampler does: of the ``total`` examples of a
            step, this replica uses ``size`` from the ``first`` on. None: draw from all examples, with replacement.
    """

    def __init__(self, task: Task, rank: int, size: int, seed: int = 0, shard: tuple[int, int] | None = None) -> None:
        (self._inputs, self._targets), _ = task.load()
        self._generator = torch.Generator().manual_seed(1_000_003 * seed + rank)
        self._size, self._seed, self._shard = size, seed, shard
        self._drawn = 0

    def draw(self) -> Examples:
        """Return the next batch."""
        if self._shard is None:
            chosen = torch.randint(len(self._targets), (self._size,), generator=self._generator)
        else:
            first, step = self._shard
            epoch, index = divmod(self._drawn, max(1, len(self._targets) // step))
            chosen = shuffled(len(self._targets), self._seed, epoch)[index * step + first :][: self._size]
            self._drawn += 1
        return self._inputs[chosen], self._targets[chosen]

    def state_dict(self) -> dict[str, Any]:
        """Return what the next batch depends on."""
        return {"generator": self._generator.get_state(), "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._drawn = state["drawn"]


@lru_cache(maxsize=4)  # all replicas ask for the same epoch
def shuffled(examples: int, seed: int, epoch: int) -> Tensor:
    """Return the order of an epoch, which all replicas of a run share."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.randperm(examples, generator=generator)
