"""Predicts what a step takes, moves and holds on a cluster, for any scheme."""

from __future__ import annotations

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
"""What a step's time depends on most; ``"turns"``: training and the link wait for each other."""


@dataclass(frozen=True)
class Prediction:
    """Of one optimizer step in the long run; of one node or one rank, since all are alike.

    Attributes:
        seconds: It takes.
        exposed_seconds: Of these, training waits for communication, inside the node and between nodes.
        inter_bytes: A node sends to other nodes; the sum of its ranks' meters.
        memory_bytes: A rank holds: model, gradients, optimizer state and what the scheme needs; no activations.
        limit: What the step's time depends on most.
    """

    seconds: float
    exposed_seconds: float
    inter_bytes: float
    memory_bytes: float
    limit: Limit


def predict(scheme: Scheme | None, cluster: Cluster, workload: Workload, wire_dtype: str | None = None) -> Prediction:
    """Predict a scheme's step.

    The step is played through on a :class:`~lightning_hiercomm.planning.predict.node.Node`, in virtual time: every
    message costs ``rounds * latency + bytes / bandwidth`` (or what was measured), one after another on each link,
    beside whatever the scheme lets go on meanwhile.

    Args:
        scheme: With its arguments; None is Lightning's ``DDPStrategy``. Phases that end are left out.
        cluster: Where it runs.
        workload: What is trained, and how long a step takes by itself.
        wire_dtype: As for the strategy: what travels between nodes.

    Raises:
        ValueError: For a scheme that has no period.
    """
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
