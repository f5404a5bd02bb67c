"""A synchronous parameter server without a server: every rank owns a shard of it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm.base import wait_all
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.replica import Bucket, Replica
from lightning_hiercomm.topology import Topology

ShardOn = Literal["elements", "parameters"]

NEEDS_WHOLE_TENSORS = frozenset({"adafactor", "dadapt", "lamb", "lars", "muon", "shampoo", "soap"})
"""Optimizers, by lower-case class name, whose update of one element depends on the others of its tensor."""

Hyperparameters = list[dict[str, Any]]
"""Per param group: learning rate, momentum, weight decay and whatever else the group holds besides its parameters."""


@dataclass(frozen=True)
class Section:
    """The parameters of one param group, dtype and device, as one flat tensor of equal shards.

    Attributes:
        group: Index of the param group.
        tensors: The parameters.
        offsets: Where each of them begins in the flat tensor.
        shard_numel: Elements of one shard.
        shards: Number of shards.
    """

    group: int
    tensors: tuple[Tensor, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    shards: int

    def zeros(self) -> Tensor:
        """A flat tensor of zeros: 1-D, ``shards * shard_numel`` elements."""
        return torch.zeros(self.shards * self.shard_numel, dtype=self.dtype, device=self.tensors[0].device)

    @property
    def dtype(self) -> torch.dtype:
        """Of every parameter."""
        return self.tensors[0].dtype

    def pack(self) -> Tensor:
        """The parameters' values as a flat tensor."""
        flat = self.zeros()
        for view, tensor in zip(self.views(flat), self.tensors, strict=True):
            view.copy_(tensor.detach())
        return flat

    def pack_gradients(self, into: Tensor, begin: int) -> None:
        """Copy the gradients of the elements from ``begin`` on into ``into``.

        A parameter without a gradient counts as zero; where there is no parameter, ``into`` stays as it is.
        """
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            start, end = max(begin - offset, 0), min(begin + into.numel() - offset, tensor.numel())
            if start >= end:
                continue
            values = into[offset + start - begin :][: end - start]
            if tensor.grad is None:
                values.zero_()
            else:
                values.copy_(tensor.grad.reshape(-1)[start:end])

    def slices(self, bucket_bytes: int) -> list[tuple[int, Bucket]]:
        """The parameters as buckets, each with its place in the flat tensor, for work that needs memory on the way."""
        runs: list[tuple[int, list[Tensor]]] = []
        end = None
        for offset, tensor in sorted(zip(self.offsets, self.tensors, strict=True), key=lambda placed: placed[0]):
            if offset != end:
                runs.append((offset, []))
            runs[-1][1].append(tensor)
            end = offset + tensor.numel()
        slices = []
        for start, tensors in runs:
            for bucket in Replica(tensors, bucket_bytes=bucket_bytes).buckets:
                slices.append((start, bucket))
                start += bucket.numel
        return slices

    def unpack(self, flat: Tensor) -> None:
        """Write a flat tensor to the parameters."""
        for tensor, values in zip(self.tensors, self.views(flat), strict=True):
            tensor.detach().copy_(values)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Every parameter's part of a flat tensor, in the parameter's shape."""
        return [
            flat[offset : offset + tensor.numel()].view(tensor.shape)
            for tensor, offset in zip(self.tensors, self.offsets, strict=True)
        ]


@dataclass(frozen=True)
class _Overlap:
    """Elements ``start`` to ``end`` of a section's ``index``-th tensor, at ``at`` in a parameter of the shard."""

    index: int
    start: int
    end: int
    at: int


@dataclass(frozen=True)
class _Owned:
    """A parameter that this rank's shard optimizer steps: a view of the shard, and what it is a part of."""

    section: int
    parameter: torch.nn.Parameter
    offset: int
    overlaps: tuple[_Overlap, ...]


