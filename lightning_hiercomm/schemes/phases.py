"""Lengths of the phases of a run: optimizer steps, epochs, or a fraction of the run."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from lightning_hiercomm.arguments import as_call, checked_fields


@checked_fields
@dataclass(frozen=True)
class Epochs:
    """A length in epochs, for arguments whose plain numbers are optimizer steps or a fraction of the run.

    Lightning reads an ``int`` as steps and a ``float`` as a fraction (``val_check_interval``, ``limit_train_batches``),
    so a plain number never means epochs here. In YAML: ``warmup: {epochs: 4}``.

    Example::

        DASO(warmup=Epochs(4), cooldown=Epochs(4))

    Args:
        epochs: The number of epochs.

    Raises:
        ValueError: If it is negative.
        TypeError: If it is not an integer.
    """

    epochs: int

    __repr__ = as_call

    def __post_init__(self) -> None:
        if self.epochs < 0:
            raise ValueError(f"epochs={self.epochs} must not be negative; 0 leaves the phase out")


def has_come(moment: int | Epochs, epoch: int, step: int) -> bool:
    """Return whether a moment, as steps or epochs from the start, is at or before an epoch and step, from 0."""
    return epoch >= moment.epochs if isinstance(moment, Epochs) else step >= moment


def before_end(length: int | Epochs, epochs: int | None, steps: int | None) -> int | Epochs | None:
    """Return the moment this long before the end of the run; None if the end is unknown, or the length is zero."""
    if isinstance(length, Epochs):
        return None if epochs is None or not length.epochs else Epochs(max(0, epochs - length.epochs))
    return None if steps is None or not length else steps - length


def fraction_of_run(moment: int | Epochs, epochs: int | None, steps: int | None) -> float | None:
    """Return the fraction of the run before a moment; None if the length of the run is unknown."""
    count, total = (moment.epochs, epochs) if isinstance(moment, Epochs) else (moment, steps)
    return count / total if total else None if count else 0.0


def check_length(name: str, length: float) -> None:
    """Check that the length of a phase is a number of steps, or a fraction of the run.

    Raises:
        ValueError: If it is neither; the message names the argument.
    """
    if length < 0 or (not isinstance(length, Integral) and length >= 1):
        raise ValueError(
            f"{name}={length} must be a number of optimizer steps (an integer of at least 0) or a fraction of the run"
            " (between 0.0 and 1.0)"
        )


def steps_of_phase(name: str, length: float, steps: int | None) -> int:
    """Return the optimizer steps of a phase whose length is a number of them, or a fraction of the run.

    Raises:
        ValueError: For a fraction of an unknown number.
    """
    if isinstance(length, Integral):
        return int(length)
    if steps is None:
        raise ValueError(
            f"{name}={length} is a fraction of the run, whose number of optimizer steps is unknown: set"
            f" Trainer(max_steps=...), or set {name} to a number of steps (with manual optimization, or loaders without"
            " a length, max_epochs does not determine it)"
        )
    return round(length * steps)
