"""What each scheme makes a node do, and hold: its schedule, in moves and passes instead of tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch

from lightning_hiercomm.comm.codec import AsIs, Codec, codec_named
from lightning_hiercomm.nodes.bucket import BUCKET_BYTES, BUCKETS_IN_FLIGHT, CACHE_SIZED
from lightning_hiercomm.planning.cluster import Cluster, Workload
from lightning_hiercomm.planning.predict.cycles import fragments_of, sent_after
from lightning_hiercomm.planning.predict.node import (
    Average,
    BucketGroup,
    Node,
    average_in_node,
    buckets,
    untouched,
)
from lightning_hiercomm.planning.predict.timeline import Operation
from lightning_hiercomm.schemes import (
    AllReduce,
    Full,
    Gossip,
    Graph,
    OuterOptimizer,
    ParameterSync,
    PeriodicAveraging,
    RandomPermutation,
    Replace,
    Ring,
    Scheme,
    StepsDelay,
)
from lightning_hiercomm.schemes.optimizer_state import is_elementwise
from lightning_hiercomm.schemes.steps_delay.buckets import MIN_BUCKET_BYTES, MIN_BUCKETS
from lightning_hiercomm.schemes.steps_delay.rules import DelayCompensation, glu

# How often a rank reads and writes its part of the parameters, beside what moves cost; rounded.
_MIXING_MERGE = 2.0  # several terms, in parts that stay in the cache
_OUTER_STEP = 3.0  # difference, step, copy; and one more for each number that it keeps
_LOCAL_RULE = 2.0  # two terms of GLU, likewise
_SERVER_STEP = 3.0
_LOOK = 0.5  # at what leaves, whether it is finite: it is only read
_OF_TWO = 1.5  # a sum or difference with what is there already: two are read

_STEPS_COUNTED = 24  # whole rounds of most graphs that go round


@dataclass(frozen=True)
class Payload:
    """What travels between nodes in place of a tensor.

    Attributes:
        codec: Makes it.
        dtype: Of the tensor.
    """

    codec: Codec
    dtype: torch.dtype

    @classmethod
    def named(cls, wire_dtype: str | None, workload: Workload) -> Payload:
        """What the argument ``wire_dtype`` makes of a workload's parameters."""
        return cls(codec_named(wire_dtype), getattr(torch, workload.dtype))

    @property
    def narrows(self) -> bool:
        """Whether it is smaller than the tensor."""
        return self.codec.narrows(self.dtype)

    @property
    def ratio(self) -> float:
        """Its size divided by the tensor's."""
        numel = 2**20
        return self.codec.payload_bytes(numel, self.dtype) / (numel * self.dtype.itemsize)

    @property
    def passes(self) -> float:
        """Over the tensor, to encode and to decode it."""
        if not self.narrows:
            return 0.0
        return 2.0 if self.codec.adds else 10.0

    @property
    def is_exact(self) -> bool:
        """Whether tensors travel as they are."""
        return isinstance(self.codec, AsIs)


# ---- what happens in each step ---------------------------------------------------------------------------------------


@singledispatch
def follow(scheme: Scheme | None, node: Node, payload: Payload, steps: int) -> None:
    """Let a node train for some steps with a scheme; None is Lightning's ``DDPStrategy``.

    Args:
        scheme: With its arguments. Phases that end (warm-up, cool-down) are left out.
        node: Of the cluster. What it does is written down.
        payload: What travels between nodes.
        steps: How many.

    Raises:
        TypeError: For a scheme of which nothing is known here.
    """
    if scheme is not None:
        raise TypeError(f"{type(scheme).__name__} is not a scheme that can be planned with")
    for _ in range(steps):
        node.train(average=_ddp)


def _ddp(node: Node, piece: BucketGroup, ready: Operation) -> Operation:
    return node.all_reduce_flat(piece, ready)


@follow.register
def _(scheme: AllReduce, node: Node, payload: Payload, steps: int) -> None:
    def sum_over_world(node: Node, bucket: BucketGroup, ready: Operation) -> Operation:
        last = ready
        for piece in buckets(bucket.bytes):
            part = piece.bytes / node.num_shards
            summed = node.intra("reduce_scatter", piece, [ready])
            encoded = node.passes(part, payload.passes, "outbound", [summed])
            summed = _sum(node, piece, payload, [encoded])
            last = node.intra("all_gather", piece, [summed], "inbound")
        return last

    for _ in range(steps):
        node.train(average=sum_over_world)


