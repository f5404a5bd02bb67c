"""Computes the number of samples of each rank, and the weight of its gradient."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Weighting = Literal["samples", "speed", "none"]


@dataclass(frozen=True)
class StepCost:
    """The time of a training step on a rank: ``seconds(B) = fixed + B / speed``.

    Attributes:
        fixed: Seconds of a step of any size (kernel launches, Python).
        speed: Samples per second, without that.
    """

    fixed: float
    speed: float

    def seconds(self, size: int) -> float:
        """Return the time of a step with ``size`` samples."""
        return self.fixed + size / self.speed


@dataclass(frozen=True)
class Speeds:
    """The speeds of all ranks.

    Attributes:
        costs: The cost of a step on every rank; empty until they are measured.
        given: Samples per second of every rank, if the user gives them.
        spreads: How much each rank's step times varied; empty if they were not measured in this run.
    """

    costs: Sequence[StepCost]
    given: list[float] | Literal["measure"]
    spreads: Sequence[float] = ()

    @property
    def is_measured(self) -> bool:
        """Whether costs are in seconds; speeds that a user gives have any unit."""
        return self.given == "measure"


def divide(total: int, costs: Sequence[StepCost], least: int = 1) -> list[int]:
    """Divide a global batch so that all ranks finish a step at the same time, as nearly as whole samples allow.

    Without fixed costs rank ``i`` gets ``total * s_i / sum(s)``. Numbers are rounded by largest remainder (ties: the
    lower rank), so they sum to ``total``. Ranks below ``least`` get that, and the others divide the rest.

    Source: HetGrad, Section 3 (``b_p = B * s_p``; the paper rounds each share on its own).

    Args:
        total: Samples of the global batch, G.
        costs: The cost of a step on every rank.
        least: The fewest samples of a rank, unless the global batch is too small.

    Returns:
        Samples per rank, at least 1 each.

    Raises:
        ValueError: If there are fewer samples than ranks.
    """
    if total < len(costs):
        raise ValueError(
            f"global_batch_size={total} is less than one sample for each of the {len(costs)} ranks: raise it"
        )
    # the samples that fit into T seconds grow piecewise linearly with T, with a bend where a rank leaves the least
    fixed = [Fraction(cost.fixed) for cost in costs]
    speed = [Fraction(cost.speed) for cost in costs]
    if total < least * len(costs):
        least = 1

    def shares(seconds: Fraction) -> list[Fraction]:
        return [max(Fraction(least), (seconds - a) * s) for a, s in zip(fixed, speed, strict=True)]

    def taken(seconds: Fraction) -> Fraction:
        return sum(shares(seconds), Fraction(0))

    bends = sorted(a + least / s for a, s in zip(fixed, speed, strict=True))
    bend = bends[bisect_right(bends, Fraction(total), key=taken) - 1]
    growing = sum((s for a, s in zip(fixed, speed, strict=True) if a + least / s <= bend), Fraction(0))
    return largest_remainder(shares(bend + (total - taken(bend)) / growing))


def largest_remainder(shares: Sequence[Fraction]) -> list[int]:
    """Round numbers whose sum is whole and keep the sum: round down, then add 1 where most was lost."""
    rounded = [int(share) for share in shares]
    by_loss = sorted(range(len(shares)), key=lambda i: (rounded[i] - shares[i], i))
    for i in by_loss[: int(sum(shares)) - sum(rounded)]:
        rounded[i] += 1
    return rounded


def relative_speeds(speeds: Sequence[float]) -> list[float]:
    """Return the speeds relative to the slowest rank, ``c_i = s_i / min(s)`` (HetGrad, Section 3)."""
    slowest = min(speeds)
    return [speed / slowest for speed in speeds]


def rank_weights(weighting: Weighting, sizes: Sequence[int], speeds: Sequence[float]) -> list[float]:
    """Return the weight of each rank's mean gradient in the sum over ranks; the weights sum to 1.

    Args:
        weighting: ``"samples"``: ``B_i / sum(B)``, which gives the gradient of the mean loss over the global batch;
            ``"speed"``: ``c_i / sum(c)`` (HetGrad, Eq. 2, normalised); ``"none"``: ``1 / R``.
        sizes: Samples per rank, B.
        speeds: Samples per second of every rank.
    """
    by_weighting: dict[Weighting, Sequence[float]] = {"samples": sizes, "none": [1] * len(sizes)}
    shares = by_weighting.get(weighting) or relative_speeds(speeds)
    total = sum(shares)
    return [share / total for share in shares]
