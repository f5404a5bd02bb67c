"""The limit on open files, of which every connection needs one."""

from __future__ import annotations

import resource

_BESIDE = 128
_MOST_IN_MESH = 64


def has_mesh(ranks: int) -> bool:
    """Return whether gloo connects so many ranks in a full mesh at the start.

    What a mesh takes of sockets, of rank 0's store and of everybody's time grows with the square of the ranks. More
    connect when they first have something to say to each other, which most never have.
    """
    return ranks <= _MOST_IN_MESH


def needed_files(ranks: int) -> int:
    """Return the number of open files of rank 0, which needs most, for its store and for a mesh."""
    return _BESIDE + ranks * (2 if has_mesh(ranks) else 1)


def raise_limit(files: int) -> None:
    """Raise the limit on open files, usually 1,024, to a number or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return
    allowed = files if hard == resource.RLIM_INFINITY else min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
