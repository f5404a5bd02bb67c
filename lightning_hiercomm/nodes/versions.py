"""The counters by which autograd finds out that somebody wrote to a tensor that a backward pass is to read."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


def version_of(tensor: Tensor) -> Callable[[Tensor], None]:
    """What gives the tensor its present count back, once it holds again, to the bit, what it holds now; no other one.

    A file may be saved, or a model be looked at, between a forward pass and its backward pass.
    """
    if tensor.is_inference():  # it has none
        return lambda _: None
    kept = _unsafe_preserve_version_counter(tensor)
    return lambda given: kept.__exit__(None, None, None) if given is tensor else None
