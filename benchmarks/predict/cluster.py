"""The cost model of a cluster: latency and bandwidth (alpha-beta)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_hiercomm.comm import costs

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "exchange"]
Algorithm = Literal["ring", "halving"]


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
        seconds: Time on the link.
        delay: Seconds until the last message arrives; other collectives may use the link meanwhile.
        bytes: Bytes that each rank sends.
    """

    seconds: float
    delay: float
    bytes: float


@dataclass(frozen=True)
class Link:
    """The network inside a node, or between nodes.

    Attributes:
        bandwidth: Bytes per second in each direction: of a rank inside a node; of a whole node between nodes.
        latency: Seconds of the shortest message.
        algorithm: Of collectives, see :func:`rounds_of`.
    """

    bandwidth: float
    latency: float = 0.0
    algorithm: Algorithm = "halving"

    def cost(self, kind: Collective, members: int, whole: float, sharing: int = 1) -> Cost:
        """Return ``rounds * latency + bytes / bandwidth`` of a collective."""
        sent = sent_bytes(kind, members, whole)
        if sent == 0:
            return Cost(0.0, 0.0, 0.0)
        rounds = rounds_of(kind, members, self.algorithm)
        return Cost(sharing * sent / self.bandwidth, rounds * self.latency, sent)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal ranks.

    Attributes:
        nodes: Number of nodes, M.
        ranks_per_node: Number of ranks on each, L.
        intra: Network inside a node.
        inter: Network between nodes.
        memory_bandwidth: Bytes per second that a rank copies. None: copies take no time.
    """

    nodes: int
    ranks_per_node: int
    intra: Link
    inter: Link
    memory_bandwidth: float | None = None

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
    """

    parameters: float
    forward: float
    backward: float
    update: float = 0.0

    @classmethod
    def of_step(cls, parameters: float, seconds: float) -> Workload:
        """Split a step whose total alone is known: a third is forward, the rest backward."""
        return cls(parameters, seconds / 3, seconds * 2 / 3)

    @property
    def model_bytes(self) -> float:
        """Size of all parameters, and of all gradients, in float32."""
        return 4 * self.parameters

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return self.forward + self.backward + self.update
