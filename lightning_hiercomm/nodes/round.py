"""A synchronization as a value, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Round:
    """One synchronization: its number, its step, who takes part, and with which weights.

    Attributes:
        number: How many synchronizations came before it.
        step: The optimizer steps that all ranks have taken.
        nodes: The ranks that take part, by node.
        weights: A weight per rank; they sum to 1. A rank without samples has weight 0.
    """

    number: int
    step: int
    nodes: Sequence[Sequence[int]]
    weights: Sequence[float]

    @cached_property
    def of_nodes(self) -> tuple[float, ...]:
        """Each node's weight: the sum over its ranks."""
        return tuple(sum(self.weights[rank] for rank in ranks) for ranks in self.nodes)

    def in_node(self, node: int) -> tuple[float, ...]:
        """Return the weights of a node's ranks, normalized, in local order."""
        own = [self.weights[rank] for rank in self.nodes[node]]
        return tuple(weight / (sum(own) or 1.0) for weight in own)
