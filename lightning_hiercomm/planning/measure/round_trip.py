"""The round trip between nodes, and the rate that it leaves to one TCP stream."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_hiercomm.nodes.topology import Topology

_CONNECTIONS = 5
_TIMEOUT = 5.0
_SYSCTL = Path("/proc/sys/net/ipv4")


def connect_seconds(host: str, port: int, connections: int = _CONNECTIONS) -> float:
    """Return the seconds of the fastest of a few TCP connections, which is one round trip."""
    taken = []
    for _ in range(connections):
        began = time.perf_counter()
        with socket.create_connection((host, port), timeout=_TIMEOUT):
            taken.append(time.perf_counter() - began)
    return min(taken)


def round_trips(topology: Topology, host: str) -> tuple[int, list[float | None]]:
    """Connect every rank to an ephemeral port of rank 0; collective.

    Args:
        topology: The nodes.
        host: Rank 0's address.

    Returns:
        The port, and every rank's round trip to rank 0: 0 on rank 0 itself, None where it cannot connect.
    """
    leads = topology.rank in {ranks[0] for ranks in topology.nodes}
    with contextlib.ExitStack() as stack:
        port = 0
        if topology.rank == 0:
            backlog = topology.world_size + _CONNECTIONS * topology.num_nodes
            server = stack.enter_context(socket.create_server(("", 0), backlog=backlog))
            port = server.getsockname()[1]
        port = topology.world.all_gather_object(port)[0]
        own: float | None = 0.0 if topology.rank == 0 else None
        with contextlib.suppress(OSError):
            if topology.rank != 0:
                own = connect_seconds(host, port, _CONNECTIONS if leads else 1)
        return port, topology.world.all_gather_object(own)


def between_nodes(nodes: Sequence[Sequence[int]], seconds: Sequence[float | None]) -> list[float]:
    """Return the round trips of the other nodes' first ranks to rank 0, without those that cannot connect."""
    found = (seconds[ranks[0]] for ranks in nodes if 0 not in ranks)
    return [each for each in found if each is not None]


def window() -> int | None:
    """Return the most bytes that Linux keeps in flight on one TCP connection, if this is Linux."""
    try:
        limits = [int((_SYSCTL / name).read_text().split()[2]) for name in ("tcp_wmem", "tcp_rmem")]
    except (OSError, ValueError, IndexError):
        return None
    return min(limits)
