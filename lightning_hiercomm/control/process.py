"""The processes of ranks: how one is recognized, whether it has ended, and how it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path


def identity(process: int | str = "self") -> str:
    """Return a process's machine, container, process id and start time; empty if it has ended."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{process}/stat").read_text()
        state, *others = stat.rpartition(")")[2].split()
        if state not in "ZX":
            return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')} {stat.split()[0]} {others[18]}"
    return ""


def has_ended(who: str) -> bool:
    """Return whether a process of this machine, given by its :func:`identity`, has ended."""
    return who != "" and who.split()[:2] == identity().split()[:2] and identity(who.split()[2]) != who


def end_frozen(who: str) -> None:
    """Kill a process, given by its :func:`identity`, if it is one of this machine."""
    if who and identity(pid := who.split()[2]) == who:  # process ids are reused
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)
