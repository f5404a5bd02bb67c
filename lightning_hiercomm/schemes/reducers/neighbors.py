"""Exchange of segments with the peers that a communication graph selects."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.base import Handle
from lightning_hiercomm.comm.spares import Spares
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import Bucket, in_cache_sized_parts
from lightning_hiercomm.nodes.topology import Holders, Topology
from lightning_hiercomm.schemes.health.nonfinite import is_unfit
from lightning_hiercomm.schemes.health.preflight import Verdict
from lightning_hiercomm.schemes.reducers.base import Reducer, UpdateReference
from lightning_hiercomm.schemes.reducers.disagreement import Disagreement, sample
from lightning_hiercomm.schemes.reducers.graphs import Graph, Round, round_of
from lightning_hiercomm.schemes.reducers.in_flight import PendingBucket


class Peers:
    """Sends shares of segments to other nodes, and takes theirs.

    Of the L ranks of a node that hold a segment ``s``, the one in place ``s mod L`` carries it, so all links of a node
    work, and shares what arrived with the others.

    Args:
        segments: What is exchanged, each as a whole.
        graph: Who sends to whom.
        topology: The nodes.
        beside: A duplicate of it, whose communicators broadcast received values inside nodes, overlapped with training.
        wire: What travels. Its sender subtracts from its own value what it really sent.
        push_sum: Whether a node gives shares of its value away, so that sums over nodes are conserved. Otherwise it
            sends all of its value, and goes on with the plain mean of that and what arrives.

    Attributes:
        disagreement: How far a node is from the mean of all, estimated from what peers sent. Over uniformly random
            peers ``E ||z_r - z_peer||^2`` is ``2 n / (n - 1)`` times the mean squared distance from the mean.
    """

    def __init__(
        self,
        segments: Sequence[Bucket],
        graph: Graph,
        topology: Topology,
        beside: Topology,
        wire: Wire,
        push_sum: bool = True,
    ) -> None:
        if wire.codec.needs_feedback:
            raise ValueError(
                "peers send each other the parameters themselves, of which wire_dtype='top4' would drop most: use"
                " 'int8' or 'bfloat16'"
            )
        self.segments = segments
        self.graph = graph
        self.disagreement = Disagreement((topology.num_nodes - 1) / (2 * topology.num_nodes))
        self._topology = topology
        self._beside = beside
        self._codec = wire.codec
        self._push_sum = push_sum
        self._spares = Spares()
        self._rounds: dict[int, tuple[tuple[int, int], Round]] = {}  # a step asks several times
        if segments and topology.inter is not None:
            topology.inter.expect_exchanges()

    def round(self, step: int, index: int) -> Round:
        """Who exchanges a segment with whom after ``step`` optimizer steps."""
        asked = step, self._topology.num_nodes
        known = self._rounds.get(index)
        if known is None or known[0] != asked:
            known = self._rounds[index] = asked, round_of(self.graph, self._topology.num_nodes, step - 1, index)
        return known[1]

    def weights_after(self, step: int, index: int, weights: Sequence[float]) -> list[float]:
        """The nodes' push-sum weights of a segment after an exchange, from those before it."""
        return self.round(step, index).push(weights) if self._push_sum else list(weights)

    def reducer(self, index: int) -> int:
        """The place, among its holders, of the rank that carries a segment."""
        return index % self._holders(index).num_shards

    def carries(self, index: int) -> bool:
        """Whether this rank carries a segment."""
        return self.reducer(index) == self._holders(index).place

    def share(self, flat: Tensor, index: int) -> Handle:
        """Give every holder what the rank that carries a segment has got, in place."""
        return self._holders(index).broadcast(flat, source=self.reducer(index))

    @torch.no_grad()
    def start(
        self,
        index: int,
        step: int,
        weights: Sequence[float],
        background: Background,
        then: Callable[[Tensor], None] | None = None,
        is_nonfinite: bool | None = None,
    ) -> PendingBucket:
        """Send a share of a segment, and make room for what comes.

        Args:
            index: Of the segment.
            step: Optimizer steps that this, and every other, rank has taken.
            weights: The nodes' push-sum weights of this segment.
            background: Where the node gets what arrives, after what was started before.
            then: Does something to what arrived before the node shares it; on a rank that does not carry the segment,
                to nothing.
            is_nonfinite: Whether this node's values are non-finite; None: they are not checked. Otherwise a peer that
                sends non-finite values counts as one that holds the same as this node, and a node that is non-finite
                itself goes on with the mean of what finite peers send.

        Returns:
            A pending bucket that receives the change to add to the segment's x; to add to zero, if this node is
            non-finite.
        """
        bucket, inter, node = self.segments[index], self._topology.inter, self._topology.node
        if not self.carries(index) or inter is None or self._topology.num_nodes == 1:
            return self._receive(index, background, then)
        round_ = self.round(step, index)
        share = bucket.pack(bucket.empty(spares=self._spares), weight=self._part(round_, weights, node))
        if is_nonfinite and share.numel():
            share[0] = math.nan
        payload = self._codec.encode(share)
        received = [
            self._spares.take(payload.numel(), payload.dtype, payload.device) for _ in round_.receive_from[node]
        ]
        arrived = inter.exchange(
            [(payload, peer) for peer in round_.send_to[node]],
            list(zip(received, round_.receive_from[node], strict=True)),
        )
        flat = received[0] if payload is share else bucket.empty(spares=self._spares)
        for tensor in (share, payload, flat, *received):
            background.uses(tensor)
        mixing = _Mixing(self, index, step, weights, round_, share, payload, received)

        def collect() -> None:
            arrived.wait()
            change = mixing.of_the_healthy(is_nonfinite) if is_nonfinite else mixing.change(flat, is_nonfinite)
            if change is not flat:
                flat.copy_(change)
            for used_up in (share, *(buffer for buffer in received if buffer is not flat)):
                self._spares.give_back(used_up)
            if then is not None:
                then(flat)
            self.share(flat, index).wait()

        return PendingBucket(index, flat, flat, background.submit(collect))

    def _receive(self, index: int, background: Background, then: Callable[[Tensor], None] | None) -> PendingBucket:
        """Return the pending bucket of a rank that does not send the segment itself."""
        is_alone = self._topology.num_nodes == 1
        flat = self.segments[index].empty(spares=self._spares)
        if is_alone:
            flat.fill_(-0.0)  # as of equal peers
        background.uses(flat)

        def receive() -> None:
            if then is not None:
                then(flat if is_alone and self.carries(index) else flat[:0])
            self.share(flat, index).wait()

        return PendingBucket(index, flat, flat, background.submit(receive))

    def give_back(self, move: PendingBucket) -> None:
        """Release the memory of a merged bucket."""
        self._spares.give_back(move.flat)

    def _holders(self, index: int) -> Holders:
        return self._beside.holders[self.segments[index].held_by]

    def _part(self, round_: Round, weights: Sequence[float], node: int) -> float:
        """What of its parameters a node sends to each of its peers."""
        return weights[node] * round_.share(node) if self._push_sum else 1.0


