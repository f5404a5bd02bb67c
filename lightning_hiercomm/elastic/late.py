"""Late nodes: how long the others wait for them, and how their progress is merged afterwards."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

_ROUNDS = 32  # arrivals of so many synchronizations are kept
_FEWEST = 3
_QUANTILE = 0.9
_TIMES = 3.0
_SHARE = 0.25  # of the median round


def weight_of(age: int) -> float:
    """Return the weight of progress that began ``age`` synchronizations ago: ``(1 + age) ** -0.5``.

    Source: the polynomial staleness function of FedAsync with a = 1/2 (Xie et al., Asynchronous Federated Optimization,
    2019), which FedBuff also uses (Nguyen et al., AISTATS 2022).
    """
    return float((1 + age) ** -0.5)


class ArrivalTimes:
    """The seconds that the nodes took from one synchronization to the next, in the last 32 of them."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, ...]] = deque(maxlen=_ROUNDS)

    def add(self, seconds: Sequence[float]) -> None:
        """Add the times of the members of one synchronization; empty times (0) are left out."""
        known = tuple(each for each in seconds if each > 0)
        if known:
            self._rounds.append(known)

    def grace(self, bound: float | None = None) -> float | None:
        """Return how many seconds the others wait beyond a usual round; None if too few rounds are known.

        It is the greater of a quarter of the median round, and three times the 0.9 quantile (nearest rank) of the
        delays, which are differences from the median of their round.
        """
        if len(self._rounds) < _FEWEST:
            return None
        medians = [median(each) for each in self._rounds]
        delays = sorted(max(0.0, t - middle) for each, middle in zip(self._rounds, medians, strict=True) for t in each)
        quantile = delays[math.ceil(_QUANTILE * len(delays)) - 1]
        grace = max(_SHARE * median(medians), _TIMES * quantile)
        return grace if bound is None else min(grace, bound)

    def longest(self, bound: float | None = None) -> float | None:
        """Return after how many seconds a node is late: the longest round's median, and the grace period."""
        grace = self.grace(bound)
        return None if grace is None else max(median(each) for each in self._rounds) + grace


class OwnProgress:
    """A node's progress since its last synchronization, from a copy of the averaged parameters."""

    def __init__(self) -> None:
        self._averaged: dict[str, Tensor] = {}

    @torch.no_grad()
    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Store the averaged parameters, by their names."""
        for name, value in parameters.items():
            if name in self._averaged and self._averaged[name].shape == value.shape:
                self._averaged[name].copy_(value)
            else:
                self._averaged[name] = value.detach().clone()
        for name in self._averaged.keys() - parameters.keys():
            del self._averaged[name]

    @torch.no_grad()
    def differences(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the difference of present parameters from the stored ones."""
        return {
            name: value.detach() - self._averaged[name]
            for name, value in parameters.items()
            if name in self._averaged and self._averaged[name].shape == value.shape
        }


@torch.no_grad()
def merge_progress(parameters: Mapping[str, Tensor], differences: Mapping[str, Tensor], age: int) -> None:
    """Add the discounted progress of a late node to the present averaged parameters, in place."""
    for name, difference in differences.items():
        parameters[name].add_(difference, alpha=weight_of(age))
