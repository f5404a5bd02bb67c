"""A port to listen at that nothing else takes before the caller does."""

from __future__ import annotations

import random
import socket
from collections import deque

_BELOW_THOSE_OF_CONNECTIONS = range(15_000, 25_000)  # the kernel gives those from 32,768 on to whoever connects

_given: deque[socket.socket] = deque()


def free_port() -> int:
    """One that no process of this machine has been given lately, whether or not it listens there already.

    Whoever is given one holds a socket of that name, which the kernel gives to one process only and takes back when
    it ends. SLURM's rule for a master's port is kept, whose last four digits are a job's.
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
