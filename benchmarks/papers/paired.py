"""How far two methods are apart, by runs of the same seeds: these share initial values and batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120),
    *(2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045),
)
"""Of Student's t, 97.5 %, for 1 to 29 degrees of freedom."""


@dataclass(frozen=True)
class Difference:
    """A mean difference and its 95 % interval.

    Attributes:
        mean: Over the pairs.
        half: Half the interval's width; infinity of a single pair.
        pairs: How many.
        diverged: The number of further pairs in which one run diverged, or both.
    """

    mean: float
    half: float
    pairs: int
    diverged: int = 0

    @property
    def low(self) -> float:
        """The interval's lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Its upper end."""
        return self.mean + self.half

    @property
    def is_shown(self) -> bool:
        """Whether 0 lies outside the interval."""
        return self.low > 0 or self.high < 0

    def text(self, digits: int = 1) -> str:
        """``+1.2, from -0.3 to 2.7``, and how many diverged; bold where a difference is shown."""
        if not self.pairs:
            return "diverged" if self.diverged else ""
        mean = f"{self.mean:+.{digits}f}"
        lost = f" ({self.diverged} of {self.pairs + self.diverged} diverged)" if self.diverged else ""
        if math.isinf(self.half):
            return f"{mean} (one run){lost}"
        shown = f"**{mean}**" if self.is_shown else mean
        return f"{shown}, from {self.low:.{digits}f} to {self.high:.{digits}f}{lost}"


def difference(one: Mapping[int, float | None], other: Mapping[int, float | None]) -> Difference:
    """Return the difference of one to the other over their common seeds; seeds where either diverged are counted."""
    both = [(a, other[seed]) for seed, a in one.items() if seed in other]
    pairs = [a - b for a, b in both if a is not None and b is not None]
    diverged = len(both) - len(pairs)
    if len(pairs) < 2:
        return Difference(pairs[0] if pairs else math.nan, math.inf, len(pairs), diverged)
    if len(pairs) > len(_QUANTILES) + 1:
        raise ValueError(f"{len(pairs)} pairs: intervals are known of 2 to {len(_QUANTILES) + 1}")
    half = _QUANTILES[len(pairs) - 2] * stdev(pairs) / math.sqrt(len(pairs))
    return Difference(fmean(pairs), half, len(pairs), diverged)
