"""A port to listen at that nothing else takes before the caller does."""

from __future__ import annotations

import os
import random
import socket

_BELOW_THOSE_OF_CONNECTIONS = range(15_000, 25_000)  # the kernel gives those from 32,768 on to whoever connects


def free_port() -> int:
    """One of this pytest worker's own; with SLURM's rule for a master's port, whose last four digits are a job's."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    for port in random.SystemRandom().sample(_BELOW_THOSE_OF_CONNECTIONS[worker::8], 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as those who listen there do
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("a hundred ports are all taken")
