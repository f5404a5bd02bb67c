"""Exchange of fragments with the peers that a communication graph selects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.spares import Spares
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import Bucket, in_cache_sized_parts
from lightning_hiercomm.nodes.topology import Holders, OneSender, Topology
from lightning_hiercomm.schemes.preflight import Preflight
from lightning_hiercomm.schemes.reducers.base import Reducer, UpdateReference
from lightning_hiercomm.schemes.reducers.disagreement import Disagreement, sample
from lightning_hiercomm.schemes.reducers.graphs import Graph, Partners, partners_of
from lightning_hiercomm.schemes.reducers.pending import PendingBucket
from lightning_hiercomm.schemes.samples import SampleWeights


class Peers:
    """Exchanges fragments of parameters with other nodes.

    Of the L ranks of a node that hold fragment ``s``, rank ``s mod L`` exchanges it and broadcasts the result to the
    others, so that all links of a node are used.

    Args:
        fragments: The fragments, each exchanged as a whole.
        graph: Selects the peers.
        topology: The nodes.
        duplicate: A duplicate of it, for broadcasts inside nodes that overlap with training.
        wire: The encoding. The sender subtracts the decoded payload from its own value.
        push_sum: Whether a node sends shares of its value, so that sums over nodes are conserved. Otherwise it sends
            all of its value, and continues with the plain mean of its own and the received values.

    Attributes:
        disagreement: The distance of a node from the mean of all, estimated from received values. Over uniformly random
            peers ``E ||z_r - z_peer||^2`` is ``2 n / (n - 1)`` times the mean squared distance from the mean.
    """

    def __init__(
        self,
        fragments: Sequence[Bucket],
        graph: Graph,
        topology: Topology,
        duplicate: Topology,
        wire: Wire,
        push_sum: bool = True,
    ) -> None:
        if wire.codec.needs_feedback:
            raise ValueError(
                "peers exchange parameters, and wire_dtype='sparse2' would drop most of them: use 'int8' or 'bfloat16'"
            )
        self.fragments = fragments
        self.graph = graph
        self.disagreement = Disagreement((topology.num_nodes - 1) / (2 * topology.num_nodes))
        self._topology = topology
        self._duplicate = duplicate
        self._codec = wire.codec
        self._push_sum = push_sum
        self._spares = Spares()
        self._last: dict[int, tuple[tuple[int, int], Partners]] = {}  # of the last exchange, by fragment
        if fragments and topology.inter is not None:
            topology.inter.expect_exchanges()

    def partners(self, step: int, index: int) -> Partners:
        """Return the exchange of a fragment after ``step`` optimizer steps."""
        key = step, self._topology.num_nodes
        last = self._last.get(index)
        if last is None or last[0] != key:
            last = self._last[index] = key, partners_of(self.graph, self._topology.num_nodes, step - 1, index)
        return last[1]

    def weights_after(self, step: int, index: int, weights: Sequence[float]) -> list[float]:
        """Return the nodes' push-sum weights of a fragment after an exchange, from those before it."""
        return self.partners(step, index).push(weights) if self._push_sum else list(weights)

    def holders_of(self, index: int) -> OneSender:
        """Return the ranks of this node that hold a fragment, and which of them exchanges it."""
        holders = self._duplicate.holders[self.fragments[index].held_by]
        return OneSender(holders.group, index % holders.num_shards)

    @torch.no_grad()
    def start(
        self,
        index: int,
        step: int,
        weights: Sequence[float],
        background: Background,
        then: Callable[[Tensor], None] | None = None,
    ) -> PendingBucket:
        """Start to exchange a fragment.

        Args:
            index: Of the fragment.
            step: The optimizer steps that all ranks have taken.
            weights: The nodes' push-sum weights of this fragment.
            background: Completes the exchange, in the order of the starts.
            then: Called with the change before its broadcast; on a rank that does not exchange the fragment, with an
                empty tensor.

        Returns:
            A pending bucket with the change to add to the fragment's x.
        """
        bucket, inter, node = self.fragments[index], self._topology.inter, self._topology.node
        holders = self.holders_of(index)
        if not holders.sends or inter is None or self._topology.num_nodes == 1:
            return self._receive(index, holders, background, then)
        partners = self.partners(step, index)
        share = bucket.pack(bucket.empty(spares=self._spares), weight=self._part(partners, weights, node))
        payload = self._codec.encode(share)
        received = [
            self._spares.take(payload.numel(), payload.dtype, payload.device) for _ in partners.receive_from[node]
        ]
        arrived = inter.exchange(
            [(payload, peer) for peer in partners.send_to[node]],
            list(zip(received, partners.receive_from[node], strict=True)),
        )
        flat = received[0] if payload is share else bucket.empty(spares=self._spares)
        for tensor in (share, payload, flat, *received):
            background.uses(tensor)

        def decoded(message: Tensor, out: Tensor) -> Tensor:
            return message if payload is share else self._codec.decode(message, out)

        def collect() -> None:
            arrived.wait()
            own, change = decoded(payload, share), decoded(received[0], flat)  # its own as the peers decode it
            theirs = self._part(partners, weights, partners.receive_from[node][0])
            samples = sample(change).div_(theirs), sample(own).div_(self._part(partners, weights, node))
            self.disagreement.compare(index, *samples, own.numel())
            _subtract(change, own)  # in pairs, so that equal replicas change by exactly zero
            for other in received[1:]:
                change.add_(_subtract(decoded(other, torch.empty_like(own)), own))
            surplus = len(received) - len(partners.send_to[node])
            if not self._push_sum:
                change.div_(len(received) + 1)
            elif surplus:
                change.add_(own, alpha=surplus)
            for used_up in (share, *(buffer for buffer in received if buffer is not flat)):
                self._spares.give_back(used_up)
            if then is not None:
                then(flat)
            holders.gather(flat).wait()

        return PendingBucket(index, flat, flat, background.submit(collect))

    def _receive(
        self, index: int, holders: Holders, background: Background, then: Callable[[Tensor], None] | None
    ) -> PendingBucket:
        """Return the pending bucket of a rank that does not send the fragment itself."""
        is_alone = self._topology.num_nodes == 1
        flat = self.fragments[index].empty(spares=self._spares)
        if is_alone:
            flat.fill_(-0.0)  # adding -0.0 changes no bit
        background.uses(flat)

        def receive() -> None:
            if then is not None:
                then(holders.shard(flat) if is_alone else flat[:0])
            holders.gather(flat).wait()

        return PendingBucket(index, flat, flat, background.submit(receive))

    def give_back(self, bucket: PendingBucket) -> None:
        """Free the memory of a merged bucket."""
        self._spares.give_back(bucket.flat)

    def _part(self, partners: Partners, weights: Sequence[float], node: int) -> float:
        return weights[node] * partners.share(node) if self._push_sum else 1.0


