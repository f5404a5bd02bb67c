"""A synchronous parameter server without a server: every rank owns a shard of it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm.base import Handle, finished
from lightning_hiercomm.comm.lane import Lane
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.replica import Bucket, Piece, Replica
from lightning_hiercomm.topology import Topology

ShardOn = Literal["elements", "parameters"]
T = TypeVar("T")

NEEDS_WHOLE_TENSORS = frozenset({"adafactor", "dadapt", "lamb", "lars", "muon", "shampoo", "soap"})
"""Optimizers, by lower-case class name, whose update of one element depends on the others of its tensor."""

Hyperparameters = list[dict[str, Any]]
"""Per param group: learning rate, momentum, weight decay and whatever else the group holds besides its parameters."""


@dataclass(frozen=True)
class Section:
    """Parameters of one param group, dtype and device, or parts of them, as one flat tensor of equal shards.

    Attributes:
        group: Index of the param group.
        bucket: The parameters.
        shards: Number of shards.
    """

    group: int
    bucket: Bucket
    shards: int

    @property
    def shard_numel(self) -> int:
        """Elements of one shard; the last ones may be padding."""
        return -(-self.bucket.numel // self.shards)

    @property
    def dtype(self) -> torch.dtype:
        """Of every parameter."""
        return self.bucket.dtype

    def empty(self, dtype: torch.dtype | None = None) -> Tensor:
        """A new flat tensor, zero where it is padded: 1-D, ``shards * shard_numel`` elements."""
        return self.bucket.empty(self.shards, dtype=dtype)

    def pack(self) -> Tensor:
        """The parameters' values as a flat tensor."""
        return self.bucket.pack(self.empty())

    def pack_gradients(self) -> Tensor:
        """Their gradients; no gradient counts as zero."""
        return self.bucket.pack_gradients(self.empty())


@dataclass(frozen=True)
class _Overlap:
    """Elements ``start`` to ``end`` of a parameter, at ``at`` in a parameter of the shard."""

    tensor: Tensor
    start: int
    end: int
    at: int


@dataclass(frozen=True)
class _Owned:
    """A parameter that this rank's shard optimizer steps: a view of the shard, and what it is a part of."""

    parameter: torch.nn.Parameter
    offset: int
    overlaps: tuple[_Overlap, ...]


