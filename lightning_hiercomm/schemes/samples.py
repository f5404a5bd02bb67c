"""Weights of ranks by the samples since the last synchronization, for nodes with unequal data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_hiercomm.nodes.round import Round


class SampleWeights:
    """Counts a rank's samples and optimizer steps, and weighs ranks by their samples since a synchronization.

    A rank without samples has weight 0. If no rank has any, all have the weights of the topology. The preflight of an
    exchange makes the counts known to all ranks.

    Fragments of a model are synchronized at unequal times, so the counts of each begin at its own synchronization.

    Args:
        is_normalized: Whether to correct for unequal numbers of steps (FedNova: Wang et al. 2020, Eq. 6 and 7). With
            weights p_i and steps tau_i since the reference parameters x, a synchronization then is ::

                x := x + (sum of p_j tau_j) * sum of p_i (x_i - x) / tau_i

    Attributes:
        round: The last synchronization, whose weights also count for tensors that no scheme exchanges. None before it.
    """

    def __init__(self, is_normalized: bool = False) -> None:
        self.is_normalized = is_normalized
        self.round: Round | None = None
        self._samples = 0.0
        self._steps = 0
        self._begins: dict[int, tuple[float, int]] = {}  # the counts at the last synchronization of each fragment

    def count(self, samples: float) -> None:
        """Count the samples of a batch."""
        self._samples += samples

    def count_step(self) -> None:
        """Count an optimizer step with gradients of this rank's own samples."""
        self._steps += 1

    def since(self, fragments: Sequence[int] | None = None) -> tuple[float, ...]:
        """Return this rank's counts since the last synchronization of fragments: samples and, if needed, steps.

        Args:
            fragments: The fragments. None: all.
        """
        fragments = [*self._begins] if fragments is None else fragments
        begins = [self._begins.get(fragment, (0.0, 0)) for fragment in fragments] or [(0.0, 0)]
        samples = self._samples - min(each[0] for each in begins)
        return (samples, self._steps - min(each[1] for each in begins)) if self.is_normalized else (samples,)

    def weighed(self, round_: Round, counts: Sequence[Sequence[float]]) -> Round:
        """Store and return a round with the weights of differences, given all ranks' :meth:`since`."""
        if self.is_normalized:
            round_ = replace(round_, of_differences=normalized(round_.weights, counts[1]))
        self.round = round_
        return round_

    def end(self, fragments: Sequence[int] | None = None) -> None:
        """Begin to count again, for fragments that have been synchronized. None: all."""
        if fragments is None:
            self._samples, self._steps, self._begins = 0.0, 0, {}
        else:
            self._begins.update(dict.fromkeys(fragments, (self._samples, self._steps)))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's counts."""
        return {"samples": self._samples, "steps": self._steps, "begins": dict(self._begins)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._samples, self._steps, self._begins = state["samples"], state["steps"], dict(state["begins"])


def normalized(weights: Sequence[float], steps: Sequence[float]) -> list[float]:
    """Return the weights of differences in FedNova's mean; equal steps keep the weights.

    Args:
        weights: The ranks' weights p_i, which sum to 1.
        steps: The ranks' optimizer steps tau_i; a rank without steps gets weight 0.
    """
    stepping = {count for weight, count in zip(weights, steps, strict=True) if weight and count}
    if len(stepping) == 1 and all(count or not weight for weight, count in zip(weights, steps, strict=True)):
        return [*weights]
    effective = sum(weight * count for weight, count in zip(weights, steps, strict=True))
    return [weight * effective / count if count else 0.0 for weight, count in zip(weights, steps, strict=True)]
