"""Simulate the schedule of each scheme on a node."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch

from benchmarks.predict.cycles import fragments_of, sent_after
from benchmarks.predict.node import (
    BucketGroup,
    Node,
    average_in_node,
    bucket_groups,
)
from benchmarks.predict.timeline import Operation
from lightning_hiercomm.comm.codec import AsIs, Codec
from lightning_hiercomm.comm.wire import codec_named
from lightning_hiercomm.nodes.bucket import BUCKET_BYTES, BUCKETS_IN_FLIGHT
from lightning_hiercomm.schemes import (
    AllReduce,
    Full,
    Gossip,
    Graph,
    OuterOptimizer,
    ParameterSync,
    Replace,
    Ring,
    Scheme,
    StepsDelay,
)
from lightning_hiercomm.schemes.optimizer_state import is_elementwise
from lightning_hiercomm.schemes.steps_delay.server import MIN_BUCKET_BYTES, MIN_BUCKETS

# passes over the parameters (a read and a write of each) besides the collectives; rounded
_MIXING_MERGE = 2.0  # several terms, on chunks that fit the cache
_OUTER_STEP = 3.0  # difference, step, copy; and one more for each state of the optimizer
_LOCAL_RULE = 2.0  # two terms of GLU, on chunks that fit the cache
_SERVER_STEP = 3.0
_CHECK = 0.5  # for non-finite values: read only
_OF_TWO = 1.5  # adds to a tensor: two reads


@dataclass(frozen=True)
class Payload:
    """The encoded form of a float32 tensor between nodes."""

    codec: Codec

    @classmethod
    def named(cls, wire_dtype: str | None) -> Payload:
        """Return the payload for a ``wire_dtype``."""
        return cls(codec_named(wire_dtype))

    @property
    def narrows(self) -> bool:
        """Whether the payload is smaller than the tensor."""
        return self.codec.narrows(torch.float32)

    @property
    def ratio(self) -> float:
        """Size of the payload divided by the tensor's."""
        numel = 2**20
        return self.codec.payload_bytes(numel, torch.float32) / (4 * numel)

    @property
    def passes(self) -> float:
        """Passes over the tensor to encode and to decode it."""
        if not self.narrows:
            return 0.0
        return 2.0 if self.codec.adds else 10.0

    @property
    def is_exact(self) -> bool:
        """Whether tensors are sent unchanged."""
        return isinstance(self.codec, AsIs)


@singledispatch
def follow(scheme: Scheme | None, node: Node, payload: Payload, steps: int) -> None:
    """Add the operations of some training steps to a node.

    Args:
        scheme: The scheme; None is Lightning's ``DDPStrategy``. Warm-up and cool-down are left out.
        node: The node.
        payload: The payload between nodes.
        steps: Number of steps.

    Raises:
        TypeError: If the scheme is not one of this package.
    """
    if scheme is not None:
        raise TypeError(f"{type(scheme).__name__} has no cost model")
    for _ in range(steps):
        node.train(average=_ddp)


def _ddp(node: Node, buckets: BucketGroup, ready: Operation) -> Operation:
    return node.all_reduce_flat(buckets, ready)


@follow.register
def _(scheme: AllReduce, node: Node, payload: Payload, steps: int) -> None:
    def sum_over_world(node: Node, gradients: BucketGroup, ready: Operation) -> Operation:
        last = ready
        for group in bucket_groups(gradients.bytes):
            shard = group.bytes / node.num_shards
            summed = node.intra("reduce_scatter", group, [ready])
            encoded = node.passes(shard, payload.passes, "outbound", [summed])
            summed = _sum(node, group, payload, [encoded])
            last = node.intra("all_gather", group, [summed], "inbound")
        return last

    for _ in range(steps):
        node.train(average=sum_over_world)


