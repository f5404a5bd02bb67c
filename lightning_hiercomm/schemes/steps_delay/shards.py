"""One rank's shard of a bucket: weights, optimizer and optimizer state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.base import Communicator, Handle, finished
from lightning_hiercomm.schemes.components.history import History
from lightning_hiercomm.schemes.optimizer_state import (
    copied,
    is_elementwise,
    keep_state_here,
    plain_values_of,
    values_of,
)
from lightning_hiercomm.schemes.optimizer_trial import NoCollectives
from lightning_hiercomm.schemes.steps_delay.buckets import ShardedBucket, Slice

Hyperparameters: TypeAlias = list[dict[str, Any]]
"""Per param group, values such as learning rate, momentum or weight decay; never the parameters."""

State: TypeAlias = dict[int, dict[str, Any]]
"""Optimizer state by a slice's index: values, or the dtype of a value that has one number per element."""


@dataclass(frozen=True)
class _Owned:
    parameter: torch.nn.Parameter
    offset: int
    slices: tuple[Slice, ...]


@dataclass
class Shard:
    """This rank's shard of a bucket.

    Attributes:
        bucket: The bucket.
        values: The weights; like ``mean``, empty on a rank that owns no shard.
        mean: The mean of the nodes' gradients.
        payload: What this rank sends and receives of the bucket: gradients during a push, weights during a pull.
        optimizer: Steps the weights. Its parameters are neighbouring slices that have taken equally many steps.
        last_pulled: The weights that the other ranks have pulled last, if pulls send differences from them.
        stepped: The step that follows the last push.
        pull: The all-gather that was started after it, if there is one.
        pulled: The end of that all-gather.
    """

    bucket: ShardedBucket
    values: Tensor
    mean: Tensor
    payload: Tensor
    optimizer: Optimizer
    last_pulled: Tensor | None
    stepped: Handle = finished
    pull: Handle = finished
    pulled: Handle = finished

    def __post_init__(self) -> None:
        self._owned: list[_Owned] = []

    # ---- step and pull -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, changes: Hyperparameters) -> None:
        """Step the weights with the mean gradient, after changes of the param groups."""
        may_keep = not _is_of_torch(self.optimizer)  # the gradient itself, while the next push overwrites `mean`
        for owned in self._owned:
            part = self.mean[owned.offset :][: owned.parameter.numel()]
            owned.parameter.grad = part.to(owned.parameter.dtype, copy=may_keep).view(owned.parameter.shape)
            keep_state_here(self.optimizer, owned.parameter)
        self.set_group(changes[self.bucket.group])
        if not self.owns_elements:
            return
        with _without_collectives(self.optimizer):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def start_pull(self, group: Communicator) -> None:
        """Start the all-gather of the weights, or of their differences from the last pulled ones."""
        own = self.payload[group.rank * self.values.numel() :][: self.values.numel()]
        if self.last_pulled is None:
            own.copy_(self.values)
        else:
            own.copy_(self.values - self.last_pulled)
            self.last_pulled.add_(own)
        self.pull = group.all_gather(self.payload, own)

    # ---- optimizer state -----------------------------------------------------------------------------------------

    @property
    def owns_elements(self) -> bool:
        """Whether the shard is more than padding, so that its optimizer steps."""
        return bool(self._owned)

    @property
    def group(self) -> dict[str, Any]:
        """A copy of the optimizer's param group without the parameters, with what its own steps have changed."""
        return values_of(self.optimizer.param_groups[0])

    def set_group(self, values: Mapping[str, Any]) -> None:
        """Change values of the optimizer's param group."""
        self.optimizer.param_groups[0].update(copied(dict(values)))

    def own(self, slices: Sequence[Slice], lengths: Sequence[int] | None = None) -> None:
        """Let the optimizer step these slices: neighbours together, so many each time (default: all)."""
        if lengths is None:
            lengths = [len(slices)] if slices else []
        left = iter(slices)
        self._owned = []
        for length in lengths:
            run = list(islice(left, length))
            begin, end = run[0].offset, run[-1].offset + run[-1].numel
            own = tuple(replace(each, offset=each.offset - begin) for each in run)
            self._owned.append(_Owned(torch.nn.Parameter(self.values[begin:end]), begin, own))
        self.optimizer.param_groups[0]["params"] = [each.parameter for each in self._owned]

    def _slices(self) -> list[Slice]:
        return [replace(each, offset=owned.offset + each.offset) for owned in self._owned for each in owned.slices]

    def state(self) -> State:
        """Return this rank's optimizer state, on the CPU, with dtypes for what has one number per element."""
        state: State = defaultdict(dict)
        for owned in self._owned:
            for name, value in self.optimizer.state.get(owned.parameter, {}).items():
                if is_elementwise(value, name, owned.parameter):
                    value = value.dtype
                elif isinstance(value, Tensor):
                    value = copied(value.detach()).cpu()
                for part in owned.slices:
                    state[part.piece][name] = value
        return dict(state)

    def state_by_element(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one number per element of the shard; zero where the optimizer has none."""
        flat = torch.zeros_like(self.values, dtype=dtype)
        for owned in self._owned:
            value = self.optimizer.state.get(owned.parameter, {}).get(name)
            if is_elementwise(value, name, owned.parameter):
                streams.keep_here(value)  # made on the stream of the server's steps
                flat[owned.offset :][: owned.parameter.numel()] = value.reshape(-1)
        return flat

    @torch.no_grad()
    def take_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take the shard's elements of a state for whole parameters."""
        self.optimizer.state.clear()
        slices = self._slices()
        runs = groupby(History.of(state.get(part.tensor, {}), part.tensor) for part in slices)
        self.own(slices, [len(list(run)) for _, run in runs])
        for owned in self._owned:
            held = self.optimizer.state[owned.parameter]
            for part in owned.slices:
                for name, value in state.get(part.tensor, {}).items():
                    if not is_elementwise(value, name, part.tensor):
                        held.setdefault(name, self._placed(name, value, owned))
                        continue
                    if name not in held:
                        held[name] = torch.zeros_like(owned.parameter, dtype=value.dtype)
                    held[name].view(-1)[part.offset :][: part.numel] = value.reshape(-1)[part.start : part.end]

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimizer state, and pulled weights that were not used yet."""
        states = (self.optimizer.state.get(owned.parameter, {}) for owned in self._owned)
        return {
            "values": self.values.clone(),
            "last_pulled": None if self.last_pulled is None else self.last_pulled.clone(),
            "payload": self.payload.clone(),
            "optimizer": [{name: copied(value) for name, value in state.items()} for state in states],
            "group": plain_values_of(self.optimizer.param_groups[0]),
            "runs": [len(owned.slices) for owned in self._owned],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, of a run with the same topology, buckets and wire."""
        self.values.copy_(state["values"])
        self.payload.copy_(state["payload"])
        if self.last_pulled is not None:
            self.last_pulled.copy_(state["last_pulled"])
        self.set_group(like_present(state["group"], self.group))
        self.optimizer.state.clear()
        self.own(self._slices(), state["runs"])
        for owned, held in zip(self._owned, state["optimizer"], strict=True):
            for name, value in held.items():
                self.optimizer.state[owned.parameter][name] = self._placed(name, value, owned)

    def _placed(self, name: str, value: Any, owned: _Owned) -> Any:
        """Return a copy of a value on the device where the optimizer needs it: step counts often on the CPU."""
        if not isinstance(value, Tensor):
            return value
        group = self.optimizer.param_groups[0]
        stays = name == "step" and not (group.get("capturable") or group.get("fused"))
        return value.clone() if stays else value.to(owned.parameter.device, copy=True)


def like_present(values: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of a param group from a file, with tensors on the devices of the present ones."""
    return {
        name: value.to(held.device)
        if isinstance(value, Tensor) and isinstance(held := present.get(name), Tensor)
        else value
        for name, value in values.items()
    }


def dtypes_of(state: State) -> Iterator[tuple[str, torch.dtype]]:
    """List the names and dtypes of state with one number per element."""
    items = (item for values in state.values() for item in values.items())
    yield from sorted({name: value for name, value in items if isinstance(value, torch.dtype)}.items())


def _is_of_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _without_collectives(optimizer: Optimizer) -> AbstractContextManager[object]:
    if _is_of_torch(optimizer):
        return nullcontext()  # the check takes as long as a step of a small shard
    return NoCollectives(
        f"{type(optimizer).__name__}.step() communicates with other ranks. With StepsDelay every rank steps another"
        " shard of the parameters, so its collectives would not match. Use AllReduce()"
    )