@follow.register
def _(scheme: ParameterSync, node: Node, payload: Payload, steps: int) -> None:
    parts = fragments_of(scheme)
    if scheme.is_exact_overlapped:
        payload = Payload(AsIs(), payload.dtype)
    exchange = _Exchange(scheme, node, payload, parts)
    in_node = scheme.node_sync_every if isinstance(scheme, PeriodicAveraging) else None
    arrives: dict[int, Sequence[int]] = {}
    quiet = 0
    for step in range(1, steps + 1):
        leaving = sent_after(scheme, step)
        arrived = arrives.pop(step, ())
        quiet += 1
        averages_in_node = in_node is not None and step % in_node == 0
        if not (leaving or arrived or averages_in_node) and step < steps:
            continue
        node.train(quiet, exchange.gradients)
        quiet = 0
        if leaving and not scheme.staleness:
            exchange.agree_now(leaving)
        elif averages_in_node:
            exchange.agree_in_node()
        else:
            exchange.turn(arrived, leaving)
        if leaving and scheme.staleness:
            arrives[step + scheme.staleness] = leaving
        node.mark()


class _Exchange:
    """What the nodes do when parts leave and arrive."""

    def __init__(self, scheme: ParameterSync, node: Node, payload: Payload, parts: int) -> None:
        self._scheme = scheme
        self._node = node
        self._payload = payload
        self._pieces = buckets(node.workload.model_bytes / parts)
        self._landing = _OUTER_STEP + outer_copies(scheme) - 1 if isinstance(scheme.merging, OuterOptimizer) else 0.0
        self._in_flight: dict[int, list[Operation]] = {}
        self.gradients: Average = average_in_node if scheme.gradients == "node" else untouched

    def agree_now(self, parts: Sequence[int]) -> None:
        """Send, and wait for it: a few buckets are on their way at any time."""
        self._begin(parts)
        node, in_flight = self._node, deque[tuple[BucketGroup, Operation]]()

        def finish() -> None:
            piece, arrived = in_flight.popleft()
            node.wait(arrived)
            self._merge(piece)

        for _ in parts:
            for piece in self._pieces:
                in_flight.append((piece, self._send(piece, waiting=True)))
                if len(in_flight) == BUCKETS_IN_FLIGHT:
                    finish()
        while in_flight:
            finish()

    def agree_in_node(self) -> None:
        """Average over the node, and wait for it."""
        node = self._node
        for piece in self._pieces:
            packed = node.passes(piece.bytes)
            node.wait(node.intra("all_reduce", piece, [packed]))
            node.passes(piece.bytes)

    def _begin(self, leaving: Sequence[int]) -> None:
        """Where ranks train alone, let them agree first with their node: it is nodes that a graph knows."""
        if self._scheme.gradients == "none" and isinstance(self._scheme.reducer, Graph):
            for _ in leaving:
                self.agree_in_node()

    def turn(self, arrived: Sequence[int], leaving: Sequence[int]) -> None:
        """Merge bucket by bucket; the next leave when the last are still on the link."""
        self._begin(leaving)
        node = self._node
        held = [task for part in arrived for task in self._in_flight.pop(part)]
        waiting = deque(part for part in leaving for _ in self._pieces)
        for index, task in enumerate(held):
            node.wait(task)
            self._merge(self._pieces[index % len(self._pieces)])
            if index + 2 >= len(held):
                self._send_all(waiting)
        self._send_all(waiting)

    def _send_all(self, waiting: deque[int]) -> None:
        while waiting:
            sent = self._in_flight.setdefault(waiting.popleft(), [])
            sent.append(self._send(self._pieces[len(sent)], waiting=False))

    def _send(self, piece: BucketGroup, waiting: bool) -> Operation:
        """A bucket's way to the other nodes and back into this one; what it ends with may be merged."""
        node, payload, reducer = self._node, self._payload, self._scheme.reducer
        resource = "node" if waiting else "inbound"
        packed = node.passes(piece.bytes, _LOOK + (2 if self._scheme.merging.needs_sent else 1))
        if isinstance(reducer, Graph):
            encoded = node.passes(piece.bytes / node.num_shards, 1 + payload.passes, after=[packed])
            peers = _out_degree(reducer, node.cluster.nodes)
            taken = node.inter("exchange", piece.scaled(payload.ratio * peers), [encoded])
            landed = node.passes(piece.bytes / node.num_shards, 1 + self._landing, resource, [taken])
            return node.intra("broadcast", piece, [landed], resource)
        senders = 1 if reducer == "leader" else node.num_shards
        if self._scheme.gradients == "none":  # ranks of a node differ: each gets the sum of what it carries
            packed = node.intra("reduce_scatter" if senders == node.num_shards else "all_reduce", piece, [packed])
        part = piece.bytes / senders
        encoded = node.passes(part, 1 + (0 if payload.is_exact else 1) + payload.passes, after=[packed])
        summed = _sum(node, piece, payload, [encoded], senders)
        landed = node.passes(part, self._landing + (0 if payload.is_exact else 2), resource, [summed])
        return node.intra("broadcast" if senders < node.num_shards else "all_gather", piece, [landed], resource)

    def _merge(self, piece: BucketGroup) -> None:
        is_plain = isinstance(self._scheme.merging, Replace | OuterOptimizer)
        self._node.passes(piece.bytes, 1 if is_plain else _MIXING_MERGE)


