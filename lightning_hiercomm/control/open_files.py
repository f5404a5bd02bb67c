"""How many files a process may open: each of its connections is one."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

_BESIDE = 128
_MANY = 100  # ranks; fewer fit everywhere, and need not hear what rank 0 says


def needed_files(ranks: int, has_mesh: bool = True) -> int:
    """Of rank 0, which needs most: all come to its store, and in a full mesh, as of gloo, it is connected to all."""
    return _BESIDE + ranks * (2 if has_mesh else 1)


def mesh_is_too_large(ranks: int, broadcast: Callable[[Any], Any]) -> bool:
    """Whether rank 0 may not open as many files as a full mesh of all ranks takes. Collective.

    What it may open is raised first, as far as the hard limit lets it: a process is usually given 1,024.

    Args:
        ranks: How many there are.
        broadcast: Gives all ranks what rank 0 says.
    """
    is_enough = raise_limit(needed_files(ranks))
    return ranks > _MANY and bool(broadcast(not is_enough))


def raise_limit(files: int) -> bool:
    """Let this process open so many, or as many as the hard limit allows; whether these are enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return True
    allowed = files if hard == resource.RLIM_INFINITY else min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    return allowed >= files
