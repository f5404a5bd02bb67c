"""Predict the time and traffic of a training step on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.predict.cluster import Cluster, Workload
from benchmarks.predict.cycles import cycle
from benchmarks.predict.node import Node
from benchmarks.predict.schemes import Payload, follow
from lightning_hiercomm.schemes import Scheme

_LEAST_STEPS = 4


@dataclass(frozen=True)
class Prediction:
    """The prediction for one optimizer step in the long run, of one node.

    Attributes:
        seconds: Its time.
        exposed_seconds: The part in which training waits for communication, inside the node or between nodes.
        inter_bytes: Bytes that a node sends to other nodes: the sum of its ranks' meters.
    """

    seconds: float
    exposed_seconds: float
    inter_bytes: float


def predict(scheme: Scheme | None, cluster: Cluster, workload: Workload, wire_dtype: str | None = None) -> Prediction:
    """Predict a scheme's step.

    The step is simulated on a :class:`~benchmarks.predict.node.Node` in virtual time. A message costs
    ``rounds * latency + bytes / bandwidth``. Messages on one link follow each other; everything
    else overlaps as the scheme allows.

    Args:
        scheme: The scheme; None is Lightning's ``DDPStrategy``. Warm-up and cool-down are left out.
        cluster: The cluster.
        workload: The training of a rank, and its step time without communication.
        wire_dtype: Payload type between nodes, as for the strategy.

    Raises:
        ValueError: If the scheme's period is unknown before a run.
    """
    payload = Payload.named(wire_dtype)
    period = cycle(scheme)
    window = period * -(-_LEAST_STEPS // period)
    node = Node(cluster, workload)
    on_one_node = None if cluster.nodes == 1 else scheme
    follow(on_one_node, node, payload, 2 * max(period, _LEAST_STEPS) + window + 1)
    result = node.run(window)
    return Prediction(result.seconds, result.exposed_seconds, result.inter_bytes)
