"""Measure the network between nodes: latency and rate."""

from __future__ import annotations

import time
from statistics import median

import torch

from lightning_hiercomm.comm import streams
from lightning_hiercomm.nodes.topology import Topology

_FIRST_BYTES, _MOST_BYTES = 2**18, 2**26
_GROWTH = 4
_LONG_ENOUGH = 0.5  # seconds of an all-reduce: a larger one would not tell more
_REPEATS = 5


def measured(topology: Topology, device: torch.device) -> tuple[float, float]:
    """Measure all-reduces between nodes over the run's own backend, in less than a minute on most networks; collective.

    An all-reduce of M nodes passes ``2 (M - 1)`` messages one after another, and each of the ranks that communicate
    sends ``2 (M - 1) / M`` times its tensor.

    Args:
        topology: At least two nodes.
        device: Where the tensors are.

    Returns:
        Bytes per second that a node sends, all its ranks together, and the seconds of a message without content.
    """
    nodes = topology.num_nodes
    empty = _seconds(topology, torch.zeros(nodes, device=device))
    size = _FIRST_BYTES
    while True:
        tensor = torch.zeros(size // 4, device=device)
        taken = _seconds(topology, tensor, repeats=1)
        if taken > _LONG_ENOUGH or size >= _MOST_BYTES:
            break
        size *= _GROWTH
    if taken < _LONG_ENOUGH:
        taken = _seconds(topology, tensor)
    sent = topology.num_shards * 2 * (nodes - 1) / nodes * size
    return sent / max(taken - empty, 1e-9), empty / (2 * (nodes - 1))


def _seconds(topology: Topology, tensor: torch.Tensor, repeats: int = _REPEATS) -> float:
    """Return the median time of an all-reduce between nodes, on the slowest rank."""
    taken: list[float] = []
    for _ in range(1 + repeats):  # the first one opens connections
        topology.world.barrier()
        streams.synchronize(tensor.device)
        began = time.perf_counter()
        if topology.inter is not None:
            topology.inter.all_reduce(tensor).wait()
        streams.synchronize(tensor.device)
        taken.append(max(topology.world.all_gather_object(time.perf_counter() - began)))
    return median(taken[1:])
