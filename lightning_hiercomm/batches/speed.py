"""Measures the time of a rank's training steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median, quantiles

import torch

from lightning_hiercomm.batches.partition import StepCost
from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.meter import Mark, Meter

_BLOCK_SECONDS = 0.2  # several periods of a CPU quota, which lets a process run and then stops it
_FIRST_STEPS = 2  # not timed: they allocate, compile, and fill the loader's queue
_STEPS_TIMED = 4  # at least
_BLOCKS_TIMED = 4
_ROUNDS = 2
_APART = 1.25  # closer batch sizes show no fixed cost


def fit_cost(seconds: Mapping[int, float]) -> StepCost:
    """Fit ``fixed + B / speed`` to seconds per step, by batch size B, by least squares; one size has no fixed cost."""
    if len(seconds) == 1:
        ((size, value),) = seconds.items()
        return StepCost(0.0, size / value)
    mean_size, mean_seconds = sum(seconds) / len(seconds), sum(seconds.values()) / len(seconds)
    covariance = sum((size - mean_size) * (value - mean_seconds) for size, value in seconds.items())
    slope = covariance / sum((size - mean_size) ** 2 for size in seconds)
    # time that does not grow with the batch is noise, or a step so short that only its fixed cost shows: without this
    # bound the rank could get the whole batch
    slope = max(slope, mean_seconds / mean_size / 20)
    if (fixed := mean_seconds - slope * mean_size) < 0:
        return StepCost(0.0, mean_size / mean_seconds)
    return StepCost(fixed, 1 / slope)


class StepClock:
    """Measures the seconds per step in which this rank computes, without waiting for other ranks.

    It takes the median over blocks of a fifth of a second. On CUDA it synchronizes the device once a block.
    """

    def __init__(self, meter: Meter, device: torch.device) -> None:
        self._meter = meter
        self._device = device
        self._blocks: list[float] = []
        self._loading_since: float | None = None
        self._load_seconds = 0.0  # of the step that comes next
        self._started: Mark | None = None
        self.drop_block()

    def load(self) -> None:
        """Begin to load a batch in this process; loading by workers does not count."""
        self._loading_since = time.perf_counter()

    def end_load(self) -> None:
        """End the loading of a batch, before ranks compare."""
        if self._loading_since is not None:
            self._load_seconds += time.perf_counter() - self._loading_since
            self._loading_since = None

    def start(self) -> None:
        """Begin a step, after its batch is loaded."""
        self.end_load()
        if not self._steps:
            self._waited_before = self._waited()
        self._loaded += self._load_seconds
        self._load_seconds = 0.0
        self._started = self._meter.mark(self._device)

    def stop(self) -> None:
        if self._started is None:
            return
        self._spans.append((self._started, self._meter.mark(self._device)))
        self._started = None
        self._steps += 1
        if time.perf_counter() - self._block_began > _BLOCK_SECONDS:
            self.end_block()

    def end_block(self) -> None:
        """End a block before something that is not a training step."""
        if self._steps:
            streams.synchronize(self._device)
            busy = self._loaded + sum(_seconds(start, end) for start, end in self._spans)
            self._blocks.append(max(busy - (self._waited() - self._waited_before), 1e-9) / self._steps)
        self.drop_block()

    def reset(self) -> None:
        """Drop all blocks, because steps will have another size."""
        self._blocks.clear()
        self.drop_block()

    def drop_block(self) -> None:
        """Drop the steps since the last block."""
        self._spans: list[tuple[Mark, Mark]] = []
        self._loaded = 0.0
        self._steps = 0
        self._waited_before = 0.0
        self._block_began = time.perf_counter()

    @property
    def spread(self) -> float:
        """Half the interquartile range of at least two blocks, relative to their median."""
        low, middle, high = quantiles(self._blocks, n=4, method="inclusive")
        return (high - low) / 2 / middle

    @property
    def blocks(self) -> int:
        """The number of blocks of steps that have one size."""
        return len(self._blocks)

    @property
    def seconds(self) -> float | None:
        """The median over the blocks, or None if there is no block yet."""
        return median(self._blocks) if self._blocks else None

    def _waited(self) -> float:
        return sum(self._meter.seconds.values())


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    return float(start.elapsed_time(end)) / 1000.0


class SpeedMeasurement:
    """Finds the cost of a step on this rank in two rounds: with batches of equal size, then of its own size.

    All ranks count the same steps. They compare their measurements after a few steps, and after each doubling, until
    every rank has enough of them.

    Attributes:
        clock: Times this rank's steps.
    """

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self._seconds: dict[int, float] = {}
        self._rounds = self._steps = 0
        self._steps_timed = _STEPS_TIMED

    def is_due(self) -> bool:
        """Count a step that begins; return whether ranks compare now."""
        steps, self._steps = self._steps, self._steps + 1
        if steps == _FIRST_STEPS:
            self.clock.reset()
        if steps < _FIRST_STEPS + self._steps_timed:
            return False
        self._steps_timed *= 2
        self.clock.drop_block()  # comparing is not part of a step
        return True

    def cost(self, size: int) -> tuple[StepCost, float] | None:
        """Return the cost of a step with batches of this size, and the spread of its time; None after too few steps."""
        own = self.clock.seconds
        if own is None or self.clock.blocks < _BLOCKS_TIMED:
            return None
        seconds = {**self._seconds, size: own}
        are_apart = max(seconds) >= _APART * min(seconds)
        return fit_cost(seconds if are_apart else {size: own}), self.clock.spread

    def end_round(self, size: int) -> bool:
        """End a round, after all ranks have found their costs; return whether it was the last one."""
        assert self.clock.seconds is not None
        self._seconds[size] = self.clock.seconds
        self._rounds += 1
        self._steps, self._steps_timed = 0, _STEPS_TIMED
        return self._rounds == _ROUNDS
