"""Groups of arguments that few users change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_hiercomm.arguments import as_call, checked_fields


@checked_fields
@dataclass(frozen=True)
class Health:
    """How a run reacts to ranks that are frozen.

    Example::

        HierarchicalStrategy("periodic", health=Health(hang_timeout=60))

    Args:
        hang_timeout: Seconds without progress on any rank after which the run ends, with a table, if ranks wait for
            each other in different collectives or at different batches, or if all wait for a rank that is frozen: it
            sends no heartbeats, being stopped, on a lost machine, or holding the interpreter's lock. Long steps,
            validations and waits in one place continue. None: never.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument has a wrong type.
    """

    hang_timeout: float | None = 300.0

    __repr__ = as_call

    def __post_init__(self) -> None:
        if self.hang_timeout is not None and not 1 <= self.hang_timeout < math.inf:
            raise ValueError(
                f"hang_timeout={self.hang_timeout} must be a number of seconds from 1 on, or None for never"
            )


@checked_fields
@dataclass(frozen=True)
class Transport:
    """How parameters travel between nodes.

    Example::

        HierarchicalStrategy(transport=Transport(inter_node="gloo"))

    Args:
        inter_node: The library for traffic between nodes: ``"torch"`` (the process group's backend), ``"gloo"`` (also
            for GPUs, whose tensors pass through pinned memory asynchronously; nccl stays inside the nodes) or ``"mpi"``
            (mpi4py; start the program with ``mpiexec``). Inside a node, and over all ranks at once, it is always torch.
        bucket_mb: Size in MiB of the buckets in which parameters travel. Gradients travel in parts of this size, except
            over nccl, where each of DDP's buckets is sent as a whole (``bucket_cap_mb``).

    Raises:
        ValueError: If a value is out of range.
        TypeError: If an argument has a wrong type.
    """

    inter_node: Literal["torch", "gloo", "mpi"] = "torch"
    bucket_mb: float = 4.0

    __repr__ = as_call

    def __post_init__(self) -> None:
        if not 0 < self.bucket_mb < 2**40:
            raise ValueError(f"bucket_mb={self.bucket_mb} must be positive, and a size that memory can have")
