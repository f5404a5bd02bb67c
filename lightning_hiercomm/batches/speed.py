"""How long a rank's training steps take: measured before training, and watched during it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

from lightning_hiercomm.batches.partition import StepCost
from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.meter import Mark, Meter

_BLOCK_SECONDS = 0.1
_TOLERANCE = 0.05
_BLOCKS_AT_ONCE = 3
_MOST_BLOCKS = 9


def fit_cost(seconds: Mapping[int, float]) -> StepCost:
    """The line ``fixed + B / speed`` through measured step times, by least squares.

    Args:
        seconds: Per step, by batch size. A single size gives no fixed cost.
    """
    if len(seconds) == 1:
        ((size, value),) = seconds.items()
        return StepCost(0.0, size / value)
    mean_size, mean_seconds = sum(seconds) / len(seconds), sum(seconds.values()) / len(seconds)
    covariance = sum((size - mean_size) * (value - mean_seconds) for size, value in seconds.items())
    slope = covariance / sum((size - mean_size) ** 2 for size in seconds)
    # Time that does not seem to grow with the batch is noise, or a step so short that only its fixed cost shows: do not
    # promise that this rank could take everything.
    slope = max(slope, mean_seconds / mean_size / 20)
    if (fixed := mean_seconds - slope * mean_size) < 0:
        return StepCost(0.0, mean_size / mean_seconds)
    return StepCost(fixed, 1 / slope)


@dataclass(frozen=True)
class StepTime:
    """How long a training step took.

    Attributes:
        seconds: The median over blocks of steps.
        spread: How far the middle half of the blocks reaches to either side, relative to the median.
    """

    seconds: float
    spread: float

    @classmethod
    def of(cls, blocks: Sequence[float]) -> StepTime:
        """Of the seconds per step in each of two blocks or more."""
        low, middle, high = quantiles(blocks, n=4, method="inclusive")
        return cls(middle, (high - low) / 2 / middle)


def time_step(
    step: Callable[[], object], gather: Callable[[Any], list[Any]], synchronize: Callable[[], object]
) -> StepTime:
    """How long ``step`` takes, over blocks of steps.

    A block lasts a tenth of a second or more on the fastest rank, if that is not too long on the slowest; those from
    one meeting of the ranks to the next follow each other at once: a CPU quota lets a process run and then stops it,
    within such a period, and one that waits may run on without a stop. All ranks take the same number of steps, so
    those may contain collectives.

    Args:
        step: A training step. Called a few times before it is timed.
        gather: Everyone's value, in rank order; collective.
        synchronize: Waits until the device has done what it was given.
    """

    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        return time.perf_counter() - start

    run(2)  # warm-up: allocations, kernels chosen by trial, lazy modules
    steps = 1
    blocks: list[float] = []
    while True:
        blocks += [run(steps) for _ in range(_BLOCKS_AT_ONCE)]
        settled = _is_close(median(blocks), median(blocks[:-1])) or len(blocks) >= _MOST_BLOCKS
        lasted, are_settled = zip(*gather((median(blocks), settled)), strict=True)
        if min(lasted) < _BLOCK_SECONDS and max(lasted) < 5 * _BLOCK_SECONDS:  # room to double, at least
            steps *= min(math.ceil(_BLOCK_SECONDS / min(lasted)), int(10 * _BLOCK_SECONDS / max(lasted)))
            blocks.clear()
        elif all(are_settled):
            return StepTime.of([seconds / steps for seconds in blocks])


class StepClock:
    """Seconds per step that this rank computes in training; the time in which it waits for other ranks is left out.

    Keeps the moving median over blocks of about a fifth of a second. On CUDA the device is synchronised once a block.

    Args:
        meter: Knows how long training waited.
        device: Where it trains.
        window: Blocks that the median looks at.
    """

    def __init__(self, meter: Meter, device: torch.device, window: int = 16) -> None:
        self._meter = meter
        self._device = device
        self._blocks: deque[float] = deque(maxlen=window)
        self._loading_since: float | None = None
        self._started: Mark | None = None
        self._forget_block()

    def load(self) -> None:
        """This process begins to load a batch (workers' loading does not count)."""
        self._loading_since = time.perf_counter()

    def start(self) -> None:
        """A step begins, its batch is loaded."""
        if not self._steps:
            self._waited_before = self._waited()
        if self._loading_since is not None:
            self._loaded += time.perf_counter() - self._loading_since
            self._loading_since = None
        self._started = self._meter.mark(self._device)

    def stop(self) -> None:
        """A step ends."""
        if self._started is None:
            return
        self._spans.append((self._started, self._meter.mark(self._device)))
        self._started = None
        self._steps += 1
        if time.perf_counter() - self._block_began > 2 * _BLOCK_SECONDS:
            self.end_block()

    def end_block(self) -> None:
        """What comes next is no step of training."""
        if self._steps:
            streams.synchronize(self._device)
            busy = self._loaded + sum(_seconds(start, end) for start, end in self._spans)
            self._blocks.append(max(busy - (self._waited() - self._waited_before), 1e-9) / self._steps)
        self._forget_block()

    def reset(self) -> None:
        """Forget everything: steps will be of another size."""
        self._blocks.clear()
        self._forget_block()

    @property
    def seconds(self) -> float | None:
        """The moving median, or None if nothing was seen yet."""
        return median(self._blocks) if self._blocks else None

    def _forget_block(self) -> None:
        self._spans: list[tuple[Mark, Mark]] = []
        self._loaded = 0.0
        self._steps = 0
        self._waited_before = 0.0
        self._block_began = time.perf_counter()

    def _waited(self) -> float:
        return sum(self._meter.seconds.values())


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    return float(start.elapsed_time(end)) / 1000.0


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= _TOLERANCE * b
