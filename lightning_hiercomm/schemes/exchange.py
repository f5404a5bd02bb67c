"""Exchanges of fragments: launch, collect and merge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.wide_sum import is_short
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.context import Context
from lightning_hiercomm.schemes.guard import NonFiniteGuard
from lightning_hiercomm.schemes.optimizer_average import OptimizerStateMean
from lightning_hiercomm.schemes.reducers.base import Reducer
from lightning_hiercomm.schemes.reducers.neighbors import NeighborExchange
from lightning_hiercomm.schemes.reducers.pending import Pending, PendingExchange
from lightning_hiercomm.schemes.reducers.sharded import LeaderAllReduce, ShardedAllReduce
from lightning_hiercomm.schemes.reference_parameters import ReferenceParameters
from lightning_hiercomm.schemes.scheme_state import LOCAL, TRANSIENT, SchemeState

if TYPE_CHECKING:
    from lightning_hiercomm.schemes.parameter_sync import ParameterSync

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


class Exchanger:
    """Exchanges fragments of a replica with other nodes, waited for or overlapped with training.

    All collectives between nodes use the same duplicated communicators, in the order of the program. The background
    thread ``inbound`` completes exchanges.

    Args:
        config: The components.
        context: The nodes and settings.
        state: The counters of the scheme.
        guard: Checks and averages the replica.
        inbound: The background thread.

    Attributes:
        fragments: The model's fragments, each given by the indexes of its buckets.
        reducer: Averages the buckets of all fragments.
        reference: The reference parameters, with the outer optimizer.
        optimizer_mean: Averages the optimizer's state with the parameters, if the user asks for it.
    """

    def __init__(
        self,
        config: ParameterSync,
        context: Context,
        state: SyncState,
        guard: NonFiniteGuard,
        inbound: Background,
    ) -> None:
        self._config = config
        self._samples, self._topology, self._wire = context.samples, context.topology, context.wire
        self._state = state
        self._guard = guard
        self._inbound = inbound
        self._averages_all_nodes = config.averages_all_nodes
        self._is_alone = self._topology.is_one_node
        # elastic nodes may be joined by one that copies their parameters
        is_copied = self._topology.may_grow and config.begins_with_copy
        self.reference = state.reference = ReferenceParameters(
            config.merging, self._averages_all_nodes, self._is_alone, is_copied
        )
        self._through = self._topology.duplicate() if config.staleness and not self._is_alone else self._topology
        self._second: Topology | None = None
        self.optimizer_mean: OptimizerStateMean | None = None
        if context.average_optimizer_state:
            self.optimizer_mean = OptimizerStateMean(
                context.optimizer, context.topology, context.wire, context.on_nonfinite
            )
        self.fragments: list[range] = []
        self.reducer: Reducer
        self._overlapped: Reducer

    # ---- fragments and reducers ----------------------------------------------------------------------------------

    def cut(self, replica: Replica) -> None:
        """Cut a replica into fragments. Collective."""
        self._replica = replica
        if self.optimizer_mean is not None:
            self.optimizer_mean.forget()
        # averages in two rounds that overlap with training need communicators for the second; two nodes send each other
        # everything in one round
        has_rounds = not self._wire.codec.adds or any(map(is_short, replica.dtypes)) or self._buffers_with_parameters
        overlaps = self._through is not self._topology
        if overlaps and has_rounds and self._second is None and self._topology.num_nodes != 2:
            self._second = self._topology.duplicate()
        if self._is_alone:
            self.reducer = self._overlapped = ShardedAllReduce(replica, self._topology, buckets=[])
        else:
            cut = [replica.buckets_of_parameters]
            if self._config.fragments != 1:
                cut = replica.cut(self._config.fragments, replica.bucket_bytes)
            ends = list(accumulate(map(len, cut)))
            self.fragments = [range(end - len(part), end) for part, end in zip(cut, ends, strict=True)]
            self.reducer = self._overlapped = self._new_reducer([bucket for part in cut for bucket in part], self._wire)
            if self._config.is_exact_overlapped:
                self._overlapped = self._new_reducer(replica.buckets_of_parameters, Wire())
                self._overlapped.disagreement = self.reducer.disagreement
        self.reference.follow(self.reducer)

    def _new_reducer(self, buckets: list[Bucket], wire: Wire) -> Reducer:
        update = self.reference.update if self._config.merging.keeps_reference else None
        kind = self._config.reducer
        if not isinstance(kind, str):
            check = partial(self._guard.check, weight=1.0)
            return NeighborExchange(buckets, kind, self._topology, self._through, self._inbound, wire, update, check)
        return ALL_REDUCERS[kind](
            self._replica,
            self._topology,
            wire,
            self._through,
            self._second,
            buckets=buckets + self._buffers_with_parameters,
            update_reference=update,
            on_nonfinite=self._guard.on_nonfinite,
        )

    @property
    def _buffers_with_parameters(self) -> list[Bucket]:
        """Float buffers that are reduced with the parameters whenever training waits for all fragments."""
        is_apart = self._config.merging.keeps_reference or not self._averages_all_nodes
        return [] if is_apart else self._replica.buckets_of_buffers

    @property
    def all_fragments(self) -> Sequence[int]:
        """The indexes of all fragments."""
        return range(len(self.fragments))

    def _buckets_of(self, fragments: Sequence[int]) -> list[int]:
        return [index for fragment in fragments for index in self.fragments[fragment]]

    # ---- waited for ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self, fragments: Sequence[int]) -> None:
        """Exchange fragments, and float buffers if these are all fragments; wait for them and merge them."""
        state, is_all = self._state, len(fragments) == len(self.fragments)
        if is_all:
            state.pending.drop()
        indexes = range(len(self.reducer.buckets)) if is_all else self._buckets_of(fragments)
        leaving = [self.reducer.buckets[index] for index in indexes]
        buffers = self._replica.buckets_of_buffers if is_all and not self._buffers_with_parameters else []
        checked = buffers if self._averages_all_nodes else []
        number = self._next_number()
        round_ = self.reducer.begin(state.steps, number, leaving + checked, self._samples, fragments).round
        for bucket, mean in self.reducer.means(round_, indexes):
            if bucket.keeps_equal:  # it holds buffers
                bucket.unpack(mean)
            else:
                self.reference.merge.at_once(bucket, mean, self._topology.num_nodes)
        state.fragments_sent += len(fragments)
        if buffers:
            self._guard.average(buffers, round_ if checked else None)
        state.synchronizations += 1
        if is_all and self.reference.merge.makes_equal and self._averages_all_nodes:
            state.unsynchronized_steps = 0
            if self.optimizer_mean is not None:
                self.optimizer_mean(self._replica, round_)
        if self._samples is not None:
            self._samples.end(fragments)

    # ---- overlapped with training --------------------------------------------------------------------------------

    def overlap(self, due: PendingExchange | None, outgoing: Sequence[int], staleness: int) -> None:
        """Merge an exchange that is due, and start the next.

        Args:
            due: The exchange that is due now, if any.
            outgoing: The fragments of the next exchange.
            staleness: Steps until the next exchange is due.
        """
        state, sent = self._state, None
        indexes = self._buckets_of(outgoing)
        if outgoing:  # checks values before a merge replaces them
            leaving = [self._overlapped.buckets[index] for index in indexes]
            preflight = self._overlapped.begin(state.steps, self._next_number(), leaving, inbound=self._inbound)
            state.fragments_sent += len(outgoing)
            sent = state.pending.start(state.steps, state.steps + staleness, outgoing, preflight)
        if due is not None:
            self._merge(due)
        if sent is not None:
            needs_sent = self.reference.merge.needs_sent
            for index in indexes:
                sent.buckets.append(self._overlapped.start(index, preflight, self._inbound, needs_sent))

    def _merge(self, due: PendingExchange) -> None:
        if due.is_unfit:
            raise self._overlapped.error(self._state.steps)
        while due.buckets:
            pending = due.buckets.popleft()
            pending.arrived.wait()
            self._inbound.hands_out(pending.flat)
            self.reference.merge(self.reducer.buckets[pending.index], pending, due.staleness, pending.nodes)
        self._state.synchronizations += 1

    # ---- for both ------------------------------------------------------------------------------------------------

    def _next_number(self) -> int:
        """Return the number of an exchange that starts; graphs count those of each fragment, from 1."""
        state = self._state
        state.exchanges_started += 1
        # counting steps, or all exchanges, a periodic graph could select the same neighbors for a fragment every time
        of_fragment = 1 + state.fragments_sent // max(1, len(self.fragments))
        return state.exchanges_started - 1 if self._averages_all_nodes else of_fragment
