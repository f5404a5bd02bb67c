"""The counters by which autograd finds out that somebody wrote to a tensor that a backward pass is to read."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


def version_of(tensor: Tensor) -> Callable[[], None]:
    """What gives a tensor the count that it has now: to be called where it holds again, to the bit, what it does now.

    A file may be saved, or a model be looked at, between a forward pass and its backward pass.
    """
    if tensor.is_inference():  # it has none
        return lambda: None
    kept = _unsafe_preserve_version_counter(tensor)
    return lambda: kept.__exit__(None, None, None)