class ShardedServer:
    """The global weights and the optimizer's state, cut into one shard per lane and node.

    A synchronous server that gets one mean gradient per iteration needs no process of its own::

        push   reduce-scatter of the gradients over each lane: the owner of a shard gets its mean
        step   the owner steps its shard, with the user's own optimizer class
        pull   all-gather over each lane, then over the node

    all of it section by section: the parameters are cut into sections of about a bucket, and every section into shards.
    With N parameters of b bytes on M nodes a push, and a pull, each send ``(M - 1) / M * N * b`` bytes per node, spread
    over the node's links. Owners are the ranks that lie in a lane, so the memory for optimizer state falls by their
    number (all ranks, if the nodes are equal). Besides the shard a rank holds room for its lane's part of the model,
    where gradients wait for the link and, later, weights arrive; and for one shard of mean gradients.

    A push leaves the training thread on the topology's communicators. What comes after it happens on the lane, where
    pulls have communicators of their own (``beside``). Everything else may be called while nothing is in flight.

    Args:
        parameters: What is trained; equal on all ranks. The server starts from their values.
        optimizer: The user's optimizer of these parameters. It keeps its param groups (hence its schedulers work), but
            its state lives here.
        topology: The nodes and their weights.
        beside: The topology, with communicators that only the lane uses.
        lane: Where the server steps, and pulls.
        wire: Payload type between nodes. Gradients are cast. Weights travel as the difference from those pulled last,
            unless the wire is raw.
        shard_on: ``"elements"`` cuts anywhere: all shards are equal. ``"parameters"`` never cuts a tensor, for
            optimizers that need whole ones; a param group is then one section, whose shards are padded to the largest,
            which costs bytes and memory when one tensor dominates the model.
        bucket_bytes: Upper bound of a section's size, if it cuts on elements.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizer: Optimizer,
        topology: Topology,
        beside: Topology,
        lane: Lane,
        wire: Wire,
        shard_on: ShardOn = "elements",
        bucket_bytes: int = 4 * 2**20,
    ) -> None:
        self.optimizer = optimizer
        self.wire = wire
        self._topology = topology
        self._beside = beside
        self._lane = lane
        self._trained = {id(parameter) for parameter in parameters}
        shards = topology.lanes * topology.num_nodes
        self.sections = list(_sections(parameters, optimizer, shards, shard_on, bucket_bytes))
        self._numbered = list(enumerate(self.sections))
        self._shards = [self._own(section.pack(), section).clone() for section in self.sections]
        # what the other ranks hold since the last pull; differs from the shard only on a narrow wire
        self._known = [shard.clone() for shard in self._shards] if self._sends_differences else []
        self._owned = [
            list(self._own_parameters(section, shard, shard_on))
            for section, shard in zip(self.sections, self._shards, strict=True)
        ]
        self._optimizers = [
            _optimizer_of_same_class(optimizer, section.group, [each.parameter for each in owned])
            for section, owned in zip(self.sections, self._owned, strict=True)
        ]
        self.start_over()

    def start_over(self) -> None:
        """Forget what was pushed and pulled, once nothing is in flight."""
        self._means = [
            torch.empty_like(shard, dtype=self.wire.dtype if self.wire.compresses(shard.dtype) else None)
            for shard in self._shards
        ]
        # gradients on their way out or, from the end of the push on, weights on their way in
        self._travelling = [
            self._topology.lane_part(section.empty(mean.dtype)).clone()
            for section, mean in zip(self.sections, self._means, strict=True)
        ]
        self._stepped: list[Handle] = [finished for _ in self.sections]
        self._arrived: list[Handle] = [finished for _ in self.sections]
        self._arriving: list[Handle] = [finished for _ in self.sections]

    # ---- the method ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def push(self, index: int, gradients: Tensor | None, hyperparameters: Hyperparameters, pull: bool) -> None:
        """Let a section's gradients go to its owners, who then step; returns as soon as they are on their way.

        Args:
            index: The section's number. All sections are pushed in each iteration, in their order, and a section whose
                weights were pulled after they have been taken from :meth:`arrivals`.
            gradients: The node's mean gradients, a flat tensor of the section; or None if they overflowed.
            hyperparameters: Of the user's optimizer at this iteration, see :meth:`hyperparameters`.
            pull: Whether :meth:`arrivals` will be asked for the weights that the step leaves.
        """
        inter = self._topology.inter
        if inter is None:
            return
        self._stepped[index].wait()  # the push before this one used the same memory
        sent = self._travelling[index]
        if gradients is None:
            sent.zero_()
        else:
            torch.mul(self._topology.lane_part(gradients), self._topology.node_weight, out=sent)
        summed = inter.reduce_scatter(self._means[index], sent)

        def step() -> None:
            summed.wait()
            self._step(index, hyperparameters)
            if pull:
                self._arriving[index] = self._start_pull(index)

        self._stepped[index] = self._lane.submit(step)

    def await_pulls(self) -> None:
        """Let the lane see to it that what this iteration's pushes were told to pull arrives."""
        if self._topology.inter is None:
            return
        for index, _ in self._numbered:

            def arrive(index: int = index, stepped: Handle = self._stepped[index]) -> None:
                stepped.wait()  # it has ended, but may have failed
                self._arriving[index].wait()

            self._arrived[index] = self._lane.submit(arrive)

    @torch.no_grad()
    def arrivals(self, last: Sequence[Tensor]) -> Iterator[Tensor]:
        """Wait for the weights that were pulled, and gather them inside the node.

        Args:
            last: What this, or :meth:`restart`, gave last; one flat tensor per section.

        Yields:
            One new flat tensor per section, in their order.
        """

        def share(index: int, section: Section) -> tuple[Tensor, Handle]:
            self._arrived[index].wait()
            payload = section.empty(self._travelling[index].dtype)
            self._topology.lane_part(payload).copy_(self._travelling[index])
            return payload, self._topology.share_lane_parts(payload)

        shared = (share(index, section) for index, section in self._numbered)
        for (payload, handle), before in zip(_early(shared), last, strict=True):
            handle.wait()
            if payload.dtype == before.dtype:
                yield payload
            else:
                yield before + payload if self._sends_differences else payload.to(before.dtype)

    @torch.no_grad()
    def _step(self, index: int, hyperparameters: Hyperparameters) -> None:
        mean, optimizer = self._means[index], self._optimizers[index]
        for owned in self._owned[index]:
            part = mean[owned.offset :][: owned.parameter.numel()]
            owned.parameter.grad = part.to(owned.parameter.dtype).view(owned.parameter.shape)
        optimizer.param_groups[0].update(hyperparameters[self.sections[index].group])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _start_pull(self, index: int) -> Handle:
        shard, part, inter = self._shards[index], self._travelling[index], self._beside.inter
        assert inter is not None
        own = part[inter.rank * shard.numel() :][: shard.numel()]
        if own.dtype != shard.dtype and self._sends_differences:
            own.copy_(shard - self._known[index])
            self._known[index].add_(own)
        else:
            own.copy_(shard)
        return inter.all_gather(part, own)

    # ---- while nothing is in flight ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until nothing is in flight; weights that were pulled stay where :meth:`arrivals` finds them."""
        for handle in (*self._stepped, *self._arrived):
            handle.wait()

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

    def weights(self) -> Iterator[Tensor]:
        """The present weights, exact: one new flat tensor per section. Collective."""
        return self._gathered(self._shards, self.sections)

    @torch.no_grad()
    def restart(self, weights: Sequence[Tensor]) -> None:
        """Go on from other weights, equal on all ranks, one flat tensor per section; the optimizer state stays."""
        self.start_over()
        for index, section in self._numbered:
            self._shards[index].copy_(self._own(weights[index], section))
            if self._sends_differences:
                self._known[index].copy_(self._shards[index])

    @torch.no_grad()
    def optimizer_state(self) -> dict[Tensor, dict[str, Any]]:
        """The optimizer's state for whole parameters. Collective.

        Returns:
            For each parameter that has state, what the optimizer would hold for it in a run without shards.
        """
        # per section, for each piece by its place: values, and for state with one number per element only its dtype
        mine: list[dict[int, dict[str, Any]]] = []
        for section, owned, optimizer in zip(self.sections, self._owned, self._optimizers, strict=True):
            places = {id(piece.tensor): place for place, piece in enumerate(section.bucket.pieces)}
            said: dict[int, dict[str, Any]] = defaultdict(dict)
            for each in owned:
                for name, value in optimizer.state.get(each.parameter, {}).items():
                    is_elementwise = _is_elementwise(name, value, each.parameter)
                    for overlap in each.overlaps:
                        said[places[id(overlap.tensor)]][name] = value.dtype if is_elementwise else _Value(value)
            mine.append(dict(said))
        everyone = self._topology.world.all_gather_object(mine)
        state: dict[Tensor, dict[str, Any]] = {}
        for index, section in self._numbered:
            known: dict[int, dict[str, Any]] = defaultdict(dict)
            for theirs in everyone:
                for place, values in theirs[index].items():
                    known[place].update(values)
            elementwise = {n: v for values in known.values() for n, v in values.items() if isinstance(v, torch.dtype)}
            for name, dtype in sorted(elementwise.items()):
                (flat,) = self._gathered([self._shard_of_state(index, name, dtype)], [section])
                for place, (piece, values) in enumerate(section.bucket.split(flat)):
                    if isinstance(known[place].get(name), torch.dtype):
                        held = state.setdefault(piece.tensor, {})
                        if name not in held:
                            held[name] = torch.empty(piece.tensor.shape, dtype=dtype, device=piece.tensor.device)
                        held[name].view(-1)[piece.start :][: piece.length] = values
            for place, values_by_name in known.items():
                for name, value in values_by_name.items():
                    if isinstance(value, _Value):
                        state.setdefault(section.bucket.pieces[place].tensor, {}).setdefault(name, value.copy())
        return state

    @torch.no_grad()
    def take_optimizer_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take this rank's shard of a state for whole parameters, as :meth:`optimizer_state` returns it."""
        for owned, optimizer in zip(self._owned, self._optimizers, strict=True):
            optimizer.state.clear()
            for each in owned:
                for overlap in each.overlaps:
                    for name, value in state.get(overlap.tensor, {}).items():
                        held = optimizer.state[each.parameter]
                        if not _is_elementwise(name, value, overlap.tensor):
                            held.setdefault(name, _placed(name, value, each, optimizer))
                            continue
                        if name not in held:
                            held[name] = torch.zeros_like(each.parameter, dtype=value.dtype)
                        held[name].view(-1)[overlap.at :][: overlap.end - overlap.start] = value.reshape(-1)[
                            overlap.start : overlap.end
                        ]

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of weights and optimizer state, and what has arrived but was not taken."""
        return {
            "shards": [shard.clone() for shard in self._shards],
            "known": [shard.clone() for shard in self._known],
            "travelling": [part.clone() for part in self._travelling],
            "optimizer": [
                [
                    {name: value.clone() if isinstance(value, Tensor) else value for name, value in held.items()}
                    for held in (optimizer.state.get(each.parameter, {}) for each in owned)
                ]
                for owned, optimizer in zip(self._owned, self._optimizers, strict=True)
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` (of a run with the same topology)."""
        for name, tensors in (("shards", self._shards), ("known", self._known), ("travelling", self._travelling)):
            for tensor, values in zip(tensors, state[name], strict=True):
                tensor.copy_(values)
        for owned, optimizer, saved in zip(self._owned, self._optimizers, state["optimizer"], strict=True):
            optimizer.state.clear()
            for each, held in zip(owned, saved, strict=True):
                for name, value in held.items():
                    optimizer.state[each.parameter][name] = _placed(name, value, each, optimizer)

    def _shard_of_state(self, index: int, name: str, dtype: torch.dtype) -> Tensor:
        shard = torch.zeros_like(self._shards[index], dtype=dtype)
        for each in self._owned[index]:
            value = self._optimizers[index].state.get(each.parameter, {}).get(name)
            if _is_elementwise(name, value, each.parameter):
                shard[each.offset :][: value.numel()] = value.reshape(-1)
        return shard

    @torch.no_grad()
    def _gathered(self, shards: Sequence[Tensor], sections: Sequence[Section]) -> Iterator[Tensor]:
        """Everyone's shards, as one flat tensor per section."""

        def gather(shard: Tensor, section: Section) -> tuple[Tensor, Handle]:
            flat = section.empty(shard.dtype)
            own, inter = self._own(flat, section).copy_(shard), self._topology.inter
            return flat, finished if inter is None else inter.all_gather(self._topology.lane_part(flat), own)

        for flat, handle in _early(map(gather, shards, sections)):
            handle.wait()
            self._topology.share_lane_parts(flat).wait()
            yield flat

    # ---- who owns what -------------------------------------------------------------------------------------------

    @property
    def _sends_differences(self) -> bool:
        return self.wire.dtype is not None and not self.wire.raw

    def _own(self, flat: Tensor, section: Section) -> Tensor:
        """This rank's shard of a flat tensor: a view, empty for a rank in no lane."""
        part, inter = self._topology.lane_part(flat), self._topology.inter
        return part if inter is None else part[inter.rank * section.shard_numel :][: section.shard_numel]

    def _own_parameters(self, section: Section, shard: Tensor, shard_on: ShardOn) -> Iterator[_Owned]:
        inter = self._topology.inter
        if inter is None:
            return
        begin = (self._topology.local_rank * inter.size + inter.rank) * section.shard_numel
        overlaps, offset = [], 0
        for piece in section.bucket.pieces:
            start, end = max(begin - offset, 0), min(begin + section.shard_numel - offset, piece.length)
            if start < end and id(piece.tensor) in self._trained:
                at = offset + start - begin
                overlaps.append(_Overlap(piece.tensor, piece.start + start, piece.start + end, at))
            offset += piece.length
        if shard_on == "parameters":
            for overlap in overlaps:
                values = shard[overlap.at :][: overlap.end].view(overlap.tensor.shape)
                whole = _Overlap(overlap.tensor, 0, overlap.end, 0)
                yield _Owned(torch.nn.Parameter(values), overlap.at, (whole,))
        elif overlaps:  # the padding at the very end belongs to nobody
            used = overlaps[-1].at + overlaps[-1].end - overlaps[-1].start
            yield _Owned(torch.nn.Parameter(shard[:used]), 0, tuple(overlaps))


