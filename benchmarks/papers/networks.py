"""Networks that are trained many at once: a batched matrix product per layer for all of them.

Parameters are models x parameters, in the order of the module's. A network with BatchNorm also has running statistics,
which follow the parameters where a model is judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.simulate.tasks import Examples, Task
from benchmarks.zoo import TASKS

Split = tuple[Examples, Examples, Examples]
"""Examples to train on, to tune by, and to judge by."""

NORM_MOMENTUM, _NORM_EPSILON = 0.1, 1e-5  # torch's BatchNorm
_WIDTH, _WINDOW, _HIDDEN_UNITS = 8, 16, 48  # of the character model
_EVERY_HELD_OUT = 4  # of the character model's windows; neighboring ones are nearly the same


@dataclass(frozen=True)
class Network:
    """A network that is trained many at once.

    Attributes:
        task: Makes one module.
        split: Loads the examples.
        scores: Scores of many models (models x parameters, and then running statistics if it has them) on models x
            examples x inputs: models x examples x classes.
        train_scores: The same with statistics of the batch, and these: models x statistics. None without BatchNorm.
        statistics: What running statistics begin with.
    """

    task: Task
    split: Callable[[], Split]
    scores: Callable[[Tensor, Tensor], Tensor]
    train_scores: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    statistics: Tensor | None = None


def split_as(parameters: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Cut models x parameters into models x shape."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.unflatten(1, shape) for part, shape in zip(parameters.split(sizes, 1), shapes, strict=True)]


def convolved(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A convolution of stride 2 and padding 1, of models x examples x length x channels."""
    examples, kernel = hidden.shape[1], weight.shape[-1]
    hidden = functional.pad(hidden, (0, 0, 1, 1))
    length = (hidden.shape[2] - kernel) // 2 + 1
    windows = torch.cat([hidden[:, :, shift : shift + 2 * length - 1 : 2] for shift in range(kernel)], 3)
    matrix = weight.permute(0, 3, 2, 1).flatten(1, 2)  # kernel and input channels x output channels
    result: Tensor = torch.baddbmm(bias.unsqueeze(1), windows.flatten(1, 2), matrix).unflatten(1, (examples, length))
    return result


# ---- MNIST-1D: its CNN, a perceptron, and the CNN with BatchNorm ----------------------------------------------------

_SHAPES: list[tuple[int, ...]] = [(25, 1, 5), (25,), (25, 25, 3), (25,), (25, 25, 3), (25,), (10, 125), (10,)]


def scores(parameters: Tensor, inputs: Tensor) -> Tensor:
    """Return the scores of many CNNs, each on examples of its own.

    Args:
        parameters: Models x parameters.
        inputs: Models x examples x 40.
    """
    *kernels, last, end = split_as(parameters, _SHAPES)
    hidden = inputs.unsqueeze(-1)  # models x examples x length x channels
    for weight, bias in zip(kernels[::2], kernels[1::2], strict=True):
        hidden = convolved(hidden, weight, bias).relu()
    return torch.baddbmm(end.unsqueeze(1), hidden.transpose(2, 3).flatten(2), last.transpose(1, 2))


def perceptron_scores(parameters: Tensor, inputs: Tensor) -> Tensor:
    """Return the scores of many perceptrons, as :func:`scores`."""
    first, bias, last, end = split_as(parameters, [(128, 40), (128,), (10, 128), (10,)])
    hidden = torch.baddbmm(bias.unsqueeze(1), inputs, first.transpose(1, 2)).relu()
    return torch.baddbmm(end.unsqueeze(1), hidden, last.transpose(1, 2))


_CHANNELS = 25
_NORMALIZED_SHAPES: list[tuple[int, ...]] = [
    *((25, 1, 5), (25,), (25,), (25,)),
    *((25, 25, 3), (25,), (25,), (25,)) * 2,
    *((10, 125), (10,)),
]
_NORMALIZED_PARAMETERS = sum(torch.Size(shape).numel() for shape in _NORMALIZED_SHAPES)


