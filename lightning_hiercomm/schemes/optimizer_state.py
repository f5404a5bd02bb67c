"""Properties of any optimizer and of its state."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from copy import copy
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hiercomm.comm import streams

_ONE_PER_PARAMETER = frozenset({"mu_product", "eta", "mu"})  # of NAdam and ASGD


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
    """Return a copy of a value of an optimizer, in which tensors are copied, in containers too, and parameters are not.

    The stream of an exchange may have allocated a tensor.
    """
    if isinstance(value, Tensor):
        if isinstance(value, Parameter):
            return value
        streams.keep_here(value)
        return value.clone()
    if isinstance(value, dict):
        own = copy(value)
        own.update({name: copied(each) for name, each in value.items()})
        return own
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value


def are_same(one: Any, other: Any) -> bool:
    """Return whether two values of an optimizer are equal, in containers too. NaN equals NaN."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
        return both and bool(torch.equal(one.cpu(), other.cpu()) or (one.isnan() & other.isnan()).all())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(are_same, one, other))
    return one is other or bool(one == other) or (one != one and other != other)


# ---- param groups ----------------------------------------------------------------------------------------------------


def values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of all values of a param group except the parameters."""
    return {name: copied(value) for name, value in group.items() if name != "params"}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``after`` that are new or different."""
    return {name: v for name, v in after.items() if name not in before or not are_same(before[name], v)}


def is_plain(value: object) -> bool:
    """Return whether a checkpoint can hold a value of a param group: numbers, strings, tensors, containers of them."""
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | Tensor)


def optimizer_like(optimizer: Optimizer, group: int, parameters: list[Parameter]) -> Optimizer:
    """Return an optimizer like one param group of another, for other parameters and without state.

    The class's constructor is not called, because its arguments cannot be read from an instance (``AdamW`` does not
    take all its own defaults). The user's hooks, and a scheduler's wrapper of ``step``, stay with the user's.
    """
    own: Optimizer = type(optimizer).__new__(type(optimizer))
    left_out = ("step", "state", "param_groups")
    own.__dict__.update({name: copied(value) for name, value in vars(optimizer).items() if name not in left_out})
    for name, value in vars(optimizer).items():
        if isinstance(value, OrderedDict):  # hooks
            setattr(own, name, OrderedDict())
    own.state = defaultdict(dict)
    own.param_groups = [{**values_of(optimizer.param_groups[group]), "params": parameters}]
    return own