@dataclass(frozen=True)
class _Value:
    """A value of the optimizer's state on its way to other ranks, through the CPU."""

    value: Any

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value.detach().cpu() if isinstance(self.value, Tensor) else self.value}

    def copy(self) -> Any:
        return self.value.clone() if isinstance(self.value, Tensor) else self.value


def _early(started: Iterator[T], ahead: int = 2) -> Iterator[T]:
    """The same, but a few items are made before they are asked for."""
    waiting = deque(islice(started, ahead))
    while waiting:
        yield waiting.popleft()
        waiting.extend(islice(started, 1))


def _sections(
    parameters: Sequence[Tensor], optimizer: Optimizer, shards: int, shard_on: ShardOn, bucket_bytes: int
) -> Iterator[Section]:
    trained = {id(parameter) for parameter in parameters}
    for group, values in enumerate(optimizer.param_groups):
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in values["params"]:
            if id(parameter) in trained:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for tensors in kinds.values():
            cut = Replica(tensors, bucket_bytes=bucket_bytes).buckets
            for bucket in cut if shard_on == "elements" else [_bucket_of_whole_tensors(tensors, shards)]:
                yield Section(group, bucket, shards)


def _bucket_of_whole_tensors(tensors: Sequence[Tensor], shards: int) -> Bucket:
    """Tensors in such an order, and padded so, that each lies in one shard: the largest first, to the emptiest."""
    placed: list[list[Tensor]] = [[] for _ in range(shards)]
    loads = [0] * shards
    for tensor in sorted(tensors, key=lambda tensor: -tensor.numel()):
        shard = min(range(shards), key=lambda i: loads[i])
        placed[shard].append(tensor)
        loads[shard] += tensor.numel()
    padding = tensors[0].new_zeros(max(loads) - min(loads))
    pieces = []
    for held, load in zip(placed, loads, strict=True):
        whole = [*held, padding[: max(loads) - load]]
        pieces += [Piece(tensor, 0, tensor.numel()) for tensor in whole if tensor.numel()]
    return Bucket(tuple(pieces), shards * max(loads), tensors[0].dtype, tensors[0].device, equal_in_node=True)


