"""Counts and events of an elastic run for loggers and the monitor's table."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ElasticHistory:
    """Counts and events of an elastic run; a recovered node continues them, except ``lost_seconds``.

    Attributes:
        nodes: How many nodes took part in the last synchronization.
        heals: How many nodes have recovered since the run began.
        lost_seconds: How long this node waited for lost nodes and for repeated synchronizations.
        joining: Admitted replicas that have not synchronized yet, and may have to ask again.
        events: Which nodes left and joined; the last hundred lines.
    """

    nodes: int = 0
    heals: int = 0
    lost_seconds: float = 0.0
    joining: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def scalars(self) -> dict[str, float]:
        """Return the numbers for loggers."""
        return {name: float(getattr(self, name)) for name in ("nodes", "heals", "lost_seconds")}

    def admit(self, joining: Collection[str], members: Collection[str]) -> None:
        """Count replicas that recover after a synchronization of these members; each once, even if it asks again."""
        self.heals += len({*joining} - {*self.joining})
        self.joining = sorted({*self.joining, *joining} - {*members})

    def note(self, event: str) -> None:
        self.events = [*self.events[-99:], f"{time.strftime('%H:%M:%S')} {event}"]

    def lines(self) -> list[str]:
        summary = f"nodes that left and joined: {self.heals} recovered; waited {self.lost_seconds:.1f} s for lost nodes"
        return [summary, *(f"  {event}" for event in self.events)]

    def common(self) -> dict[str, Any]:
        """Return the part that is equal on all nodes."""
        return {name: getattr(self, name) for name in ("heals", "events", "joining")}
