"""The number of the format in which checkpoints hold this package's state."""

from __future__ import annotations

FORMAT = 2
"""To be raised whenever an entry changes its name or meaning."""


def check_format(found: object, of: object, remedy: str) -> None:
    """Refuse state that another version of this package has written.

    Raises:
        ValueError: If ``found`` is not :data:`FORMAT`, naming what it was read from, and the remedy.
    """
    if found != FORMAT:
        has = "no format number" if found is None else f"format {found}"
        raise ValueError(f"{of} has {has}, but this version of lightning-hiercomm reads only format {FORMAT}. {remedy}")
