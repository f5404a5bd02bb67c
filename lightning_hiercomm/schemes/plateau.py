"""Detection of a loss that has stopped falling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Plateau:
    """Detects when a sequence of losses stops falling.

    A loss is an improvement if it is below the best one so far by more than ``threshold`` of it. The plateau is reached
    when more than ``patience`` losses in a row are no improvement; then the count restarts with the same best loss.
    A NaN is no improvement.

    Source: DASO, Section 3, changes B and S "when the training loss plateaus"; Section 4.2 defines a plateau of its
    learning-rate scheduler as a loss "not decreasing by more than a set percentage threshold". The default numbers are
    specific to this package. The rule is that of torch's ``ReduceLROnPlateau(threshold_mode="rel")``, except that a
    negative loss must fall to improve, too.

    Attributes:
        best: The lowest loss so far that was an improvement; infinity at first.
        bad_values: The number of losses in a row that have failed to improve.

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
        """Record the next loss, and return whether the plateau is reached."""
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
        """Return the best loss and the count."""
        return {"best": self.best, "bad_values": self.bad_values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.best, self.bad_values = state["best"], state["bad_values"]
