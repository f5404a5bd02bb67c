"""NaN and infinity: noticed in what is about to be sent, and kept from spreading.

Whoever sends a bucket adds a *mark* to one element of it: a number that changes nothing if all that is sent is finite,
and NaN if anything is not. So a sum that a sick rank takes part in is NaN where everybody looks, on every rank alike:
nobody has to ask. Only then is there more to say, in exchanges of their own: who it was, and what the mean of the
others is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.dtensor import local
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.buffers import is_of_numbers
from lightning_hiercomm.nodes.replica import Replica

OnNonfinite = Literal["raise", "skip", "ignore"]


class NonfiniteError(RuntimeError):
    """Parameters or gradients are NaN or infinite."""


@torch.no_grad()
def mark_of(tensors: Iterable[Tensor]) -> Tensor:
    """A scalar: -0.0, which added to any number leaves every bit of it, if the tensors are finite; NaN if not.

    It takes one read of them, and waits for nothing. Finite values whose sum overflows count as not finite: look again,
    with :func:`describe`.
    """
    sums = [tensor.sum(dtype=_wide(tensor.dtype)) for tensor in tensors if tensor.numel()]
    if not sums:
        return torch.tensor(-0.0)
    if len({(each.dtype, each.device) for each in sums}) > 1:  # what is too large for float32 is finite
        sums = [each.abs().mul(0.0).to(sums[0].device, torch.float32) for each in sums]
    return torch.stack(sums).sum().abs().mul_(-0.0)


def mark_of_buckets(buckets: Iterable[Bucket]) -> Tensor:
    """The :func:`mark_of` all values of some buckets."""
    pieces = (piece for bucket in buckets for piece in bucket.pieces)
    return mark_of(
        piece.tensor if piece.covers_tensor() else piece.tensor.view(-1)[piece.start :][: piece.length]
        for piece in pieces
    )


def put_mark(mark: Tensor, flat: Tensor, parts: int = 1) -> None:
    """Add a mark to the first element of each of ``flat``'s equal parts."""
    if flat.numel():
        flat.view(parts, -1)[:, 0].add_(mark)


def arrived_mark(flat: Tensor, parts: int = 1) -> Tensor:
    """A scalar that is NaN if somebody who sent what arrived in ``flat`` was sick; waits for nothing."""
    return flat.view(parts, -1)[:, 0].sum().abs() if flat.numel() else flat.new_zeros(())


def is_marked(flat: Tensor, parts: int = 1) -> bool:
    """Whether somebody who sent what arrived in ``flat`` was sick. Waits for it, on CUDA too."""
    return bool(flat.numel()) and math.isnan(arrived_mark(flat, parts).item())


def choose(condition: Tensor, value: Tensor, otherwise: Callable[[], Tensor]) -> Tensor:
    """``value`` if a scalar says so; on CUDA without waiting to know."""
    if streams.has(condition.device):
        return torch.where(condition, value, otherwise())
    return value if bool(condition) else otherwise()


def describe(replica: Replica, gradients: bool = False) -> str | None:
    """The first tensor of a replica that is not finite, or whose gradient is not, for people; None if all are."""
    for index, tensor in enumerate(replica.tensors):
        looked_at = tensor.grad if gradients else tensor.detach()
        if looked_at is None:
            continue
        bad = int(looked_at.numel() - looked_at.isfinite().sum().item())
        if bad:
            kind = "parameter" if index < len(replica.parameters) else "buffer"
            name = replica.names.get(id(tensor), f"number {index} of shape {tuple(tensor.shape)}")
            whose = "the gradient of " if gradients else ""
            return f"{whose}{kind} {name} ({bad} of {looked_at.numel()} elements)"
    return None


@torch.no_grad()
def begin_state_anew(optimizer: Optimizer) -> None:
    """Set the state of every parameter for which it is not finite to zero, as it was at the beginning."""
    for state in optimizer.state.values():
        held = {name: local(value) for name, value in state.items() if isinstance(value, Tensor)}
        tensors = [value for value in held.values() if is_of_numbers(value)]
        if any(not bool(value.isfinite().all()) for value in tensors):
            for value in tensors:  # the number of steps among them, or Adam's next ones would be six times too long
                value.zero_()
            if isinstance(state.get("step"), int):
                state["step"] = 0


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.promote_types(dtype, torch.float32)
