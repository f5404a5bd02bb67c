"""Counts what communication costs: bytes, messages, and the seconds that training waited for it."""

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
    """The communication of one rank, by tier (``"intra"``, ``"inter"``, ``"world"``).

    Bytes are those this rank puts on the wire, by the textbook cost of each move (a ring all-reduce over ``n`` ranks
    sends ``2 (n - 1) / n`` of the tensor), so they are the same on every backend and comparable between schemes.

    Exposed seconds are the time that *training* spent waiting: a move that ends before it is waited for costs nothing.
    Waits in parallel with training do not count; all others do, also on the thread of autograd's that takes a GPU's
    backward pass and calls hooks. On CUDA a wait only stalls the stream, so it is timed by events.

    Attributes:
        unawaited: A move of this rank that nobody waited for before its handle was dropped, and where it is from; its
            communicators look at it, and refuse to go on.
    """

    def __init__(self) -> None:
        self.unawaited: str | None = None
        self.bytes: dict[str, float] = defaultdict(float)
        self.messages: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def count(self, tier: str, sent_bytes: float) -> None:
        """Add one move that sends ``sent_bytes`` bytes from this rank."""
        with self._lock:  # background threads count, too
            self.bytes[tier] += sent_bytes
            self.messages[tier] += 1

    @contextmanager
    def waiting(self, tier: str, device: torch.device) -> Iterator[None]:
        """Time the enclosed wait, unless it is in parallel with training."""
        if getattr(_thread, "is_beside_training", False):
            yield
            return
        start = self.mark(device)
        try:
            yield
        finally:
            self.add_wait(tier, start, self.mark(device))

    @staticmethod
    @contextmanager
    def beside_training() -> Iterator[None]:
        """Let this thread's waits not count: they stall a thread, or a stream, that training does not run on."""
        before = getattr(_thread, "is_beside_training", False)
        _thread.is_beside_training = True
        try:
            yield
        finally:
            _thread.is_beside_training = before

    @staticmethod
    def mark(device: torch.device) -> Mark:
        """Now, on the host or on the current stream of ``device``."""
        return streams.mark(device, timing=True) if streams.has(device) else time.perf_counter()

    def add_wait(self, tier: str, start: Mark, end: Mark) -> None:
        """Add the time between two marks to the exposed seconds of a tier."""
        with self._lock:  # hooks of a CPU's and of a GPU's gradients have a thread each
            if isinstance(start, float) and isinstance(end, float):
                self._seconds[tier] += end - start
            elif not isinstance(start, float) and not isinstance(end, float):
                self._events.append((tier, start, end))
                if len(self._events) > 1000:  # bounds the memory of runs that never read the meter
                    self._collect()

    @property
    def seconds(self) -> dict[str, float]:
        """Exposed seconds by tier, of the waits that have ended."""
        with self._lock:
            self._collect()
            return dict(self._seconds)

    def snapshot(self) -> dict[str, float]:
        """All counters as one flat dictionary.

        ``inter_bytes``, ``inter_messages`` and ``inter_exposed_seconds``; the same of the other tiers;
        ``exposed_seconds`` of all together.
        """
        values: dict[str, float] = {}
        seconds = self.seconds
        for tier in ("intra", "inter", "world"):
            values[f"{tier}_bytes"] = self.bytes[tier]
            values[f"{tier}_messages"] = float(self.messages[tier])
            values[f"{tier}_exposed_seconds"] = seconds.get(tier, 0.0)
        values["exposed_seconds"] = sum(seconds.values())
        return values

    def _collect(self) -> None:
        pending = []
        for tier, start, end in self._events:
            if end.query():
                self._seconds[tier] += start.elapsed_time(end) / 1000.0
            else:
                pending.append((tier, start, end))
        self._events = pending