@dataclass
class _Mixing:
    """What a rank makes of a segment's share that it has sent, and of those that have arrived from its peers.

    Attributes:
        share: What it has sent, before it was encoded.
        payload: The same, encoded; the same tensor, if it travels as it is.
        received: From every peer, in the order of the round.
    """

    peers: Peers
    index: int
    step: int
    weights: Sequence[float]
    round: Round
    share: Tensor
    payload: Tensor
    received: Sequence[Tensor]

    @property
    def node(self) -> int:
        """This rank's."""
        return self.peers._topology.node

    @property
    def travels_as_it_is(self) -> bool:
        """Whether nothing was encoded."""
        return self.payload is self.share

    def change(self, out: Tensor, is_nonfinite: bool | None) -> Tensor:
        """What is to be added to the segment's x, written to ``out``.

        Args:
            out: May be the first of :attr:`received`.
            is_nonfinite: Whether this node's values are non-finite; None: not checked.
        """
        own = self._own(is_nonfinite)
        change = self._theirs(0, out, own, is_nonfinite)
        self._compare(own, change)
        _subtract(change, own)  # pairwise, so that equal replicas change by exactly nothing
        for place in range(1, len(self.received)):
            change.add_(_subtract(self._theirs(place, torch.empty_like(own), own, is_nonfinite), own))
        more_came = len(self.received) - len(self.round.send_to[self.node])
        if not self.peers._push_sum:
            change.div_(len(self.received) + 1)
        elif more_came:
            change.add_(own, alpha=more_came)
        return change

    def of_the_healthy(self, is_nonfinite: bool | None) -> Tensor:
        """Return the mean of finite peers' values, which repairs a non-finite node; NaN if there are none."""
        own = self._own(is_nonfinite)
        total, healthy = torch.zeros_like(own), torch.zeros((), device=own.device)
        for place, peer in enumerate(self.round.receive_from[self.node]):
            values = self._decoded(self.received[place], torch.empty_like(own))
            is_healthy = self._is_finite(values)
            total += torch.where(is_healthy, values / self._part_of(peer), 0.0)
            healthy += is_healthy
        after = self.peers.weights_after(self.step, self.index, self.weights)[self.node]
        return total.mul_(after if self.peers._push_sum else 1.0).div_(healthy)

    def _own(self, is_nonfinite: bool | None) -> Tensor:
        """What this node has sent, as it has arrived."""
        if is_nonfinite is not False or self.travels_as_it_is:
            return self._decoded(self.payload, self.share)
        # values too large for the wire are excluded
        sent = self._decoded(self.payload, torch.empty_like(self.share))
        return _choose(self._is_finite(sent), sent, lambda: self.share)

    def _theirs(self, place: int, out: Tensor, own: Tensor, is_nonfinite: bool | None) -> Tensor:
        """Return a peer's values, or this node's own values if the peer's are non-finite."""
        values = self._decoded(self.received[place], out)
        can_look = self.travels_as_it_is and not streams.has(values.device)
        if is_nonfinite is None or (can_look and not _is_flagged(values)):
            return values
        peer = self.round.receive_from[self.node][place]
        as_own = self._part_of(peer) / self._part_of(self.node)
        return _choose(self._is_finite(values), values, lambda: own * as_own)

    def _part_of(self, node: int) -> float:
        return self.peers._part(self.round, self.weights, node)

    def _decoded(self, payload: Tensor, out: Tensor) -> Tensor:
        return payload if self.travels_as_it_is else self.peers._codec.decode(payload, out)

    def _is_finite(self, values: Tensor) -> Tensor:
        if self.travels_as_it_is:  # a sender flags its first element; a shard may be empty
            return ~values[:1].isnan().any()
        return is_unfit([values]).to(values.device) == 0

    def _compare(self, own: Tensor, theirs: Tensor) -> None:
        """Note how far apart this node's and a peer's parameters are."""
        peer = self.round.receive_from[self.node][0]
        samples = sample(theirs).div_(self._part_of(peer)), sample(own).div_(self._part_of(self.node))
        self.peers.disagreement.compare(self.index, *samples, own.numel())


