"""Properties of any optimizer and of its state."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeGuard

from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm import streams

_ONE_PER_PARAMETER = frozenset({"mu_product", "eta", "mu"})  # of NAdam and ASGD
_NEED_WHOLE_TENSORS = frozenset({"adafactor", "dadapt", "lamb", "lars", "muon", "shampoo", "soap"})


def class_names(optimizer: Optimizer) -> set[str]:
    """Return the names of an optimizer's class and its bases, in lower case."""
    return {base.__name__.lower() for base in type(optimizer).__mro__}


def needs_whole_tensors(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to update elements of a tensor depending on its other elements."""
    return bool(class_names(optimizer) & _NEED_WHOLE_TENSORS)


def evaluates_loss(optimizer: Optimizer) -> bool:
    """Return whether a step needs a closure that evaluates the loss, as that of LBFGS does."""
    return _needs_closure(type(optimizer).step)


@cache  # reading a signature takes longer than all else in a step
def _needs_closure(step: Callable[..., object]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def is_placeholder(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has no parameters, as Lightning's where ``configure_optimizers`` returns None."""
    return not any(group["params"] for group in optimizer.param_groups)


def wraps_another(optimizer: Optimizer) -> bool:
    """Return whether an optimizer delegates its steps to another one, as Lookahead does."""
    held = vars(optimizer)
    return "param_groups" not in held or any(isinstance(value, Optimizer) for value in held.values())


def releases_gradients(optimizer: Optimizer) -> bool:
    """Return whether an optimizer steps each parameter in the backward pass (torch-optimi's ``gradient_release``)."""
    return bool(getattr(optimizer, "defaults", {}).get("gradient_release"))


def own_state(optimizer: Any) -> dict[str, Any]:
    """Return the whole state of an optimizer. Collective over its process group, if it shards its state."""
    if not hasattr(optimizer, "consolidate_state_dict"):  # torch's ZeroRedundancyOptimizer has it
        return dict(optimizer.state_dict())
    state = {}
    for rank in range(optimizer.world_size):  # it keeps the state on one rank at a time
        optimizer.consolidate_state_dict(to=rank)
        if rank == optimizer.rank:
            state = dict(optimizer.state_dict())
    return state


def is_elementwise(value: object, name: str, parameter: Tensor) -> TypeGuard[Tensor]:
    """Return whether a value of an optimizer's state has one number per element of the parameter."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or name == "step":
        return False
    return value.dim() > 0 or name not in _ONE_PER_PARAMETER


def keep_state_here(optimizer: Optimizer, parameter: Tensor) -> None:
    """Keep the memory of a parameter's state until the current stream has used it: another stream allocated it."""
    values = optimizer.state.get(parameter, {}).values()
    streams.keep_here(*(value for value in values if isinstance(value, Tensor)))


def copied(value: Any) -> Any:
    """Return a copy of a value of an optimizer's state, which the stream of an exchange may have allocated."""
    if not isinstance(value, Tensor):
        return value
    streams.keep_here(value)
    return value.clone()
