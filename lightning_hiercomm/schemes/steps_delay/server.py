"""A synchronous parameter server without a server: every rank owns a shard of it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby, islice, starmap
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.base import Communicator, Handle, finished
from lightning_hiercomm.comm.no_collectives import NoCollectives
from lightning_hiercomm.comm.spares import Spares
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import BUCKET_BYTES
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.components.history import History
from lightning_hiercomm.schemes.optimizer_state import copied, is_elementwise, keep_state_here
from lightning_hiercomm.schemes.steps_delay.section import Overlap, Section, ShardOn, _sections

T = TypeVar("T")


Hyperparameters = list[dict[str, Any]]
"""Per param group: learning rate, momentum, weight decay and whatever else the group holds besides its parameters."""


@dataclass(frozen=True)
class _Owned:
    """A parameter that this rank's shard optimizer steps: a view of the shard, and what it is a part of."""

    parameter: torch.nn.Parameter
    offset: int
    overlaps: tuple[Overlap, ...]


@dataclass
class _Shard:
    """What this rank holds of one section.

    Attributes:
        section: The section.
        values: The weights that it owns; like ``mean``, empty on a rank that is in no lane.
        mean: Of the gradients that the nodes push.
        travelling: Its lane's part: gradients on their way out or, from the end of a push on, weights on their way in.
            Like ``mean`` it may be without memory between a :meth:`ShardedServer.settle` and the next push.
        owned: What the optimizer steps: neighbours together, as long as they have taken equally many steps.
        optimizer: Of these weights.
        known: The weights that the other ranks hold since the last pull, where differences from them travel.
        stepped: That the last push has arrived, and the optimizer has stepped.
        pull: The all-gather that was launched after that, if it was told to.
        pulled: That it has ended.
    """

    section: Section
    values: Tensor
    mean: Tensor
    travelling: Tensor
    owned: list[_Owned]
    optimizer: Optimizer
    known: Tensor | None
    stepped: Handle = finished
    pull: Handle = finished
    pulled: Handle = finished

    @torch.no_grad()
    def step(self, hyperparameters: Hyperparameters) -> None:
        """Step the weights with the mean gradient."""
        for owned in self.owned:
            part = self.mean[owned.offset :][: owned.parameter.numel()]
            owned.parameter.grad = part.to(owned.parameter.dtype).view(owned.parameter.shape)
            keep_state_here(self.optimizer, owned.parameter)
        self.optimizer.param_groups[0].update(hyperparameters[self.section.group])
        with _without_collectives(self.optimizer):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def own_in_runs(self, lengths: Sequence[int]) -> None:
        """Let the optimizer step so many neighbouring parts of parameters together each time."""
        if list(lengths) == [len(each.overlaps) for each in self.owned]:
            return
        overlaps = iter([replace(o, at=each.offset + o.at) for each in self.owned for o in each.overlaps])
        self.owned = []
        for length in lengths:
            run = list(islice(overlaps, length))
            begin, end = run[0].at, run[-1].at + run[-1].numel
            parts = tuple(replace(overlap, at=overlap.at - begin) for overlap in run)
            self.owned.append(_Owned(torch.nn.Parameter(self.values[begin:end]), begin, parts))
        self.optimizer.param_groups[0]["params"] = [each.parameter for each in self.owned]

    @torch.no_grad()
    def start_pull(self, inter: Communicator) -> None:
        """Launch the all-gather of the weights over the lane."""
        own = self.travelling[inter.rank * self.values.numel() :][: self.values.numel()]
        if self.known is None:
            own.copy_(self.values)
        else:
            own.copy_(self.values - self.known)
            self.known.add_(own)
        self.pull = inter.all_gather(self.travelling, own)