def _is_flagged(flat: Tensor) -> bool:
    """Whether a node that knew its values were not finite sent them, as they are; waits for them, on CUDA too."""
    return bool(flat[:1].isnan().any())


def _choose(condition: Tensor, value: Tensor, otherwise: Callable[[], Tensor]) -> Tensor:
    """Return ``value`` if a scalar is true, otherwise the other one; on CUDA without waiting for the scalar."""
    if streams.has(condition.device):
        return torch.where(condition, value, otherwise())
    return value if bool(condition) else otherwise()


def _subtract(theirs: Tensor, own: Tensor) -> Tensor:
    """``theirs - own``, in place; of what is equal minus zero, for that changes no bit of what it is added to."""
    for value, less in in_cache_sized_parts(theirs, own):
        torch.sub(less, value, out=value).neg_()
    return theirs


class NeighborExchange(Reducer):
    """The mean of this node's and its peers' parts, for a graph in which everyone sends as much as it receives.

    All nodes count alike, whatever their weights. Where the ranks of a node train alone, the node's mean takes the
    place of what they hold when it leaves.

    Args:
        buckets: What is carried, each as a whole.
        graph: Who exchanges with whom.
        topology: The nodes.
        through: A duplicate of it.
        wire: The encoding of parameters, which are sent whole because peers have no common reference.
        turn: Says which turn of the graph is the next one, from 1.
        average_in_node: Writes the mean of the node's ranks to what differs among them.
        update_reference: As for :class:`~lightning_hiercomm.schemes.reducers.all_reduce.ShardedAllReduce`.
        look: Says whether what leaves is not finite; see :meth:`~lightning_hiercomm.schemes.guard.NonFiniteGuard.look`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        graph: Graph,
        topology: Topology,
        through: Topology,
        background: Background,
        wire: Wire,
        turn: Callable[[], int],
        average_in_node: Callable[[Sequence[Bucket]], object],
        update_reference: UpdateReference | None = None,
        look: Callable[[Sequence[Bucket]], bool | None] = lambda _: None,
    ) -> None:
        self.buckets = buckets
        self.topology = topology
        self.through = through
        self.wire = wire
        self._peers = Peers(buckets, graph, topology, through, wire)
        self._background = background
        self._update_reference = update_reference
        self._average_in_node = average_in_node
        self._look = look
        self._next_turn = turn
        self._sick: bool | None = None
        self.disagreement = self._peers.disagreement
        self._turn = 0
        self.set_references()

    def set_references(self) -> None:
        if self._update_reference is not None:
            self.references = [self.carried(bucket.pack(), index).clone() for index, bucket in enumerate(self.buckets)]

    def begin(
        self, step: int, turn: int, only: Sequence[int], background: Background, outbound: Background | None = None
    ) -> Verdict:
        self._turn = self._next_turn()
        leaving = [self.buckets[index] for index in only]
        # ranks that train alone average inside the node first, because the graph connects nodes
        self._average_in_node([bucket for bucket in leaving if not bucket.equal_in_node])
        self._sick = self._look(leaving)
        # ranks that come after different numbers of steps wait for others than those that come
        return Verdict(is_nonfinite=bool(self._sick))

    def start(
        self, index: int, background: Background, keep_sent: bool = False, outbound: Background | None = None
    ) -> PendingBucket:
        self._check(self._peers.round(self._turn, index))
        bucket = self.buckets[index]
        is_needed = self._peers.carries(index) or keep_sent
        own = bucket.pack() if is_needed else torch.empty(0, dtype=bucket.dtype, device=bucket.device)
        for tensor in (own, *self.references[index : index + 1]):
            background.uses(tensor)
        is_nonfinite = bool(self._sick)  # by now; what leaves next may be healthy, before this has arrived
        if is_nonfinite:
            own.zero_()

        def update_reference(change: Tensor) -> None:
            mean = change.add_(self.carried(own, index))
            # a non-finite node without a finite peer keeps its reference values, to continue from later
            if self._update_reference is not None and not (is_nonfinite and _is_flagged(mean)):
                reference = self.references[index]
                mean.copy_(self._update_reference(index, reference, mean.sub(reference)))

        equal_weights = [1.0] * self.topology.num_nodes
        move = self._peers.start(index, self._turn, equal_weights, background, update_reference, self._sick)
        move.nodes = 1 + len(self._peers.round(self._turn, index).receive_from[self.topology.node])
        return replace(move, sent=own) if keep_sent else move

    def __call__(
        self,
        step: int = 0,
        turn: int = 0,
        only: Sequence[int] | None = None,
        take: Callable[[Bucket, Tensor], None] = Bucket.unpack,
    ) -> Verdict:
        indexes = range(len(self.buckets)) if only is None else only
        verdict = self.begin(step, turn, indexes, self._background)
        moves = [self.start(index, self._background) for index in indexes]
        for move in moves:
            move.arrived.wait()
            self._background.hands_out(move.flat)
            (Bucket.unpack if verdict.is_nonfinite else take)(self.buckets[move.index], move.flat)
        return verdict

    def parts_of(self, index: int) -> int:
        return 1

    def carried(self, flat: Tensor, index: int) -> Tensor:
        return flat if self._peers.carries(index) else flat[:0]

    def share(self, flat: Tensor, index: int) -> Handle:
        return self._peers.share(flat, index)

    def _check(self, round_: Round) -> None:
        if any(len(to) != len(of) for to, of in zip(round_.send_to, round_.receive_from, strict=True)):
            raise ValueError(
                f"{self._peers.graph!r} lets nodes receive more than they send, so what arrives has no mean: use a"
                " graph in which everyone sends as much as it receives, or Gossip, which keeps push-sum weights"
            )
