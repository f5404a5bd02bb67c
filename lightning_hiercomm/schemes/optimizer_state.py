"""What can be said of any optimizer, and of its state, without knowing it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeGuard

from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm import streams

_OF_ALL = frozenset({"mu_product", "eta", "mu"})  # of NAdam and ASGD, which have one of each for a whole parameter
_NEED_WHOLE_TENSORS = frozenset({"adafactor", "dadapt", "lamb", "lars", "muon", "shampoo", "soap"})


def class_names(optimizer: Optimizer) -> set[str]:
    """The names of an optimizer's class and its bases, in lower case."""
    return {base.__name__.lower() for base in type(optimizer).__mro__}


def needs_whole_tensors(optimizer: Optimizer) -> bool:
    """Whether the update of one element depends on the others of its tensor, as far as is known of the class."""
    return bool(class_names(optimizer) & _NEED_WHOLE_TENSORS)


def evaluates_loss(optimizer: Optimizer) -> bool:
    """Whether a step evaluates the loss as often as it likes, as that of LBFGS does: it cannot do without a closure."""
    return _needs_closure(type(optimizer).step)


@cache  # or this would take longest of what we do in a step: it reads a signature
def _needs_closure(step: Callable[..., object]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def is_placeholder(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has no parameters, as Lightning's for ``configure_optimizers`` that returns None."""
    return not any(group["params"] for group in optimizer.param_groups)


def wraps_another(optimizer: Optimizer) -> bool:
    """Whether another optimizer inside makes the steps, as in Lookahead; often it has the param groups, too."""
    held = vars(optimizer)
    return "param_groups" not in held or any(isinstance(value, Optimizer) for value in held.values())


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers of the same parameters that another one holds, as SAM does."""
    parameters = _parameters_of(optimizer)
    held = getattr(optimizer, "__dict__", {}).values()
    others = (value for value in held if isinstance(value, Optimizer) and value is not optimizer)
    return [other for other in others if parameters and _parameters_of(other) == parameters]


def _parameters_of(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def releases_gradients(optimizer: Optimizer) -> bool:
    """Whether it steps each parameter inside the backward pass (torch-optimi's ``gradient_release``)."""
    return bool(getattr(optimizer, "defaults", {}).get("gradient_release"))


def own_state(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's state, whole on every rank. Collective over its process group, if it shards its state."""
    if not hasattr(optimizer, "consolidate_state_dict"):  # torch's ZeroRedundancyOptimizer has it
        return dict(optimizer.state_dict())
    state = {}
    for rank in range(optimizer.world_size):  # it keeps the state on one rank at a time
        optimizer.consolidate_state_dict(to=rank)
        if rank == optimizer.rank:
            state = dict(optimizer.state_dict())
    return state


def is_elementwise(value: object, name: str, parameter: Tensor) -> TypeGuard[Tensor]:
    """Whether a value of an optimizer's state has one number per element of the parameter."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or name == "step":
        return False
    return value.dim() > 0 or name not in _OF_ALL


def keep_state_here(optimizer: Optimizer, parameter: Tensor) -> None:
    """Keep it for the current stream: training made what was loaded, and a run that breaks off gives it back."""
    values = optimizer.state.get(parameter, {}).values()
    streams.keep_here(*(value for value in values if isinstance(value, Tensor)))


def copied(value: Any) -> Any:
    """Of an optimizer's state: made on the stream of an exchange, perhaps, and read by training."""
    if not isinstance(value, Tensor):
        return value
    streams.keep_here(value)
    return value.clone()
