"""A trial, on tensors of its own, of whether an optimizer can step parts of tensors on different ranks."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hiercomm.schemes.optimizer_state import are_same, changed, is_plain, values_of

_SIZES = ((8, 12), (5,)), ((64, 72), (40,))
"""Of whole tensors, in two trials. The first finds optimizers that take minutes for long flat tensors, and the second
those that factor or quantize the state of large tensors only."""
_STEPS = 8
_LEARNING_RATE = 0.05  # a scheduler's warm-up may begin with zero
_NEAR = 1e-3
"""The largest difference, relative to the largest element. Vectorized and scalar code round differently."""

MakeOptimizer = Callable[[list[Parameter]], Optimizer]

_HELD = ("step", "state", "param_groups", "defaults")

_known: dict[tuple[object, ...], str | None] = {}
"""The results of trials, by all that decides them."""
_alone = threading.Lock()  # ranks may be threads, and torch's look-up of dispatch modes is not safe between them


def why_not_in_parts(make: MakeOptimizer, device: torch.device, *, keeps_attributes: bool = False) -> str | None:
    """Return the reason why an optimizer cannot step parts of tensors on different ranks; None if it can.

    One optimizer steps whole tensors, and two others the two parts of the same tensors, joined and flat. Their values,
    states and param groups must be equal after each step.

    Args:
        make: Makes a new optimizer of the given parameters.
        device: The device on which the optimizer will step.
        keeps_attributes: Whether it must not change its attributes, and must have its whole state after its first step.
    """
    with _alone:
        key = _key(make, device, keeps_attributes)
        if key is not None and key in _known:
            return _known[key]
        reasons = (_tried(make, device, keeps_attributes, shapes) for shapes in _SIZES)
        reason = next(filter(None, reasons), None)
        if key is not None:
            _known[key] = reason
        return reason


def _key(make: MakeOptimizer, device: torch.device, keeps_attributes: bool) -> tuple[object, ...] | None:
    """Return what identifies an optimizer; None if it has values whose text does not."""
    try:
        with NoCollectives():
            optimizer = make([Parameter(torch.zeros(1, device=device))])
    except Exception:  # the trial reports it
        return None
    own = {name: value for name, value in vars(optimizer).items() if name not in ("step", "state", "param_groups")}
    groups = [{n: v for n, v in values_of(group).items() if n != "lr"} for group in optimizer.param_groups]
    held = [{name: value for name, value in own.items() if not isinstance(value, OrderedDict)}, groups]  # no hooks
    text = repr(held)
    return (type(optimizer), text, device, keeps_attributes) if is_plain(held) and "tensor(" not in text else None


def _tried(
    make: MakeOptimizer, device: torch.device, keeps_attributes: bool, shapes: Sequence[tuple[int, ...]]
) -> str | None:
    generator = torch.Generator().manual_seed(0)
    sizes = [math.prod(shape) for shape in shapes]
    cut = sizes[0] // 3 - 1  # in a row of the matrix
    flat = torch.randn(sum(sizes), generator=generator)
    flat[cut:] *= 0.1  # so that norms of the two parts differ
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad(), NoCollectives():
            parts = [_Tried(make, [part], device) for part in (flat[:cut], flat[cut:])]
            tensors = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
            whole = _Tried(make, tensors, device)
            before: set[str] = set()
            for step in range(_STEPS):
                gradient = torch.randn(len(flat), generator=generator)
                gradient[:cut] = gradient[:cut].abs()
                gradient[cut:] *= 8
                gradient *= 10 ** (2 * torch.rand((), generator=generator) - 1)
                for part, of_part in zip((*parts, whole), (gradient[:cut], gradient[cut:], gradient), strict=True):
                    part.step(of_part)
                if reason := _difference(whole, parts, keeps_attributes):
                    return reason
                names = {name for state in whole.states() for name in state}
                if keeps_attributes and step and (late := sorted(names - before)):
                    return f"its state {late[0]!r} first exists after {step + 1} steps"
                before = names
    except Exception as error:  # whatever the optimizer raises
        return _why_it_raised("of a flat shard", error)
    return None


def why_not_without_gradient(make: MakeOptimizer, device: torch.device) -> str | None:
    """Return the reason why an optimizer must not be called when no parameter has a gradient; None if it may."""
    values = torch.ones(40)
    try:
        with _alone, torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad(), NoCollectives():
            tried = _Tried(make, [values], device)
            tried.optimizer.step()
    except Exception as error:  # whatever the optimizer raises
        return _why_it_raised("without gradients", error)
    return None if torch.equal(tried.values.cpu(), values) else "it moves parameters that have no gradient"


def _why_it_raised(kind: str, error: Exception) -> str:
    if isinstance(error, CollectiveError):
        return "its step communicates with other ranks, whose steps are of other shards"
    first, *_ = str(error).splitlines() or [""]  # of a compiled step it has dozens
    return f"a trial step {kind} raised {type(error).__name__}: {first}"


class _Tried:
    """An optimizer of some tensors, and all that it changes, as flat tensors."""

    def __init__(self, make: MakeOptimizer, values: Sequence[Tensor], device: torch.device) -> None:
        self.parameters = [Parameter(each.to(device, copy=True)) for each in values]
        self.initial = self.values
        self.optimizer = make(self.parameters)
        for group in self.optimizer.param_groups:
            if isinstance(rate := group.get("lr"), Tensor | float | int):
                group["lr"] = rate.new_full((), _LEARNING_RATE) if isinstance(rate, Tensor) else _LEARNING_RATE
        self.groups_before, self.attributes_before = self.groups, self.attributes

    def step(self, gradient: Tensor) -> None:
        """Step with the gradients of all tensors, joined and flat."""
        of_each = gradient.split([parameter.numel() for parameter in self.parameters])
        for parameter, own in zip(self.parameters, of_each, strict=True):
            parameter.grad = own.to(parameter.device, copy=True).view_as(parameter)
        self.optimizer.step()

    @property
    def values(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])

    @property
    def groups(self) -> list[dict[str, Any]]:
        return list(map(values_of, self.optimizer.param_groups))

    @property
    def attributes(self) -> dict[str, Any]:
        """The plain attributes of the optimizer, which no checkpoint holds."""
        own = {name: value for name, value in vars(self.optimizer).items() if not name.startswith("_")}
        return {name: value for name, value in values_of(own).items() if name not in _HELD and is_plain(value)}

    def states(self) -> list[Mapping[str, Any]]:
        """Return the state of each tensor."""
        state: Mapping[Any, Mapping[str, Any]] = self.optimizer.state
        return [state.get(parameter, {}) for parameter in self.parameters]


def _difference(whole: _Tried, parts: Sequence[_Tried], keeps_attributes: bool) -> str | None:
    """Return in what the steps of whole tensors and of their parts differ."""
    for part in parts:
        if names := sorted(changed(whole.attributes, part.attributes)):
            return f"its attribute {names[0]!r} depends on all elements"
        for one, other in zip(whole.groups, part.groups, strict=True):
            if names := sorted(changed(one, other) | changed(other, one)):
                return f"its {names[0]!r} in param_groups depends on all elements"
    for tried in (*parts, whole):
        for key in tried.optimizer.state:
            if not isinstance(key, Tensor):
                return f"its state {key!r} belongs to no parameter"
    if keeps_attributes and (names := sorted(changed(whole.attributes_before, whole.attributes))):
        return f"it changes its attribute {names[0]!r}, which no checkpoint holds"
    for before, after in zip(whole.groups_before, whole.groups, strict=True):
        if names := sorted(changed(before, after)):
            return f"it changes {names[0]!r} in param_groups, which only the program may change"
    for tried in (*parts, whole):
        for state, parameter in zip(tried.states(), tried.parameters, strict=True):
            for name, value in state.items():
                if not _is_number_or_elementwise(value, parameter):
                    return f"its state {name!r} is neither one number nor one per element"
    for name in sorted({name for tried in (*parts, whole) for state in tried.states() for name in state}):
        if not _states_are_near(name, whole, parts):
            return f"its state {name!r} depends on all elements of a tensor"
    moved = whole.values - whole.initial, *(part.values - part.initial for part in parts)
    if not _are_near(*moved, rounding=float(whole.initial.abs().max())):
        return "its step depends on all elements of a tensor"
    return None


def _states_are_near(name: str, whole: _Tried, parts: Sequence[_Tried]) -> bool:
    held = [state.get(name) for tried in (whole, *parts) for state in tried.states()]
    flat = [v.reshape(-1).to(torch.float32) for v in held if isinstance(v, Tensor) and v.numel() > 1]
    if len(flat) == len(held):
        tensors = len(whole.parameters)
        return _are_near(torch.cat(flat[:tensors]), *flat[tensors:])
    return all(are_same(held[0], value) for value in held[1:])


def _are_near(whole: Tensor, *parts: Tensor, rounding: float = 0.0) -> bool:
    cut = whole.split([len(part) for part in parts])
    for one, other in zip(cut, parts, strict=True):
        largest = one.abs().max().nan_to_num(0.0, posinf=0.0)
        within = float(_NEAR * largest + 1e-6 * rounding)
        if not torch.allclose(one, other, rtol=0.0, atol=within, equal_nan=True):
            return False
    return True


def _is_number_or_elementwise(value: object, parameter: Tensor) -> bool:
    """Return whether a value is None, one number or word for all elements, or one number for each."""
    if isinstance(value, Tensor):
        return value.numel() == 1 or value.shape == parameter.shape
    return value is None or isinstance(value, bool | int | float | str)


class CollectiveError(RuntimeError):
    """A collective was about to start."""


class NoCollectives(TorchDispatchMode):
    """Raises an error before a collective of ``torch.distributed`` starts in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise CollectiveError
        return func(*args, **(kwargs or {}))
