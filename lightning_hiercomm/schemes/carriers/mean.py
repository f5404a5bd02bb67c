"""The mean over all ranks: inside a node by parts, part ``l`` between the nodes over lane ``l``."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.base import CommunicationError, Communicator, Handle, finished
from lightning_hiercomm.comm.codec import AsIs
from lightning_hiercomm.comm.encoded_sum import Feedback
from lightning_hiercomm.comm.wide_sum import is_short, send_parts
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import BUCKETS_IN_FLIGHT, Bucket
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Holders, Topology
from lightning_hiercomm.schemes.carriers.base import Carrier, Land
from lightning_hiercomm.schemes.carriers.disagreement import Disagreement, sample
from lightning_hiercomm.schemes.carriers.in_flight import Exchange, Move
from lightning_hiercomm.schemes.carriers.lane_sum import LaneSum
from lightning_hiercomm.schemes.health.nonfinite import (
    OnNonfinite,
    arrived_mark,
    choose,
    is_marked,
    mark_of,
    mark_of_buckets,
    put_mark,
)

_STEPS_TOLD_APART = 4096


@dataclass(frozen=True)
class _Way:
    """Who carries a bucket, and with which weight, decided when it is launched: its sums end later, on other threads.

    Attributes:
        part: The part of the packed bucket that this rank takes to the other nodes, as a view; empty if it takes none.
        parts: The same for every rank of the node, in local order, where they hold different values.
        share: Gives every rank of the node all of it, in place.
        in_node: The weights of the node's ranks, which sum to 1.
        of_nodes: The weights of all nodes, likewise.
    """

    part: Callable[[Tensor], Tensor]
    parts: Callable[[Tensor], Sequence[Tensor]]
    share: Callable[[Tensor], Handle]
    in_node: Sequence[float]
    of_nodes: Sequence[float]


class Average(Carrier):
    """The weighted mean over all ranks of a replica's buckets, ``sum_m W_m x_m``.

    The ranks of a node hold the same parameters, so rank ``l`` of every node all-reduces only part ``l`` of each bucket
    over its lane, then the node gathers the parts: ``2 (M - 1) / M`` of the model per node, spread over all its links.
    Where a rank holds a part of the model anyway, nothing is left to gather.
    While one bucket is gathered the next are already on the wire. Values that differ inside a node are averaged there
    first, each rank getting the mean of its own part.

    All ranks end with identical bits. Means of 16-bit numbers are summed in float32, of statistics in float64, and
    rounded once (that of a node once more, before it leaves), so what is equal stays as it is.

    Args:
        replica: What agrees.
        topology: Between whom, and with which weights.
        wire: What travels between nodes. If that is not exact, it is the differences from the last agreed values (see
            :class:`~lightning_hiercomm.comm.wire.Wire`), which costs one copy of this rank's part of the model.
        through: A :meth:`~lightning_hiercomm.nodes.topology.Topology.twin` whose communicators carry it, where averages
            also run beside training. Default: the topology itself.
        second: Another twin, for the second round of codes that do not add, if sums end beside training.
        buckets: What of the replica agrees, in place of all its buckets.
        land: Says where the last agreed values go when the nodes' mean has arrived, and what every rank gets in place
            of the mean. Differences travel in any case. Default: to the mean.
        on_nonfinite: Unless ``"ignore"``, buckets are void for which a rank sent anything that is not finite, or for
            which the wire has no finite number.
        checks_buffers: Whether buckets of buffers are also void where a rank's module has replaced one of them by
            another shape.
        weights: Says what the ranks' weights for a bucket are when it is launched; they sum to 1. Default: the
            topology's.

    Attributes:
        landed: The buckets whose last agreed values have moved, on this lane, in the last exchange that was waited for.
    """

    def __init__(
        self,
        replica: Replica,
        topology: Topology,
        wire: Wire | None = None,
        through: Topology | None = None,
        second: Topology | None = None,
        *,
        buckets: Sequence[Bucket] | None = None,
        land: Land | None = None,
        on_nonfinite: OnNonfinite = "ignore",
        checks_buffers: bool = False,
        weights: Callable[[int], Sequence[float]] | None = None,
    ) -> None:
        self.on_nonfinite = on_nonfinite
        self._checks_buffers = checks_buffers
        self.weights = weights or (lambda _: topology.weights)
        self._mark: Tensor | None = None
        self._is_sharded = bool(replica.shares)
        self.landed: set[int] = set()
        self.buckets = list(replica.buckets if buckets is None else buckets)
        self.topology = topology
        self.through = through or topology
        self.wire = wire or Wire()
        self._turn = 0
        self._is_alone = topology.is_one_node and replica.equal_in_node
        self._device = replica.device
        self._land = land
        self._sum = LaneSum(self.wire.codec, self.through.inter, None if second is None else second.inter)
        self._feedback: list[Feedback] = []
        self.disagreement = Disagreement()
        self.anchor()

    def anchor(self) -> None:
        differences_travel = not self.wire.raw and any(map(self._is_narrowed, self.buckets))
        if self._land is not None or differences_travel:
            # buffers, which travel as they are and come last, need none
            with_anchor = [index for index, bucket in enumerate(self.buckets) if not bucket.keeps_equal]
            self.anchors = [self._present(index) for index in with_anchor]
            feedback = [self._sum.feedback(anchor) for anchor in self.anchors]
            self._feedback = [each for each in feedback if each is not None]

    def restart(self, indexes: Sequence[int]) -> None:
        for index in indexes:
            if self.buckets[index].keeps_equal:
                continue
            if self.anchors and self._land is None:
                self.anchors[index].copy_(self._present(index))
            if self._feedback:
                self._feedback[index].clear()

    def _present(self, index: int) -> Tensor:
        return self.remembered(self.buckets[index].pack(multiple_of=self.parts_of(index)), index).clone()

    def _differ_in_node(self, indexes: Sequence[int]) -> bool:
        return not all(self.buckets[index].equal_in_node for index in indexes)

    # ---- waited for ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(
        self,
        step: int = 0,
        turn: int = 0,
        only: Sequence[int] | None = None,
        take: Callable[[Bucket, Tensor], None] = Bucket.unpack,
    ) -> list[int]:
        indexes = range(len(self.buckets)) if only is None else only
        if self._is_alone:
            return []
        self._turn = turn
        self.landed = set()
        self._look_at(indexes)
        void: list[int] = []
        carries_step = bool(indexes) and self._can_carry_step(self.buckets[indexes[-1]])
        check = finished if carries_step else same_step(self.through, step, self._device)
        marks: dict[int, Tensor] = {}
        in_flight: deque[tuple[int, Tensor, Callable[[], None]]] = deque()

        def finish() -> None:
            index, flat, complete = in_flight.popleft()
            complete()
            bucket, parts = self.buckets[index], self.parts_of(index)
            if self._may_be_marked(bucket) and streams.has(self._device):
                # the host would wait for every bucket to know; what is void leaves the bucket as it is
                marks[index] = arrived_mark(flat, parts)
                take(bucket, torch.where(marks[index].isnan(), bucket.pack(), flat[: bucket.numel]))
            elif self._may_be_marked(bucket) and is_marked(flat, parts):
                void.append(index)
            else:
                take(bucket, flat)

        for index in indexes:
            bucket, is_last = self.buckets[index], index == indexes[-1]
            flat = bucket.pack(bucket.empty(self.parts_of(index), extra=int(carries_step and is_last)))
            if carries_step and is_last:
                flat[-1] = step % _STEPS_TOLD_APART
            self._put_mark(index, flat)
            way = self._way(index)
            averaged_in_node = self._average_in_node(index, flat, self.through.intra, way)
            in_flight.append(
                (index, flat, self._between_nodes(index, flat, averaged_in_node, way, self.landed, waiting=True))
            )
            if len(in_flight) == BUCKETS_IN_FLIGHT:
                finish()
        while in_flight:
            finish()
        if streams.has(self._device):  # all that the host has to know, in one go
            told = [*marks.values(), *([flat[-1]] if carries_step else _bounds(check))]
            found = _numbers(told).tolist() if told else []
            void = [index for index, mark in zip(marks, found, strict=False) if math.isnan(mark)]
            if carries_step:
                self._check_step(step, found[-1])
            elif isinstance(check, _SameStep):
                check.compare(*found[-2:])
            return void
        check.wait()
        if carries_step:
            self._check_step(step, float(flat[-1]))
        return void

    # ---- beside training -----------------------------------------------------------------------------------------

    def begin(self, step: int, turn: int, only: Sequence[int] | None = None) -> Handle:
        indexes = range(len(self.buckets)) if only is None else only
        self._turn = turn
        self._look_at(indexes)
        return same_step(self.topology if self._differ_in_node(indexes) else self.through, step, self._device)

    @torch.no_grad()
    def start(
        self, index: int, background: Background, keep_sent: bool = False, outbound: Background | None = None
    ) -> Move:
        bucket = self.buckets[index]
        sent = bucket.pack(multiple_of=self.parts_of(index))
        flat = sent.clone() if keep_sent else sent
        self._put_mark(index, flat)
        used = (flat, *self.anchors[index : index + 1])  # a run that breaks off gives back the last agreed values, too
        for tensor in used:
            background.uses(tensor)
        way, landed, nodes = self._way(index), set[int](), self.topology.num_nodes
        # training's own communicator: the twin's belongs to the background thread as soon as it shares parts
        averaged_in_node = self._average_in_node(index, flat, self.topology.intra, way)
        if averaged_in_node is None:
            complete_now = self._between_nodes(index, flat, None, way, landed)
            return Move(index, flat, sent, background.submit(complete_now), landed, nodes)
        if outbound is None:
            raise RuntimeError("values that differ inside a node need a background thread of their own to leave it")
        for tensor in used:
            outbound.uses(tensor)
        launched: list[Callable[[], None]] = []
        has_left = outbound.submit(
            lambda: launched.append(self._between_nodes(index, flat, averaged_in_node, way, landed))
        )

        def complete() -> None:
            has_left.wait()
            launched.pop()()

        return Move(index, flat, sent, background.submit(complete), landed, nodes)

    def seal(self, exchange: Exchange, background: Background) -> None:
        """Where the host would wait for every bucket, and for training, let it read all that it has to know at once."""
        looks = self.on_nonfinite != "ignore" and bool(exchange.moves)
        # a rank in no lane has no steps to compare, but launches what follows in the order of its node's others
        compares = self.topology.num_nodes > 1 and not self.topology.may_grow
        if streams.has(self._device) and (looks or compares):
            verdict = _Verdict(self, exchange, background, looks)
            exchange.check, exchange.is_void = verdict, verdict.is_void

    # ---- what is not finite ------------------------------------------------------------------------------------------

    def _look_at(self, indexes: Sequence[int]) -> None:
        """See whether what leaves is finite."""
        if self.on_nonfinite == "ignore" or self._is_alone:
            return
        self._mark = mark_of_buckets(self.buckets[index] for index in indexes)
        if self._is_sharded:  # the ranks of a node hold different parts: what is wrong with one is wrong with all
            self._mark = self._mark.to(self._device, torch.float32)
            self.topology.intra.all_reduce(self._mark).wait()

    def _may_be_marked(self, bucket: Bucket) -> bool:
        return self._mark is not None or (self._checks_buffers and bucket.keeps_equal)

    def _put_mark(self, index: int, flat: Tensor) -> None:
        bucket = self.buckets[index]
        if self._checks_buffers and bucket.is_outdated:  # the other ranks cannot know of it otherwise
            put_mark(flat.new_tensor(math.nan), flat, self.parts_of(index))
        elif self._mark is not None and bucket.numel:
            put_mark(self._mark, flat, self.parts_of(index))

    def _land_in(self, index: int, anchor: Tensor, part: Tensor, landed: set[int]) -> None:
        """Move the last agreed values, unless nothing finite has arrived; leave in ``part`` what every rank gets."""
        assert self._land is not None
        if self._mark is None or not part.numel():
            part.copy_(self._land(index, anchor, part))
        elif streams.has(part.device) and self.on_nonfinite != "skip":
            # it takes the way zero, and so does not wait to know: the run ends if nothing finite has arrived
            mark = part[0] * -0.0
            part.copy_(self._land(index, anchor, torch.where(mark.isnan(), 0.0, part)))
            put_mark(mark.abs().neg(), part)
        elif not is_marked(part):
            part.copy_(self._land(index, anchor, part))
            landed.add(index)

    # ---- who carries what ----------------------------------------------------------------------------------------

    def _way(self, index: int) -> _Way:
        """The way of a bucket that is launched now; by the training thread, which alone knows what now is."""
        holders, topology, weights = self._holders(index), self.topology, self.weights(index)

        def parts(flat: Tensor) -> list[Tensor]:
            return [holders.part(flat, local_rank) for local_rank in range(topology.ranks_on_node)]

        return _Way(holders.part, parts, holders.share, topology.in_node(weights), topology.of_nodes(weights))

    def parts_of(self, index: int) -> int:
        return self._holders(index).lanes

    def carried(self, flat: Tensor, index: int) -> Tensor:
        return self._holders(index).part(flat)

    def share(self, flat: Tensor, index: int) -> Handle:
        return self._holders(index).share(flat)

    def remembered(self, flat: Tensor, index: int) -> Tensor:
        """The part of a packed bucket whose last agreed values this rank may need; begins with what it carries."""
        return self.carried(flat, index)

    def _holders(self, index: int) -> Holders:
        return self.through.holders[self.buckets[index].held_by]

    def _average_in_node(self, index: int, flat: Tensor, intra: Communicator, way: _Way) -> Callable[[], None] | None:
        """Start to average values that differ inside the node, each rank's with its weight; None if they do not.

        Returns:
            A function that waits, and leaves the mean in the part of ``flat`` that this rank carries.
        """
        if self.buckets[index].equal_in_node:
            return None
        topology = self.topology
        if self.buckets[index].keeps_equal or is_short(flat.dtype):
            return send_parts(intra, way.parts(flat), way.in_node)
        weight, part = way.in_node[topology.local_rank], way.part(flat)
        if part.numel() * topology.ranks_on_node == flat.numel() and topology.ranks_on_node == topology.lanes:
            node_mean = torch.empty_like(part)
            summed = intra.reduce_scatter(node_mean, flat, weight=weight)

            def finish() -> None:
                summed.wait()
                streams.keep_here(node_mean)  # made on training's stream, but outbound
                part.copy_(node_mean)

            return finish
        return intra.all_reduce(flat, weight=weight).wait

    def _between_nodes(
        self,
        index: int,
        flat: Tensor,
        averaged_in_node: Callable[[], None] | None,
        way: _Way,
        landed: set[int],
        waiting: bool = False,
    ) -> Callable[[], None]:
        """Send a packed bucket on its way between the nodes.

        Returns:
            A function that waits for it, and leaves in ``flat`` what the nodes agree on.
        """
        part = way.part(flat)
        is_narrowed = self._is_narrowed(self.buckets[index])
        has_anchor = self._land is not None or (is_narrowed and bool(self.anchors))
        anchor = self.anchors[index] if has_anchor else None
        if averaged_in_node is not None:
            averaged_in_node()
        numel = min(part.numel(), self.buckets[index].numel)
        sent = sample(part[:numel])
        if anchor is not None:
            part.sub_(anchor[: part.numel()])
        feedback = self._feedback[index] if self._feedback and is_narrowed else None
        arrive = self._sum.launch(part, feedback, waiting, way.of_nodes, self.buckets[index].keeps_equal)

        def complete() -> None:
            arrive()
            if self._mark is not None and is_narrowed:
                put_mark(mark_of([part]), part)  # all numbers were finite, but perhaps too large for the wire
            arrived = sample(part[:numel])
            if anchor is not None:
                arrived.add_(sample(anchor[:numel]))
            self.disagreement.compare(index, sent, arrived, numel)
            if anchor is not None and self._land is not None:
                self._land_in(index, anchor, part, landed)
            elif anchor is not None:
                part.add_(anchor[: part.numel()])
            way.share(flat).wait()
            if anchor is not None and self._land is None:
                anchor.copy_(self.remembered(flat, index))

        return complete

    def _is_narrowed(self, bucket: Bucket) -> bool:
        # what is a counter or a variance among float buffers must not be rounded by what lies beside it
        return self.wire.compresses(bucket.dtype) and not bucket.keeps_equal

    # ---- the step, and state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._feedback:
            state["feedback"] = [feedback.state_dict() for feedback in self._feedback]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        of_files = state.get("feedback", ())[: len(self._feedback)]  # earlier ones have more, of buffers
        for feedback, saved in zip(self._feedback, of_files, strict=True):
            feedback.load_state_dict(saved)

    def _can_carry_step(self, bucket: Bucket) -> bool:
        """Whether the step can travel as one more element of the last bucket: half the latency of a small model.

        Its mean over all ranks then comes back. That takes a lane that carries whole buckets, in a type with digits.
        """
        return (
            self.topology.holders[bucket.held_by].lanes == 1
            and self._land is None
            and bucket.dtype.itemsize >= 4
            and not self.wire.compresses(bucket.dtype)
        )

    def _check_step(self, step: int, mean: float) -> None:
        if self.topology.may_grow:  # a node that was lost would look like one that is elsewhere
            return
        # if ranks differ, the furthest is at least half a step from the mean; rounding takes a hundredth
        if abs(mean - step % _STEPS_TOLD_APART) > 0.25:
            raise _unequal_steps(self.topology, step, "another number of them")


class RotatingAverage(Average):
    """The mean over all ranks, carried between the nodes by one rank of each and broadcast inside them.

    With a wire that is not exact every rank keeps the last agreed values of all parameters, for its turn will come.
    """

    def _way(self, index: int) -> _Way:
        topology, carrier, weights = self.topology, self._turn % self.topology.lanes, self.weights(index)

        def parts(flat: Tensor) -> list[Tensor]:
            return [flat if local_rank == carrier else flat[:0] for local_rank in range(topology.ranks_on_node)]

        def part(flat: Tensor) -> Tensor:
            return parts(flat)[topology.local_rank]

        share = partial(self.through.intra.broadcast, source=carrier)
        return _Way(part, parts, share, topology.in_node(weights), topology.of_nodes(weights))

    def remembered(self, flat: Tensor, index: int) -> Tensor:
        return flat


def same_step(topology: Topology, step: int, device: torch.device) -> Handle:
    """Check, beside other moves, that the lane's ranks have taken the same number of steps; the wait raises if not."""
    if topology.inter is None or topology.inter.size == 1 or topology.may_grow:  # such nodes say so when they meet
        return finished
    bounds = torch.full((2,), step, device=device)  # made there: a GPU's host waits for training when it copies
    bounds[1].neg_()
    return _SameStep(topology, step, bounds, topology.inter.all_reduce(bounds, op="max"))


