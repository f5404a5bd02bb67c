"""Autograd's version counters, which detect writes to tensors that a backward pass reads."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


def version_of(tensor: Tensor) -> Callable[[Tensor], None]:
    """Return a callback that restores the tensor's autograd version counter, after its values were restored.

    It is needed where a checkpoint or an evaluation comes between a forward pass and its backward pass.
    """
    if tensor.is_inference():  # it has no counter
        return lambda _: None
    kept = _unsafe_preserve_version_counter(tensor)
    return lambda given: kept.__exit__(None, None, None) if given is tensor else None
