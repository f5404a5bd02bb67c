"""Counts and events of an elastic run for loggers and the monitor's table."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

_COMMON = (
    *("heals", "lost_batches", "events", "joining"),
    *("missed_syncs", "late_merges", "late_age", "late_weight", "missed"),
)


@dataclass
class ElasticHistory:
    """Counts and events of an elastic run; a recovered node continues them, except ``lost_seconds``.

    Attributes:
        nodes: How many nodes took part in the last synchronization.
        heals: How many nodes have recovered since the run began.
        lost_seconds: How long this node waited for lost nodes and for repeated synchronizations.
        lost_batches: Batches, of one rank each, that the averaged model has not learned from; also those of late nodes,
            which are merged later.
        missed_syncs: How many synchronizations late nodes have missed, summed over nodes.
        late_merges: How often a late node's progress was merged.
        late_age: How many synchronizations the last late node had missed.
        late_weight: The weight of its progress.
        missed: How many synchronizations each late node has missed, by its name.
        joining: Admitted replicas that have not synchronized yet, and may have to ask again.
        events: Which nodes left and joined; the last hundred lines.
    """

    nodes: int = 0
    heals: int = 0
    lost_seconds: float = 0.0
    lost_batches: int = 0
    missed_syncs: int = 0
    late_merges: int = 0
    late_age: int = 0
    late_weight: float = 0.0
    missed: dict[str, int] = field(default_factory=dict)
    joining: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def scalars(self) -> dict[str, float]:
        """Return the numbers for loggers."""
        late = ("missed_syncs", "late_merges", "late_age", "late_weight") if self.missed else ()
        return {name: float(getattr(self, name)) for name in ("nodes", "heals", "lost_seconds", "lost_batches", *late)}

    def admit(self, joining: Collection[str], members: Collection[str]) -> None:
        """Count replicas that recover after a synchronization of these members; each once, even if it asks again."""
        self.heals += len({*joining} - {*self.joining})
        self.joining = sorted({*self.joining, *joining} - {*members})

    def note_late(self, node: str, age: int, weight: float) -> None:
        """Count a late node that continues from the present state after it has missed ``age`` synchronizations."""
        self.missed = {**self.missed, node: self.missed.get(node, 0) + age}
        self.missed_syncs = sum(self.missed.values())
        self.late_merges, self.late_age, self.late_weight = self.late_merges + 1, age, weight
        self.note(f"node {node} was late: missed {age} synchronizations, continues with weight {weight:.2f}")

    def note(self, event: str) -> None:
        self.events = [*self.events[-99:], f"{time.strftime('%H:%M:%S')} {event}"]

    def lines(self) -> list[str]:
        summary = (
            f"nodes that left and joined: {self.heals} recovered; waited {self.lost_seconds:.1f} s for lost nodes;"
            f" {self.lost_batches} batches were lost with them"
        )
        return [summary, *(f"  {event}" for event in self.events)]

    def common(self) -> dict[str, Any]:
        """Return the part that is equal on all nodes."""
        return {name: getattr(self, name) for name in _COMMON}
