"""The ranks that a launcher started, found as the strategy finds them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_hiercomm._lightning.launcher import place_of
from lightning_hiercomm._lightning.tree import fabric
from lightning_hiercomm.control.bootstrap import Bootstrap
from lightning_hiercomm.nodes.connect import connect_world
from lightning_hiercomm.nodes.topology import Topology

environments = fabric.plugins.environments

# in the Trainer's order
_ENVIRONMENTS: tuple[type[fabric.plugins.ClusterEnvironment], ...] = (
    environments.torchelastic.TorchElasticEnvironment,
    environments.slurm.SLURMEnvironment,
    environments.lsf.LSFEnvironment,
    environments.mpi.MPIEnvironment,
)


def cluster_environment() -> fabric.plugins.ClusterEnvironment:
    """Return the environment of torchrun, SLURM, LSF or MPI, or Lightning's own for a single process."""
    for kind in _ENVIRONMENTS:
        if kind.detect():
            return kind()
    return environments.lightning.LightningEnvironment()


@dataclass(frozen=True)
class Ranks:
    """All connected ranks, from the view of one."""

    topology: Topology
    device: torch.device
    backend: str


def meet(environment: fabric.plugins.ClusterEnvironment, timeout: timedelta) -> Bootstrap:
    """Return a store that all ranks share; its :meth:`~Bootstrap.gather` names the ranks that are missing."""
    rank, size = environment.global_rank(), environment.world_size()
    return Bootstrap(environment.main_address, environment.main_port, rank, size, timeout)


@contextmanager
def connected(
    environment: fabric.plugins.ClusterEnvironment, meeting: Bootstrap, ranks_per_node: int | None, timeout: timedelta
) -> Iterator[Ranks]:
    """Connect all ranks as the strategy does; collective, after a :meth:`~Bootstrap.gather` of the meeting.

    Raises:
        ValueError: If ``ranks_per_node`` does not make the world.
    """
    rank, size = environment.global_rank(), environment.world_size()
    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available():
        backend, device = "nccl", torch.device("cuda", environment.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # gloo waits five times as long for a rank that does not connect
    store = meeting.store("process group")
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout / 5)
    try:
        place = place_of(environment, environment.node_rank(), environment.local_rank(), starts_ranks=False)
        yield Ranks(connect_world(rank, size, place, ranks_per_node, timeout=timeout), device, backend)
    finally:
        dist.destroy_process_group()


def this_machine() -> tuple[str, str]:
    """Return this machine's host name, and an id that all processes of one kernel share."""
    host, boot_id = socket.gethostname(), Path("/proc/sys/kernel/random/boot_id")
    return host, boot_id.read_text().strip() if boot_id.exists() else host
