"""Check versions, network and processes before a run."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from lightning_hiercomm._lightning.launcher import place_of
from lightning_hiercomm._lightning.tree import fabric
from lightning_hiercomm.control.bootstrap import Bootstrap, names_of_ranks
from lightning_hiercomm.nodes.connect import connect_world
from lightning_hiercomm.nodes.interfaces import interfaces, use_reachable_interface
from lightning_hiercomm.nodes.topology import nodes_by_count
from lightning_hiercomm.planning.network import measured
from lightning_hiercomm.planning.quantities import shown_rate, shown_seconds

environments = fabric.plugins.environments

Level = Literal["ok", "note", "FAIL"]

_PATIENCE = timedelta(seconds=60)
_ENVIRONMENTS: tuple[type[fabric.plugins.ClusterEnvironment], ...] = (  # in the Trainer's order
    environments.torchelastic.TorchElasticEnvironment,
    environments.slurm.SLURMEnvironment,
    environments.lsf.LSFEnvironment,
    environments.mpi.MPIEnvironment,
)


@dataclass(frozen=True)
class Finding:
    """A line of the output.

    Attributes:
        level: ``"FAIL"`` if training would not work.
        text: The result of the check.
        remedy: What to do.
    """

    level: Level
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.text}{f': {self.remedy}' if self.remedy else ''}"


def examine(ranks_per_node: int | None = None) -> int:
    """Check this process, or all processes of a launcher; return the exit status, 1 if training would fail.

    Raises:
        ValueError: If ``ranks_per_node`` does not divide the world.
    """
    environment = cluster_environment()
    rank, size, local_rank = environment.global_rank(), environment.world_size(), environment.local_rank()
    # a single process does not know the later world size
    if ranks_per_node is not None and (size > 1 or ranks_per_node < 1):
        nodes_by_count(ranks_per_node, size)
    own = [*local_findings(local_rank)]
    if size == 1:
        return _show(
            [*own, Finding("note", "one process", "start this with torchrun, mpiexec or srun to check the network")]
        )
    reports, address = local_rank == 0, f"{environment.main_address}:{environment.main_port}"
    if reports:
        print(f"waiting at most {_PATIENCE.seconds} s for {size} ranks at {address}", flush=True)
    try:
        meeting = Bootstrap(environment.main_address, environment.main_port, rank, size, _PATIENCE)
        machines: list[tuple[str, str]] = meeting.gather(this_machine())
        found_interface = use_reachable_interface(environment.main_address, meeting.gather)
        if found_interface is not None:
            own.append(Finding("ok", found_interface))
        everyone = [[Finding(*found) for found in each] for each in meeting.gather([astuple(each) for each in own])]
    except (RuntimeError, OSError) as error:
        failed = _failed(f"not all ranks reached {address}", error, "start all ranks, and open that port between nodes")
        return _show([*own, failed]) if reports else 1
    status = _fails([*itertools.chain(*everyone)])
    if rank == 0:  # before ranks connect, which may fail
        _show(gathered(everyone))
    try:
        found = _connected(environment, meeting, ranks_per_node, machines)
        reports = rank == 0
    except (RuntimeError, ValueError, OSError) as error:
        remedy = "check interfaces and addresses, and open ephemeral ports between the nodes"
        found = [_failed("the ranks did not connect to each other", error, remedy)]
    return status | (_show(found) if reports else _fails(found))


def _show(found: Sequence[Finding]) -> int:
    """Print findings; return whether one has failed."""
    print(*found, sep="\n", flush=True)
    return _fails(found)


def _fails(found: Sequence[Finding]) -> int:
    return int(any(finding.level == "FAIL" for finding in found))


def cluster_environment() -> fabric.plugins.ClusterEnvironment:
    """Return the environment of torchrun, SLURM, LSF or MPI, or Lightning's own for a single process."""
    for kind in _ENVIRONMENTS:
        if kind.detect():
            return kind()
    return environments.lightning.LightningEnvironment()


def this_machine() -> tuple[str, str]:
    """Return this machine's host name, and an id that all processes of one kernel share."""
    host, boot_id = socket.gethostname(), Path("/proc/sys/kernel/random/boot_id")
    return host, boot_id.read_text().strip() if boot_id.exists() else host


def _failed(text: str, error: Exception, remedy: str) -> Finding:
    reason = " ".join(str(error).split())[:200]
    return Finding("FAIL", f"{text} ({type(error).__name__}: {reason})", remedy)


# ---- checks of one process -------------------------------------------------------------------------------------------


