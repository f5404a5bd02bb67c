"""What a scheme needs of a run, and what it costs, as far as its arguments say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """For whoever plans a run, refuses it, or lets nodes join it.

    Attributes:
        needs_whole_parameters: Why ranks that hold parts of a model cannot follow it, and the remedy; None if they can.
        needs_nodes_that_stay: Why no node may leave or join while it trains, and what to take; None if they may.
        begins_with_copy: Whether a node that comes begins with what another has become by itself: they are never equal.
        can_average_optimizer_state: Whether the nodes ever wait for each other with a state that could be averaged.
        shares_optimizer_state: Whether every rank holds only its part of the optimizer's state.
        drift: Steps that nodes train apart, the oldest that they do not know of each other: a rough order of risk.
        drift_of_two: The same of two nodes, where that is less.
        first_phase: How to say what a step takes in phases that end, given ``{seconds}`` of one; None without any.
        period: Steps after which it does the same again, or why that is not known before a run.
        leaves: Whether something leaves for the other nodes after a step of the first cycle, counted from 1.
    """

    needs_whole_parameters: str | None = None
    needs_nodes_that_stay: str | None = None
    begins_with_copy: bool = False
    can_average_optimizer_state: bool = False
    shares_optimizer_state: bool = False
    drift: float = 0
    drift_of_two: float | None = None
    first_phase: str | None = None
    period: int | str = 1
    leaves: Callable[[int], bool] = lambda step: True

    @property
    def cycle(self) -> int:
        """Steps after which it does the same again.

        Raises:
            ValueError: If that is not known before a run.
        """
        if isinstance(self.period, str):
            raise ValueError(self.period)
        return self.period

    @property
    def agreements_per_cycle(self) -> int:
        """How often something leaves for the other nodes in a :attr:`cycle`; raises as that does."""
        return max(1, sum(self.leaves(step) for step in range(1, self.cycle + 1)))
