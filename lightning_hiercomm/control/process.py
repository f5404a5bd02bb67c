"""The identity and the end of a rank's process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path


def identity() -> list[str]:
    """Return this process's host and container, its process id, and its start time."""
    spaces = Path("/proc/self/ns/pid")
    space = os.readlink(spaces) if spaces.is_symlink() else ""
    return [f"{socket.gethostname()} {space}", str(os.getpid()), _started(os.getpid())]


def is_gone(who: Sequence[str]) -> bool:
    """Return whether a process of this host, given by its :func:`identity`, has ended."""
    _, pid, started = who
    return started != "" and _started(int(pid)) != started


def _started(pid: int) -> str:
    """Return the start time of a process, in ticks since boot; empty if it has ended, or is a zombie."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


def end_frozen(who: Sequence[str], patience: float = 1.0) -> None:
    """Kill a process of this host, given by its :func:`identity`.

    SIGABRT comes first: faulthandler then writes the stacks, also while a loop holds the interpreter's lock.
    """
    for number in (signal.SIGABRT, signal.SIGCONT, signal.SIGKILL):
        if not who[2] or is_gone(who):  # process ids are reused
            return
        with contextlib.suppress(OSError):
            os.kill(int(who[1]), number)
        if number == signal.SIGCONT:
            time.sleep(patience)


def end_this() -> None:
    """End this process at once, and its children, such as a dataloader's workers: a stopped one would stay."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)
