"""The work every contender does: a model, its batches, its optimizer, and how to judge it.

The speed workloads are multi-layer perceptrons on fixed random batches: many parameters for little arithmetic, so that
on a small machine the network, not the processor, is what is measured. The accuracy workloads are real data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.language import corpus
from benchmarks.language.model import SIZES, adamw
from benchmarks.language.model import Transformer as ByteTransformer

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """One piece of work.

    Args:
        name: What the command line calls it.
        build: Makes the model; the caller seeds torch first.
        batches: ``batches(rank, world_size, seed)`` gives an endless stream of batches for one rank.
        optimizer: Makes the optimizer.
        held_out: One large batch the accuracy is measured on; None for the speed workloads.
    """

    name: str
    build: Callable[[], nn.Module]
    batches: Callable[[int, int, int], Iterator[Batch]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    held_out: Callable[[], Batch] | None = None

    def model(self, seed: int = 0) -> nn.Module:
        """The model, the same for the same seed."""
        torch.manual_seed(seed)
        return self.build()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy over the last dimension."""
    inputs, targets = batch
    logits = cast(Tensor, model(inputs))
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def judged(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """The share of right predictions, and the loss."""
    inputs, targets = batch
    with torch.no_grad():
        logits = cast(Tensor, model(inputs))
    loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
    return float((logits.argmax(-1) == targets).float().mean()), float(loss)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers of the given widths with ReLU between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _speed(name: str, *widths: int, batch_size: int) -> Workload:
    def batches(rank: int, world_size: int, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        fixed = [
            (
                torch.randn(batch_size, widths[0], generator=generator),
                torch.randint(widths[-1], (batch_size,), generator=generator),
            )
            for _ in range(4)
        ]
        while True:
            yield from fixed

    return Workload(name, lambda: mlp(*widths), batches, sgd)


class Transformer(nn.Module):
    """A decoder-only transformer as wide and as deep as GPT-2, whose output layer is its embedding."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        options = {"dropout": 0.0, "activation": functional.gelu, "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, **options)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.layers(self.tokens(tokens) + self.places.weight[:length], mask=causal, is_causal=True)
        return functional.linear(hidden, self.tokens.weight)


def _tokens(name: str, vocabulary: int, context: int, width: int, layers: int, batch_size: int) -> Workload:
    """A transformer on fixed random tokens, for GPUs."""

    def batches(rank: int, world_size: int, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        fixed = [torch.randint(vocabulary, (batch_size, context + 1), generator=generator) for _ in range(4)]
        while True:
            yield from ((tokens[:, :-1], tokens[:, 1:]) for tokens in fixed)

    return Workload(name, lambda: Transformer(vocabulary, context, width, layers), batches, _adamw)


# Digits: 1 797 images of 8 x 8 pixels; one in five is held out.


@cache
def _digits() -> tuple[Batch, Batch]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs, targets = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    held_out = len(targets) // 5
    return (inputs[held_out:], targets[held_out:]), (inputs[:held_out], targets[:held_out])


def _digit_batches(rank: int, world_size: int, seed: int, batch_size: int = 16) -> Iterator[Batch]:
    inputs, targets = _digits()[0]
    generator = torch.Generator().manual_seed(seed)
    step = batch_size * world_size
    while True:  # the same shuffle on every rank, disjoint slices
        order = torch.randperm(len(targets), generator=generator)
        for start in range(0, len(order) - step + 1, step):
            mine = order[start + rank * batch_size : start + (rank + 1) * batch_size]
            yield inputs[mine], targets[mine]


# Characters: predict the next character of the text that Python's `help()` shows for keywords and topics.


@cache
def _characters() -> tuple[Tensor, int]:
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))
    alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text]), len(alphabet)


_CONTEXT = 32


class CharacterModel(nn.Module):
    """A small causal convolutional language model: fast on a CPU, and it does learn."""

    def __init__(self, alphabet: int, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, width)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, width, kernel_size=4) for _ in range(layers))
        self.head = nn.Linear(width, alphabet)

    def forward(self, characters: Tensor) -> Tensor:
        hidden = self.embedding(characters).transpose(1, 2)
        for convolution in self.convolutions:
            hidden = hidden + functional.relu(convolution(functional.pad(hidden, (3, 0))))
        return cast(Tensor, self.head(hidden.transpose(1, 2)))


def _character_model() -> nn.Module:
    return CharacterModel(_characters()[1])


def character_windows() -> Batch:
    """All windows to train on, and the same one character further; views of one text."""
    text = _characters()[0]
    windows = text[: int(0.9 * len(text))].unfold(0, _CONTEXT + 1, 1)
    return windows[:, :-1], windows[:, 1:]


def _character_batches(rank: int, world_size: int, seed: int) -> Iterator[Batch]:
    return _drawn(character_windows(), rank, seed, batch_size=8)


def _drawn(windows: Batch, rank: int, seed: int, batch_size: int) -> Iterator[Batch]:
    """Yield batches of windows that this rank draws."""
    inputs, targets = windows
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        starts = torch.randint(len(inputs) - 1, (batch_size,), generator=generator)
        yield inputs[starts].long(), targets[starts].long()


def _characters_held_out(windows: int = 128) -> Batch:
    text = _characters()[0]
    held_out = text[int(0.9 * len(text)) :]
    starts = torch.linspace(0, len(held_out) - _CONTEXT - 2, windows).long()
    chosen = held_out[starts[:, None] + torch.arange(_CONTEXT + 1)]
    return chosen[:, :-1], chosen[:, 1:]


# Bytes: predict the next byte of Python sources, with the smallest model of `benchmarks.language`.


def _byte_model() -> nn.Module:
    return ByteTransformer(SIZES["small"])


def _byte_windows(text: Tensor) -> Batch:
    windows = text.unfold(0, SIZES["small"].length + 1, 1)
    return windows[:, :-1], windows[:, 1:]


def _byte_batches(rank: int, world_size: int, seed: int) -> Iterator[Batch]:
    return _drawn(_byte_windows(corpus.load().training), rank, seed, batch_size=4)


def _bytes_held_out(windows: int = 64) -> Batch:
    inputs, targets = _byte_windows(corpus.load().judging)
    starts = torch.linspace(0, len(inputs) - 1, windows).long()
    return inputs[starts].long(), targets[starts].long()


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


WORKLOADS = {
    workload.name: workload
    for workload in (
        _speed("mlp11m", 1024, 2048, 2048, 2048, 256, batch_size=4),
        _speed("mlp1m", 256, 640, 640, 640, 32, batch_size=4),
        _speed("mlp85k", 64, 256, 256, 10, batch_size=32),
        _tokens("gpt124m", 50304, 1024, width=768, layers=12, batch_size=8),
        _tokens("gpt1m", 256, 64, width=128, layers=4, batch_size=2),
        Workload("digits", lambda: mlp(64, 1024, 1024, 10), _digit_batches, _momentum, lambda: _digits()[1]),
        Workload("digits10m", lambda: mlp(64, 3072, 3072, 10), _digit_batches, _momentum, lambda: _digits()[1]),
        Workload("characters", _character_model, _character_batches, _momentum, _characters_held_out),
        Workload("characters_adamw", _character_model, _character_batches, _adamw, _characters_held_out),
        Workload("bytes", _byte_model, _byte_batches, lambda model: adamw(model.parameters(), 1e-3), _bytes_held_out),
    )
}
