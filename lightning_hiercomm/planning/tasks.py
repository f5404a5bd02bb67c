"""Small real tasks, on which replicas learn in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_hiercomm.planning.errors import PlanningError

Examples = tuple[Tensor, Tensor]
"""Inputs and targets: class numbers."""

_WINDOW = 16  # characters that the next one is predicted from
_MOST_CHARACTERS = 200_000


@dataclass(frozen=True)
class Task:
    """What is learnt, by which model.

    Attributes:
        name: What the command line calls it.
        build: Makes the model; the caller seeds torch first.
        load: Gives examples to train on, and held-out ones.
        batch: Examples that a replica takes per step, unless something else is asked for.
        learning_rate: Of SGD with momentum 0.9, for one replica.
    """

    name: str
    build: Callable[[int], nn.Module]
    load: Callable[[], tuple[Examples, Examples]]
    batch: int
    learning_rate: float

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
    """

    def __init__(self, task: Task, rank: int, size: int, seed: int = 0) -> None:
        (self._inputs, self._targets), _ = task.load()
        self._generator = torch.Generator().manual_seed(1_000_003 * seed + rank)
        self._size = size

    def draw(self) -> Examples:
        """The next one."""
        chosen = torch.randint(len(self._targets), (self._size,), generator=self._generator)
        return self._inputs[chosen], self._targets[chosen]


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


@cache
def _digits() -> tuple[Examples, Examples]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise PlanningError("--task digits needs scikit-learn: pip install scikit-learn") from error
    images, labels = load_digits(return_X_y=True)
    return _split(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))


@cache
def _mnist1d() -> tuple[Examples, Examples]:
    try:
        from mnist1d.data import get_dataset_args, make_dataset
    except ImportError as error:
        raise PlanningError("--task mnist1d needs mnist1d: pip install mnist1d") from error
    made = make_dataset(get_dataset_args())

    def pair(suffix: str) -> Examples:
        return torch.tensor(made[f"x{suffix}"], dtype=torch.float32), torch.tensor(made[f"y{suffix}"])

    return pair(""), pair("_test")


@cache
def _characters() -> tuple[Examples, Examples]:
    """Windows of the text that Python's ``help()`` shows, and the character that follows each."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))[:_MOST_CHARACTERS]
    known = {character: index for index, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([known[character] for character in text])
    windows = numbers.unfold(0, _WINDOW + 1, 1)
    held_out = len(windows) // 10
    train, test = windows[:-held_out], windows[-held_out::16]
    return (train[:, :-1], train[:, -1]), (test[:, :-1], test[:, -1])


def _split(inputs: Tensor, targets: Tensor) -> tuple[Examples, Examples]:
    """One in five is held out."""
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    inputs, targets = inputs[order], targets[order]
    held_out = len(targets) // 5
    return (inputs[held_out:], targets[held_out:]), (inputs[:held_out], targets[:held_out])


def _reader_of_characters(classes: int) -> nn.Module:
    width = 16
    return nn.Sequential(
        nn.Embedding(classes, width),
        nn.Flatten(),
        nn.Linear(width * _WINDOW, 96),
        nn.ReLU(),
        nn.Linear(96, classes),
    )


def _perceptron(inputs: int, width: int) -> Callable[[int], nn.Module]:
    return lambda classes: nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, classes))


TASKS = {
    task.name: task
    for task in (
        Task("digits", _perceptron(64, 64), _digits, batch=8, learning_rate=0.05),
        Task("characters", _reader_of_characters, _characters, batch=32, learning_rate=0.1),
        Task("mnist1d", _perceptron(40, 128), _mnist1d, batch=16, learning_rate=0.05),
    )
}
"""By name."""