@torch.no_grad()
def average_in_node(
    buckets: Sequence[Bucket],
    topology: Topology,
    mark: Tensor | None = None,
    healthy: Collection[int] | None = None,
) -> list[Bucket]:
    """Replace values by their weighted mean over the ranks of this node; blocks.

    Args:
        buckets: Of these values.
        topology: The ranks.
        mark: See :func:`~lightning_hiercomm.schemes.health.nonfinite.mark_of_buckets`. None: nobody looks.
        healthy: Those of whom the mean is; the others' values are not read. None: all.

    Returns:
        The buckets for which nothing finite has arrived, the same on all ranks; they stay as they are.
    """
    weights = topology.weights if healthy is None else among(healthy, topology.weights)
    mean, is_void = LaneSum(AsIs(), topology.intra), list[Tensor]()
    for bucket in buckets:
        flat = bucket.pack() if healthy is None or topology.rank in healthy else bucket.empty().zero_()
        if mark is not None:
            put_mark(mark, flat)
        mean.launch(flat, weights=topology.in_node(weights))()
        if mark is not None:
            is_void.append(arrived_mark(flat).isnan())
            flat = choose(~is_void[-1], flat, bucket.pack)
        bucket.unpack(flat)
    void = torch.stack(is_void).tolist() if is_void else []
    return [bucket for bucket, is_one in zip(buckets, void, strict=False) if is_one]