class ShardedServer:
    """The global weights and the optimizer's state, cut into one shard per lane and node.

    A synchronous server that gets one mean gradient per iteration needs no process of its own::

        push   reduce-scatter of the gradients over each lane: the owner of a shard gets its mean
        step   the owner steps its shard, with the user's own optimizer class
        pull   all-gather over each lane, then over the node

    all of it section by section: the parameters are cut into sections of about a bucket, and every section into shards.
    With N parameters of b bytes on M nodes a push, and a pull, each send ``(M - 1) / M * N * b`` bytes per node, spread
    over the node's links. Owners are the ranks that lie in a lane, so the memory for optimizer state falls by their
    number (all ranks, if the nodes are equal). Besides its shard of the weights a rank holds one of mean gradients, its
    lane's part of the model for what travels and, on a narrow wire, a copy of its shard.

    A push leaves the training thread on the topology's communicators. What comes after it happens in the
    background, where pulls have a communicator of their own. Everything else may be called while nothing is in flight.

    Args:
        parameters: What is trained; equal on all ranks. The server starts from their values.
        optimizer: The user's optimizer of these parameters. It keeps its param groups (hence its schedulers work), but
            its state lives here.
        topology: The nodes and their weights.
        pull_lane: This rank's lane, by a communicator that nobody else uses; None if it is in none.
        background: Where the server steps, and pulls.
        wire: Payload type between nodes. Gradients are cast. Weights travel as the difference from those pulled last,
            unless the wire is raw.
        shard_on: ``"elements"`` cuts anywhere: all shards are equal. ``"parameters"`` never cuts a tensor, for
            optimizers that need whole ones; a param group is then one section, whose shards are padded to the largest,
            which costs bytes and memory when one tensor dominates the model.
        bucket_bytes: Upper bound of a section's size, if it cuts on elements. A small model has smaller ones.
        may_step: Says whether a shard may step with a mean gradient; it may replace the values. Default: always.

    Attributes:
        sections: The parameters.
        spares: Memory for parameters, to be used again.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizer: Optimizer,
        topology: Topology,
        pull_lane: Communicator | None,
        background: Background,
        wire: Wire,
        shard_on: ShardOn = "elements",
        bucket_bytes: int = BUCKET_BYTES,
        may_step: Callable[[Tensor], bool] = lambda mean: True,
    ) -> None:
        self.optimizer = optimizer
        self._may_step = may_step
        self.wire = wire
        self._topology = topology
        self._pull_lane = pull_lane
        self._background = background
        self._trained = {id(parameter) for parameter in parameters}
        self._bucket_bytes = bucket_bytes
        self._shard_on = shard_on
        self.spares = Spares()
        self._num_shards = topology.num_shards * topology.num_nodes
        self.sections = list(_sections(parameters, optimizer, self._num_shards, shard_on, bucket_bytes))
        self._shards = [self._shard(section, shard_on) for section in self.sections]

    # ---- the method ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def push(self, index: int, hyperparameters: Hyperparameters, has_gradients: bool, pull: bool) -> None:
        """Let a section's gradients go to their owners, who then step; waits only for the section's push before this.

        They are copied before this returns.

        Args:
            index: The section's number. All sections are pushed in each iteration, in their order, and a section whose
                weights were pulled after they have been taken from :meth:`arrivals`.
            hyperparameters: Of the user's optimizer at this iteration, see :meth:`hyperparameters`.
            has_gradients: Whether the parameters hold the node's mean gradients; otherwise these overflowed.
            pull: Whether :meth:`arrivals` will be asked for the weights that the step leaves.
        """
        shard, inter, pull_lane = self._shards[index], self._topology.inter, self._pull_lane
        if inter is None or pull_lane is None:
            return
        shard.stepped.wait()  # the push before this one used the same memory
        for tensor in (shard.mean, shard.travelling):
            _give_memory(tensor)
            self._background.uses(tensor)  # the step may still do so when a run that broke off gives it back
        if has_gradients:
            begin = self._topology.local_rank * shard.travelling.numel()
            shard.section.pack_gradients(shard.travelling, begin, self._topology.node_weight)
        else:
            shard.travelling.zero_()
        summed = inter.reduce_scatter(shard.mean, shard.travelling)

        def step() -> None:
            summed.wait()
            if self._may_step(shard.mean):
                shard.step(hyperparameters)
            if pull:
                shard.start_pull(pull_lane)

        for value in hyperparameters[shard.section.group].values():
            if isinstance(value, Tensor):  # a tensor learning rate was cloned on the stream of training
                self._background.uses(value)
        shard.stepped = self._background.submit(step)

    @torch.no_grad()
    def take_over(self, last: Sequence[Tensor]) -> None:
        """Let this rank's shards take what somebody wrote to the parameters; not collective, and nothing is in flight.

        Args:
            last: What the parameters held before, as for :meth:`arrivals`: the shards' weights but for a narrow wire's
                rounding, so that elements to which nobody wrote keep theirs.
        """
        if (inter := self._topology.inter) is None:
            return
        for shard, before in zip(self._shards, last, strict=True):
            numel, was = shard.section.shard_numel, self._own(before)
            begin = (self._topology.local_rank * inter.size + inter.rank) * numel
            for overlap in shard.section.overlaps(begin, begin + numel):
                here = slice(overlap.at, overlap.at + overlap.numel)
                held = overlap.tensor.detach().reshape(-1)[overlap.start : overlap.end]
                shard.values[here] = torch.where(held == was[here], shard.values[here], held)

    def expect_pulls(self) -> None:
        """Say that all sections of this iteration were pushed and told to pull; returns at once.

        Only now does the background wait for a pull: earlier, the pushes and steps behind it would have waited, too.
        """
        if self._pull_lane is None:
            return
        for shard in self._shards:

            def end_pull(shard: _Shard = shard, stepped: Handle = shard.stepped) -> None:
                stepped.wait()  # it has ended, but may have failed
                shard.pull.wait()

            shard.pulled = self._background.submit(end_pull)

    @torch.no_grad()
    def arrivals(self, last: Sequence[Tensor]) -> Iterator[Tensor]:
        """Wait for the weights that were pulled, and gather them inside the node.

        Args:
            last: What this, or :meth:`restart`, gave last; one flat tensor per section.

        Yields:
            One flat tensor per section, in their order, for :attr:`spares` when it is not used any more.
        """

        def share(shard: _Shard) -> tuple[Tensor, Handle]:
            shard.pulled.wait()
            payload = shard.section.empty(shard.travelling.dtype, self.spares)
            self._topology.own_shard(payload).copy_(shard.travelling)
            return payload, self._topology.gather_shards(payload)

        for (payload, handle), before in zip(_early(map(share, self._shards)), last, strict=True):
            handle.wait()
            if payload.dtype == before.dtype:
                yield payload
                continue
            weights = self.spares.take(before.numel(), before.dtype, before.device)
            if self.wire.raw:
                weights.copy_(payload)
            else:
                torch.add(before, payload, out=weights)
            self.spares.give_back(payload)
            yield weights

    # ---- while nothing is in flight ------------------------------------------------------------------------------

    def settle(self, has_pulled: bool) -> None:
        """Wait until nothing is in flight, and give back the memory for what travels until the next push needs it.

        Args:
            has_pulled: Whether there are weights that were pulled: they stay where :meth:`arrivals` finds them.
        """
        for shard in self._shards:
            shard.stepped.wait()
        for shard in self._shards:
            shard.pulled.wait()
            _take_memory(shard.mean)
            if not has_pulled:
                _take_memory(shard.travelling)

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
        return self._gathered((shard.section.shard_numel, shard.values) for shard in self._shards)

    @torch.no_grad()
    def restart(self, weights: Sequence[Tensor]) -> None:
        """Go on from other weights, equal on all ranks, one flat tensor per section; the optimizer state stays."""
        for shard, flat in zip(self._shards, weights, strict=True):
            shard.stepped = shard.pull = shard.pulled = finished
            shard.values.copy_(self._own(flat))
            if shard.known is not None:
                shard.known.copy_(shard.values)

    @torch.no_grad()
    def optimizer_state(self, only_on: int | None = None) -> dict[Tensor, dict[str, Any]]:
        """The optimizer's state for whole parameters, gathered part by part. Collective.

        Args:
            only_on: The one rank that gets it, so that no other holds more than a few parts. None: all ranks.

        Returns:
            For each parameter that has state, what the optimizer would hold for it in a run without shards; nothing on
            ranks that do not get it.
        """
        known = self._known_state()
        parts = [
            (shard, values_by_place, name, dtype, start, end)
            for shard, values_by_place in zip(self._shards, known, strict=True)
            for name, dtype in sorted(_dtypes(values_by_place).items())
            for start, end in self._parts(shard.section)
        ]
        own = (
            (end - start, _part_of_state(shard, name, dtype, start, end)) for shard, _, name, dtype, start, end in parts
        )
        # gloo's messages take CPU tensors only, and nccl's take memory of their own: CUDA tensors go to everybody
        on_cpu = all(not streams.has(section.bucket.device) for section in self.sections)
        flats = self._gathered_on(only_on, own) if on_cpu and only_on is not None else self._gathered(own)
        gets_it = only_on is None or only_on == self._topology.rank
        state: dict[Tensor, dict[str, Any]] = {}
        for (shard, values_by_place, name, dtype, start, _), flat in zip(parts, flats, strict=True):
            for overlap, values in shard.section.split(flat, start) if gets_it else ():
                if isinstance(values_by_place[overlap.place].get(name), torch.dtype):
                    tensor = overlap.tensor
                    held = state.setdefault(tensor, {})
                    if name not in held:
                        held[name] = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
                    held[name].view(-1)[overlap.start : overlap.end] = values
        if not gets_it:
            return state
        for shard, values_by_place in zip(self._shards, known, strict=True):
            for place, values_by_name in values_by_place.items():
                for name, value in values_by_name.items():
                    if isinstance(value, _Value):
                        state.setdefault(shard.section.bucket.slices[place].tensor, {}).setdefault(name, value.copy())
        return state

    def _known_state(self) -> list[dict[int, dict[str, Any]]]:
        """Per section, for each piece by its place: values, and of state with one number per element the dtype only."""
        mine: list[dict[int, dict[str, Any]]] = []
        for shard in self._shards:
            said: dict[int, dict[str, Any]] = defaultdict(dict)
            for each in shard.owned:
                for name, value in shard.optimizer.state.get(each.parameter, {}).items():
                    told = value.dtype if is_elementwise(value, name, each.parameter) else _Value(value)
                    for overlap in each.overlaps:
                        said[overlap.place][name] = told
            mine.append(dict(said))
        everyone = self._topology.world.all_gather_object(mine)
        known: list[dict[int, dict[str, Any]]] = [defaultdict(dict) for _ in self._shards]
        for theirs in everyone:
            for values_by_place, merged in zip(theirs, known, strict=True):
                for place, values in values_by_place.items():
                    merged[place].update(values)
        return known

    def _parts(self, section: Section) -> Iterator[tuple[int, int]]:
        """Elements ``start`` to ``end`` of every shard that together make about a bucket: most sections are one."""
        numel = max(1, -(-self._bucket_bytes // (section.shards * section.dtype.itemsize)))
        for start in range(0, section.shard_numel, numel):
            yield start, min(start + numel, section.shard_numel)

    @torch.no_grad()
    def take_optimizer_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take this rank's shard of a state for whole parameters, as :meth:`optimizer_state` returns it."""
        for shard in self._shards:
            shard.optimizer.state.clear()
            if self._shard_on == "elements":
                tensors = [overlap.tensor for each in shard.owned for overlap in each.overlaps]
                histories = [History.of(state.get(tensor, {}), tensor) for tensor in tensors]
                shard.own_in_runs([len(list(run)) for _, run in groupby(histories)])
            for each in shard.owned:
                for overlap in each.overlaps:
                    for name, value in state.get(overlap.tensor, {}).items():
                        held = shard.optimizer.state[each.parameter]
                        if not is_elementwise(value, name, overlap.tensor):
                            held.setdefault(name, _placed(name, value, each, shard.optimizer))
                            continue
                        if name not in held:
                            held[name] = torch.zeros_like(each.parameter, dtype=value.dtype)
                        held[name].view(-1)[overlap.at :][: overlap.numel] = value.reshape(-1)[
                            overlap.start : overlap.end
                        ]

    def state_dict(self) -> list[dict[str, Any]]:
        """This rank's shards of weights and optimizer state, and what has arrived but was not taken."""
        return [
            {
                "values": shard.values.clone(),
                "known": None if shard.known is None else shard.known.clone(),
                "travelling": shard.travelling.clone()
                if _has_memory(shard.travelling)
                else torch.zeros_like(shard.travelling),
                "optimizer": [
                    {name: copied(value) for name, value in held.items()}
                    for held in (shard.optimizer.state.get(each.parameter, {}) for each in shard.owned)
                ],
                "runs": [len(each.overlaps) for each in shard.owned],
            }
            for shard in self._shards
        ]

    @torch.no_grad()
    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore :meth:`state_dict` (of a run with the same topology, buckets and wire)."""
        for shard, saved in zip(self._shards, state, strict=True):
            shard.values.copy_(saved["values"])
            _give_memory(shard.travelling)
            shard.travelling.copy_(saved["travelling"])
            if shard.known is not None:
                shard.known.copy_(saved["known"])
            shard.optimizer.state.clear()
            shard.own_in_runs(saved["runs"])
            for each, held in zip(shard.owned, saved["optimizer"], strict=True):
                for name, value in held.items():
                    shard.optimizer.state[each.parameter][name] = _placed(name, value, each, shard.optimizer)

    @torch.no_grad()
    def _gathered(self, shards: Iterable[tuple[int, Tensor]]) -> Iterator[Tensor]:
        """Everyone's shards, one after another, as one flat tensor.

        Args:
            shards: The number of elements of each, and this rank's own: none if it is in no lane.
        """

        def gather(numel: int, own: Tensor) -> tuple[Tensor, Handle]:
            flat, inter = own.new_empty(self._num_shards * numel), self._topology.inter
            part = self._own(flat).copy_(own)
            return flat, finished if inter is None else inter.all_gather(self._topology.own_shard(flat), part)

        for flat, handle in _early(starmap(gather, shards)):
            handle.wait()
            self._topology.gather_shards(flat).wait()
            yield flat

    def _gathered_on(self, rank: int, shards: Iterable[tuple[int, Tensor]]) -> Iterator[Tensor]:
        """As :meth:`_gathered`, but only one rank gets them; what the others get is empty."""
        topology = self._topology
        owners = [
            topology.nodes[node][lane] for lane in range(topology.num_shards) for node in range(topology.num_nodes)
        ]

        def gather(numel: int, own: Tensor) -> tuple[Tensor, Handle]:
            if topology.rank != rank:
                return own[:0], topology.world.exchange([(own, rank)], [])
            flat = own.new_empty(len(owners) * numel)
            parts = zip(flat.view(len(owners), -1), owners, strict=True)
            self._own(flat).copy_(own)
            return flat, topology.world.exchange([], [(part, owner) for part, owner in parts if owner != rank])

        for flat, handle in _early(starmap(gather, shards)):
            handle.wait()
            yield flat

    # ---- who owns what -------------------------------------------------------------------------------------------

    def _shard(self, section: Section, shard_on: ShardOn) -> _Shard:
        payload_dtype = self.wire.codec.payload_dtype(section.dtype)
        values = self._own(section.pack()).clone()
        mean = torch.empty_like(values, dtype=payload_dtype)
        travelling = self._topology.own_shard(section.empty(mean.dtype)).clone()
        owned = list(self._own_parameters(section, values, shard_on))
        optimizer = _optimizer_of_same_class(self.optimizer, section.group, [each.parameter for each in owned])
        known = values.clone() if self.wire.compresses(section.dtype) and not self.wire.raw else None
        for tensor in (values, known):
            if tensor is not None:
                self._background.uses(tensor)
        return _Shard(section, values, mean, travelling, owned, optimizer, known)

    def _own(self, flat: Tensor) -> Tensor:
        """This rank's of the equal shards of a flat tensor: a view, empty for a rank in no lane."""
        part, inter = self._topology.own_shard(flat), self._topology.inter
        return part if inter is None else part.chunk(inter.size)[inter.rank]

    def _own_parameters(self, section: Section, shard: Tensor, shard_on: ShardOn) -> Iterator[_Owned]:
        inter = self._topology.inter
        if inter is None:
            return
        begin = (self._topology.local_rank * inter.size + inter.rank) * section.shard_numel
        lie_here = section.overlaps(begin, begin + section.shard_numel)
        overlaps = [overlap for overlap in lie_here if id(overlap.tensor) in self._trained]
        if shard_on == "parameters":
            for overlap in overlaps:
                values = shard[overlap.at :][: overlap.numel].view(overlap.tensor.shape)
                yield _Owned(torch.nn.Parameter(values), overlap.at, (replace(overlap, at=0),))
        elif overlaps:  # the padding at the very end belongs to nobody
            used = overlaps[-1].at + overlaps[-1].numel
            yield _Owned(torch.nn.Parameter(shard[:used]), 0, tuple(overlaps))


