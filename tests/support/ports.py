"""Free ports, which no other process of the tests gets."""

from __future__ import annotations

import random
import socket
from collections import deque

_BELOW_THOSE_OF_CONNECTIONS = range(15_000, 25_000)  # the kernel gives ports from 32,768 on to clients

_given: deque[socket.socket] = deque()


def free_port() -> int:
    """Return a port that no other process of this machine got recently, even if nothing listens there yet.

    The process holds an abstract socket named after the port; the kernel removes it when the process ends. The range
    follows SLURM's rule for a master port, whose last four digits are those of the job.
    """
    for port in random.SystemRandom().sample(_BELOW_THOSE_OF_CONNECTIONS, 100):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0hiercomm's tests have port {port}")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as those who listen there do
                probe.bind(("", port))
        except OSError:
            name.close()
            continue
        _given.append(name)
        if len(_given) > 500:
            _given.popleft().close()
        return port
    raise OSError("a hundred ports are all taken")
