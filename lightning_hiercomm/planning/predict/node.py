"""One node of a cluster in virtual time: all nodes do the same, and so do the ranks of a node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_hiercomm.nodes.bucket import BUCKET_BYTES
from lightning_hiercomm.planning.cluster import Cluster, Cost, Move, Workload
from lightning_hiercomm.planning.predict.timeline import Operation, Timeline

_FIRST_DDP_BUCKET = 2**20
_DDP_BUCKET = 25 * 2**20
_MOST_PIECES = 16  # more would be more exact by less than anybody can measure
_MOST_STEPS_IN_DETAIL = 4
_STEPS_ALIKE = 4


@dataclass(frozen=True)
class BucketGroup:
    """A part of the model that travels by itself.

    Attributes:
        bytes: Its size.
        messages: How many buckets it stands for.
    """

    bytes: float
    messages: int = 1

    def scaled(self, by: float) -> BucketGroup:
        """As many messages of another size."""
        return BucketGroup(self.bytes * by, self.messages)


Average = Callable[["Node", BucketGroup, Operation], Operation]
"""What becomes of a bucket of gradients that is ready when a task has ended; returns what ends it."""


def average_in_node(node: Node, piece: BucketGroup, ready: Operation) -> Operation:
    """The mean of a bucket of gradients over the node."""
    if node.cluster.ranks_per_node == 1:
        return ready
    return node.intra("all_reduce", piece, [ready])


def untouched(node: Node, piece: BucketGroup, ready: Operation) -> Operation:
    """Every rank trains with its own gradients."""
    return ready


class Node:
    """Writes down what the ranks of one node do, step by step, then says how long it takes.

    Args:
        cluster: Of which this is one node.
        workload: What each of its ranks trains.

    Attributes:
        inter_bytes: What this node has sent to others so far.
        intra_bytes: What its ranks have sent each other so far.
    """

    def __init__(self, cluster: Cluster, workload: Workload) -> None:
        self.cluster = cluster
        self.workload = workload
        self.inter_bytes = 0.0
        self.intra_bytes = 0.0
        self._cost_inside = functools.cache(cluster.intra.cost)  # which every step asks for again
        self._cost_between = functools.cache(cluster.inter.cost)
        self._timeline = Timeline() if cluster.processors is None else Timeline(cluster.processors)
        self._steps = 0
        self._marks: list[_Mark] = []
        self._waits: list[tuple[Operation, float]] = []
        self._alike: dict[Average, tuple[Result, float, float]] = {}

    @property
    def num_shards(self) -> int:
        """Ranks that carry parts of what goes between the nodes: all of them."""
        return self.cluster.ranks_per_node

    # ---- the training thread -------------------------------------------------------------------------------------

    def train(self, steps: int = 1, average: Average = average_in_node) -> None:
        """Take optimizer steps: forward, backward with DDP's buckets averaged meanwhile, update.

        Args:
            steps: How many, with nothing but gradients to be exchanged.
            average: What becomes of a bucket of gradients.
        """
        if steps <= _MOST_STEPS_IN_DETAIL:
            for _ in range(steps):
                self.train_once(average)
            return
        for _ in range(2):
            self.train_once(average)
        self._train_at_once(steps - 3, average)
        self.train_once(average)

    def train_once(self, average: Average, before_update: Callable[[], object] | None = None) -> None:
        """Take one optimizer step.

        Args:
            average: What becomes of a bucket of gradients.
            before_update: What is done besides, between backward and update.
        """
        workload = self.workload
        self._compute(workload.forward)
        backward = workload.backward + (workload.averaging if self._averages(average) else 0.0)
        ends = []
        for piece in ddp_buckets(workload.model_bytes):
            ready = self._compute(backward * piece.bytes / workload.model_bytes)
            ends.append(average(self, piece, ready))
        self.wait(*ends)
        if before_update is not None:
            before_update()
        self._compute(workload.update)
        self._steps += 1
        self.mark()

    def _averages(self, average: Average) -> bool:
        """Whether gradients go to other ranks: else a strategy leaves DDP out."""
        return average is not untouched and (average is not average_in_node or self.cluster.ranks_per_node > 1)

    def _train_at_once(self, steps: int, average: Average) -> None:
        """Steps that differ in nothing, as one task: nobody wants to wait for a thousand of them."""
        if average not in self._alike:
            one = Node(self.cluster, self.workload)
            one.train(_STEPS_ALIKE, average)
            result = one.run(_STEPS_ALIKE // 2)
            work = one._timeline.processor_seconds() / _STEPS_ALIKE
            self._alike[average] = result, work / result.seconds, one.intra_bytes / _STEPS_ALIKE
        result, processors, intra_bytes = self._alike[average]
        task = self._timeline.add("training", steps * result.seconds, processors)
        self._waits.append((task, steps * result.exposed_seconds))
        self._steps += steps
        self.inter_bytes += steps * result.inter_bytes
        self.intra_bytes += steps * intra_bytes

    def passes(
        self, size: float, times: float = 1.0, resource: str = "training", after: Iterable[Operation] = ()
    ) -> Operation:
        """Every rank reads ``size`` bytes and writes as many, so many times."""
        bandwidth = self.cluster.memory_bandwidth
        seconds = 0.0 if bandwidth is None else times * size / bandwidth
        return self._timeline.add(resource, seconds, self.num_shards if self.workload.threads else 0.0, after)

    def wait(self, *tasks: Operation) -> Operation:
        """Training goes on when these have ended."""
        return self._timeline.add("training", after=tasks)

    def mark(self) -> None:
        """What a step entails has ended; what came after the optimizer belongs to it."""
        self._marks.append(_Mark(self._timeline.add("training"), self._steps, self.inter_bytes))

    def _compute(self, seconds: float) -> Operation:
        return self._timeline.add("training", seconds, self.cluster.ranks_per_node * self.workload.threads)

    # ---- moves ---------------------------------------------------------------------------------------------------

    def intra(
        self, move: Move, piece: BucketGroup, after: Iterable[Operation] = (), resource: str = "node"
    ) -> Operation:
        """A move of the ranks of the node.

        Args:
            move: What they do.
            piece: What they end up with, or begin with.
            after: What must have ended before.
            resource: Moves on different resources do not wait for each other, but share what joins the ranks.
        """
        ranks = self.cluster.ranks_per_node
        if ranks == 1:
            return self._timeline.add(resource, after=after)
        cost = self._cost_inside(move, ranks, piece.bytes / piece.messages)
        senders = 1 if move == "broadcast" else ranks
        self.intra_bytes += senders * piece.messages * cost.bytes
        return self._move(resource, cost, piece, ranks, after, "inside")

    def inter(
        self, move: Move, piece: BucketGroup, after: Iterable[Operation] = (), senders: int | None = None
    ) -> Operation:
        """A move between the nodes.

        Args:
            move: The collective of each inter-node group.
            piece: The tensors of all inter-node groups together.
            after: What must have ended before.
            senders: How many ranks of the node take equal parts. Default: all.
        """
        senders = senders or self.num_shards
        cost = self._cost_between(move, self.cluster.nodes, piece.bytes / piece.messages / senders, senders)
        self.inter_bytes += senders * piece.messages * cost.bytes
        return self._move("link", cost, piece, senders, after)

    def all_reduce_flat(self, piece: BucketGroup, ready: Operation) -> Operation:
        """A ring over all ranks in node order, as DDP does it: each node sends everything to the next."""
        cluster, size = self.cluster, piece.bytes / piece.messages
        link = cluster.world or cluster.inter
        cost = link.cost("all_reduce", cluster.ranks, size)
        if cluster.nodes > 1:
            self.inter_bytes += piece.messages * cost.bytes
        if cluster.nodes == 1 or (cluster.world is None and cluster.ranks_per_node > 1):
            inside = cluster.intra.cost("all_reduce", cluster.ranks, size)
            # a ring is as slow as its slowest link; what was measured of the world was measured of all of them
            cost = inside if cluster.nodes == 1 else max(cost, inside, key=lambda each: each.seconds)
        return self._move("link", cost, piece, cluster.ranks_per_node, [ready])

    def _move(
        self,
        resource: str,
        cost: Cost,
        piece: BucketGroup,
        ranks: int,
        after: Iterable[Operation],
        link: str | None = None,
    ) -> Operation:
        processors = ranks * cost.processor_seconds / cost.seconds if cost.seconds else 0.0
        seconds = piece.messages * cost.seconds
        return self._timeline.add(resource, seconds, processors, after, cost.delay, cost.longer, link)

    # ---- what came out -------------------------------------------------------------------------------------------

    def run(self, steps: int) -> Result:
        """What the last steps took, on average."""
        self._timeline.run()
        last = self._marks[-1]
        *_, first = (mark for mark in self._marks if mark.steps == last.steps - steps)
        start, end = first.task.end, last.task.end
        waited = sum(seconds for task, seconds in self._waits if start <= task.start < end)
        used, cores = self._timeline.processor_seconds(start, end), self.cluster.processors
        return Result(
            seconds=(end - start) / steps,
            exposed_seconds=(end - start - self._timeline.busy("training", start, end) + waited) / steps,
            inter_bytes=(last.inter_bytes - first.inter_bytes) / steps,
            processors_busy=used / cores / (end - start) if cores else 0.0,
            link_busy=self._timeline.busy("link", start, end) / (end - start),
        )


@dataclass(frozen=True)
class Result:
    """Of one step, on average.

    Attributes:
        seconds: It took.
        exposed_seconds: Of these, training waited.
        inter_bytes: A node sent to others.
        processors_busy: ProcessorShare of the node's processors that was in use.
        link_busy: ProcessorShare of the time in which the node's link was.
    """

    seconds: float
    exposed_seconds: float
    inter_bytes: float
    processors_busy: float
    link_busy: float


@dataclass(frozen=True)
class _Mark:
    """The end of a step."""

    task: Operation
    steps: int
    inter_bytes: float


def buckets(model_bytes: float, size: float = BUCKET_BYTES) -> list[BucketGroup]:
    """The model in equal pieces of at most ``size`` bytes, or of several such if it is large."""
    messages = max(1, round(-(-model_bytes // size)))
    pieces = min(messages, _MOST_PIECES)
    counts = [messages * (i + 1) // pieces - messages * i // pieces for i in range(pieces)]
    return [BucketGroup(model_bytes * count / messages, count) for count in counts]


def ddp_buckets(model_bytes: float) -> list[BucketGroup]:
    """In the order in which DDP makes them: a small one first."""
    first = min(model_bytes, _FIRST_DDP_BUCKET)
    return [BucketGroup(first), *(buckets(model_bytes - first, _DDP_BUCKET) if model_bytes > first else [])]