def _without_collectives(optimizer: Optimizer) -> AbstractContextManager[object]:
    """Refuse collectives: every rank steps another shard, and in the background, so that they would not match."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return nullcontext()  # the guard takes as long as a step of a small shard
    return NoCollectives(
        f"{type(optimizer).__name__}.step() communicates with other ranks. With StepsDelay every rank steps another"
        " shard of the parameters, so its collectives would not match. Use AllReduce()"
    )


def _dtypes(values_by_place: Mapping[int, Mapping[str, Any]]) -> dict[str, torch.dtype]:
    """Of the state with one number per element, by name."""
    return {
        name: value
        for values in values_by_place.values()
        for name, value in values.items()
        if isinstance(value, torch.dtype)
    }


def _part_of_state(shard: _Shard, name: str, dtype: torch.dtype, start: int, end: int) -> Tensor:
    """One number for each of the shard's elements ``start`` to ``end``; zero where the optimizer holds none."""
    flat = shard.values.new_zeros(shard.values[start:end].numel(), dtype=dtype)
    for each in shard.owned:
        value = shard.optimizer.state.get(each.parameter, {}).get(name)
        first, last = max(start, each.offset), min(end, each.offset + each.parameter.numel())
        if first < last and is_elementwise(value, name, each.parameter):
            streams.keep_here(value)  # made on the stream of the server's steps
            flat[first - start : last - start] = value.reshape(-1)[first - each.offset : last - each.offset]
    return flat


