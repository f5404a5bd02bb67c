"""PowerSGD for many short runs at once: gradients travel as two thin matrices under error feedback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.papers.many import Arena, Method, State


class PowerSGD(Method):
    """All-reduce of low-rank gradients: one step of power iteration per training step, started from the last one.

    Of every parameter with two or more dimensions the gradient is a matrix ``M`` with the first dimension as its rows.
    With ``e_w`` the error-feedback residual of node ``w``, and ``Q`` of the previous step::

        M_w := gradient_w + e_w        P := orthogonal(mean_w M_w Q)        Q := mean_w M_w' P
        mean gradient := P Q'          e_w := M_w - P Q'

    Vectors, and matrices that ``P`` and ``Q`` would not shrink, are averaged in float32.

    References:
        - Vogels, Karimireddy & Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
          Optimization", NeurIPS 2019, Algorithms 1 and 2.

    Args:
        rank: Columns of ``P`` and ``Q``.

    Attributes:
        right: ``Q`` of every matrix: runs x 1 x columns x rank.
        residual: The error-feedback residual: runs x nodes x parameters.
    """

    averages_gradients = needs_node_gradients = True

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def begin(self, state: State) -> None:
        self._matrices = list(matrices(shapes_of(state.arena), self._rank))
        generator = torch.Generator().manual_seed(0)
        runs = len(state.weights)
        self.right = [
            torch.randn(columns, self._rank, generator=generator).expand(runs, 1, -1, -1)
            for _, _, columns in self._matrices
        ]
        self.residual: Tensor | None = None

    def step(self, state: State, gradients: Tensor) -> None:
        wanted = gradients if self.residual is None else self.residual + gradients
        mean = gradients.mean(1, keepdim=True)
        residual = torch.zeros_like(gradients)
        for number, (part, rows, columns) in enumerate(self._matrices):
            own = wanted[..., part].unflatten(-1, (rows, columns))
            left, _ = torch.linalg.qr((own @ self.right[number]).mean(1, keepdim=True))
            self.right[number] = (own.mT @ left).mean(1, keepdim=True)
            shared = left @ self.right[number].mT
            mean[..., part] = shared.flatten(-2)
            residual[..., part] = (own - shared).flatten(-2)
        self.residual = residual
        state.descend(mean)


def matrices(shapes: Sequence[torch.Size], rank: int) -> Iterator[tuple[slice, int, int]]:
    """Yield the places, rows and columns of the parameters that travel as two thin matrices.

    Args:
        shapes: The parameters' shapes, in the order in which they follow each other.
        rank: Columns of the thin matrices.
    """
    start = 0
    for shape in shapes:
        rows, columns = (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())
        if (rows + columns) * rank < rows * columns:
            yield slice(start, start + shape.numel()), rows, columns
        start += shape.numel()


def share_sent(shapes: Sequence[torch.Size], rank: int) -> float:
    """Return the elements that travel as a share of all elements."""
    whole = sum(shape.numel() for shape in shapes)
    saved = sum(rows * columns - (rows + columns) * rank for _, rows, columns in matrices(shapes, rank))
    return (whole - saved) / whole


def shapes_of(arena: Arena) -> list[torch.Size]:
    """Return the shapes of the parameters of an arena's network."""
    return [parameter.shape for parameter in arena.task.model(0).parameters()]
