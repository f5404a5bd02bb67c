"""Runs a parameter synchronization: launches, collects and merges exchanges of fragments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lightning_hiercomm.comm.wide_sum import is_short
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.base import Gradients, RunningScheme
from lightning_hiercomm.schemes.components.schedules import Schedule
from lightning_hiercomm.schemes.context import Context
from lightning_hiercomm.schemes.in_place_of_step import Update
from lightning_hiercomm.schemes.optimizer_average import OptimizerStateMean
from lightning_hiercomm.schemes.phases import steps_of_phase
from lightning_hiercomm.schemes.reducers.base import Reducer
from lightning_hiercomm.schemes.reducers.neighbors import NeighborExchange
from lightning_hiercomm.schemes.reducers.pending import Pending, PendingExchange
from lightning_hiercomm.schemes.reducers.sharded import LeaderAllReduce, ShardedAllReduce
from lightning_hiercomm.schemes.reference_parameters import ReferenceParameters
from lightning_hiercomm.schemes.scheme_state import LOCAL, TRANSIENT, SchemeState

if TYPE_CHECKING:
    from lightning_hiercomm.schemes.parameter_sync import ParameterSync

log = logging.getLogger(__name__)

A = TypeVar("A", bound="ParameterSync", covariant=True)

ALL_REDUCERS: dict[str, type[ShardedAllReduce]] = {"sharded": ShardedAllReduce, "leader": LeaderAllReduce}
"""The reducers over all nodes, by name."""


@dataclass
class SyncState(SchemeState):
    """The state of a parameter synchronization.

    Attributes:
        exchanges_started: The number of exchanges that were started.
        fragments_sent: The number of fragments that were sent in them.
        round_begins: Optimizer steps before the current round, whose length the scheme's ``next_period`` returns.
        round_period: The length of the current round.
        begins_at: Optimizer steps before the schedule begins; None if that is not known yet.
        pending: The exchange that was started and not merged.
        reference: The reference parameters, with the outer optimizer.
    """

    exchanges_started: int = 0
    fragments_sent: int = 0
    round_begins: int = 0
    round_period: int | None = None
    begins_at: int | None = field(default=0, metadata=TRANSIENT)
    pending: Pending = field(default_factory=Pending, metadata=LOCAL)
    reference: ReferenceParameters | None = field(default=None, metadata=TRANSIENT)

    def settle(self) -> None:
        self.pending.settle()

    def undo_point(self) -> Callable[[], None]:
        assert self.reference is not None, "the scheme is complete"
        undo_reference, undo_fields = self.reference.undo_point(), super().undo_point()

        def undo() -> None:
            undo_fields()
            undo_reference()

        return undo


class RunningParameterSync(RunningScheme[A]):
    """Runs a parameter synchronization: exchanges fragments, and waits for them or overlaps them with training.

    All collectives between nodes use the same duplicated communicators, in the order of the program.

    Attributes:
        fragments: The model's fragments, each given by the indexes of its buckets.
        reducer: Averages the buckets of all fragments.
        reference: The reference parameters, with the outer optimizer.
        optimizer_mean: Averages the optimizer's state with the parameters, if the user asks for it.
    """

    state: SyncState
    state_type = SyncState

    def __init__(self, config: A, context: Context) -> None:
        super().__init__(config, context)
        self.state.begins_at = None if config.first_phase else 0
        self._average_gradients_over(self.gradients)
        self._inbound = self._new_background()  # completes exchanges
        # elastic nodes may be joined by one that copies their parameters
        is_copied = self.topology.may_grow and config.begins_with_copy
        self.reference = self.state.reference = ReferenceParameters(
            config.merging, config.averages_all_nodes, self.is_alone, is_copied
        )
        self._through = self.topology.duplicate() if config.staleness and not self.is_alone else self.topology
        self._second: Topology | None = None
        self.optimizer_mean: OptimizerStateMean | None = None
        if context.average_optimizer_state:
            self.optimizer_mean = OptimizerStateMean(context.optimizer, context.topology, context.wire)
        self._cut()

    @property
    def schedule(self) -> Schedule:
        """The current schedule of the merges."""
        return self.config.schedule

    @property
    def period(self) -> int | None:
        """Current optimizer steps between two merges of a fragment; None if the schedule has no such number."""
        return self.schedule.period if self.state.round_period is None else self.state.round_period

    @property
    def staleness(self) -> int:
        """Current optimizer steps between sending and merging."""
        return self.config.staleness

    # ---- a run ---------------------------------------------------------------------------------------------------

    def follow(self, replica: Replica) -> None:
        super().follow(replica)
        self.state.pending.drop()
        self._cut()

    def _cut(self) -> None:
        """Cut the replica into fragments, and make their reducers. Collective."""
        config, replica = self.config, self.replica
        if self.optimizer_mean is not None:
            self.optimizer_mean.forget()
        # averages in two rounds that overlap with training need communicators for the second; two nodes send each other
        # everything in one round
        has_rounds = not self.wire.codec.adds or any(map(is_short, replica.dtypes)) or self._buffers_with_parameters
        overlaps = self._through is not self.topology
        if overlaps and has_rounds and self._second is None and self.topology.num_nodes != 2:
            self._second = self.topology.duplicate()
        self.fragments: list[range] = []
        self.reducer: Reducer
        self._overlapped: Reducer
        if self.is_alone:
            self.reducer = self._overlapped = ShardedAllReduce(replica, self.topology, buckets=[])
        else:
            cut = [replica.buckets_of_parameters]
            if config.fragments != 1:
                cut = replica.cut(config.fragments, replica.bucket_bytes)
            ends = list(accumulate(map(len, cut)))
            self.fragments = [range(end - len(part), end) for part, end in zip(cut, ends, strict=True)]
            self.reducer = self._overlapped = self._new_reducer([bucket for part in cut for bucket in part], self.wire)
            if config.is_exact_overlapped:
                self._overlapped = self._new_reducer(replica.buckets_of_parameters, Wire())
                self._overlapped.disagreement = self.reducer.disagreement
            if cut and self.staleness > (longest := self.schedule.longest_staleness(len(cut))):
                raise ValueError(
                    f"staleness={self.staleness} must be at most {longest} for {self.schedule} with {len(cut)}"
                    " fragments, because one exchange is pending at a time"
                )
        self.reference.follow(self.reducer)

    def _new_reducer(self, buckets: list[Bucket], wire: Wire) -> Reducer:
        update = self.reference.update if self.config.merging.keeps_reference else None
        kind = self.config.reducer
        if not isinstance(kind, str):
            check = partial(self.guard.check, weight=1.0)
            return NeighborExchange(buckets, kind, self.topology, self._through, self._inbound, wire, update, check)
        return ALL_REDUCERS[kind](
            self.replica,
            self.topology,
            wire,
            self._through,
            self._second,
            buckets=buckets + self._buffers_with_parameters,
            update_reference=update,
        )

    @property
    def _buffers_with_parameters(self) -> list[Bucket]:
        """Float buffers that are reduced with the parameters whenever training waits for all fragments."""
        is_apart = self.config.merging.keeps_reference or not self.config.averages_all_nodes
        return [] if is_apart else self.replica.buckets_of_buffers

    def begin_run(self, epochs: int | None, steps: int | None) -> None:
        super().begin_run(epochs, steps)
        given, state = self.config.first_phase, self.state
        if self._in_first_phase:
            if state.begins_at is None:
                state.begins_at = steps_of_phase("warmup_steps", given, steps)
            if state.steps >= state.begins_at:
                self._end_first_phase()
            return
        is_known = given and (steps is not None or isinstance(given, Integral))
        if is_known and self.topology.rank == 0 and state.steps < steps_of_phase("warmup_steps", given, steps):
            log.warning(
                "%s: the resumed run skips warmup_steps=%s, because its nodes have already trained independently",
                type(self.config).__name__,
                given,
            )

    def before_step(self, last: bool) -> Update | None:
        state = self.state
        if state.round_period is None or state.steps == state.round_begins + state.round_period:
            state.round_begins = state.steps
            state.round_period = self.config.next_period(state, self.optimizer)
        return None

    def after_step(self, last: bool) -> None:
        if self.is_alone:
            return
        state, staleness = self.state, self.staleness
        outgoing: Sequence[int] = ()
        if state.round_period is None:
            step = state.steps - (state.begins_at or 0) + staleness
            outgoing = self.schedule.due(step, state.step_in_epoch + staleness, len(self.fragments))
        elif state.steps + staleness == state.round_begins + state.round_period:
            outgoing = range(len(self.fragments))
        if staleness:
            # if the last epoch ended with a pending exchange, that is merged before another one starts
            self.overlap(state.pending.take(state.steps, at_once=bool(outgoing)), outgoing)
        elif outgoing:
            self.average(outgoing)

    def finish(self) -> None:
        super().finish()
        self.state.pending.drop()
        if self.optimizer_mean is not None:
            self.optimizer_mean.forget()

    # ---- exchanges -----------------------------------------------------------------------------------------------

    def average(self, fragments: Sequence[int] | None = None) -> None:
        """Synchronize fragments and wait for them; default: all, with float buffers, and pending ones are dropped."""
        if self.is_alone:
            self.state.unsynchronized_steps = 0
            self.state.synchronizations += 1
            return
        fragments = range(len(self.fragments)) if fragments is None else fragments
        admits = self.config.begins_with_copy or len(fragments) == len(self.fragments)
        self.topology.synchronize(partial(self._exchange, fragments), admits)

    @torch.no_grad()
    def _exchange(self, fragments: Sequence[int]) -> None:
        """Exchange fragments, and float buffers if these are all fragments; wait for them and merge them."""
        state, merge, is_all = self.state, self.reference.merge, len(fragments) == len(self.fragments)
        if is_all:
            state.pending.drop()
        indexes = range(len(self.reducer.buckets)) if is_all else self._buckets_of(fragments)
        leaving = [self.reducer.buckets[index] for index in indexes]
        buffers = self.replica.buckets_of_buffers if is_all and not self._buffers_with_parameters else []
        checked = buffers if self.config.averages_all_nodes else []
        number = self._new_number(fragments)
        round_ = self.reducer.begin(state.steps, number, leaving + checked, self.samples, fragments).round
        for bucket, mean in self.reducer.means(round_, indexes):
            if bucket.keeps_equal:  # it holds buffers
                bucket.unpack(mean)
            else:
                merge.at_once(bucket, mean, self.topology.num_nodes)
        if buffers:
            self.guard.average(buffers, round_ if checked else None)
        state.synchronizations += 1
        if is_all and merge.makes_equal and self.config.averages_all_nodes:
            state.unsynchronized_steps = 0
            if self.optimizer_mean is not None:
                self.optimizer_mean(self.replica, round_)
        if self.samples is not None:
            self.samples.end(fragments)

    def overlap(self, due: PendingExchange | None, outgoing: Sequence[int]) -> None:
        """Merge an exchange that is due, and start the next; training continues in parallel.

        Args:
            due: The exchange that is due now, if any.
            outgoing: The fragments of the next exchange; empty if none starts now.
        """
        state, merge, preflight = self.state, self.reference.merge, None
        indexes = self._buckets_of(outgoing)
        if outgoing:  # checks values before a merge replaces them
            leaving = [self._overlapped.buckets[index] for index in indexes]
            number = self._new_number(outgoing)
            preflight = self._overlapped.begin(state.steps, number, leaving, inbound=self._inbound)
        if due is not None:
            if due.is_unfit:
                raise self._overlapped.error(state.steps)
            while due.buckets:
                pending = due.buckets.popleft()
                pending.arrived.wait()
                self._inbound.hands_out(pending.flat)
                merge(self.reducer.buckets[pending.index], pending, due.staleness, pending.nodes)
            state.synchronizations += 1
        if preflight is not None:
            sent = state.pending.start(state.steps, state.steps + self.staleness, outgoing, preflight)
            for index in indexes:
                sent.buckets.append(self._overlapped.start(index, preflight, self._inbound, merge.needs_sent))

    def _new_number(self, fragments: Sequence[int]) -> int:
        """Count an exchange of fragments that starts, and return its number."""
        state, number = self.state, self.state.exchanges_started
        if not self.config.averages_all_nodes:
            # counting steps, or all exchanges, a graph could select the same neighbors for a fragment every time
            number = 1 + state.fragments_sent // max(1, len(self.fragments))
        state.exchanges_started += 1
        state.fragments_sent += len(fragments)
        return number

    def _buckets_of(self, fragments: Sequence[int]) -> list[int]:
        return [index for fragment in fragments for index in self.fragments[fragment]]

    # ---- the first phase -----------------------------------------------------------------------------------------

    def _after_synchronous_step(self) -> None:
        super()._after_synchronous_step()
        if self.state.begins_at is not None and self.state.steps >= self.state.begins_at:
            self._end_first_phase()

    def _average_gradients_over(self, gradients: Gradients) -> None:
        self.gradients = gradients
        if self.config.first_phase:
            self.phase = "warm-up" if self._in_first_phase else "training"

    def _end_first_phase(self) -> None:
        """Start the schedule from the nodes' parameters, which are equal. Collective."""
        self._average_gradients_over(self.config.gradients)
        self.state.begins_at = self.state.steps
        if self.replica.buffers:
            self.guard.average(self.replica.buckets_of_buffers)
        self.state.unsynchronized_steps = 0
        self.reference.restart()

    # ---- state ---------------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """``sync_every``, ``staleness`` and ``disagreement``.

        With a synchronous first phase also ``phase``: 0 in it, 1 after it. The disagreement is this node's distance
        from the mean over all nodes before the last merge, relative to the mean. It is estimated on up to 4096 elements
        of every bucket that this rank reduces, without further communication.
        """
        values = {"sync_every": float(self.period or 0), "staleness": float(self.staleness)}
        if self.config.first_phase:
            values["phase"] = float(not self._in_first_phase)
            if self._in_first_phase:
                values |= {"sync_every": 1.0, "staleness": 0.0}
        relative = self.reducer.disagreement.relative()
        return values | ({} if relative is None else {"disagreement": relative})

    def state_dict(self, shared: bool = False, can_communicate: bool = True) -> dict[str, Any]:
        state = super().state_dict(shared, can_communicate)
        if self.config.first_phase:
            state["first_phase"] = [self.config.first_phase, self.state.begins_at, self._in_first_phase]
        if self._in_first_phase:  # the reference parameters of a run that resumes without this phase
            self.reference.restart()
        if not shared:
            state |= self.reference.state_dict()
            mean = self.optimizer_mean
            if mean is not None and (of_optimizer := mean.state_dict()):
                state["optimizer_average"] = of_optimizer
        if not shared or not can_communicate:
            return state
        if self.reference.merge.keeps_reference:
            self.state.settle()
            state["outer"] = self.reference.by_parameter(self.replica.parameters)
        elif self.reference.is_copied:
            self.state.settle()
            state["reference"] = self.reference.by_tensor(self.replica)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`. Shared state has no pending exchanges: nodes resume with averaged parameters."""
        own = self.state
        own.pending.drop()
        own.pending.device = self.replica.device
        super().load_state_dict(state)
        if self.optimizer_mean is not None:
            self.optimizer_mean.load_state_dict(state.get("optimizer_average", {}))
        self._load_first_phase(state)
        if not self.is_alone:
            self.reference.load_state_dict(state, self.replica)

    def _load_first_phase(self, state: Mapping[str, Any]) -> None:
        """Resume the phase in which a state was saved. Nodes that have trained independently skip a first phase."""
        given, begins_at, is_first = state.get("first_phase", [0, 0, not state["steps"]])
        first_gradients = self.config.first_gradients if is_first else None
        is_first = first_gradients is not None
        self._average_gradients_over(first_gradients or self.config.gradients)
        if not is_first:
            self.state.begins_at = state["steps"] if begins_at is None else min(begins_at, state["steps"])
        elif given == self.config.first_phase:
            self.state.begins_at = begins_at
        else:
            self.state.begins_at = None  # the length of the phase has changed

    def before_nodes_change(self) -> Callable[[], None]:
        resume = super().before_nodes_change()
        resume_reference = self.reference.before_nodes_change(self.replica.parameters)

        def resume_with_reference() -> None:
            self.reference.outer = None
            resume()
            resume_reference()

        return resume_with_reference
