"""``sync_every="auto"``: choose a period that limits the fraction of time spent waiting for exchanges."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeVar

import torch

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.base import Communicator

P = TypeVar("P", int, int | None)

OVERHEAD_TARGET = 0.05
"""The default of ``overhead_target``."""

_FIRST_EXCHANGES = 1  # not counted: they open connections
_FIRST_STEPS = 2  # not counted: they allocate, compile, and fill the loader's queue
_STEPS_KEPT = 64
_STEPS_BETWEEN = 3  # steps without an exchange; with two optimizers, one of these contains the other's exchange


@dataclass(frozen=True)
class Choice:
    """The measured times and the chosen period, equal on every rank.

    Attributes:
        period: Optimizer steps between two synchronizations of the same fragment.
        step_seconds: Seconds of a step without an exchange, on the slowest rank.
        exchange_seconds: Seconds that training waits for the exchanges of a period, without waits for slower ranks.
        overhead: Fraction of a period's training time spent waiting for exchanges.
    """

    period: int
    step_seconds: float
    exchange_seconds: float
    overhead: float

    def __str__(self) -> str:
        return (
            f"sync_every={self.period}: a step takes {1e3 * self.step_seconds:.3g} ms, and training waits"
            f" {1e3 * self.exchange_seconds:.3g} ms for the exchanges of a period, which is"
            f" {1e2 * self.overhead:.1f} % of it"
        )


@dataclass(frozen=True)
class AutoPeriod:
    """The settings of a :class:`PeriodTuner` for ``sync_every="auto"``.

    Attributes:
        target: The accepted overhead.
        least: The shortest period that the scheme can have.
        parts: Exchanges in a period.
    """

    target: float
    least: int
    parts: int = 1

    @property
    def provisional_period(self) -> int:
        """Optimizer steps between synchronizations until the period is chosen, some of them without an exchange."""
        return self.parts * (-(-self.least // self.parts) + _STEPS_BETWEEN)

    @property
    def exchanges(self) -> int:
        """The number of exchanges to time."""
        return _FIRST_EXCHANGES + self.parts * (4 if self.parts == 1 else 2)

    def check(self, left: int) -> None:
        """Raise a ValueError if the run, with ``left`` optimizer steps, ends before the period is chosen."""
        if left < self.steps:
            raise ValueError(
                f"sync_every='auto' times exchanges for the first {self.steps} optimizer steps, but the run ends"
                f" after {left}: set sync_every to a number, or train for longer"
            )

    @property
    def steps(self) -> int:
        """The largest number of optimizer steps needed to choose the period."""
        return _FIRST_STEPS + -(-self.exchanges * self.provisional_period // self.parts)


class PeriodTuner:
    """Times the steps and exchanges of a scheme with a short period, then chooses its period.

    With T the time of a step, E the time that training waits in the exchanges of a period (one for each fragment of the
    model), and the accepted overhead o, the period is ``H = max(least, ceil(E / (o T)))``: the smallest with ``E <= o H
    T``.

    Faster ranks wait for slower ones at a synchronization with any period. So the time of an exchange is that of the
    rank that waited least, and the time of a step that of the slowest rank. The median over several exchanges or steps
    is used.

    Args:
        auto: The accepted overhead o, the shortest period, and the number of exchanges in one.
        clock: Returns seconds.
    """

    def __init__(self, auto: AutoPeriod, clock: Callable[[], float] = time.perf_counter) -> None:
        self.auto = auto
        self.clock = clock
        self._device = torch.device("cpu")
        self._steps: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._steps_seen = 0
        self._exchanges: list[float] = []
        self._is_pending = False
        self._was_pending = False
        self._waited = 0.0  # in the pending exchange
        self._waited_in_step = 0.0
        self._step_ended: float | None = None

    def begin_epoch(self, device: torch.device) -> None:
        """Restart the clock, because time since the last step (validation, checkpoints) is not training."""
        self._device = device
        self._step_ended = None
        self._waited_in_step = 0.0

    @contextmanager
    def exchanging(self, starts: bool, ends: bool) -> Iterator[None]:
        """Return a context in which training waits for other nodes.

        Args:
            starts: Whether an exchange of the schedule starts.
            ends: Whether an exchange of the schedule ends: that one, or an earlier one.
        """
        start = self._now()
        yield
        waited = self._now() - start
        self._waited_in_step += waited
        if starts or ends:
            self._waited += waited
        self._is_pending |= starts
        if ends:
            self._exchanges.append(self._waited)
            self.drop()

    def drop(self) -> None:
        """Reset the timer of the pending exchange."""
        self._is_pending, self._waited = False, 0.0

    def end_step(self) -> bool:
        """Record the end of a step.

        Returns:
            Whether enough was measured to :meth:`choose`; equal on all ranks.
        """
        now = self._now()
        is_quiet = not self._is_pending and not self._was_pending
        if self._step_ended is not None and is_quiet:
            self._steps_seen += 1
            if self._steps_seen > _FIRST_STEPS:
                self._steps.append(now - self._step_ended - self._waited_in_step)
        self._was_pending, self._step_ended, self._waited_in_step = self._is_pending, now, 0.0
        return len(self._exchanges) >= self.auto.exchanges and bool(self._steps) and is_quiet

    def choose(self, world: Communicator) -> Choice:
        """Choose the period from the measurements of all ranks. Collective."""
        everyone: list[tuple[float, list[float]]] = world.all_gather_object(
            (median(self._steps), self._exchanges[_FIRST_EXCHANGES : self.auto.exchanges])
        )
        step = max(seconds for seconds, _ in everyone)
        waits = [min(waits) for waits in zip(*(waits for _, waits in everyone), strict=True)]
        parts = self.auto.parts
        waited = median(sum(waits[start : start + parts]) for start in range(0, len(waits), parts))
        overhead_at_every_step = waited / step if step else 0.0
        needed = math.ceil(overhead_at_every_step / self.auto.target * (1 - 1e-9))
        period = max(self.auto.least, needed)
        return Choice(period, step, waited, overhead_at_every_step / period)

    def _now(self) -> float:
        streams.synchronize(self._device)
        return self.clock()


def tuned(
    sync_every: P | Literal["auto"], target: float, least: int, parts: int = 1
) -> tuple[P | int, AutoPeriod | None]:
    """Return the initial period, and the settings of the tuner for ``"auto"``.

    Raises:
        ValueError: If ``sync_every`` is another string, or the target is out of range or not needed.
    """
    if not 0 < target < math.inf:
        raise ValueError(
            f"overhead_target={target} must be a positive fraction of the training time, such as 0.05 for 5 %"
        )
    if sync_every == "auto":
        auto = AutoPeriod(target, max(1, least), parts)
        return auto.provisional_period, auto
    if isinstance(sync_every, str):
        raise ValueError(f"sync_every={sync_every!r} must be a positive number of optimizer steps, or 'auto'")
    if target != OVERHEAD_TARGET:
        raise ValueError(
            f"overhead_target={target} is for sync_every='auto': leave it out with sync_every={sync_every}"
        )
    return sync_every, None