@dataclass(frozen=True)
class _Value:
    """A value of the optimizer's state on its way to other ranks, through the CPU."""

    value: Any

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value.detach().cpu() if isinstance(self.value, Tensor) else self.value}

    def copy(self) -> Any:
        return copied(self.value)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def _take_memory(tensor: Tensor) -> None:
    """Free what a tensor with a storage of its own lies in; its values are lost."""
    tensor.untyped_storage().resize_(0)


def _give_memory(tensor: Tensor) -> None:
    """Let a tensor have memory again, with any values in it, if it has none."""
    if not _has_memory(tensor):
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def _early(started: Iterator[T], ahead: int = 2) -> Iterator[T]:
    """The same, but a few items are made before they are asked for."""
    waiting = deque(islice(started, ahead))
    while waiting:
        yield waiting.popleft()
        waiting.extend(islice(started, 1))


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


def _placed(name: str, value: Any, owned: _Owned, optimizer: Optimizer) -> Any:
    """A copy of a value of the optimizer's state, where the optimizer wants it: step counts often on the CPU."""
    if not isinstance(value, Tensor):
        return value
    group = optimizer.param_groups[0]
    stays = name == "step" and not (group.get("capturable") or group.get("fused"))
    return value.clone() if stays else value.to(owned.parameter.device, copy=True)
