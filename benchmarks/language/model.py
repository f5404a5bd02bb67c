"""A decoder-only transformer over bytes, in three sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

_VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """A model, its batches, and the length of its runs.

    Attributes:
        width: Of the residual stream.
        layers: Number of blocks.
        heads: Attention heads.
        length: Bytes of a sequence.
        batch: Sequences of a node per step.
        steps: Optimizer steps of a run, eight epochs.
        short: Optimizer steps of a run that only compares learning rates.
        seeds: Runs of each method at its best rate.
        windows: Sequences of each held-out part that are evaluated, tuning and judging.
    """

    width: int
    layers: int
    heads: int
    length: int
    batch: int
    steps: int
    short: int
    seeds: int
    windows: tuple[int, int]

    @property
    def flops_per_token(self) -> float:
        """Of a forward and a backward pass: six per weight of a matrix, and attention."""
        weights = 12 * self.layers * self.width**2 + _VOCABULARY * self.width
        return 6.0 * weights + 6.0 * self.layers * self.length * self.width


SIZES = {
    "toy": Size(16, 1, 2, 16, 2, 16, 8, 1, (4, 4)),
    "small": Size(192, 3, 3, 128, 2, 400, 160, 3, (96, 192)),
    "medium": Size(512, 8, 8, 512, 8, 2048, 512, 3, (64, 128)),
    "large": Size(768, 12, 12, 512, 8, 10240, 512, 1, (64, 128)),
}
"""1.45 M, 25.7 M and 85.7 M parameters; ``toy`` is for tests."""


class Block(nn.Module):
    """Causal attention, then two layers with a GELU between them, each on normalized inputs."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width, bias=False)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.before_layers = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        batch, length, width = stream.shape
        mixed = self.queries_keys_values(self.before_attention(stream))
        queries, keys, values = mixed.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        stream = stream + self.attention_out(seen.transpose(1, 2).reshape(batch, length, width))
        hidden = functional.gelu(self.up(self.before_layers(stream)), approximate="tanh")
        return stream + self.down(hidden)


class Transformer(nn.Module):
    """Scores of the next byte at every place."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_VOCABULARY, size.width)
        self.places = nn.Parameter(torch.empty(size.length, size.width))
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.last = nn.LayerNorm(size.width, bias=False)
        self.scores = nn.Linear(size.width, _VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_stream = name.endswith(("attention_out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * size.layers) if into_stream else 1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        stream = self.bytes(inputs) + self.places[: inputs.shape[1]]
        scores: Tensor = self.scores(self.last(self.blocks(stream)))
        return scores


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy in nats per byte; on a GPU in bfloat16."""
    device = next(model.parameters()).device
    inputs, targets = (each.to(device, torch.int64, non_blocking=True) for each in batch)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        scores = model(inputs)
    return functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


def adamw(parameters: object, learning_rate: float) -> Optimizer:
    """Make AdamW as language models use it."""
    return torch.optim.AdamW(
        parameters,  # type: ignore[arg-type]
        learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
    )
