"""Has the loss stopped falling?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Plateau:
    """Sees, one value after another, whether a loss still falls.

    A value is an improvement if it is below the best so far by more than ``threshold`` of it. The plateau is reached
    with the value that makes more than ``patience`` in a row no improvement; then counting starts anew, against the
    same best. A value that is not a number is no improvement.

    Source: DASO, Section 3, lets B and S change "when the training loss plateaus"; Section 4.2 says of its learning
    rates' scheduler that a plateau is a loss "not decreasing by more than a set percentage threshold". The numbers are
    ours. The same rule as torch's ``ReduceLROnPlateau(threshold_mode="rel")``, except that a negative loss must fall
    too to improve.

    Args:
        threshold: The relative improvement that counts, from 0 to below 1.
        patience: How many values in a row may fail to improve.

    Attributes:
        best: The lowest value so far that was an improvement; infinity at first.
        bad_values: How many values in a row have failed to improve.

    Raises:
        ValueError: If ``threshold`` or ``patience`` is out of range.
    """

    def __init__(self, threshold: float = 0.05, patience: int = 2) -> None:
        if not 0.0 <= threshold < 1.0:
            raise ValueError(f"threshold={threshold} must be a fraction from 0 to below 1, such as 0.05 for 5 %")
        if patience < 0:
            raise ValueError(f"patience={patience} must not be negative")
        self.threshold = threshold
        self.patience = patience
        self.best = math.inf
        self.bad_values = 0

    def reached(self, loss: float) -> bool:
        """Take the next value; whether the loss has, with it, stopped falling."""
        to_beat = self.best - self.threshold * abs(self.best) if self.best < math.inf else math.inf
        if loss < to_beat:
            self.best = loss
            self.bad_values = 0
            return False
        self.bad_values += 1
        if self.bad_values <= self.patience:
            return False
        self.bad_values = 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the count."""
        return {"best": self.best, "bad_values": self.bad_values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.best, self.bad_values = state["best"], state["bad_values"]
