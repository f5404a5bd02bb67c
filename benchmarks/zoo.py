"""Small real tasks, on which replicas of a simulation learn in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from benchmarks.simulate.tasks import Examples, Task, Turn

_WINDOW = 16  # characters that the next one is predicted from
_MOST_CHARACTERS = 200_000
_PIECE = 4  # numbers of a signal that a recurrent network reads at a time
_LATENT = 8
_GRID = 3  # modes in a row, and rows of them
_MODE_WIDTH = 0.1  # standard deviation of the points of a mode; modes are 1 apart


def adam(parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
    """Adam with torch's defaults."""
    return torch.optim.Adam(parameters, learning_rate)


@cache
def _digits() -> tuple[Examples, Examples]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError("this task needs scikit-learn: pip install scikit-learn") from error
    images, labels = load_digits(return_X_y=True)
    return _split(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))


@cache
def _mnist1d() -> tuple[Examples, Examples]:
    try:
        from mnist1d.data import get_dataset_args, make_dataset
    except ImportError as error:
        raise ValueError("this task needs mnist1d: pip install mnist1d") from error
    made = make_dataset(get_dataset_args())

    def pair(suffix: str) -> Examples:
        return torch.tensor(made[f"x{suffix}"], dtype=torch.float32), torch.tensor(made[f"y{suffix}"])

    return pair(""), pair("_test")


@cache
def _pieces_of_mnist1d() -> tuple[Examples, Examples]:
    """The same signals, as ten pieces of four numbers."""
    (inputs, targets), (held_out, labels) = _mnist1d()
    return (inputs.unflatten(1, (-1, _PIECE)), targets), (held_out.unflatten(1, (-1, _PIECE)), labels)


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


@cache
def _mixture() -> tuple[Examples, Examples]:
    """Latent vectors, and points of nine Gaussians on a grid that have nothing to do with them."""
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(12_000, _LATENT, generator=generator)
    centres = _modes()[torch.randint(_GRID**2, (len(latent),), generator=generator)]
    points = centres + _MODE_WIDTH * torch.randn(len(latent), 2, generator=generator)
    return (latent[2_000:], points[2_000:]), (latent[:2_000], points[:2_000])


def _modes() -> Tensor:
    """Their means."""
    row = torch.arange(_GRID) - (_GRID - 1) / 2
    return torch.cartesian_prod(row, row)


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


def _convolutions(classes: int) -> nn.Module:
    """The CNN of MNIST-1D (Greydanus and Kobak 2024)."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 40))]
    for channels, kernel in ((1, 5), (25, 3), (25, 3)):
        layers += [nn.Conv1d(channels, 25, kernel, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(125, classes))


class _Reader(nn.Module):
    """Classifies a sequence by its last state.

    Args:
        cells: Makes the recurrent layer from the sizes of its input and of its state.
        classes: To tell apart.
    """

    def __init__(self, cells: Callable[..., nn.RNNBase], classes: int) -> None:
        super().__init__()
        width = 48
        self.cells = cells(_PIECE, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, sequences: Tensor) -> Tensor:
        states, _ = self.cells(sequences)
        scores: Tensor = self.head(states[:, -1])
        return scores


class _Adversaries(nn.Module):
    """A generator of points from latent vectors, and a critic that classifies points as real."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = _layers(_LATENT, 64, 64, 2, between=nn.Tanh)
        self.critic = _layers(2, 64, 64, 1, between=nn.Tanh)

    def forward(self, latent: Tensor) -> Tensor:
        points: Tensor = self.generator(latent)
        return points


def _critics_loss(model: nn.Module, batch: Examples) -> Tensor:
    latent, points = batch
    assert isinstance(model, _Adversaries)
    softplus = functional.softplus  # of minus the logit: the cross entropy of what is real
    return (softplus(-model.critic(points)) + softplus(model.critic(model(latent).detach()))).mean()


def _generators_loss(model: nn.Module, batch: Examples) -> Tensor:
    latent, _ = batch
    assert isinstance(model, _Adversaries)
    return functional.softplus(-model.critic(model(latent))).mean()


@torch.no_grad()
def _judge_points(model: nn.Module, examples: Examples) -> tuple[float, float]:
    """The overlap of what is generated with the modes, and its sliced Wasserstein distance from real points.

    The overlap is the sum over modes of the share of points that lie within three standard deviations. Each
    mode counts for at most 1/9: 1/9 where all points are in one mode, 0.97 for real ones.
    """
    latent, points = examples
    made = model(latent)
    distances, nearest = torch.cdist(made, _modes()).min(1)
    shares = nearest[distances < 3 * _MODE_WIDTH].bincount(minlength=_GRID**2) / len(made)
    angles = torch.arange(32) * math.pi / 32
    directions = torch.stack([angles.cos(), angles.sin()])
    apart = (made @ directions).sort(0).values - (points @ directions).sort(0).values
    return float(shares.clamp(max=1 / _GRID**2).sum()), float(apart.abs().mean())


def _perceptron(inputs: int, width: int) -> Callable[[int], nn.Module]:
    return lambda classes: _layers(inputs, width, classes)


def _layers(*widths: int, between: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear ones, with an activation between them."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), between())]
    return nn.Sequential(*layers[:-1])


def _adam_of_gans(parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
    return torch.optim.Adam(parameters, learning_rate, betas=(0.5, 0.999))


TASKS = {
    task.name: task
    for task in (
        Task("digits", _perceptron(64, 64), _digits, batch=8, learning_rate=0.05),
        Task("characters", _reader_of_characters, _characters, batch=32, learning_rate=0.1),
        Task("mnist1d", _convolutions, _mnist1d, batch=16, learning_rate=0.05),
        *(
            Task(name, partial(_Reader, cells), _pieces_of_mnist1d, batch=16, learning_rate=0.005, optimizer=adam)
            for name, cells in (("rnn", nn.RNN), ("gru", nn.GRU), ("lstm", nn.LSTM))
        ),
        Task(
            "gan",
            lambda _: _Adversaries(),
            _mixture,
            batch=64,
            learning_rate=3e-3,
            optimizer=_adam_of_gans,
            turns=(Turn(_critics_loss, "critic"), Turn(_generators_loss, "generator")),
            judge=_judge_points,
        ),
    )
}
"""By name."""
