"""Requirements of a scheme that follow from its arguments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Requirements:
    """The kinds of runs that a scheme can train.

    Attributes:
        needs_whole_parameters: Why it cannot train sharded models, and the remedy; None if it can.
        needs_own_parameters: Why two optimizers cannot train the same parameter, and the remedy; None if they can.
        needs_fixed_nodes: Why no node may leave or join while it trains, and the remedy; None if nodes may.
        needs_equal_data: Why all nodes must have equally many batches, and the remedy; None if they need not.
        begins_with_copy: Whether a joining node begins with a copy of another node's parameters: nodes are never equal.
        can_average_optimizer_state: Whether blocking synchronizations of all parameters can average optimizer state.
    """

    needs_whole_parameters: str | None = None
    needs_own_parameters: str | None = None
    needs_fixed_nodes: str | None = None
    needs_equal_data: str | None = None
    begins_with_copy: bool = False
    can_average_optimizer_state: bool = False
