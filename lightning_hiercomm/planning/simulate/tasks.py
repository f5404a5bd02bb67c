"""What replicas of a simulation learn."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from lightning_hiercomm.planning.cluster import PlanningError

Examples = tuple[Tensor, Tensor]
"""Inputs and targets, the number of examples first: for most tasks, the numbers of their classes, int64."""

OptimizerMaker = Callable[[Iterable[nn.Parameter], float], Optimizer]
"""Makes an optimizer of parameters and a learning rate."""


def momentum_sgd(parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
    """SGD with momentum 0.9."""
    return torch.optim.SGD(parameters, learning_rate, momentum=0.9)


def loss_of(model: nn.Module, batch: Examples) -> Tensor:
    """Cross entropy."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


@torch.no_grad()
def judge(model: nn.Module, examples: Examples) -> tuple[float, float]:
    """The share of right answers, and the loss."""
    inputs, targets = examples
    scores = model(inputs)
    return float((scores.argmax(1) == targets).float().mean()), float(functional.cross_entropy(scores, targets))


@dataclass(frozen=True)
class Turn:
    """What one of the task's optimizers does in every step.

    Attributes:
        loss: Of the model, on a batch; the optimizer follows its gradient.
        part: The submodule whose parameters the optimizer trains; ``""`` is the whole model.
    """

    loss: Callable[[nn.Module, Examples], Tensor] = loss_of
    part: str = ""


@dataclass(frozen=True)
class Task:
    """What is learnt, by which model.

    Attributes:
        name: What tables call it.
        build: Makes the model from the number of classes; the caller seeds torch first.
        load: Gives examples to train on, and held-out ones. Every replica calls it: use ``functools.cache``.
        batch: Examples that a replica takes per step, unless something else is asked for.
        learning_rate: Of ``optimizer``, for one replica.
        optimizer: Makes one for each turn.
        turns: Optimizers with their losses, in the order in which they step. Each has a scheme of its own.
        judge: Gives the accuracy of the model on examples, between 0 and 1 and better when larger, and a loss.
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
        """The model, the same for the same seed."""
        (_, targets), _ = self.load()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build(int(targets.max()) + 1)

    def steps_per_epoch(self, examples: int) -> int:
        """Optimizer steps after which as many examples were seen as there are.

        Args:
            examples: Of all replicas together, per step.
        """
        (_, targets), _ = self.load()
        return max(1, len(targets) // examples)


class Batches:
    """One replica's batches: drawn at random, and its own.

    Args:
        task: Of which.
        rank: Of the replica.
        size: Of a batch.
        seed: Of the run.
        shard: As a distributed sampler does it: epochs are shuffled, every example comes once at most, and of each
            step's examples this replica takes those from the first number on, of as many as the second says. None: with
            replacement.
    """

    def __init__(self, task: Task, rank: int, size: int, seed: int = 0, shard: tuple[int, int] | None = None) -> None:
        (self._inputs, self._targets), _ = task.load()
        self._generator = torch.Generator().manual_seed(1_000_003 * seed + rank)
        self._size, self._seed, self._shard = size, seed, shard
        self._drawn = 0

    def draw(self) -> Examples:
        """The next one."""
        if self._shard is None:
            chosen = torch.randint(len(self._targets), (self._size,), generator=self._generator)
        else:
            first, step = self._shard
            epoch, index = divmod(self._drawn, max(1, len(self._targets) // step))
            chosen = shuffled(len(self._targets), self._seed, epoch)[index * step + first :][: self._size]
            self._drawn += 1
        return self._inputs[chosen], self._targets[chosen]


@lru_cache(maxsize=4)  # all replicas of a simulation ask for the same
def shuffled(examples: int, seed: int, epoch: int) -> Tensor:
    """The order of an epoch of a run, for all its replicas."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.randperm(examples, generator=generator)


def load_task(path: str) -> Task:
    """Import the task that a person names.

    Args:
        path: Where it is: ``"package.module:name"``.

    Raises:
        PlanningError: If there is none.
    """
    module, separator, name = path.partition(":")
    if not separator or not module or not name:
        raise PlanningError(f"--task {path!r} must look like package.module:name")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        task = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PlanningError(f"--task {path!r} cannot be imported: {error}") from error
    if not isinstance(task, Task):
        raise PlanningError(f"--task {path!r} is not a {Task.__module__}.Task")
    return task
