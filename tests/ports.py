"""A port to listen at that nothing else takes before the caller does."""

from __future__ import annotations

import os
import random
import socket
from collections import deque

_BELOW_THOSE_OF_CONNECTIONS = range(15_000, 25_000)  # the kernel gives those from 32,768 on to whoever connects


_given: deque[int] = deque(maxlen=500)  # of a launch that asks for two before anybody listens, both would be one


def free_port() -> int:
    """One of this pytest worker's own, not given lately.

    SLURM's rule for a master's port is kept, whose last four digits are a job's.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    own = [port for port in _BELOW_THOSE_OF_CONNECTIONS[worker::8] if port not in _given]
    for port in random.SystemRandom().sample(own, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as those who listen there do
            try:
                probe.bind(("", port))
            except OSError:
                continue
            _given.append(port)
            return port
    raise OSError("a hundred ports are all taken")