def _build_normalized(classes: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 40))]
    for channels, kernel in ((1, 5), (25, 3), (25, 3)):
        layers += [
            nn.Conv1d(channels, _CHANNELS, kernel, stride=2, padding=1),
            nn.BatchNorm1d(_CHANNELS),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(125, classes))


NORMALIZED = replace(TASKS["mnist1d"], name="mnist1d, BatchNorm", build=_build_normalized)
"""The CNN of MNIST-1D with a BatchNorm after every convolution."""


def normalized_scores(parameters: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores of many CNNs with BatchNorm, and the statistics of their batches as a module would keep them.

    Args:
        parameters: Models x parameters; followed by running statistics, which then replace the batch's.
        inputs: Models x examples x 40.
    """
    own, given = parameters[:, :_NORMALIZED_PARAMETERS], parameters[:, _NORMALIZED_PARAMETERS:]
    parts = split_as(own, _NORMALIZED_SHAPES)
    running = given.unflatten(1, (3, 2, _CHANNELS)).unbind(1) if given.shape[1] else None
    found = []
    hidden = inputs.unsqueeze(-1)
    for layer in range(3):
        weight, bias, scale, shift = parts[4 * layer : 4 * layer + 4]
        hidden = convolved(hidden, weight, bias)
        if running is None:
            variance, mean = torch.var_mean(hidden, (1, 2), correction=0)
            count = hidden.shape[1] * hidden.shape[2]
            found.append(torch.cat([mean, variance * (count / (count - 1))], 1).detach())
        else:
            mean, variance = running[layer].unbind(1)
        factor = scale / (variance + _NORM_EPSILON).sqrt()
        offset = shift - mean * factor
        hidden = (hidden * factor[:, None, None] + offset[:, None, None]).relu()
    features = hidden.transpose(2, 3).flatten(2)
    scores = torch.baddbmm(parts[-1].unsqueeze(1), features, parts[-2].transpose(1, 2))
    return scores, torch.cat(found, 1) if found else given


# ---- a character model -----------------------------------------------------------------------------------------------


def _build_reader(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(classes, _WIDTH),
        nn.Flatten(),
        nn.Linear(_WIDTH * _WINDOW, _HIDDEN_UNITS),
        nn.ReLU(),
        nn.Linear(_HIDDEN_UNITS, classes),
    )


CHARACTERS = replace(TASKS["characters"], name="characters, small", build=_build_reader)
"""The next character of a text from the 16 before it, by a perceptron on embeddings with a third of the parameters."""


@cache
def character_split() -> Split:
    """Return the task's windows to train on, and those of either half of its held-out text to tune and to judge by."""
    train, (inputs, targets) = CHARACTERS.load()
    text = torch.cat([inputs.flatten(), targets[-1:]])  # the task's held-out windows follow each other
    windows = text.unfold(0, _WINDOW + 1, 1)[::_EVERY_HELD_OUT]
    half = len(windows) // 2
    tuning, judging = windows[: half - _WINDOW // _EVERY_HELD_OUT], windows[half:]  # which share no character
    return train, (tuning[:, :-1], tuning[:, -1]), (judging[:, :-1], judging[:, -1])


def character_scores(parameters: Tensor, inputs: Tensor) -> Tensor:
    """Return the scores of many character models, each on windows of its own (models x examples x 16)."""
    models, classes = len(parameters), _classes()
    shapes = [(classes, _WIDTH), (_HIDDEN_UNITS, _WIDTH * _WINDOW), (_HIDDEN_UNITS,), (classes, _HIDDEN_UNITS)]
    table, first, bias, last, end = split_as(parameters, [*shapes, (classes,)])
    places = inputs + classes * torch.arange(models)[:, None, None]
    embedded = functional.embedding(places, table.flatten(0, 1)).flatten(2)
    hidden = torch.baddbmm(bias.unsqueeze(1), embedded, first.transpose(1, 2)).relu()
    return torch.baddbmm(end.unsqueeze(1), hidden, last.transpose(1, 2))


@cache
def _classes() -> int:
    (_, targets), _ = CHARACTERS.load()
    return int(targets.max()) + 1
