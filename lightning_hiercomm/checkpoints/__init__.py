"""Checkpoints: plain ones, sidecars of every rank, and directories of shards."""

KEY = "hiercomm"
"""The key of this package's state in checkpoints."""

FORMAT = 5
"""The format number of that state: increase it whenever an entry changes its name or meaning."""


def check_format(found: object, of: object, remedy: str) -> None:
    """Raise a ``ValueError`` with the remedy if state was saved in another format."""
    if found != FORMAT:
        has = "no format number" if found is None else f"format {found}"
        raise ValueError(f"{of} has {has}, but this version of lightning-hiercomm reads only format {FORMAT}. {remedy}")