@follow.register
def _(scheme: ParameterSync, node: Node, payload: Payload, steps: int) -> None:
    if scheme.is_exact_overlapped:
        payload = Payload(AsIs())
    exchange = _Exchange(scheme, node, payload)
    arrives: dict[int, Sequence[int]] = {}
    quiet = 0
    for step in range(1, steps + 1):
        leaving = sent_after(scheme, step)
        arrived = arrives.pop(step, ())
        quiet += 1
        if not (leaving or arrived) and step < steps:
            continue
        node.train(quiet)
        quiet = 0
        if leaving and not scheme.staleness:
            exchange.synchronize(leaving)
        else:
            exchange.overlap(arrived, leaving)
        if leaving and scheme.staleness:
            arrives[step + scheme.staleness] = leaving
        node.mark()


class _Exchange:
    def __init__(self, scheme: ParameterSync, node: Node, payload: Payload) -> None:
        self._scheme = scheme
        self._node = node
        self._payload = payload
        self._groups = bucket_groups(node.workload.model_bytes / fragments_of(scheme))
        self._outer_step = (
            _OUTER_STEP + _outer_copies(scheme) - 1 if isinstance(scheme.merging, OuterOptimizer) else 0.0
        )
        self._in_flight: dict[int, list[Operation]] = {}

    def synchronize(self, fragments: Sequence[int]) -> None:
        """Exchange fragments and wait, with a few buckets in flight."""
        node, in_flight = self._node, deque[tuple[BucketGroup, Operation]]()

        def finish() -> None:
            group, arrived = in_flight.popleft()
            node.wait(arrived)
            self._merge(group)

        for _ in fragments:
            for group in self._groups:
                in_flight.append((group, self._send(group, waiting=True)))
                if len(in_flight) == BUCKETS_IN_FLIGHT:
                    finish()
        while in_flight:
            finish()

    def overlap(self, arrived: Sequence[int], leaving: Sequence[int]) -> None:
        """Merge arrived fragments bucket by bucket, and send the next."""
        node = self._node
        held = [task for fragment in arrived for task in self._in_flight.pop(fragment)]
        waiting = deque(fragment for fragment in leaving for _ in self._groups)
        for index, task in enumerate(held):
            node.wait(task)
            self._merge(self._groups[index % len(self._groups)])
        self._send_all(waiting)

    def _send_all(self, waiting: deque[int]) -> None:
        while waiting:
            sent = self._in_flight.setdefault(waiting.popleft(), [])
            sent.append(self._send(self._groups[len(sent)], waiting=False))

    def _send(self, group: BucketGroup, waiting: bool) -> Operation:
        """Exchange buckets with other nodes; return the operation after which they can be merged."""
        node, payload, reducer = self._node, self._payload, self._scheme.reducer
        resource = "node" if waiting else "inbound"
        packed = node.passes(group.bytes, _CHECK + (2 if self._scheme.merging.needs_sent else 1))
        if isinstance(reducer, Graph):
            encoded = node.passes(group.bytes / node.num_shards, 1 + payload.passes, after=[packed])
            peers = _out_degree(reducer, node.cluster.nodes)
            received = node.inter("exchange", group.scaled(payload.ratio * peers), [encoded])
            updated = node.passes(group.bytes / node.num_shards, 1 + self._outer_step, resource, [received])
            return node.intra("broadcast", group, [updated], resource)
        senders = 1 if reducer == "leader" else node.num_shards
        shard = group.bytes / senders
        encoded = node.passes(shard, 1 + (0 if payload.is_exact else 1) + payload.passes, after=[packed])
        summed = _sum(node, group, payload, [encoded], senders)
        updated = node.passes(shard, self._outer_step + (0 if payload.is_exact else 2), resource, [summed])
        return node.intra("broadcast" if senders < node.num_shards else "all_gather", group, [updated], resource)

    def _merge(self, group: BucketGroup) -> None:
        is_plain = isinstance(self._scheme.merging, Replace | OuterOptimizer)
        self._node.passes(group.bytes, 1 if is_plain else _MIXING_MERGE)