def _sum(
    node: Node, piece: BucketGroup, payload: Payload, after: Sequence[Operation], senders: int | None = None
) -> Operation:
    """Add the sum over the nodes of each inter-node group's shard."""
    smaller = piece.scaled(payload.ratio)
    if payload.codec.adds or not payload.narrows:
        return node.inter("all_reduce", smaller, after, senders)
    swapped = node.inter("reduce_scatter", smaller, after, senders)
    return node.inter("all_gather", smaller, [swapped], senders)


def _out_degree(graph: Graph, nodes: int) -> int:
    """To how many others a node sends, on average."""
    if isinstance(graph, Full):
        return nodes - 1
    if isinstance(graph, Ring):
        return min(2, nodes - 1)
    few = min(nodes, 64)
    return round(sum(map(len, graph.send_to(few, 0, 0))) / few)


def _share_in_node(graph: Graph, cluster: Cluster) -> float:
    """Of what ranks send that gossip by themselves, the part that stays in their node, on average."""
    ranks, on_node = cluster.ranks, cluster.ranks_per_node
    if isinstance(graph, Full | RandomPermutation):  # all others are alike
        return (on_node - 1) / (ranks - 1)
    stays = [
        rank // on_node == peer // on_node
        for step in range(_STEPS_COUNTED)
        for rank, peers in enumerate(graph.send_to(ranks, step, 0))
        for peer in peers
    ]
    return sum(stays) / len(stays)


@follow.register
def _(scheme: StepsDelay, node: Node, payload: Payload, steps: int) -> None:
    sections = _sections(scheme, node.workload.model_bytes)
    stepped: list[Operation | None] = [None] * len(sections)
    pulled: list[Operation] = []
    for step in range(1, steps + 1):
        node.train()
        node.passes(node.workload.model_bytes, _LOOK)
        arrivals = [
            node.intra("all_gather", section.scaled(payload.ratio), [pull])
            for section, pull in zip(sections, pulled, strict=False)
        ]
        pulls = step % scheme.delay == 0
        for index, section in enumerate(sections):
            part = section.bytes / node.num_shards
            if arrivals:
                node.wait(arrivals[index])
            before = stepped[index]
            if before is not None:
                node.wait(before)
            packed = node.passes(part, 1 + payload.passes / 2)
            pushed = node.inter("reduce_scatter", section.scaled(payload.ratio), [packed])
            stepped[index] = node.passes(part / node.cluster.nodes, _SERVER_STEP, "outbound", [pushed])
            node.passes(section.bytes, _LOCAL_RULE * (2 if arrivals else 1))  # on copies of what arrived
        pulled = []
        if pulls:
            for section, task in zip(sections, stepped, strict=True):
                assert task is not None
                pulled.append(node.inter("all_gather", section.scaled(payload.ratio), [task]))
        node.mark()


@follow.register
def _(scheme: Gossip, node: Node, payload: Payload, steps: int) -> None:
    segments = scheme.segments if isinstance(scheme.segments, int) else len(scheme.segments) + 1
    model_bytes = node.workload.model_bytes
    size = scheme.segment_bytes or model_bytes / segments
    copies = 1 if scheme.hierarchical else node.num_shards  # of the model that leave a node: one per node, or per rank
    members = node.cluster.nodes if scheme.hierarchical else node.cluster.ranks
    peers = _out_degree(scheme.graph, members)
    inside = 0.0 if scheme.hierarchical else peers * _share_in_node(scheme.graph, node.cluster)
    gradients = average_in_node if scheme.hierarchical else untouched
    pieces = buckets(model_bytes, size)
    in_flight: list[tuple[BucketGroup, Operation]] = []

    def merge() -> None:
        for piece, task in in_flight:
            node.wait(task)
            node.passes(piece.bytes, _OF_TWO)
        in_flight.clear()

    for _ in range(steps):
        node.train_once(gradients, before_update=merge)
        node.passes(model_bytes, _LOOK)
        for piece in pieces:
            part = piece.bytes * copies / node.num_shards
            packed = node.passes(part, 1 + payload.passes / 2)
            sent = [node.inter("exchange", piece.scaled(copies * payload.ratio * (peers - inside)), [packed], copies)]
            if inside:
                sent.append(node.intra("exchange", piece.scaled(payload.ratio * inside), [packed]))
            changed = node.passes(part, _OF_TWO + payload.passes / 2, "inbound", sent)
            shared = node.intra("broadcast", piece, [changed], "inbound") if scheme.hierarchical else changed
            in_flight.append((piece, shared))
        if not scheme.overlap:
            merge()
        node.mark()


