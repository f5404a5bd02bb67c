"""The cost model of a cluster: latency and bandwidth (alpha-beta), or measured curves."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_hiercomm.comm import costs

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "exchange"]
Algorithm = Literal["ring", "halving"]


class PlanningError(ValueError):
    """An argument of a command is invalid; the command prints the message in one line."""


def sent_bytes(kind: Collective, members: int, whole: float) -> float:
    """Return the bytes that one member of a group sends; in a broadcast, its source."""
    return float(getattr(costs, kind)(members, whole))


def rounds_of(kind: Collective, members: int, algorithm: Algorithm) -> int:
    """Return the number of consecutive messages of a collective.

    ``"ring"``, used by gloo, has one per other member. ``"halving"``, used by NCCL and MPI where it pays, has one per
    halving of the group.
    """
    if members == 1:
        return 0
    if kind == "exchange":
        return 1
    halvings = math.ceil(math.log2(members))
    once = halvings if algorithm == "halving" or kind == "broadcast" else members - 1
    return 2 * once if kind == "all_reduce" else once


@dataclass(frozen=True)
class Cost:
    """The cost of one collective.

    Attributes:
        seconds: Time on the link, if enough processors are free.
        delay: Seconds until the last message arrives; other collectives may use the link meanwhile.
        processor_seconds: Processor time of each rank.
        bytes: Bytes that each rank sends.
    """

    seconds: float
    delay: float
    processor_seconds: float
    bytes: float


@dataclass(frozen=True)
class CostCurve:
    """Measured costs of one kind of collective, by size, with several in flight.

    Attributes:
        members: Of the measured group.
        sharing: Number of groups that used the link at the same time.
        points: Bytes that a member sends (ascending), seconds, processor-seconds of a rank. The first is latency only.
    """

    members: int
    sharing: int
    points: tuple[tuple[float, float, float], ...]

    def seconds(self, sent: float, latencies: float) -> float:
        """Return the time of sending other bytes, with ``latencies`` times as many consecutive messages."""
        return self._at(sent, latencies, 1)

    def processor_seconds(self, sent: float, latencies: float) -> float:
        """Return the processor time of the same message."""
        return self._at(sent, latencies, 2)

    def faster(self, factor: float) -> CostCurve:
        """Scale the bandwidth, not the latency or the processor time."""
        (_, latency, _), *_ = self.points
        points = ((sent, latency + max(0.0, seconds - latency) / factor, work) for sent, seconds, work in self.points)
        return CostCurve(self.members, self.sharing, tuple(points))

    def _at(self, sent: float, latencies: float, column: int) -> float:
        fixed = self.points[0][column]
        if len(self.points) == 1 or sent <= self.points[0][0]:
            return latencies * fixed
        above = min(bisect_left(self.points, (sent,)), len(self.points) - 1)
        low, high = self.points[above - 1], self.points[above]
        slope = max(0.0, (high[column] - low[column]) / (high[0] - low[0]))
        return max(0.0, low[column] + slope * (sent - low[0]) - fixed) + latencies * fixed


INTRA_LATENCY, INTER_LATENCY = 5e-6, 50e-6
"""Seconds of the shortest message inside a node and between nodes, if they are not known."""


@dataclass(frozen=True)
class Link:
    """The network inside a node, or between nodes.

    Attributes:
        bandwidth: Bytes per second in each direction: of a rank inside a node; of a whole node between nodes.
        latency: Seconds of the shortest message.
        algorithm: Of collectives, see :func:`rounds_of`.
        curves: Measured costs by collective; they take precedence over the numbers above.
    """

    bandwidth: float
    latency: float = 0.0
    algorithm: Algorithm = "halving"
    curves: Mapping[Collective, CostCurve] = field(default_factory=dict)

    def cost(self, kind: Collective, members: int, whole: float, sharing: int = 1) -> Cost:
        """Return the measured cost of a collective, or ``rounds * latency + bytes / bandwidth``."""
        sent = sent_bytes(kind, members, whole)
        if sent == 0:
            return Cost(0.0, 0.0, 0.0, 0.0)
        rounds = rounds_of(kind, members, self.algorithm)
        curve = self.curves.get(kind)
        if curve is None:
            return Cost(sharing * sent / self.bandwidth, rounds * self.latency, 0.0, sent)
        latencies = rounds / rounds_of(kind, curve.members, self.algorithm)
        seconds = curve.seconds(sent * sharing / curve.sharing, latencies)
        return Cost(seconds, 0.0, curve.processor_seconds(sent, latencies), sent)

    def faster(self, factor: float) -> Link:
        """Scale the bandwidth, not the latency."""
        curves = {kind: curve.faster(factor) for kind, curve in self.curves.items()}
        return Link(self.bandwidth * factor, self.latency, self.algorithm, curves)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal ranks.

    Attributes:
        nodes: Number of nodes, M.
        ranks_per_node: Number of ranks on each, L.
        intra: Network inside a node.
        inter: Network between nodes.
        world: Measured cost of a flat all-reduce over all ranks. None: derived from ``inter``.
        processors: Cores of one node. None: enough, or other hardware computes.
        memory_bandwidth: Bytes per second that a rank copies. None: copies take no time.

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
        """Number of all ranks, R."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Workload:
    """The training of one rank, and the time of a step without communication.

    Attributes:
        parameters: Number of trained parameters.
        forward: Seconds until the backward pass.
        backward: Seconds of the backward pass.
        update: Seconds of the optimizer's step.
        dtype: Of the parameters.
        state_per_parameter: Numbers that the optimizer keeps per parameter: 2 for Adam, 1 for SGD with momentum.
        threads: Cores that a rank's step keeps busy; 0 where a GPU computes.
        averaging: Seconds of a step for hooks and copies of averaged gradients, without the collectives.

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
        """Split a step whose total alone is known: a third is forward, the rest backward."""
        return cls(parameters, seconds / 3, seconds * 2 / 3, **others)  # type: ignore[arg-type]

    def at_speed(self, speed: float) -> Workload:
        """Return the same training on a rank that computes ``speed`` times as fast."""
        parts = {name: getattr(self, name) / speed for name in ("forward", "backward", "update", "averaging")}
        return replace(self, **parts)

    @property
    def bytes_per_parameter(self) -> int:
        """Size of a parameter, and of a gradient."""
        return _BYTES[self.dtype]

    @property
    def model_bytes(self) -> float:
        """Size of all parameters, and of all gradients."""
        return self.parameters * self.bytes_per_parameter

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return self.forward + self.backward + self.update


_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