def among(ranks: Collection[int], weights: Sequence[float]) -> list[float]:
    """The weights of some ranks, which sum to 1; zero for the others."""
    total = sum(weights[rank] for rank in ranks)
    return [weight / total if rank in ranks else 0.0 for rank, weight in enumerate(weights)]


class _SameStep(Handle):
    def __init__(self, topology: Topology, step: int, bounds: Tensor, handle: Handle) -> None:
        self._topology = topology
        self._step = step
        self._bounds = bounds
        self._handle = handle

    def wait(self) -> None:
        self.compare(*self.bounds().tolist())

    def bounds(self) -> Tensor:
        """The most steps that a rank has taken, and minus the least; for the current stream."""
        self._handle.wait()
        streams.keep_here(self._bounds)  # made by training; whoever reads it beside that may not be waited for
        return self._bounds

    def compare(self, most: float, least: float) -> None:
        """Raise unless these :meth:`bounds` are this rank's steps."""
        if most != self._step or -least != self._step:
            raise _unequal_steps(self._topology, self._step, f"{-least:.0f} to {most:.0f}")

    def is_done(self) -> bool:
        return self._handle.is_done()


class _Verdict(Handle):
    """What the host has to know of an exchange: whether all took as many steps, and what is void. It reads once."""

    def __init__(self, carrier: Average, exchange: Exchange, background: Background, looks: bool) -> None:
        self._check = exchange.check
        moves = [(move.index, move.flat, carrier.parts_of(move.index)) for move in exchange.moves if looks]
        self._indexes = [index for index, _, _ in moves]
        self._void: set[int] | None = None

        def numbers() -> Tensor:
            told = [*(arrived_mark(flat, parts) for _, flat, parts in moves), *_bounds(self._check)]
            return _numbers(told) if told else torch.empty(0, device=carrier._device)

        self._reading = background.read(numbers)

    def wait(self) -> None:
        if self._void is None:
            numbers = self._reading.numbers()
            self._void = {index for index, mark in zip(self._indexes, numbers, strict=False) if math.isnan(mark)}
            if isinstance(self._check, _SameStep):
                self._check.compare(*numbers[-2:])

    def is_done(self) -> bool:
        return self._reading.is_done()

    def is_void(self, move: Move) -> bool:
        self.wait()
        assert self._void is not None
        return move.index in self._void


def _bounds(check: Handle) -> list[Tensor]:
    return [check.bounds()] if isinstance(check, _SameStep) else []


def _numbers(tensors: Sequence[Tensor]) -> Tensor:
    """All elements in one tensor, wide enough for numbers of steps."""
    return torch.cat([*(tensor.double().view(-1) for tensor in tensors)])


def _unequal_steps(topology: Topology, step: int, others: str) -> CommunicationError:
    return CommunicationError(
        f"rank {topology.rank} (node {topology.node}) came to an agreement after {step} optimizer steps, others after"
        f" {others}. All ranks must take equally many steps: give all ranks dataloaders of one length (or"
        " limit_train_batches)."
    )
