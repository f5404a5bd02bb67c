"""Simulate one node of a cluster in virtual time; all nodes, and all ranks of a node, do the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.predict.cluster import Cluster, Collective, Cost, Workload
from benchmarks.predict.timeline import Operation, Timeline
from lightning_hiercomm.nodes.bucket import BUCKET_BYTES

_FIRST_DDP_BUCKET = 2**20
_DDP_BUCKET = 25 * 2**20
_MOST_GROUPS = 16  # more groups change predictions by less than measurements can show
_MOST_STEPS_IN_DETAIL = 4
_STEPS_ALIKE = 4


@dataclass(frozen=True)
class BucketGroup:
    """Some buckets that are sent one after another.

    Attributes:
        bytes: Size of all buckets.
        messages: Number of buckets.
    """

    bytes: float
    messages: int = 1

    def scaled(self, by: float) -> BucketGroup:
        """Return as many buckets of another size."""
        return BucketGroup(self.bytes * by, self.messages)


Average = Callable[["Node", BucketGroup, Operation], Operation]
"""Adds the averaging of gradient buckets to a node, after an operation; returns the last operation."""


def average_in_node(node: Node, buckets: BucketGroup, ready: Operation) -> Operation:
    """Average gradients over the ranks of the node."""
    if node.cluster.ranks_per_node == 1:
        return ready
    return node.intra("all_reduce", buckets, [ready])


class Node:
    """Collects the operations of a node, step by step, and then computes their times."""

    def __init__(self, cluster: Cluster, workload: Workload) -> None:
        self.cluster = cluster
        self.workload = workload
        self.inter_bytes = 0.0
        self.intra_bytes = 0.0
        self._cost_inside = functools.cache(cluster.intra.cost)  # every step needs the same costs
        self._cost_between = functools.cache(cluster.inter.cost)
        self._timeline = Timeline()
        self._steps = 0
        self._marks: list[_Mark] = []
        self._waits: list[tuple[Operation, float]] = []
        self._alike: dict[Average, tuple[Result, float]] = {}

    @property
    def num_shards(self) -> int:
        """Number of shards of inter-node traffic: one per rank."""
        return self.cluster.ranks_per_node

    # ---- the training thread -----------------------------------------------------------------------------------------

    def train(self, steps: int = 1, average: Average = average_in_node) -> None:
        """Add optimizer steps: forward, backward overlapped with the averaging of DDP's buckets, update."""
        if steps <= _MOST_STEPS_IN_DETAIL:
            for _ in range(steps):
                self.train_once(average)
            return
        for _ in range(2):
            self.train_once(average)
        self._train_at_once(steps - 3, average)
        self.train_once(average)

    def train_once(self, average: Average, before_update: Callable[[], object] | None = None) -> None:
        """Add one optimizer step."""
        workload = self.workload
        self._compute(workload.forward)
        ends = []
        for group in ddp_buckets(workload.model_bytes):
            ready = self._compute(workload.backward * group.bytes / workload.model_bytes)
            ends.append(average(self, group, ready))
        self.wait(*ends)
        if before_update is not None:
            before_update()
        self._compute(workload.update)
        self._steps += 1
        self.mark()

    def _train_at_once(self, steps: int, average: Average) -> None:
        """Add equal steps as one operation, which is fast to simulate."""
        if average not in self._alike:
            one = Node(self.cluster, self.workload)
            one.train(_STEPS_ALIKE, average)
            result = one.run(_STEPS_ALIKE // 2)
            self._alike[average] = result, one.intra_bytes / _STEPS_ALIKE
        result, intra_bytes = self._alike[average]
        task = self._timeline.add("training", steps * result.seconds)
        self._waits.append((task, steps * result.exposed_seconds))
        self._steps += steps
        self.inter_bytes += steps * result.inter_bytes
        self.intra_bytes += steps * intra_bytes

    def passes(
        self, size: float, times: float = 1.0, resource: str = "training", after: Iterable[Operation] = ()
    ) -> Operation:
        """Add a pass of every rank over memory, which reads and writes ``size`` bytes, ``times`` times."""
        bandwidth = self.cluster.memory_bandwidth
        seconds = 0.0 if bandwidth is None else times * size / bandwidth
        return self._timeline.add(resource, seconds, after)

    def wait(self, *operations: Operation) -> Operation:
        """Let training wait for operations."""
        return self._timeline.add("training", after=operations)

    def mark(self) -> None:
        """End a step, including the operations after its optimizer."""
        self._marks.append(_Mark(self._timeline.add("training"), self._steps, self.inter_bytes))

    def _compute(self, seconds: float) -> Operation:
        return self._timeline.add("training", seconds)

    # ---- collectives -------------------------------------------------------------------------------------------------

    def intra(
        self, kind: Collective, buckets: BucketGroup, after: Iterable[Operation] = (), resource: str = "node"
    ) -> Operation:
        """Add a collective of the ranks of the node."""
        ranks = self.cluster.ranks_per_node
        if ranks == 1:
            return self._timeline.add(resource, after=after)
        cost = self._cost_inside(kind, ranks, buckets.bytes / buckets.messages)
        senders = 1 if kind == "broadcast" else ranks
        self.intra_bytes += senders * buckets.messages * cost.bytes
        return self._add(resource, cost, buckets, after, "inside")

    def inter(
        self, kind: Collective, buckets: BucketGroup, after: Iterable[Operation] = (), senders: int | None = None
    ) -> Operation:
        """Add a collective between the nodes.

        Args:
            kind: Its kind.
            buckets: The tensors of all inter-node groups together.
            after: Operations that it waits for.
            senders: Ranks of the node that send equal parts. Default: all.
        """
        senders = senders or self.num_shards
        cost = self._cost_between(kind, self.cluster.nodes, buckets.bytes / buckets.messages / senders, senders)
        self.inter_bytes += senders * buckets.messages * cost.bytes
        return self._add("link", cost, buckets, after)

    def all_reduce_flat(self, buckets: BucketGroup, ready: Operation) -> Operation:
        """Add DDP's all-reduce, a ring over all ranks in node order: each node sends everything to the next."""
        cluster, size = self.cluster, buckets.bytes / buckets.messages
        cost = cluster.inter.cost("all_reduce", cluster.ranks, size)
        if cluster.nodes > 1:
            self.inter_bytes += buckets.messages * cost.bytes
        if cluster.nodes == 1 or cluster.ranks_per_node > 1:
            inside = cluster.intra.cost("all_reduce", cluster.ranks, size)
            # a ring is as slow as its slowest link
            cost = inside if cluster.nodes == 1 else max(cost, inside, key=lambda each: each.seconds)
        return self._add("link", cost, buckets, [ready])

    def _add(
        self,
        resource: str,
        cost: Cost,
        buckets: BucketGroup,
        after: Iterable[Operation],
        link: str | None = None,
    ) -> Operation:
        return self._timeline.add(resource, buckets.messages * cost.seconds, after, cost.delay, link)

    # ---- results -----------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> Result:
        """Return the mean of the last steps."""
        self._timeline.run()
        last = self._marks[-1]
        *_, first = (mark for mark in self._marks if mark.steps == last.steps - steps)
        start, end = first.task.end, last.task.end
        waited = sum(seconds for task, seconds in self._waits if start <= task.start < end)
        return Result(
            seconds=(end - start) / steps,
            exposed_seconds=(end - start - self._timeline.busy("training", start, end) + waited) / steps,
            inter_bytes=(last.inter_bytes - first.inter_bytes) / steps,
        )


@dataclass(frozen=True)
class Result:
    """The mean step of a node.

    Attributes:
        seconds: Its time.
        exposed_seconds: The part of it in which training waits.
        inter_bytes: Bytes that the node sends to others.
    """

    seconds: float
    exposed_seconds: float
    inter_bytes: float


@dataclass(frozen=True)
class _Mark:
    task: Operation
    steps: int
    inter_bytes: float


def bucket_groups(model_bytes: float, size: float = BUCKET_BYTES) -> list[BucketGroup]:
    """Cut a model into equal buckets of at most ``size`` bytes, and group them if there are many."""
    messages = max(1, round(-(-model_bytes // size)))
    groups = min(messages, _MOST_GROUPS)
    counts = [messages * (i + 1) // groups - messages * i // groups for i in range(groups)]
    return [BucketGroup(model_bytes * count / messages, count) for count in counts]


def ddp_buckets(model_bytes: float) -> list[BucketGroup]:
    """Cut gradients into DDP's buckets: a small one first."""
    first = min(model_bytes, _FIRST_DDP_BUCKET)
    return [BucketGroup(first), *(bucket_groups(model_bytes - first, _DDP_BUCKET) if model_bytes > first else [])]
