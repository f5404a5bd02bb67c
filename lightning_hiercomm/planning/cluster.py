"""What a cluster is made of, as far as time is concerned: an alpha-beta model, or measured curves."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lightning_hiercomm.comm import costs

Move = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "exchange"]
Algorithm = Literal["ring", "halving"]


def sent_bytes(move: Move, members: int, whole: float) -> float:
    """Bytes that one member of a group sends (of a broadcast, its source); see :mod:`lightning_hiercomm.comm.costs`."""
    return float(getattr(costs, move)(members, whole))


def rounds_of(move: Move, members: int, algorithm: Algorithm) -> int:
    """How many messages follow each other, at the least, until the last member has everything.

    Args:
        move: What is done.
        members: By how many.
        algorithm: ``"ring"``: one message per other member, as gloo's collectives do. ``"halving"``: one per halving of
            the group, as trees and recursive halving and doubling do; nccl and MPI choose such where it pays.
    """
    if members == 1:
        return 0
    if move == "exchange":
        return 1
    halvings = math.ceil(math.log2(members))
    once = halvings if algorithm == "halving" or move == "broadcast" else members - 1
    return 2 * once if move == "all_reduce" else once


@dataclass(frozen=True)
class Cost:
    """What one move costs.

    Attributes:
        seconds: For which the link is busy, with all the processors that the move can use.
        delay: Seconds after which the last message is there; others may be on the link meanwhile.
        processor_seconds: Of each rank that takes part.
        bytes: That each rank sends.
        longer: How many times as long it takes while the processors are busy with something else, too.
    """

    seconds: float
    delay: float
    processor_seconds: float
    bytes: float
    longer: float = 1.0


@dataclass(frozen=True)
class Beside:
    """What a link's moves and training do to each other where processors are scarce.

    Attributes:
        later: Seconds by which a move ends later while the processors are busy with something else, too: its threads
            wait for their turns.
        unbilled: Processor-seconds, by second that a rank's move is under way, which no process is billed for: what the
            kernel does for its packets, and threads that wake up in turn. Between 0 and the processors of a rank.
    """

    later: float = 0.0
    unbilled: float = 0.0


@dataclass(frozen=True)
class Curve:
    """Measured costs of one kind of move, by size, with several in flight.

    Attributes:
        members: Of the group that was measured.
        sharing: How many such groups moved at once over one link.
        points: (bytes that a member sends, seconds, processor-seconds of a rank), by rising bytes. The first is a move
            so small that it is all latency.
    """

    members: int
    sharing: int
    points: tuple[tuple[float, float, float], ...]

    def seconds(self, sent: float, latencies: float) -> float:
        """How long a move takes that sends other bytes, and waits ``latencies`` times as often for a message."""
        return self._at(sent, latencies, 1)

    def processor_seconds(self, sent: float, latencies: float) -> float:
        """The same of the processors' time."""
        return self._at(sent, latencies, 2)

    def faster(self, factor: float) -> Curve:
        """On a link of another bandwidth, but with the same latency and the same processors."""
        (_, latency, _), *_ = self.points
        points = ((sent, latency + max(0.0, seconds - latency) / factor, work) for sent, seconds, work in self.points)
        return Curve(self.members, self.sharing, tuple(points))

    def _at(self, sent: float, latencies: float, column: int) -> float:
        fixed = self.points[0][column]
        if len(self.points) == 1 or sent <= self.points[0][0]:
            return latencies * fixed
        above = min(bisect_left(self.points, (sent,)), len(self.points) - 1)
        low, high = self.points[above - 1], self.points[above]
        slope = max(0.0, (high[column] - low[column]) / (high[0] - low[0]))
        return max(0.0, low[column] + slope * (sent - low[0]) - fixed) + latencies * fixed


