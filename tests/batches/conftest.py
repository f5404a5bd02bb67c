"""A clock that only moves by advance(), and ranks that train on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import harness
import pytest
from torch.utils.data import DataLoader

from lightning_hiercomm import HeterogeneousBatches
from lightning_hiercomm.batches import speed
from lightning_hiercomm.batches.running import RunningBatches
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


def on_ranks(nodes: Any, work: Callable[[int, Any], Any]) -> list[Any]:
    """What ``work(rank, topology)`` returns on each rank."""
    return harness.on_ranks(lambda topology: work(topology.rank, topology), nodes)


def bound(
    topology: Any, *arguments: Any, state: Any = None, least: int = 1, may_change: bool = True, **named: Any
) -> RunningBatches:
    """HeterogeneousBatches of these arguments on this rank, perhaps in a run that is resumed."""
    config = HeterogeneousBatches(*arguments, **named)
    return RunningBatches(config, topology, harness.place.device, least, state, may_change)


Seconds = Callable[[int], float]


def steps(
    clock: ManualClock, batches: RunningBatches, loaded: Iterable[Any], seconds: Seconds, first: int = 0, every: int = 1
) -> Iterator[Any]:
    """Take a step of ``seconds(size)`` on each batch of those that are ``loaded``; yield the batch."""
    for step, samples in enumerate(loaded, first):
        batches.begin_step(step, every)
        assert len(samples) == batches.batch_size
        clock.advance(seconds(len(samples)))
        batches.end_step()
        yield samples


def train(clock: ManualClock, batches: RunningBatches, seconds: Seconds, count: int = 400) -> list[Any]:
    """Train an epoch of so many steps; return the indices of each batch."""
    total = batches.config.global_batch_size
    sampler = batches.process_dataloader(DataLoader(range(count * total))).batch_sampler
    batches.announce()
    sampler.sampler.set_epoch(0)
    batches.begin_epoch(0)
    return [*steps(clock, batches, sampler, seconds)]


def four_times_as_slow(rank: int) -> Seconds:
    """Seconds of a step on rank 0, a millisecond a sample, and on rank 1, four."""
    return lambda size: size * 1e-3 * (1 + 3 * rank)
