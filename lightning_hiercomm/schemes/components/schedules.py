"""Schedules, which determine the fragments of a model that are due after a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from lightning_hiercomm.arguments import checked_fields


class Schedule(ABC):
    """Base class of schedules: functions from counters, equal on all ranks, to the fragments that are due.

    Attributes:
        period: Optimizer steps between two merges of the same fragment; None if there is no such number.
    """

    period: int | None = None

    @abstractmethod
    def due(self, step: int, step_in_epoch: int, fragments: int) -> Sequence[int]:
        """Return the fragments that are due after a step, in the order in which they are sent.

        Args:
            step: Optimizer steps since the run began, this one included: 1, 2, ...
            step_in_epoch: Optimizer steps since the epoch began, this one included.
            fragments: The number of fragments of the model.
        """

    @abstractmethod
    def longest_staleness(self, fragments: int) -> int:
        """Return the largest staleness with which every exchange ends before the next one starts."""


@checked_fields
@dataclass(frozen=True)
class Every(Schedule):
    """All fragments at every ``period``-th step.

    Args:
        period: Optimizer steps from one merge to the next. None: never.
        of: Start of the step count: the beginning of each ``"epoch"``, or of the ``"run"``.

    Raises:
        ValueError: If the period is not positive.
    """

    period: int | None = field()
    of: str = "run"

    def __post_init__(self) -> None:
        if self.period is not None and self.period < 1:
            raise ValueError(f"period={self.period} must be a positive number of steps")
        if self.of not in ("epoch", "run"):
            raise ValueError(f"of={self.of!r} must be 'epoch' or 'run'")

    @override
    def due(self, step: int, step_in_epoch: int, fragments: int) -> Sequence[int]:
        counted = step_in_epoch if self.of == "epoch" else step
        return range(fragments) if self.period is not None and counted % self.period == 0 else ()

    @override
    def longest_staleness(self, fragments: int) -> int:
        return self.period or 0


@checked_fields
@dataclass(frozen=True)
class Staggered(Schedule):
    """Synchronize each fragment once per period, evenly spread over it.

    Fragment p of P is due after step t if ``t mod H == ((p + 1) H // P) mod H``, with H the period.

    Source: Douillard et al. 2025, "Streaming DiLoCo", section 2.2.

    Args:
        period: H, optimizer steps between two merges of the same fragment.
    """

    period: int = field()

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period={self.period} must be a positive number of steps")

    @override
    def due(self, step: int, step_in_epoch: int, fragments: int) -> Sequence[int]:
        return [p for p in range(fragments) if step % self.period == (p + 1) * self.period // fragments % self.period]

    @override
    def longest_staleness(self, fragments: int) -> int:
        return -(-self.period // fragments) - 1
