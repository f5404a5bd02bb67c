"""What a scheme requires of a run, as far as its arguments tell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Requirements:
    """What a run must offer, so that a scheme can train it.

    Attributes:
        needs_whole_parameters: Why it cannot train sharded models, and the remedy; None if it can.
        needs_fixed_nodes: Why no node may leave or join while it trains, and the remedy; None if nodes may.
        begins_with_copy: Whether a joining node begins with a copy of another node's parameters: nodes are never equal.
        can_average_optimizer_state: Whether nodes ever wait for each other with a state that could be averaged.
    """

    needs_whole_parameters: str | None = None
    needs_fixed_nodes: str | None = None
    begins_with_copy: bool = False
    can_average_optimizer_state: bool = False
