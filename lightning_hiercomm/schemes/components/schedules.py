"""Schedules, which determine the fragments of a model that are due after a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from typing_extensions import override

from lightning_hiercomm.arguments import as_call, checked_fields
from lightning_hiercomm.schemes.tuning import OVERHEAD_TARGET, AutoPeriod


class Schedule(ABC):
    """Base class of schedules: functions from counters, equal on all ranks, to the fragments that are due.

    Attributes:
        period: Optimizer steps between two merges of the same fragment; None if there is no such number.
        counts_in_epoch: Whether steps are counted from the start of each epoch.
        auto: How to choose the period in the first steps of a run; None if it is given.
    """

    period: int | None = None
    auto: AutoPeriod | None = None

    @property
    def counts_in_epoch(self) -> bool:
        return False

    def with_period(self, period: int) -> Schedule:
        """Return the same schedule with another period."""
        return self

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

    @property
    @override
    def counts_in_epoch(self) -> bool:
        return self.of == "epoch"

    @override
    def with_period(self, period: int) -> Every:
        return replace(self, period=period)

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
    def with_period(self, period: int) -> Staggered:
        return replace(self, period=period)

    @override
    def due(self, step: int, step_in_epoch: int, fragments: int) -> Sequence[int]:
        return [p for p in range(fragments) if step % self.period == (p + 1) * self.period // fragments % self.period]

    @override
    def longest_staleness(self, fragments: int) -> int:
        return -(-self.period // fragments) - 1


@dataclass(frozen=True)
class Auto(Schedule):
    """A schedule whose period is measured in the first steps of a run: ``sync_every="auto"``.

    Args:
        provisional: The schedule while steps and exchanges are timed.
        auto: How to choose the period afterwards.
    """

    provisional: Schedule = field()
    auto: AutoPeriod = field()

    @property
    @override
    def period(self) -> int | None:  # type: ignore[override]
        return self.provisional.period

    @property
    @override
    def counts_in_epoch(self) -> bool:
        return self.provisional.counts_in_epoch

    @override
    def with_period(self, period: int) -> Schedule:
        return self.provisional.with_period(period)

    @override
    def due(self, step: int, step_in_epoch: int, fragments: int) -> Sequence[int]:
        return self.provisional.due(step, step_in_epoch, fragments)

    @override
    def longest_staleness(self, fragments: int) -> int:
        return self.provisional.longest_staleness(fragments)


@checked_fields
@dataclass(frozen=True)
class EverySeconds(Schedule):
    """Synchronize by the clock: each node takes as many optimizer steps as it can in between.

    A node synchronizes after its first step that ends ``seconds`` or more after the last synchronization. With P
    fragments, one fragment follows another in a fixed order, one every ``seconds / P``. All nodes leave an exchange at
    nearly the same time, and each starts its clock again there. So nodes need no message to choose the next one, and
    wait for at most one step of the slowest. The ranks of a node follow the clock of its first rank, which costs one
    all-reduce of a number inside the node per step, and nothing on nodes of one rank. Before each exchange, one
    all-reduce of 8 numbers per rank runs over all ranks.

    It implies ``unequal_data=True``: nodes are weighted by their samples. A node without further batches waits in the
    exchanges with weight 0. The exchange that finds no node with batches ends the epoch on all nodes. At each exchange
    ``trainer.global_step``, and so ``max_steps``, becomes the mean of the nodes' steps: nodes would otherwise idle
    until the slowest has taken ``max_steps``. Learning-rate schedulers of steps advance as much there, so that they
    are equal on all nodes. ``trainer.estimated_stepping_batches`` is known only with ``max_steps``.

    Example::

        HierarchicalStrategy(DiLoCo(sync_every=EverySeconds(30), fragments=4))

    Args:
        seconds: Seconds between two synchronizations of the same fragment, shorter than the process group's timeout.
            ``"auto"``: after each exchange, as many as ``overhead_target`` allows: the share of time that the slowest
            node spends in an exchange, without waiting for others. The first two exchanges come after a second each.

    Raises:
        ValueError: If the seconds are not positive.
    """

    seconds: float | Literal["auto"]

    __repr__ = as_call

    def __post_init__(self) -> None:
        if isinstance(self.seconds, str):
            if self.seconds != "auto":
                raise ValueError(f"EverySeconds: seconds={self.seconds!r} must be a positive number, or 'auto'")
        elif not self.seconds > 0:
            raise ValueError(f"EverySeconds: seconds={self.seconds} must be a positive number, or 'auto'")

    @override
    def due(self, step: int, step_in_epoch: int, fragments: int) -> Sequence[int]:
        return ()  # no number of steps decides, but `Pace`

    @override
    def longest_staleness(self, fragments: int) -> int:
        return 0


def by_clock(schedule: EverySeconds, target: float) -> EverySeconds:
    """Return a schedule by the clock, if ``overhead_target`` fits it.

    Raises:
        ValueError: If the target is out of range or not needed.
    """
    if not 0 < target < 1:
        raise ValueError(f"overhead_target={target} must be a fraction of the training time between 0 and 1")
    if schedule.seconds != "auto" and target != OVERHEAD_TARGET:
        raise ValueError(f"overhead_target={target} is for EverySeconds('auto'): leave it out with {schedule!r}")
    return schedule
