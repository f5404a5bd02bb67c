"""A clock that only moves by advance(), and ranks whose CPU can be taken away."""

from __future__ import annotations

import threading

import pytest

from lightning_hiercomm.batches import speed
from lightning_hiercomm.comm import meter


class ManualClock(threading.local):
    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """Replaces the clock that measures steps and waits."""
    clock = ManualClock()
    monkeypatch.setattr(speed, "time", clock)
    monkeypatch.setattr(meter, "time", clock)
    monkeypatch.setattr(meter.Meter, "mark", staticmethod(lambda device: clock.now))  # CUDA has its own clock
    return clock
