"""The limit on open files; every connection needs one."""

from __future__ import annotations

import resource

_OTHER_FILES = 128
_MOST_IN_MESH = 64


def has_mesh(ranks: int) -> bool:
    """Return whether gloo connects all pairs of ranks at the start; more ranks connect on first use."""
    return ranks <= _MOST_IN_MESH


def needed_files(ranks: int) -> int:
    """Return how many open files rank 0 needs: two per rank at its store, and gloo's mesh; other ranks need fewer."""
    return _OTHER_FILES + ranks * (3 if has_mesh(ranks) else 2)


def raise_limit(files: int) -> None:
    """Raise the limit on open files, usually 1,024, to ``files`` or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return
    allowed = files if hard == resource.RLIM_INFINITY else min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