def _subtract(theirs: Tensor, own: Tensor) -> Tensor:
    """Calculate ``theirs - own`` in place, as -0.0 for equal values, because adding -0.0 changes no bit."""
    for value, less in in_cache_sized_parts(theirs, own):
        torch.sub(less, value, out=value).neg_()
    return theirs


class NeighborExchange(Reducer):
    """The plain mean of this node's and its peers' values, for graphs in which all nodes send as much as they receive.

    The number of a round, from 1, selects the peers.

    Args:
        buckets: The buckets, each exchanged as a whole.
        graph: Selects the peers.
        topology: The nodes.
        through: A duplicate of it.
        background: Completes all exchanges, also those that training waits for.
        wire: The encoding of parameters, not of differences, because peers have no common reference.
        update_reference: As for :class:`~lightning_hiercomm.schemes.reducers.sharded.ShardedAllReduce`.
        check: Raises an error if buckets cannot be sent.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        graph: Graph,
        topology: Topology,
        through: Topology,
        background: Background,
        wire: Wire,
        update_reference: UpdateReference | None = None,
        check: Callable[[Sequence[Bucket]], None] = lambda _: None,
    ) -> None:
        self.buckets = buckets
        self.topology = topology
        self._peers = Peers(buckets, graph, topology, through, wire)
        self._background = background
        self._update_reference = update_reference
        self._check_values = check
        self.disagreement = self._peers.disagreement
        self.set_references()

    def set_references(self) -> None:
        if self._update_reference is not None:
            self.references = [
                self.holders_of(index).shard(bucket.pack()).clone() for index, bucket in enumerate(self.buckets)
            ]

    def begin(
        self,
        step: int,
        number: int = 0,
        leaving: Sequence[Bucket] | None = None,
        samples: SampleWeights | None = None,
        fragments: Sequence[int] | None = None,
        inbound: Background | None = None,
    ) -> Preflight:
        self._check_values(self.buckets if leaving is None else leaving)
        # no check for equal steps: ranks with other counts have other peers
        return Preflight(self.topology, self.topology.new_round(step, number))

    def start(
        self, index: int, preflight: Preflight, background: Background | None = None, keep_sent: bool = False
    ) -> PendingBucket:
        number = preflight.round.number
        partners = self._peers.partners(number, index)
        if any(len(to) != len(of) for to, of in zip(partners.send_to, partners.receive_from, strict=True)):
            raise ValueError(
                f"{self._peers.graph!r} lets nodes receive more than they send: use a graph in which all nodes send as"
                " much as they receive, or Gossip, which has push-sum weights"
            )
        bucket = self.buckets[index]
        holders = self._peers.holders_of(index)
        is_needed = holders.sends or keep_sent
        own = bucket.pack() if is_needed else torch.empty(0, dtype=bucket.dtype, device=bucket.device)
        for tensor in (own, *self.references[index : index + 1]):
            self._background.uses(tensor)

        def update_reference(change: Tensor) -> None:
            mean = change.add_(holders.shard(own))
            if self._update_reference is not None:
                reference = self.references[index]
                mean.copy_(self._update_reference(index, reference, mean.sub(reference)))

        equal_weights = [1.0] * self.topology.num_nodes
        pending = self._peers.start(index, number, equal_weights, self._background, update_reference)
        pending.nodes = 1 + len(partners.receive_from[self.topology.node])
        return replace(pending, sent=own) if keep_sent else pending

    def holders_of(self, index: int) -> Holders:
        return self._peers.holders_of(index)