def local_findings(local_rank: int = 0) -> Iterator[Finding]:
    """Run the checks of one process."""
    yield versions(_installed)
    variable = "GLOO_SOCKET_IFNAME"
    if torch.cuda.is_available():
        variable, count = "NCCL_SOCKET_IFNAME", torch.cuda.device_count()
        gpus = f"{count} GPU{'' if count == 1 else 's'} ({torch.cuda.get_device_name()})"
        if local_rank < count:
            yield Finding("ok", f"{gpus}, backend nccl")
        else:
            yield Finding(
                "FAIL", f"{gpus}, but more ranks: nccl refuses two ranks on a GPU", "start one process per GPU"
            )
    else:
        yield Finding("ok", "no GPU, backend gloo")
    yield interface(variable, os.environ.get(variable), interfaces())


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions(installed: Callable[[str], str | None]) -> Finding:
    """Check the versions of packages."""
    requirements = map(Requirement, metadata.requires("lightning-hiercomm") or ())
    required = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    found = {each.name: installed(each.name) for each in required}
    missing = [str(each) for each in required if not each.specifier.contains(found[each.name] or "0")]
    python = ".".join(map(str, sys.version_info[:3]))
    shown = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    return Finding(
        "FAIL" if missing else "ok",
        f"python {python}, {shown}, lightning-hiercomm {installed('lightning-hiercomm')}",
        f"pip install {' '.join(map(repr, missing))}" if missing else "",
    )


def interface(variable: str, wanted: str | None, known: Mapping[str, str | None]) -> Finding:
    """Check that an interface exists that the user has chosen for the backend.

    Args:
        variable: ``"GLOO_SOCKET_IFNAME"`` or ``"NCCL_SOCKET_IFNAME"``.
        wanted: Its value: a name, or for nccl prefixes of names.
        known: Interfaces with their addresses.
    """
    shown = ", ".join(f"{name} {address or 'without address'}" for name, address in known.items())
    if not wanted:
        return Finding("ok", f"interfaces {shown}; {variable} is not set")
    beginnings = tuple(wanted.removeprefix("=").split(","))
    if wanted.startswith("^") or any(name.startswith(beginnings) for name in known):
        return Finding("ok", f"interfaces {shown}; {variable}={wanted}")
    return Finding("FAIL", f"{variable}={wanted}, but this machine has {shown}", f"set {variable} to one of these")


# ---- checks of all ranks ---------------------------------------------------------------------------------------------


def gathered(everyone: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the findings of all ranks; equal ones once, with their ranks."""
    who: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(everyone):
        for finding in findings:
            who.setdefault(finding, []).append(rank)
    return [
        finding
        if len(ranks) == len(everyone)
        else Finding(finding.level, f"{names_of_ranks(ranks)}: {finding.text}", finding.remedy)
        for finding, ranks in who.items()
    ]


def _connected(
    environment: fabric.plugins.ClusterEnvironment,
    meeting: Bootstrap,
    ranks_per_node: int | None,
    machines: Sequence[tuple[str, str]],
) -> list[Finding]:
    """Connect all ranks as the strategy does, and measure the network. Collective, after a gather of the meeting."""
    rank, size = environment.global_rank(), environment.world_size()
    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available():
        backend, device = "nccl", torch.device("cuda", environment.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # gloo waits five times as long for a rank that does not connect
    store = meeting.store("process group")
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE / 5)
    try:
        place = place_of(environment, environment.node_rank(), environment.local_rank(), starts_ranks=False)
        topology = connect_world(rank, size, place, ranks_per_node, timeout=_PATIENCE)
        found = [Finding("ok", f"{size} ranks connected over {backend} by {type(environment).__name__}")]
        found += layout(topology.nodes, machines)
        if topology.num_nodes > 1:
            rate, latency = measured(topology, device)
            text = f"a node sends {shown_rate(rate)}, and a message takes {shown_seconds(latency)}"
            found.append(Finding("ok", text))
        return found
    finally:
        dist.destroy_process_group()


def layout(nodes: Sequence[Sequence[int]], machines: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """Report the nodes, and check that each is one machine.

    Args:
        nodes: The ranks of each.
        machines: The host name and the id of each rank's machine.
    """
    shown = "; ".join(f"node {m} ({machines[node[0]][0]}): {names_of_ranks(node)}" for m, node in enumerate(nodes))
    yield Finding("ok", shown if len(nodes) <= 16 else f"{len(nodes)} nodes of {len(nodes[0])} ranks")
    if len({len(node) for node in nodes}) > 1:
        least = min(map(len, nodes))
        yield Finding("note", f"nodes are unequal: only the first {least} ranks of each communicate with other nodes")
    homes = [{machines[rank][1] for rank in node} for node in nodes]
    if any(len(home) > 1 for home in homes):
        yield Finding(
            "FAIL", "a node has ranks on several machines", "omit ranks_per_node, or start ranks node by node"
        )
    elif len(nodes) > 1 and len(set.union(*homes)) < len(nodes):
        yield Finding("note", "several nodes are one machine: their traffic does not cross a network")
    elif len(nodes) == 1:
        yield Finding("note", "all ranks are one node: every scheme trains as DDP does")
