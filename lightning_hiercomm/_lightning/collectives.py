"""Private members of torch that report what a process sends, and the store of its process group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def process_groups() -> Iterable[Any]:
    """Return all process groups of this process; torch has no public list of them."""
    c10d: Any = distributed_c10d
    groups: Iterable[Any] = c10d._world.pg_map
    return groups


def store_of_default_group() -> dist.Store | None:
    """Return the store with which the default process group was created; None if it has none, as over MPI."""
    c10d: Any = distributed_c10d
    _, store = c10d._world.pg_map[dist.group.WORLD]
    return store  # type: ignore[no-any-return]


def collectives_begun() -> int:
    """Return how many collectives this process has begun, in all process groups together. For any thread."""
    return sum(map(_begun_in, [*process_groups()])) if dist.is_initialized() else 0


def collectives_of_default_group() -> int:
    """Return how many collectives this process has begun in the default process group. For any thread."""
    return _begun_in(dist.group.WORLD) if dist.is_initialized() else 0


def _begun_in(group: Any) -> int:
    """Return the sum over a group's backends, one per kind of device: the group's own number is that of only one."""
    count = 0
    with contextlib.suppress(RuntimeError):  # another thread may destroy a group meanwhile
        backends = [group._get_backend(device) for device in group._device_types]
        for backend in {id(backend): backend for backend in backends}.values():
            with contextlib.suppress(RuntimeError):  # backends of third parties need not have one
                count += backend._get_sequence_number_for_group()
    return count
