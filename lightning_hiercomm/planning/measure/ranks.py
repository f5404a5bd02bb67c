"""The ranks that a launcher started, found as the strategy finds them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_hiercomm._lightning.launcher import place_of
from lightning_hiercomm._lightning.tree import fabric
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

    environment: fabric.plugins.ClusterEnvironment
    topology: Topology
    device: torch.device
    backend: str

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints."""
        return self.topology.rank == 0


@contextmanager
def connected(
    ranks_per_node: int | Sequence[int] | None = None, timeout: timedelta = timedelta(seconds=120)
) -> Iterator[Ranks]:
    """Connect all ranks; collective.

    Raises:
        ValueError: If ``ranks_per_node`` does not make the world.
    """
    environment = cluster_environment()
    rank, size = environment.global_rank(), environment.world_size()
    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available():
        backend, device = "nccl", torch.device("cuda", environment.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    was_initialized = dist.is_initialized()
    if not was_initialized:
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
    try:
        place = place_of(environment, environment.node_rank(), environment.local_rank(), starts_ranks=False)
        yield Ranks(environment, connect_world(rank, size, place, ranks_per_node, timeout=timeout), device, backend)
    finally:
        if not was_initialized and dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class Machine:
    """The machine of a rank.

    Attributes:
        host: Its name, which may be that of a container.
        boot: The same for all processes of one kernel.
        processors: Cores that this process may use.
    """

    host: str
    boot: str
    processors: float


def this_machine() -> Machine:
    """Return the machine of this process."""
    host = socket.gethostname()
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    boot = boot_id.read_text().strip() if boot_id.exists() else host
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Machine(host, boot, min(float(cores), _quota()))


def processors_per_node(topology: Topology, machine: Machine) -> list[float]:
    """Return the number of cores of each node, if the ranks of a machine share them evenly; collective."""
    machines: list[Machine] = topology.world.all_gather_object(machine)
    crowd = [sum(other.boot == own.boot for other in machines) for own in machines]
    return [sum(machines[rank].processors / crowd[rank] for rank in ranks) for ranks in topology.nodes]


def _quota() -> float:
    """Return the cores that the control group of this process may use."""
    limit = Path("/sys/fs/cgroup/cpu.max")
    if not limit.exists():
        return float("inf")
    quota, period = limit.read_text().split()
    return float("inf") if quota == "max" else float(quota) / float(period)
