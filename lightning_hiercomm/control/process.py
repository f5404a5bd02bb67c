"""Functions for a rank's own process: its stacks, its identity, and its end."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_STANDARD_ERROR = 2


def dump_stacks(why: str) -> None:
    """Write the Python stacks of all threads to standard error in one piece, because other ranks write there too."""
    head = f"lightning_hiercomm: {why}\n".encode()
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = head + file.read()
    except OSError:  # a full disk, for instance
        os.write(_STANDARD_ERROR, head)
        faulthandler.dump_traceback(_STANDARD_ERROR, all_threads=True)
    else:
        os.write(_STANDARD_ERROR, text)


def identity() -> list[str]:
    """Return this process's host and container, its process id, and its start time."""
    spaces = Path("/proc/self/ns/pid")
    space = os.readlink(spaces) if spaces.is_symlink() else ""
    return [f"{socket.gethostname()} {space}", str(os.getpid()), _started(os.getpid())]


def is_gone(who: Sequence[str]) -> bool:
    """Return whether a process of this host, given by its :func:`identity`, has ended."""
    _, pid, started = who
    return started != "" and _started(int(pid)) != started


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


def _started(pid: int) -> str:
    """Return the start time of a process, in ticks since boot; empty if it has ended, or is a zombie."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


class StuckDetector:
    """Detects a main thread or a dataloader's worker that is stuck in the kernel or stopped; on Linux only.

    A thread that waits for a hung file system is in an uninterruptible state and is never scheduled. Waits for data or
    other ranks are in other states.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[int, str], float] = {}

    def check(self) -> tuple[str, float]:
        """Return what is stuck, and for how many seconds since the first check."""
        now, workers = time.monotonic(), [child.pid for child in multiprocessing.active_children() if child.daemon]
        states = {(pid, _schedulings_if_stuck(pid)) for pid in (os.getpid(), *workers) if pid is not None}
        self._since = {state: self._since.get(state, now) for state in states if state[1]}
        if not self._since:
            return "", 0.0
        (pid, _), since = min(self._since.items(), key=lambda item: item[1])
        return "its main thread" if pid == os.getpid() else f"its worker {pid}", now - since


def _schedulings_if_stuck(pid: int) -> str:
    """Return the main thread's state and number of schedulings; empty if it is not stuck."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines()
        states = ("State:\tD", "State:\tT", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
        found = [line for line in lines if line.startswith(states)]
        return " ".join(found) if len(found) == 3 else ""
    return ""


def end_children() -> None:
    """Kill child processes of multiprocessing, such as a dataloader's workers, which may be stuck."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a dataloader's worker is killed
    for child in multiprocessing.active_children():
        child.kill()


def end_after(grace: float, message: str, unless: threading.Event) -> None:
    """Print ``message`` and end this process and its children after ``grace`` seconds, ``unless`` that is set."""
    if not unless.wait(grace):
        print(f"lightning_hiercomm: {message}", file=sys.stderr, flush=True)
        end_children()
        os._exit(1)