# ---- what a rank holds -----------------------------------------------------------------------------------------------


@singledispatch
def own_bytes(scheme: Scheme | None, cluster: Cluster, workload: Workload, payload: Payload) -> float:
    """Bytes that a scheme holds on every rank beside the model, its gradients and the optimizer's state.

    Args:
        scheme: With its arguments; None is Lightning's ``DDPStrategy``, which copies gradients into buckets.
        cluster: Where it runs.
        workload: What is trained.
        payload: What travels between nodes.
    """
    return workload.model_bytes


@own_bytes.register
def _(scheme: AllReduce, cluster: Cluster, workload: Workload, payload: Payload) -> float:
    # each rank's part of every bucket that is on its way, which is all of them where the link is slow
    held = 1.0
    if payload.narrows:
        held += payload.ratio if payload.codec.adds else 2 * payload.ratio + 1  # with what encoding has kept back
    return workload.model_bytes / cluster.ranks_per_node * held


@own_bytes.register
def _(scheme: ParameterSync, cluster: Cluster, workload: Workload, payload: Payload) -> float:
    model = workload.model_bytes
    share = 1.0 if scheme.reducer == "leader" else 1 / cluster.ranks_per_node
    kept = outer_copies(scheme)  # of this rank's part
    if not isinstance(scheme.reducer, Graph):  # peers do not know each other's last agreed values
        if not kept and payload.narrows:
            kept += 1  # what was agreed on last
        if payload.narrows and not payload.codec.adds:
            kept += 1  # what encoding has kept back
    encoded = payload.ratio * share * (1 if payload.codec.adds else 2) if payload.narrows else 0.0
    return kept * share * model + _in_flight_bytes(scheme, model) * (1 + scheme.merging.needs_sent + encoded)


def outer_copies(scheme: Scheme | None) -> int:
    """Copies of the model that an outer optimizer keeps: what was agreed on last, and its state.

    Args:
        scheme: With its arguments; one without an outer optimizer keeps none.
    """
    if not isinstance(scheme, ParameterSync) or not isinstance(scheme.merging, OuterOptimizer):
        return 0
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    optimizer = scheme.merging.make_optimizer([parameter])
    optimizer.step()
    state = optimizer.state[parameter]
    return 1 + sum(is_elementwise(value, name, parameter) for name, value in state.items())


def _in_flight_bytes(scheme: ParameterSync, model: float) -> float:
    """The most that is packed at any time."""
    part = model / fragments_of(scheme)
    return part if scheme.staleness else min(part, BUCKETS_IN_FLIGHT * BUCKET_BYTES)


@own_bytes.register
def _(scheme: StepsDelay, cluster: Cluster, workload: Workload, payload: Payload) -> float:
    model = workload.model_bytes
    travelling = model / cluster.ranks_per_node * payload.ratio
    kept = 1 + payload.ratio + (0 if payload.is_exact else 1)  # weights, mean gradients, what was pulled last
    sections = _sections(scheme, model)
    size = model / sum(section.messages for section in sections)
    ahead = min(2, len(sections))  # arrive while one is taken over
    arriving = (ahead * payload.ratio + (0 if payload.is_exact else 1)) * size
    at_once = min(size, CACHE_SIZED) if workload.threads else size  # a processor's rule works through its cache
    working = arriving + at_once
    remembered = model * _remembered_by(scheme)
    return model + remembered + travelling + kept * model / cluster.ranks + working


def _remembered_by(scheme: StepsDelay) -> int:
    """Numbers per parameter that the local rule keeps on every rank; of a rule of one's own, nobody knows."""
    return int(isinstance(scheme.rule, DelayCompensation) or (scheme.rule is glu and scheme.hold))


def _sections(scheme: StepsDelay, model_bytes: float) -> list[BucketGroup]:
    fine = max(MIN_BUCKET_BYTES, model_bytes / MIN_BUCKETS)
    return buckets(model_bytes, min(BUCKET_BYTES, fine))


@own_bytes.register
def _(scheme: Gossip, cluster: Cluster, workload: Workload, payload: Payload) -> float:
    model = workload.model_bytes
    carried = model / cluster.ranks_per_node if scheme.hierarchical else model
    return model + carried * (1 + (2 * payload.ratio if payload.narrows else 0))


def state_bytes(scheme: Scheme | None, cluster: Cluster, workload: Workload) -> float:
    """Bytes of the optimizer's state on every rank; ``StepsDelay`` shares it out."""
    whole = workload.model_bytes * workload.state_per_parameter
    return whole / cluster.ranks if isinstance(scheme, StepsDelay) else whole
