"""Beginnings and ends of the phases of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """A moment of a run at which a phase changes, before an epoch or a step; or the length of a phase.

    Attributes:
        epoch: The number of epochs before the moment.
        step: The number of optimizer steps before the moment, instead of ``epoch``.
    """

    epoch: int | None = None
    step: int | None = None

    def has_come(self, epoch: int, step: int) -> bool:
        """Return whether it is at or before an epoch and step, counted from 0."""
        return step >= self.step if self.step is not None else epoch >= (self.epoch or 0)

    def before(self, epochs: int | None, steps: int | None) -> Moment | None:
        """Return the moment this long before the end of the run; None if the end is unknown, or the length is zero."""
        if self.step is not None:
            return None if steps is None or not self.step else Moment(step=steps - self.step)
        return None if epochs is None or not self.epoch else Moment(epoch=epochs - self.epoch)

    def fraction(self, epochs: int | None, steps: int | None) -> float | None:
        """Return the fraction of the run before the moment; None if the length of the run is unknown."""
        moment, length = (self.epoch, epochs) if self.step is None else (self.step, steps)
        return None if moment is None or not length else moment / length


def check_length(name: str, length: float) -> None:
    """Check that the length of a phase is a number of steps, or a fraction of the run.

    Raises:
        ValueError: If it is neither; the message names the argument.
    """
    if length < 0 or (isinstance(length, float) and length >= 1):
        raise ValueError(
            f"{name}={length} must be a number of optimizer steps (an integer of at least 0) or a fraction of the run"
            " (between 0.0 and 1.0)"
        )


def steps_of_phase(name: str, length: float, steps: int | None) -> int:
    """Return the optimizer steps of a phase whose length is a number of them, or a fraction of the run.

    Raises:
        ValueError: For a fraction of an unknown number.
    """
    if not isinstance(length, float):
        return length
    if steps is None:
        raise ValueError(
            f"{name}={length} is a fraction of the run, whose number of optimizer steps is unknown: set"
            f" Trainer(max_steps=...), or set {name} to a number of steps (with manual optimization, or loaders without"
            " a length, max_epochs does not determine it)"
        )
    return round(length * steps)
