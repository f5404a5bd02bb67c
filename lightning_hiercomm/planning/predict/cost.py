"""Predict the time, traffic and memory of a training step on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hiercomm.planning.cluster import Cluster, Workload
from lightning_hiercomm.planning.predict.cycles import cycle
from lightning_hiercomm.planning.predict.node import Node, Result
from lightning_hiercomm.planning.predict.schemes import Payload, follow, own_bytes, state_bytes
from lightning_hiercomm.schemes import Scheme

_LEAST_STEPS = 4
_BUSY = 0.9

Limit = Literal["processors", "link", "training", "turns"]
"""The resource that limits a step; ``"turns"``: training and the link wait for each other."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one optimizer step in the long run, of one node or rank.

    Attributes:
        seconds: Its time.
        exposed_seconds: The part in which training waits for communication, inside the node or between nodes.
        inter_bytes: Bytes that a node sends to other nodes: the sum of its ranks' meters.
        memory_bytes: Memory of a rank: model, gradients, optimizer state and the scheme's own; no activations.
        limit: The resource that limits the step.
    """

    seconds: float
    exposed_seconds: float
    inter_bytes: float
    memory_bytes: float
    limit: Limit


def predict(
    scheme: Scheme | None,
    cluster: Cluster,
    workload: Workload,
    wire_dtype: str | None = None,
    speeds: Sequence[float] = (1.0,),
) -> Prediction:
    """Predict a scheme's step.

    The step is simulated on a :class:`~lightning_hiercomm.planning.predict.node.Node` in virtual time. A message costs
    ``rounds * latency + bytes / bandwidth``, or the measured time. Messages on one link follow each other; everything
    else overlaps as the scheme allows.

    Args:
        scheme: The scheme; None is Lightning's ``DDPStrategy``. Warm-up and cool-down are left out.
        cluster: The cluster.
        workload: The training of a rank, and its step time without communication.
        wire_dtype: Payload type between nodes, as for the strategy.
        speeds: Of the nodes, where a node of speed 1 takes the time of the workload. All take as long as the slowest.

    Raises:
        ValueError: If the scheme's period is unknown before a run.
    """
    workload = workload.at_speed(min(speeds))
    payload = Payload.named(wire_dtype, workload)
    period = cycle(scheme)
    window = period * -(-_LEAST_STEPS // period)
    node = Node(cluster, workload)
    on_one_node = None if cluster.nodes == 1 else scheme
    follow(on_one_node, node, payload, 2 * max(period, _LEAST_STEPS) + window + 1)
    result = node.run(window)
    memory = 2 * workload.model_bytes + state_bytes(scheme, cluster, workload)
    memory += own_bytes(scheme, cluster, workload, payload)
    return Prediction(result.seconds, result.exposed_seconds, result.inter_bytes, memory, _limit(result))


def _limit(result: Result) -> Limit:
    if result.processors_busy > _BUSY:
        return "processors"
    if result.link_busy > _BUSY:
        return "link"
    return "training" if result.exposed_seconds < (1 - _BUSY) * result.seconds else "turns"
