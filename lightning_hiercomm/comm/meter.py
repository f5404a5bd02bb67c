"""Counts bytes, messages, and the seconds that training waits for communication."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_hiercomm.comm import streams

_thread = threading.local()

Mark = float | torch.cuda.Event
"""A moment: host seconds, or an event on a CUDA stream."""


class Meter:
    """The communication of one rank, by level (``"intra"``, ``"inter"``, ``"world"``).

    Bytes are those that this rank sends by the textbook cost of each collective (see
    :mod:`lightning_hiercomm.comm.costs`), so they are equal on all backends.

    Exposed seconds are the time that training waits. A collective that ends before it is waited for costs none. Waits
    inside :meth:`overlapped` do not count; all others do, also on autograd's threads. On CUDA a wait only stalls the
    stream, so it is timed by events.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, float] = defaultdict(float)
        self.messages: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def count(self, level: str, sent_bytes: float) -> None:
        """Add one collective that sends ``sent_bytes`` bytes from this rank."""
        with self._lock:  # background threads call this too
            self.bytes[level] += sent_bytes
            self.messages[level] += 1

    @contextmanager
    def waiting(self, level: str, device: torch.device) -> Iterator[None]:
        """Time the enclosed wait, unless it is inside :meth:`overlapped`."""
        if getattr(_thread, "is_overlapped", False):
            yield
            return
        start = self.mark(device)
        try:
            yield
        finally:
            self.add_wait(level, start, self.mark(device))

    @staticmethod
    @contextmanager
    def overlapped() -> Iterator[None]:
        """Do not count this thread's waits, which stall a thread or a stream other than training's."""
        before = getattr(_thread, "is_overlapped", False)
        _thread.is_overlapped = True
        try:
            yield
        finally:
            _thread.is_overlapped = before

    @staticmethod
    def mark(device: torch.device) -> Mark:
        """Return the present moment, on the host or on the current stream of ``device``."""
        return streams.mark(device, timing=True) if streams.has(device) else time.perf_counter()

    def add_wait(self, level: str, start: Mark, end: Mark) -> None:
        """Add the time between two marks to the exposed seconds of a level."""
        with self._lock:  # autograd has a thread for each device
            if isinstance(start, float) and isinstance(end, float):
                self._seconds[level] += end - start
            elif not isinstance(start, float) and not isinstance(end, float):
                self._events.append((level, start, end))
                if len(self._events) > 1000:  # bounds the memory of runs that never read the meter
                    self._collect()

    @property
    def seconds(self) -> dict[str, float]:
        """Exposed seconds by level, of the waits that have ended."""
        with self._lock:
            self._collect()
            return dict(self._seconds)

    def snapshot(self) -> dict[str, float]:
        """Return all counters.

        These are ``inter_bytes``, ``inter_messages`` and ``inter_exposed_seconds``, the same of the other levels, and
        ``exposed_seconds`` of all levels.
        """
        values: dict[str, float] = {}
        seconds = self.seconds
        for level in ("intra", "inter", "world"):
            values[f"{level}_bytes"] = self.bytes[level]
            values[f"{level}_messages"] = float(self.messages[level])
            values[f"{level}_exposed_seconds"] = seconds.get(level, 0.0)
        values["exposed_seconds"] = sum(seconds.values())
        return values

    def _collect(self) -> None:
        pending = []
        for level, start, end in self._events:
            if end.query():
                self._seconds[level] += start.elapsed_time(end) / 1000.0
            else:
                pending.append((level, start, end))
        self._events = pending
