"""Detection of a loss that has stopped falling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_hiercomm.arguments import as_call, checked_fields, note_owner


@checked_fields
@dataclass(frozen=True)
class Plateau:
    """When a loss counts as no longer falling: after more than ``patience`` epochs in a row without an improvement.

    The loss is what ``training_step`` returns, averaged over the epoch and all ranks.

    Example::

        DASO(plateau=Plateau(patience=4, threshold=0.01))

    Source: DASO, Section 3, changes B and S "when the training loss plateaus"; Section 4.2 defines a plateau of its
    learning-rate scheduler as a loss "not decreasing by more than a set percentage threshold". The default numbers are
    specific to this package. The rule is that of torch's ``ReduceLROnPlateau(threshold_mode="rel")``, except that a
    negative loss must fall to improve, too.

    Args:
        patience: Consecutive epochs without improvement that are accepted.
        threshold: Smallest decrease of an epoch's loss that counts as an improvement, relative to the best loss so far.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument has a wrong type.
    """

    patience: int = 2
    threshold: float = 0.05

    __repr__ = as_call

    def __post_init__(self) -> None:
        if self.patience < 0:
            raise ValueError(f"patience={self.patience} must not be negative")
        if not 0.0 <= self.threshold < 1.0:
            raise ValueError(f"threshold={self.threshold} must be a fraction from 0 to below 1, such as 0.05 for 5 %")


note_owner("Plateau", (each.name for each in fields(Plateau)))


class PlateauDetector:
    """Detects the plateau of a sequence of losses; then it starts to count again, with the same best loss.

    A NaN is no improvement.

    Args:
        plateau: The rule.

    Attributes:
        best: The lowest loss so far that was an improvement; infinity at first.
        bad_values: The number of losses in a row that have failed to improve.
    """

    def __init__(self, plateau: Plateau = Plateau()) -> None:
        self.plateau = plateau
        self.best = math.inf
        self.bad_values = 0

    def reached(self, loss: float) -> bool:
        """Record the next loss, and return whether the plateau is reached."""
        to_beat = self.best - self.plateau.threshold * abs(self.best) if self.best < math.inf else math.inf
        if loss < to_beat:
            self.best = loss
            self.bad_values = 0
            return False
        self.bad_values += 1
        if self.bad_values <= self.plateau.patience:
            return False
        self.bad_values = 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the best loss and the count."""
        return {"best": self.best, "bad_values": self.bad_values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.best, self.bad_values = state["best"], state["bad_values"]
