"""Schedules: which fragments of a model are due after a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from lightning_hiercomm.arguments import checked_fields


class Schedule(ABC):
    """A schedule. It depends on counters that are the same on every rank, and on nothing else.

    One whose agreements on the same part are always as many optimizer steps apart has an attribute ``period``, for
    whoever watches the run; others need none.
    """

    @abstractmethod
    def due(self, step: int, step_in_epoch: int, parts: int) -> Sequence[int]:
        """The parts on which the nodes are to agree after a step, in the order in which they travel.

        Args:
            step: Optimizer steps since the run began, this one included: 1, 2, ...
            step_in_epoch: The same since the epoch began.
            parts: Into how many parts the model is cut.
        """

    @abstractmethod
    def longest_staleness(self, parts: int) -> int:
        """The most steps that an exchange may take and still end before the next one starts."""


@checked_fields
@dataclass(frozen=True)
class Every(Schedule):
    """All parts at every ``period``-th step.

    Args:
        period: Optimizer steps from one agreement to the next. None: never.
        of: What steps are counted from: the beginning of each ``"epoch"``, or of the ``"run"``.

    Raises:
        ValueError: If the period is not positive.
    """

    period: int | None
    of: str = "run"

    def __post_init__(self) -> None:
        if self.period is not None and self.period < 1:
            raise ValueError(f"period={self.period} must be a positive number of steps")
        if self.of not in ("epoch", "run"):
            raise ValueError(f"of={self.of!r} must be 'epoch' or 'run'")

    @override
    def due(self, step: int, step_in_epoch: int, parts: int) -> Sequence[int]:
        counted = step_in_epoch if self.of == "epoch" else step
        return range(parts) if self.period is not None and counted % self.period == 0 else ()

    @override
    def longest_staleness(self, parts: int) -> int:
        return self.period or 0


@checked_fields
@dataclass(frozen=True)
class Staggered(Schedule):
    """Each part once in a period, the parts evenly spread over it.

    Part p of P is due after step t if ``t mod H == ((p + 1) H // P) mod H``, with H the period.

    Source: Douillard et al. 2025, "Streaming DiLoCo", section 2.2.

    Args:
        period: H, optimizer steps between two agreements on the same part.
    """

    period: int

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period={self.period} must be a positive number of steps")

    @override
    def due(self, step: int, step_in_epoch: int, parts: int) -> Sequence[int]:
        return [p for p in range(parts) if step % self.period == (p + 1) * self.period // parts % self.period]

    @override
    def longest_staleness(self, parts: int) -> int:
        return -(-self.period // parts) - 1