@dataclass(frozen=True)
class Link:
    """What carries messages inside a node, or between nodes.

    Attributes:
        bandwidth: Bytes per second that can be sent while as many are received: by a rank, inside a node; by a node,
            between nodes, where its ranks share it.
        latency: Seconds that the shortest message takes.
        algorithm: Of collectives, see :func:`rounds_of`.
        stream_bandwidth: What one rank alone reaches, if that is less than ``bandwidth``.
        curves: Measured costs by move; they take precedence over the numbers above.
        beside: What moves and training do to each other.
    """

    bandwidth: float
    latency: float = 0.0
    algorithm: Algorithm = "halving"
    stream_bandwidth: float = math.inf
    curves: Mapping[Move, Curve] = field(default_factory=dict)
    beside: Beside = Beside()

    def cost(self, move: Move, members: int, whole: float, sharing: int = 1) -> Cost:
        """What a move costs: ``rounds * latency + bytes / bandwidth``, or what was measured.

        Args:
            move: What is done.
            members: By how many ranks.
            whole: Bytes of the tensor that they end up with, or began with.
            sharing: How many such moves go over the link at once.
        """
        sent = sent_bytes(move, members, whole)
        if sent == 0:
            return Cost(0.0, 0.0, 0.0, 0.0)
        rounds = rounds_of(move, members, self.algorithm)
        alone = sent / self.stream_bandwidth
        curve = self.curves.get(move)
        if curve is None:
            return Cost(max(alone, sharing * sent / self.bandwidth), rounds * self.latency, 0.0, sent)
        latencies = rounds / rounds_of(move, curve.members, self.algorithm)
        seconds = curve.seconds(sent * sharing / curve.sharing, latencies)
        work = curve.processor_seconds(sent, latencies) + self.beside.unbilled * seconds
        longer = 1 + self.beside.later / seconds if self.beside.later else 1.0
        return Cost(max(alone, seconds), 0.0, work, sent, longer)

    def faster(self, factor: float) -> Link:
        """A link of ``factor`` times the bandwidth, with the same latency."""
        return Link(
            self.bandwidth * factor,
            self.latency,
            self.algorithm,
            self.stream_bandwidth * factor,
            {move: curve.faster(factor) for move, curve in self.curves.items()},
            self.beside,
        )


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal ranks.

    Attributes:
        nodes: How many, M.
        ranks_per_node: On each, L.
        intra: What joins the ranks of a node.
        inter: What joins the nodes.
        world: What a flat all-reduce over all ranks was measured to cost. None: it is derived from ``inter``.
        processors: Processor cores that the ranks of one node have together. None: so many that it does not matter, or
            other hardware does the work.
        memory_bandwidth: Bytes per second of parameters that a rank copies. None: passes over the parameters take no
            time.

    Raises:
        ValueError: If there is no node, or no rank.
    """

    nodes: int
    ranks_per_node: int
    intra: Link
    inter: Link
    world: Link | None = None
    processors: float | None = None
    memory_bandwidth: float | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"nodes={self.nodes} must be at least 1")
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={self.ranks_per_node} must be at least 1")

    @property
    def ranks(self) -> int:
        """All of them, R."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Workload:
    """What one rank trains, and how long a step takes it without any communication.

    Attributes:
        parameters: How many are trained.
        forward: Seconds of the forward pass, and of everything else before the backward pass.
        backward: Seconds of the backward pass.
        update: Seconds of the optimizer's step.
        dtype: Of the parameters: ``"float64"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        state_per_parameter: Numbers that the optimizer keeps per parameter: 2 of Adam, 1 of SGD with momentum.
        threads: Processor cores that a rank's step keeps busy; 0 where a GPU does the work.
        averaging: Seconds that a step computes longer if gradients go to other ranks, beside the moves themselves:
            hooks, and buckets that are written and read once more.

    Raises:
        ValueError: For numbers that are not positive.
    """

    parameters: float
    forward: float
    backward: float
    update: float = 0.0
    dtype: str = "float32"
    state_per_parameter: float = 2.0
    threads: float = 0.0
    averaging: float = 0.0

    def __post_init__(self) -> None:
        if self.parameters < 1:
            raise ValueError(f"parameters={self.parameters:g} must be at least 1")
        if min(self.forward, self.backward, self.update, self.averaging) < 0 or self.seconds <= 0:
            raise ValueError(f"a step of {self.seconds:g} s must take some time")
        if self.dtype not in _BYTES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(_BYTES)}")

    @classmethod
    def of_step(cls, parameters: float, seconds: float, **others: object) -> Workload:
        """A step of which only the whole is known: a third is forward, the rest backward."""
        return cls(parameters, seconds / 3, seconds * 2 / 3, **others)  # type: ignore[arg-type]

    @property
    def bytes_per_parameter(self) -> int:
        """Of the parameters and gradients."""
        return _BYTES[self.dtype]

    @property
    def model_bytes(self) -> float:
        """Of all parameters, and of all gradients."""
        return self.parameters * self.bytes_per_parameter

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.forward + self.backward + self.update


_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
