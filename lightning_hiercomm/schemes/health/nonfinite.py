"""Detection of values that are NaN, infinite, or too large to be sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm.dtensor import local
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.buffers import is_of_numbers
from lightning_hiercomm.nodes.replica import Replica

OnNonfinite = Literal["raise", "skip", "ignore"]


class NonfiniteError(RuntimeError):
    """Parameters or gradients are NaN or infinite."""


@torch.no_grad()
def is_unfit(tensors: Iterable[Tensor], largest: float = math.inf) -> Tensor:
    """Return an int64 scalar: 1 if an element is not finite, or larger than ``largest``; otherwise 0.

    It reads every tensor once, and does not wait for the device.
    """
    bounds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            bounds.setdefault(real.dtype, []).extend(real.aminmax())
    if not bounds:
        return torch.zeros((), dtype=torch.int64)
    found = [~(torch.stack(each).abs() <= min(largest, torch.finfo(dtype).max)).all() for dtype, each in bounds.items()]
    return torch.stack(found).any().to(torch.int64)  # a NaN is not less than anything


def values_of(buckets: Iterable[Bucket]) -> Iterator[Tensor]:
    """Iterate over all values of some buckets, without a copy where a bucket holds a whole tensor."""
    for bucket in buckets:
        for piece in bucket.slices:
            tensor = piece.tensor.detach()
            yield tensor if piece.covers_tensor() else tensor.view(-1)[piece.start :][: piece.length]


def describe(replica: Replica, gradients: bool = False) -> str | None:
    """Describe the first tensor (or gradient) of a replica that is non-finite; return None if all are finite."""
    for index, tensor in enumerate(replica.tensors):
        checked = tensor.grad if gradients else tensor.detach()
        if checked is None:
            continue
        bad = int(checked.numel() - checked.isfinite().sum().item())
        if bad:
            kind = "parameter" if index < len(replica.parameters) else "buffer"
            name = replica.names.get(id(tensor), f"number {index} of shape {tuple(tensor.shape)}")
            whose = "the gradient of " if gradients else ""
            return f"{whose}{kind} {name} ({bad} of {checked.numel()} elements)"
    return None


@torch.no_grad()
def reset_nonfinite_state(optimizer: Optimizer) -> None:
    """Set an optimizer's state to zero, as at the beginning, for every parameter whose state is non-finite."""
    for state in optimizer.state.values():
        held = {name: local(value) for name, value in state.items() if isinstance(value, Tensor)}
        tensors = [value for value in held.values() if is_of_numbers(value)]
        if any(not bool(value.isfinite().all()) for value in tensors):
            for value in tensors:  # also the number of steps: Adam's next updates would be too large otherwise
                value.zero_()
            if isinstance(state.get("step"), int):
                state["step"] = 0