class ShardedServer:
    """The global weights and the optimizer's state, cut into one shard per lane and node.

    A synchronous server that gets one mean gradient per iteration needs no process of its own::

        push   reduce-scatter of the gradients over each lane: the owner of a shard gets its mean
        step   the owner steps its shard, with the user's own optimizer class
        pull   all-gather over each lane, then over the node

    With N parameters of b bytes on M nodes a push, and a pull, each send ``(M - 1) / M * N * b`` bytes per node, spread
    over the node's links. Owners are the ranks that lie in a lane, so the memory for optimizer state falls by their
    number (all ranks, if the nodes are equal).

    :meth:`push`, :meth:`pull`, :meth:`gather` and :meth:`optimizer_state` block and use communicators of their own
    (``beside``): call them from a :class:`~lightning_hiercomm.comm.lane.Lane`. Everything else belongs to the
    training thread, while nothing is in flight.

    Args:
        parameters: What is trained; equal on all ranks. The server starts from their values.
        optimizer: The user's optimizer of these parameters. It keeps its param groups (hence its schedulers work), but
            its state lives here.
        beside: The topology, with communicators that nobody else uses.
        wire: Payload type between nodes. Gradients are cast. Weights travel as the difference from those pulled last,
            unless the wire is raw.
        shard_on: ``"elements"`` cuts anywhere: all shards are equal. ``"parameters"`` never cuts a tensor, for
            optimizers that need whole ones; shards are then padded to the largest, which costs bytes and memory when
            one tensor dominates the model.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizer: Optimizer,
        beside: Topology,
        wire: Wire,
        shard_on: ShardOn = "elements",
    ) -> None:
        self.optimizer = optimizer
        self.wire = wire
        self._beside = beside
        self.sections = _sections(parameters, optimizer, beside.lanes * beside.num_nodes, shard_on)
        self._shards = [self._own(section.pack(), section).clone() for section in self.sections]
        # what the other ranks hold since the last pull; differs from the shard only on a narrow wire
        self._pulled = [shard.clone() for shard in self._shards] if self._sends_differences else []
        self._owned = list(self._own_parameters(shard_on))
        self._shard_optimizer = _optimizer_of_same_class(
            optimizer,
            [
                [owned.parameter for owned in self._owned if self.sections[owned.section].group == group]
                for group in range(len(optimizer.param_groups))
            ],
        )

    # ---- on the lane ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def push(self, gradients: Sequence[Tensor], hyperparameters: Hyperparameters) -> None:
        """Take one weighted gradient from every node and step.

        Args:
            gradients: ``W_m g_m``, as :meth:`pack_gradients` lays it out; consumed.
            hyperparameters: Of the user's optimizer at this iteration, see :meth:`hyperparameters`.
        """
        inter = self._beside.inter
        if inter is None:
            return
        means, pushes = [], []
        for section, part in zip(self.sections, gradients, strict=True):
            sent = part.to(self.wire.dtype) if self.wire.compresses(part.dtype) else part
            means.append(sent.new_empty(section.shard_numel))
            pushes.append(inter.reduce_scatter(means[-1], sent))
        wait_all(pushes)
        for owned in self._owned:
            mean = means[owned.section][owned.offset :][: owned.parameter.numel()]
            owned.parameter.grad = mean.to(owned.parameter.dtype).view(owned.parameter.shape)
        for group, values in zip(self._shard_optimizer.param_groups, hyperparameters, strict=True):
            group.update(values)
        self._shard_optimizer.step()
        self._shard_optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def pull(self, into: Sequence[Tensor], last: Sequence[Tensor]) -> None:
        """Give all ranks the present weights.

        Args:
            into: One flat tensor per section; overwritten.
            last: What the last pull (or :meth:`restart`) gave; read if differences travel.
        """
        for index, (section, flat) in enumerate(zip(self.sections, into, strict=True)):
            shard = self._shards[index]
            if not self.wire.compresses(section.dtype):
                self._gather(shard, flat, section)
                continue
            payload = torch.empty_like(flat, dtype=self.wire.dtype)
            if self.wire.raw:
                self._gather(shard, payload, section)
                flat.copy_(payload)
            else:
                difference = (shard - self._pulled[index]).to(self.wire.dtype)
                self._pulled[index].add_(difference)
                self._gather(difference, payload, section)
                flat.copy_(last[index]).add_(payload)

    @torch.no_grad()
    def gather(self, into: Sequence[Tensor]) -> None:
        """Write the present weights, exact, to one flat tensor per section; nothing else changes."""
        for section, shard, flat in zip(self.sections, self._shards, into, strict=True):
            self._gather(shard, flat, section)

    @torch.no_grad()
    def optimizer_state(self) -> dict[Tensor, dict[str, Any]]:
        """The optimizer's state for whole parameters. Collective; call it from the lane.

        Returns:
            For each parameter that has state, what the optimizer would hold for it in a run without shards.
        """
        # per section and tensor: values, and for state with one number per element only its dtype
        mine: list[dict[int, dict[str, Any]]] = [{} for _ in self.sections]
        elements: dict[tuple[int, str], dict[int, Tensor]] = defaultdict(dict)
        for owned in self._owned:
            for name, value in self._shard_optimizer.state.get(owned.parameter, {}).items():
                is_elementwise = _is_elementwise(name, value, owned.parameter)
                if is_elementwise:
                    elements[owned.section, name][owned.offset] = value
                for overlap in owned.overlaps:
                    said = ("dtype", str(value.dtype)) if is_elementwise else ("value", _on_cpu(value))
                    mine[owned.section].setdefault(overlap.index, {})[name] = said
        everyone = self._beside.world.all_gather_object(mine)
        state: dict[Tensor, dict[str, Any]] = {}
        for s, section in enumerate(self.sections):
            known: dict[int, dict[str, Any]] = {}
            for theirs in everyone:
                for index, values in theirs[s].items():
                    known.setdefault(index, {}).update(values)
            dtypes = {n: value for values in known.values() for n, (kind, value) in values.items() if kind == "dtype"}
            for name in sorted(dtypes):
                dtype = getattr(torch, dtypes[name].removeprefix("torch."))
                shard = torch.zeros_like(self._shards[s], dtype=dtype)
                for offset, value in elements[s, name].items():
                    shard[offset : offset + value.numel()] = value.reshape(-1)
                flat = section.zeros().to(dtype)
                self._gather(shard, flat, section)
                views = section.views(flat)
                for index, values in known.items():
                    if values.get(name, ("value",))[0] == "dtype":
                        state.setdefault(section.tensors[index], {})[name] = views[index].clone()
            for index, values in known.items():
                for name, (kind, value) in values.items():
                    if kind == "value":
                        copy = value.clone() if isinstance(value, Tensor) else value
                        state.setdefault(section.tensors[index], {})[name] = copy
        return state

    def _gather(self, shard: Tensor, flat: Tensor, section: Section) -> None:
        """Put this rank's shard, and everyone else's, into a flat tensor of the section."""
        self._own(flat, section).copy_(shard)
        inter = self._beside.inter
        if inter is not None:
            inter.all_gather(self._beside.lane_part(flat), self._own(flat, section)).wait()
        self._beside.share_lane_parts(flat).wait()

    # ---- on the training thread ----------------------------------------------------------------------------------

    def hyperparameters(self) -> Hyperparameters:
        """What the user's optimizer (and its schedulers) say now."""
        return [
            {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in self.optimizer.param_groups
        ]

    def gradient_buffers(self) -> list[Tensor]:
        """Room for what this rank pushes: one 1-D tensor per section, its lane's part of it; zeros."""
        return [self._beside.lane_part(section.zeros()).clone() for section in self.sections]

    @torch.no_grad()
    def pack_gradients(self, into: Sequence[Tensor]) -> None:
        """Copy the parameters' gradients into :meth:`gradient_buffers`."""
        for section, part in zip(self.sections, into, strict=True):
            section.pack_gradients(part, begin=self._beside.local_rank * self._beside.num_nodes * section.shard_numel)

    @torch.no_grad()
    def restart(self, weights: Sequence[Tensor]) -> None:
        """Go on from other weights, equal on all ranks, one flat tensor per section; the optimizer state stays."""
        for index, (section, flat) in enumerate(zip(self.sections, weights, strict=True)):
            self._shards[index].copy_(self._own(flat, section))
            if self._sends_differences:
                self._pulled[index].copy_(self._shards[index])

    @torch.no_grad()
    def take_optimizer_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take this rank's shard of a state for whole parameters, as :meth:`optimizer_state` returns it."""
        self._shard_optimizer.state.clear()
        for owned in self._owned:
            tensors = self.sections[owned.section].tensors
            saved = [(overlap, tensors[overlap.index]) for overlap in owned.overlaps]
            for overlap, tensor in saved:
                for name, value in state.get(tensor, {}).items():
                    held = self._shard_optimizer.state[owned.parameter]
                    if not _is_elementwise(name, value, tensor):
                        held.setdefault(name, self._placed(name, value, owned))
                        continue
                    if name not in held:
                        held[name] = torch.zeros_like(owned.parameter, dtype=value.dtype)
                    held[name].view(-1)[overlap.at :][: overlap.end - overlap.start] = value.reshape(-1)[
                        overlap.start : overlap.end
                    ]

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of weights and optimizer state."""
        return {
            "shards": [shard.clone() for shard in self._shards],
            "pulled": [shard.clone() for shard in self._pulled],
            "optimizer": [
                {name: value.clone() if isinstance(value, Tensor) else value for name, value in held.items()}
                for held in (self._shard_optimizer.state.get(owned.parameter, {}) for owned in self._owned)
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` (of a run with the same topology)."""
        for tensors, saved in ((self._shards, state["shards"]), (self._pulled, state["pulled"])):
            for tensor, values in zip(tensors, saved, strict=True):
                tensor.copy_(values)
        self._shard_optimizer.state.clear()
        for owned, held in zip(self._owned, state["optimizer"], strict=True):
            for name, value in held.items():
                self._shard_optimizer.state[owned.parameter][name] = self._placed(name, value, owned)

    def _placed(self, name: str, value: Any, owned: _Owned) -> Any:
        """A copy of a value of the optimizer's state, where the optimizer wants it: step counts often on the CPU."""
        if not isinstance(value, Tensor):
            return value
        group = self._shard_optimizer.param_groups[self.sections[owned.section].group]
        stays = name == "step" and not (group.get("capturable") or group.get("fused"))
        return value.clone() if stays else value.to(owned.parameter.device, copy=True)

    # ---- who owns what -------------------------------------------------------------------------------------------

    @property
    def _sends_differences(self) -> bool:
        return self.wire.dtype is not None and not self.wire.raw

    def _own(self, flat: Tensor, section: Section) -> Tensor:
        """This rank's shard of a flat tensor: a view, empty for a rank in no lane."""
        part, inter = self._beside.lane_part(flat), self._beside.inter
        return part if inter is None else part[inter.rank * section.shard_numel :][: section.shard_numel]

    def _own_parameters(self, shard_on: ShardOn) -> Iterator[_Owned]:
        inter = self._beside.inter
        if inter is None:
            return
        shard_index = self._beside.local_rank * inter.size + inter.rank
        for s, section in enumerate(self.sections):
            begin = shard_index * section.shard_numel
            overlaps = []
            for index, (tensor, offset) in enumerate(zip(section.tensors, section.offsets, strict=True)):
                start, end = max(begin - offset, 0), min(begin + section.shard_numel - offset, tensor.numel())
                if start < end:
                    overlaps.append(_Overlap(index, start, end, offset + start - begin))
            if shard_on == "parameters":
                for overlap in overlaps:
                    shape = section.tensors[overlap.index].shape
                    values = self._shards[s][overlap.at : overlap.at + overlap.end]
                    whole = _Overlap(overlap.index, 0, overlap.end, 0)
                    yield _Owned(s, torch.nn.Parameter(values.view(shape)), overlap.at, (whole,))
            elif overlaps:  # the padding at the very end belongs to nobody
                used = overlaps[-1].at + overlaps[-1].end - overlaps[-1].start
                yield _Owned(s, torch.nn.Parameter(self._shards[s][:used]), 0, tuple(overlaps))


def _sections(parameters: Sequence[Tensor], optimizer: Optimizer, shards: int, shard_on: ShardOn) -> list[Section]:
    trained = {id(parameter) for parameter in parameters}
    sections = []
    for group, values in enumerate(optimizer.param_groups):
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in values["params"]:
            if id(parameter) in trained:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for tensors in kinds.values():
            place = _on_elements if shard_on == "elements" else _on_parameters
            offsets, shard_numel = place([tensor.numel() for tensor in tensors], shards)
            sections.append(Section(group, tuple(tensors), tuple(offsets), shard_numel, shards))
    return sections


def _on_elements(sizes: Sequence[int], shards: int) -> tuple[list[int], int]:
    """Offsets of tensors laid end to end, and the size of a shard."""
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return offsets, -(-sum(sizes) // shards)


def _on_parameters(sizes: Sequence[int], shards: int) -> tuple[list[int], int]:
    """Offsets of tensors that each lie in one shard: the largest first, always to the emptiest shard."""
    placed: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    loads = [0] * shards
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        shard = min(range(shards), key=lambda j: loads[j])
        placed[index] = (shard, loads[shard])
        loads[shard] += sizes[index]
    return [shard * max(loads) + within for shard, within in placed], max(loads)


def _optimizer_of_same_class(optimizer: Optimizer, parameters: Sequence[list[torch.nn.Parameter]]) -> Optimizer:
    """An optimizer like the user's, with other parameters and without state.

    The class's constructor is not called: its arguments cannot be told from an instance (``AdamW`` does not take all
    its own defaults). The user's hooks, and the wrapper that a scheduler puts around ``step``, stay with the user's.
    """
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    for name, value in vars(optimizer).items():
        if isinstance(value, OrderedDict):  # hooks
            setattr(twin, name, OrderedDict())
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": params} for group, params in zip(optimizer.param_groups, parameters, strict=True)
    ]
    return twin


def _is_elementwise(name: str, value: object, parameter: Tensor) -> bool:
    """Whether a value of an optimizer's state has one number per element of the parameter."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and name != "step"


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
