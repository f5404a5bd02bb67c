"""Exchanges of fragments: launch, collect and merge."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.wide_sum import is_short
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.guard import NonFiniteGuard
from lightning_hiercomm.schemes.reducers.all_reduce import LeaderAllReduce, ShardedAllReduce
from lightning_hiercomm.schemes.reducers.base import Reducer
from lightning_hiercomm.schemes.reducers.in_flight import PendingExchange
from lightning_hiercomm.schemes.reducers.neighbors import NeighborExchange
from lightning_hiercomm.schemes.reference import ReferenceParameters
from lightning_hiercomm.schemes.samples import SampleWeights

if TYPE_CHECKING:
    from lightning_hiercomm.schemes.parameter_sync import ParameterSync, SyncState


ALL_REDUCERS: dict[str, type[ShardedAllReduce]] = {"sharded": ShardedAllReduce, "leader": LeaderAllReduce}
"""The reducers over all nodes, by name."""


class Exchanger:
    """Exchanges fragments of a replica with other nodes, waited for or overlapped with training.

    All collectives between nodes use the same duplicated communicators, in the order of the program. The background
    thread ``inbound`` completes exchanges.

    Attributes:
        fragments: The model's fragments, each given by the indexes of its buckets.
        reducer: Averages the buckets of all fragments.
    """

    def __init__(
        self,
        config: ParameterSync,
        state: SyncState,
        reference: ReferenceParameters,
        guard: NonFiniteGuard,
        topology: Topology,
        wire: Wire,
        inbound: Background,
        samples: SampleWeights | None = None,
    ) -> None:
        # the normalized mean is one of differences from reference parameters
        self._normalizing = samples if samples is not None and samples.is_normalized else None
        self._config = config
        self._state = state
        self._reference = reference
        self._guard = guard
        self._topology = topology
        self._wire = wire
        self._inbound = inbound
        self._is_alone = reference.is_alone
        shares_communicators = self._is_alone or (topology.may_grow and not config.staleness)
        self._through = topology if shares_communicators else topology.duplicate()
        self._second: Topology | None = None
        self.fragments: list[range] = []
        self.reducer: Reducer
        self._overlapped: Reducer

    # ---- fragments and reducers ----------------------------------------------------------------------------------

    def cut(self, replica: Replica) -> None:
        """Cut a replica into fragments. Collective."""
        self._replica = replica
        self._second = self._opened_second(self._second)
        if self._is_alone:
            self.reducer = self._overlapped = ShardedAllReduce(replica, self._topology, buckets=[])
        else:
            config = self._config
            cut = [replica.buckets_of_parameters]
            if config.fragments != 1:
                cut = replica.cut(config.fragments, replica.bucket_bytes)
            ends = list(accumulate(map(len, cut)))
            self.fragments = [range(end - len(part), end) for part, end in zip(cut, ends, strict=True)]
            self.reducer = self._overlapped = self._new_reducer([bucket for part in cut for bucket in part], self._wire)
            if config.is_exact_overlapped:
                self._overlapped = self._new_reducer(replica.buckets_of_parameters, Wire())
                self._overlapped.disagreement = self.reducer.disagreement
        self._reference.follow(self.reducer)

    def _opened_second(self, second: Topology | None) -> Topology | None:
        """Duplicate the communicators again, if averages have a second round that overlaps with training."""
        dtypes, topology, staleness = self._replica.dtypes, self._topology, self._config.staleness
        has_rounds = not self._wire.codec.adds or any(map(is_short, dtypes))
        has_rounds |= staleness > 0 and bool(self._buffers_with_parameters)
        # elastic nodes that wait for every exchange need one set of communicators
        needs_second = staleness > 0 if topology.may_grow else topology.num_nodes > 2
        if second is None and has_rounds and needs_second and not self._is_alone:
            return topology.duplicate()
        return second

    def _new_reducer(self, buckets: list[Bucket], wire: Wire) -> Reducer:
        config, state, guard = self._config, self._state, self._guard
        if not isinstance(config.reducer, str):
            return NeighborExchange(
                buckets,
                config.reducer,
                self._topology,
                self._through,
                self._inbound,
                wire,
                # counting steps, a periodic graph could select the same neighbors at every synchronization
                turn=lambda: 1 + state.fragments_sent // max(1, len(self.fragments)),
                update_reference=self._reference.update,
                check=partial(guard.check, weight=1.0),
            )
        normalizing = self._normalizing
        return ALL_REDUCERS[config.reducer](
            self._replica,
            self._topology,
            wire,
            self._through,
            self._second,
            buckets=buckets + self._buffers_with_parameters,
            update_reference=self._reference.update or (None if normalizing is None else _add_difference),
            on_nonfinite=guard.policy.on_nonfinite,
            weights=None if normalizing is None else lambda _: normalizing.of_differences,
        )

    @property
    def _buffers_with_parameters(self) -> list[Bucket]:
        """Float buffers that are reduced with the parameters whenever training waits for all fragments."""
        has_reference = self._reference.merge.keeps_reference or self._normalizing is not None
        is_apart = has_reference or not self._config.averages_all_nodes
        return [] if is_apart else self._replica.buckets_of_buffers

    @property
    def all_fragments(self) -> Sequence[int]:
        """The indexes of all fragments."""
        return range(len(self.fragments))

    def _buckets_of(self, fragments: Sequence[int]) -> list[int]:
        return [index for fragment in fragments for index in self.fragments[fragment]]

    def average_buffers(self) -> None:
        """Replace float buffers by their mean over all ranks; blocks."""
        if self._replica.buffers:
            self._guard.average(self._replica.buckets_of_buffers)

    # ---- waited for ----------------------------------------------------------------------------------------------

    def run(self, fragments: Sequence[int]) -> None:
        """Exchange fragments, and float buffers if these are all fragments; wait for them and merge them."""
        state, is_all = self._state, len(fragments) == len(self.fragments)
        if is_all:
            state.pending.drop()
        indexes = range(len(self.reducer.buckets)) if is_all else self._buckets_of(fragments)
        self.reducer(state.steps, self._next_turn(), indexes, self._take)
        state.fragments_sent += len(fragments)
        if is_all and not self._buffers_with_parameters:
            self.average_buffers()
        self._end_round(fragments)
        state.synchronizations += 1
        if is_all and self._reference.merge.makes_equal and self._config.averages_all_nodes:
            state.unsynchronized_steps = 0
            self._guard.average_optimizer_state()

    def _take(self, bucket: Bucket, mean: Tensor) -> None:
        if any(bucket is of_buffers for of_buffers in self._replica.buckets_of_buffers):
            bucket.unpack(mean)
        else:
            self._reference.merge.at_once(bucket, mean, self._topology.num_nodes)

    # ---- overlapped with training --------------------------------------------------------------------------------

    def overlap(self, due: PendingExchange | None, outgoing: Sequence[int], staleness: int) -> None:
        """Merge an exchange that is due, and start the next.

        Its first buckets are sent while the last ones that are due are still on the link. Sent earlier, they would
        delay those for which training waits.

        Args:
            due: The exchange that is due now, if any.
            outgoing: The fragments of the next exchange.
            staleness: Steps until the next exchange is due.
        """
        state = self._state
        sent = self._begin(outgoing, staleness) if outgoing else None
        if due is not None:
            self._overlapped.check(due.verdict, state.steps)
            self._end_round(due.fragments, due)  # before the next exchange updates the reference parameters
        waiting: deque[int] = deque()
        for index in self._buckets_of(outgoing):
            if due is not None and due.holds(index):
                self._merge_up_to(index, due)
            waiting.append(index)
            if due is None or due.is_nearly_done():
                self._send(waiting, sent)
        if due is not None:
            self._merge_up_to(None, due)
            state.synchronizations += 1
        self._send(waiting, sent)

    def overlap_elastic(
        self, due: PendingExchange | None, outgoing: Sequence[int], staleness: int, admits: bool
    ) -> None:
        """Do as :meth:`overlap` where nodes leave and join: merge in one quorum, and send in another.

        If the nodes have changed since an exchange was sent, or it has not arrived everywhere, it is lost: its updates
        of the reference parameters are undone, and the present nodes synchronize their current parameters and wait.

        A node may join during the merge if ``admits``, because no exchange is pending then.
        """
        pending = self._state.pending
        if due is not None:
            pending.keep(due)

            def merge() -> None:
                if due.is_lost:
                    self.run(due.fragments)
                else:
                    self.overlap(due, (), staleness)

            self._topology.synchronize(merge, admits=admits)
            pending.forget(due)
        if outgoing:
            self._topology.synchronize(lambda: self.overlap(None, outgoing, staleness), brings=False)

    def _begin(self, outgoing: Sequence[int], staleness: int) -> PendingExchange:
        """Launch the preflight of an exchange."""
        state = self._state
        indexes = self._buckets_of(outgoing)
        verdict = self._overlapped.begin(state.steps, self._next_turn(), indexes, self._inbound)
        state.fragments_sent += len(outgoing)
        exchange = state.pending.start(state.steps, state.steps + staleness, outgoing, verdict)
        if self._topology.may_grow:
            exchange.undo = self._reference.undo_point()
        return exchange

    def _send(self, waiting: deque[int], exchange: PendingExchange | None) -> None:
        needs_sent = self._reference.merge.needs_sent
        while waiting and exchange is not None:
            index = waiting.popleft()
            exchange.buckets.append(self._overlapped.start(index, self._inbound, needs_sent))

    def _merge_up_to(self, last: int | None, due: PendingExchange) -> None:
        """Merge the remaining buckets of an exchange in their order, up to and including bucket ``last``, or all."""
        while due.buckets:
            pending = due.buckets.popleft()
            pending.arrived.wait()
            self._inbound.hands_out(pending.flat)
            bucket = self.reducer.buckets[pending.index]
            self._reference.merge(bucket, pending, due.staleness, pending.nodes)
            if pending.index == last:
                return

    def drop_pending(self) -> None:
        """Drop pending exchanges, but count their rounds, because their outer steps were taken."""
        pending = self._state.pending
        pending.settle()
        for dropped in pending.exchanges:
            self._end_round(dropped.fragments)
        pending.drop()

    # ---- for both ------------------------------------------------------------------------------------------------

    def _end_round(self, fragments: Sequence[int], arriving: PendingExchange | None = None) -> None:
        """Step the outer scheduler when all fragments have been received again."""
        if self._reference.outer is not None and self._ends_round(fragments):
            if arriving is not None:
                arriving.wait()
            self._reference.end_round()

    def _ends_round(self, fragments: Sequence[int]) -> bool:
        return bool(fragments) and fragments[-1] == len(self.fragments) - 1

    def pending_rounds(self) -> int:
        """Return the number of rounds of all fragments that end with pending exchanges."""
        return sum(self._ends_round(each.fragments) for each in self._state.pending.exchanges)

    def _next_turn(self) -> int:
        self._state.exchanges_started += 1
        return self._state.exchanges_started - 1


def _add_difference(index: int, reference: Tensor, difference: Tensor) -> Tensor:
    """Update reference parameters by the normalized mean of the ranks' differences from them."""
    return reference.add_(difference)
