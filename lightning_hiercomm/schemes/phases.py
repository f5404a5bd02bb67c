"""When the phases of a run begin and end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """When a phase changes: before an epoch, or before a step of the run. As a length: so much from the beginning."""

    epoch: int | None = None
    step: int | None = None

    def has_come(self, epoch: int, step: int) -> bool:
        """Whether it has come before an epoch or step, counted from 0."""
        return step >= self.step if self.step is not None else epoch >= (self.epoch or 0)

    def before(self, epochs: int | None, steps: int | None) -> Moment | None:
        """Return the moment this long before the end of the run; None if the end is unknown, or the length is zero."""
        if self.step is not None:
            return None if steps is None or not self.step else Moment(step=steps - self.step)
        return None if epochs is None or not self.epoch else Moment(epoch=epochs - self.epoch)

    def share(self, epochs: int | None, steps: int | None) -> float | None:
        """Of the run, as far as one can tell."""
        moment, length = (self.epoch, epochs) if self.step is None else (self.step, steps)
        return None if moment is None or not length else moment / length


def check_length(name: str, length: float) -> None:
    """See that the length of a phase is a number of steps, or a share of the run.

    Raises:
        ValueError: If it is neither, naming the argument.
    """
    if length < 0 or (isinstance(length, float) and length >= 1):
        raise ValueError(
            f"{name}={length} must be a number of optimizer steps (an integer from 0 on), or a share of the run"
            " (between 0.0 and 1.0)"
        )


def steps_of_phase(name: str, length: float, steps: int | None) -> int:
    """Return the optimizer steps of a phase that is given as a number of them, or as a share of the run.

    Args:
        name: Of the argument.
        length: Its value.
        steps: Optimizer steps of the run; None if they are not known.

    Raises:
        ValueError: For a share of an unknown number.
    """
    if not isinstance(length, float):
        return length
    if steps is None:
        raise ValueError(
            f"{name}={length} is a share of the run, whose number of optimizer steps is not known: set"
            f" Trainer(max_steps=...), or give {name} a number of steps (with manual optimization, or loaders without"
            " a length, max_epochs does not tell)"
        )
    return round(length * steps)
