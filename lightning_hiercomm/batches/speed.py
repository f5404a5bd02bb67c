"""How long a rank's training steps take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from lightning_hiercomm.batches.partition import StepCost
from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.meter import Mark, Meter

_BLOCK_SECONDS = 0.2  # several periods of a CPU quota, which lets a process run and then stops it
_FIRST_STEPS = 2  # allocate, compile, and fill the loader's queue; not timed
_STEPS_TIMED = 4  # at least
_BLOCKS_TIMED = 4
_ROUNDS = 2
_APART = 1.25  # times of sizes closer than this differ by chance


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


class StepClock:
    """Seconds per step that this rank computes in training; the time in which it waits for other ranks is left out.

    Keeps the moving median over blocks of a fifth of a second. On CUDA the device is synchronised once a block.

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
        if time.perf_counter() - self._block_began > _BLOCK_SECONDS:
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

    def drop_block(self) -> None:
        """Forget the steps since the last block."""
        self._forget_block()

    def time(self, blocks: int) -> StepTime | None:
        """The time of a step, or None if fewer blocks were seen."""
        return StepTime.of(self._blocks) if len(self._blocks) >= blocks else None

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


class SpeedMeasurement:
    """Finds what a step costs this rank, in two rounds of training steps: batches of equal size, then of its own size.

    All ranks count the same steps. They compare what they have seen after a few of them, and, until that is enough for
    every rank, whenever there are twice as many.

    Args:
        clock: Times the steps.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._seconds: dict[int, float] = {}
        self._rounds = self._steps = 0
        self._steps_timed = _STEPS_TIMED

    def is_due(self) -> bool:
        """Count a step that begins; return whether ranks compare now."""
        steps, self._steps = self._steps, self._steps + 1
        if steps == _FIRST_STEPS:
            self._clock.reset()
        if steps < _FIRST_STEPS + self._steps_timed:
            return False
        self._steps_timed *= 2
        self._clock.drop_block()  # of the time in which ranks compare no step is a part
        return True

    def cost(self, size: int) -> tuple[StepCost, float] | None:
        """The cost of a step, and the spread of its time; None if too few steps were seen.

        Args:
            size: Of this rank's batches.
        """
        time = self._clock.time(_BLOCKS_TIMED)
        if time is None:
            return None
        seconds = {**self._seconds, size: time.seconds}
        if max(seconds) >= _APART * min(seconds):
            return fit_cost(seconds), time.spread
        return StepCost(0.0, size / time.seconds), time.spread

    def end_round(self, size: int) -> bool:
        """End a round, in which all ranks have found their costs; return whether it was the last one."""
        time = self._clock.time(_BLOCKS_TIMED)
        assert time is not None
        self._seconds[size] = time.seconds
        self._rounds += 1
        self._steps, self._steps_timed = 0, _STEPS_TIMED
        return self._rounds == _ROUNDS
