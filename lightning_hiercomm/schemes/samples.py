"""Counts of samples since the last synchronization, which weigh nodes with unequal data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hiercomm.nodes.round import Round


class SampleWeights:
    """Counts a rank's samples since a synchronization, by which the preflight of the next one weighs the ranks.

    A rank without samples has weight 0. If no rank has any, all have the weights of the topology.

    Fragments of a model are synchronized at unequal times, so the count of each begins at its own synchronization.

    Attributes:
        round: The last synchronization, whose weights also count for tensors that no scheme exchanges. None before it.
    """

    def __init__(self) -> None:
        self.round: Round | None = None
        self._samples = 0.0
        self._begins: dict[int, float] = {}  # the count at the last synchronization of each fragment

    def count(self, samples: float) -> None:
        """Count the samples of a batch."""
        self._samples += samples

    def since(self, fragments: Sequence[int] | None = None) -> float:
        """Return this rank's samples since the last synchronization of fragments. None: of all."""
        fragments = [*self._begins] if fragments is None else fragments
        return self._samples - min((self._begins.get(fragment, 0.0) for fragment in fragments), default=0.0)

    def end(self, fragments: Sequence[int] | None = None) -> None:
        """Begin to count again, for fragments that have been synchronized. None: all."""
        if fragments is None:
            self._samples, self._begins = 0.0, {}
        else:
            self._begins.update(dict.fromkeys(fragments, self._samples))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's counts."""
        return {"samples": self._samples, "begins": dict(self._begins)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._samples, self._begins = state["samples"], dict(state["begins"])