def _optimizer_of_same_class(optimizer: Optimizer, group: int, parameters: list[torch.nn.Parameter]) -> Optimizer:
    """An optimizer like one param group of the user's, with other parameters and without state.

    The class's constructor is not called: its arguments cannot be told from an instance (``AdamW`` does not take all
    its own defaults). The user's hooks, and the wrapper that a scheduler puts around ``step``, stay with the user's.
    """
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    for name, value in vars(optimizer).items():
        if isinstance(value, OrderedDict):  # hooks
            setattr(twin, name, OrderedDict())
    twin.state = defaultdict(dict)
    twin.param_groups = [{**optimizer.param_groups[group], "params": parameters}]
    return twin


def _is_elementwise(name: str, value: object, parameter: Tensor) -> TypeGuard[Tensor]:
    """Whether a value of an optimizer's state has one number per element of the parameter."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and name != "step"


def _placed(name: str, value: Any, owned: _Owned, optimizer: Optimizer) -> Any:
    """A copy of a value of the optimizer's state, where the optimizer wants it: step counts often on the CPU."""
    if not isinstance(value, Tensor):
        return value
    group = optimizer.param_groups[0]
    stays = name == "step" and not (group.get("capturable") or group.get("fused"))
    return value.clone() if stays else value.to(owned.parameter.device, copy=True)