def _outer_copies(scheme: ParameterSync) -> int:
    """Return the copies of the model for an outer optimizer: the reference parameters and its state."""
    if not isinstance(scheme.merging, OuterOptimizer):
        return 0
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    optimizer = scheme.merging.make_optimizer([parameter])
    optimizer.step()
    state = optimizer.state[parameter]
    return 1 + sum(is_elementwise(value, name, parameter) for name, value in state.items())


def _sum(
    node: Node, group: BucketGroup, payload: Payload, after: Sequence[Operation], senders: int | None = None
) -> Operation:
    smaller = group.scaled(payload.ratio)
    if payload.codec.adds or not payload.narrows:
        return node.inter("all_reduce", smaller, after, senders)
    swapped = node.inter("reduce_scatter", smaller, after, senders)
    return node.inter("all_gather", smaller, [swapped], senders)


def _out_degree(graph: Graph, nodes: int) -> int:
    """Return the mean number of nodes that a node sends to."""
    if isinstance(graph, Full):
        return nodes - 1
    if isinstance(graph, Ring):
        return min(2, nodes - 1)
    few = min(nodes, 64)
    return round(sum(map(len, graph.send_to(few, 0, 0))) / few)


@follow.register
def _(scheme: StepsDelay, node: Node, payload: Payload, steps: int) -> None:
    groups = _push_groups(node.workload.model_bytes)
    stepped: list[Operation | None] = [None] * len(groups)
    pulled: list[Operation] = []
    for step in range(1, steps + 1):
        node.train()
        node.passes(node.workload.model_bytes, _CHECK)
        arrivals = [
            node.intra("all_gather", group.scaled(payload.ratio), [pull])
            for group, pull in zip(groups, pulled, strict=False)
        ]
        pulls = step % scheme.delay == 0
        for index, group in enumerate(groups):
            shard = group.bytes / node.num_shards
            if arrivals:
                node.wait(arrivals[index])
            before = stepped[index]
            if before is not None:
                node.wait(before)
            packed = node.passes(shard, 1 + payload.passes / 2)
            pushed = node.inter("reduce_scatter", group.scaled(payload.ratio), [packed])
            stepped[index] = node.passes(shard / node.cluster.nodes, _SERVER_STEP, "outbound", [pushed])
            node.passes(group.bytes, _LOCAL_RULE * (2 if arrivals else 1))  # also on the pulled copies
        pulled = []
        if pulls:
            for group, task in zip(groups, stepped, strict=True):
                assert task is not None
                pulled.append(node.inter("all_gather", group.scaled(payload.ratio), [task]))
        node.mark()


def _push_groups(model_bytes: float) -> list[BucketGroup]:
    fine = max(MIN_BUCKET_BYTES, model_bytes / MIN_BUCKETS)
    return bucket_groups(model_bytes, min(BUCKET_BYTES, fine))


@follow.register
def _(scheme: Gossip, node: Node, payload: Payload, steps: int) -> None:
    fragments = scheme.fragments if isinstance(scheme.fragments, int) else len(scheme.fragments) + 1
    model_bytes = node.workload.model_bytes
    peers = _out_degree(scheme.graph, node.cluster.nodes)
    groups = bucket_groups(model_bytes, model_bytes / fragments)
    in_flight: list[tuple[BucketGroup, Operation]] = []

    def merge() -> None:
        for group, task in in_flight:
            node.wait(task)
            node.passes(group.bytes, _OF_TWO)
        in_flight.clear()

    for _ in range(steps):
        node.train_once(average_in_node, before_update=merge)
        node.passes(model_bytes, _CHECK)
        for group in groups:
            shard = group.bytes / node.num_shards
            packed = node.passes(shard, 1 + payload.passes / 2)
            sent = node.inter("exchange", group.scaled(payload.ratio * peers), [packed], 1)
            changed = node.passes(shard, _OF_TWO + payload.passes / 2, "inbound", [sent])
            in_flight.append((group, node.intra("broadcast", group, [changed], "inbound")))
        if not scheme.overlap:
            merge()
        node.mark()
