"""How many files a process may open: each of its connections is one."""

from __future__ import annotations

import resource

_BESIDE = 128
_MOST_IN_MESH = 64


def has_mesh(ranks: int) -> bool:
    """Whether so many ranks are all connected to each other from the beginning, over gloo.

    What a mesh takes of sockets, of rank 0's store and of everybody's time grows with the square of the ranks. More
    connect when they first have something to say to each other, which most never have.
    """
    return ranks <= _MOST_IN_MESH


def needed_files(ranks: int) -> int:
    """Of rank 0, which needs most: all come to its store, and in a mesh it is connected to all once more."""
    return _BESIDE + ranks * (2 if has_mesh(ranks) else 1)


def raise_limit(files: int) -> None:
    """Let this process open so many, or as many as the hard limit allows: it is usually given 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return
    allowed = files if hard == resource.RLIM_INFINITY else min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
