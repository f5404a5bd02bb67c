"""Check versions, network and processes before a run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from typing import Literal

import torch
from packaging.requirements import Requirement

from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.control.hub import names_of_ranks
from lightning_hiercomm.control.open_files import needed_files
from lightning_hiercomm.nodes.topology import Topology, nodes_by_count
from lightning_hiercomm.planning.measure.ranks import Machine, Ranks, cluster_environment, connected, this_machine
from lightning_hiercomm.planning.measure.round_trip import between_nodes, round_trips, window

Level = Literal["ok", "note", "FAIL"]

_CONNECT = timedelta(seconds=60)
_FAR = 0.005  # seconds of a round trip, from which on the TCP window may limit a stream


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
    size = environment.world_size()
    # a single process does not know the later world size
    if ranks_per_node is not None and (size > 1 or ranks_per_node < 1):
        nodes_by_count(ranks_per_node, size)
    found = list(local_findings(size, environment.local_rank()))
    prints = environment.global_rank() == 0
    if size == 1:
        found.append(Finding("note", "one process", "start this with torchrun, mpiexec or srun to check the network"))
    else:
        try:
            with connected(ranks_per_node, _CONNECT) as ranks:
                found = [*gathered(ranks.topology.world, found), *_together(ranks)]
        except (RuntimeError, ValueError, OSError) as error:
            found.append(_not_connected(error, environment.main_address, environment.main_port))
            prints = True  # rank 0 may be unable to
    if prints:
        for finding in found:
            print(finding)
    return int(any(finding.level == "FAIL" for finding in found))


def _not_connected(error: Exception, address: str, port: int) -> Finding:
    reason = " ".join(str(error).split())[:200]
    return Finding(
        "FAIL",
        f"the ranks did not connect at {address}:{port} ({type(error).__name__}: {reason})",
        "open that port between the nodes, and check the interfaces and addresses above",
    )


# ---- checks of one process -------------------------------------------------------------------------------------------


def local_findings(world_size: int, local_rank: int = 0) -> Iterator[Finding]:
    """Run the checks of one process."""
    yield from versions(_installed)
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        gpus = f"{count} GPU{'' if count == 1 else 's'} ({torch.cuda.get_device_name()})"
        if local_rank < count:
            yield Finding("ok", f"{gpus}, backend nccl")
        else:
            yield Finding(
                "FAIL", f"{gpus}, but more ranks: nccl refuses two ranks on a GPU", "start one process per GPU"
            )
        yield interface("NCCL_SOCKET_IFNAME", os.environ, interfaces())
    else:
        yield Finding("ok", "no GPU, backend gloo")
        yield interface("GLOO_SOCKET_IFNAME", os.environ, interfaces())
    yield from addresses(os.environ, world_size)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield open_files(soft, hard, world_size)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions(installed: Callable[[str], str | None]) -> Iterator[Finding]:
    """Check the versions of packages."""
    requirements = map(Requirement, metadata.requires("lightning-hiercomm") or ())
    required = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    found = {each.name: installed(each.name) for each in required}
    missing = [str(each) for each in required if not each.specifier.contains(found[each.name] or "0")]
    python = ".".join(map(str, sys.version_info[:3]))
    shown = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    yield Finding(
        "FAIL" if missing else "ok",
        f"python {python}, {shown}, lightning-hiercomm {installed('lightning-hiercomm')}",
        f"pip install {' '.join(map(repr, missing))}" if missing else "",
    )
    second = installed("pytorch-lightning")
    if second is not None:
        yield Finding(
            "note",
            f"pytorch-lightning {second} has other classes than lightning.pytorch",
            "with its Trainer, import it before lightning_hiercomm, or set HIERCOMM_LIGHTNING=pytorch_lightning",
        )
    mpi = installed("mpi4py")
    if mpi is None:
        yield Finding("note", "no mpi4py", "for inter_node='mpi', pip install 'lightning-hiercomm[mpi]'")
    else:
        yield Finding("ok", f"mpi4py {mpi}")


def interfaces() -> dict[str, str | None]:
    """Return this machine's network interfaces with their IPv4 addresses."""
    return {name: _address_of(name) for _, name in socket.if_nameindex()}


def _address_of(name: str) -> str | None:
    if sys.platform != "linux":
        return None
    request_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), request_address, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def interface(variable: str, environment: Mapping[str, str], known: Mapping[str, str | None]) -> Finding:
    """Check which network interface the backend uses.

    Args:
        variable: ``"GLOO_SOCKET_IFNAME"``, or ``"NCCL_SOCKET_IFNAME"``, which holds prefixes.
        environment: Environment variables.
        known: Interfaces with their addresses.
    """
    shown = ", ".join(f"{name} {address or 'without address'}" for name, address in known.items())
    wanted = environment.get(variable)
    if not wanted:
        how = "gloo uses that of the host name's address" if "GLOO" in variable else "nccl uses any except lo"
        return Finding("ok", f"interfaces {shown}; {variable} is not set, {how}")
    names = wanted.lstrip("^=").split(",")
    is_exact = "GLOO" in variable or wanted.startswith("=")
    chosen = [one for one in known if any(one == name if is_exact else one.startswith(name) for name in names)]
    if wanted.startswith("^") and "NCCL" in variable:
        chosen = [one for one in known if one not in chosen and one != "lo"]
    if not chosen:
        return Finding("FAIL", f"{variable}={wanted}, but this machine has {shown}", f"set {variable} to one of these")
    first = chosen[0]
    if known[first] is None and sys.platform == "linux":
        return Finding(
            "FAIL", f"{variable}={wanted} chooses {first}, which has no address", "choose another one, or configure it"
        )
    return Finding("ok", f"interfaces {shown}; {variable}={wanted} chooses {first}")


def addresses(environment: Mapping[str, str], world_size: int) -> Iterator[Finding]:
    """Check that the names of the first rank and of this host resolve."""
    master = environment.get("MASTER_ADDR")
    if master is not None:
        resolved = _resolved(master)
        if resolved is None:
            yield Finding(
                "FAIL", f"MASTER_ADDR={master} does not resolve on {socket.gethostname()}", "set it to an IP address"
            )
        else:
            yield Finding("ok", f"MASTER_ADDR={master} is {resolved}")
    host = socket.gethostname()
    own = _resolved(host)
    if own is None:
        level: Level = "FAIL" if world_size > 1 and not environment.get("GLOO_SOCKET_IFNAME") else "note"
        yield Finding(
            level, f"the host name {host} does not resolve", "set GLOO_SOCKET_IFNAME, or add the name to /etc/hosts"
        )
    elif own.startswith("127."):
        yield Finding(
            "note",
            f"the host name {host} is {own}, which other machines cannot reach",
            "on several machines, set GLOO_SOCKET_IFNAME to the network's interface",
        )
    else:
        yield Finding("ok", f"the host name {host} is {own}")


def _resolved(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def open_files(soft: int, hard: int, world_size: int) -> Finding:
    """Check the hard limit on open files; the strategy raises the soft limit."""
    if hard == resource.RLIM_INFINITY or max(soft, hard) >= needed_files(world_size):
        return Finding("ok", f"a process may open {'any number of' if hard == resource.RLIM_INFINITY else hard} files")
    found = f"a process may open {hard} files; on gloo, rank 0 of {world_size} needs {needed_files(world_size)}"
    return Finding("FAIL", found, f"raise the hard limit (ulimit -Hn {needed_files(world_size)})")


# ---- checks of all ranks ---------------------------------------------------------------------------------------------


def gathered(world: Communicator, own: list[Finding]) -> list[Finding]:
    """Return the findings of all ranks; equal ones once, with their ranks."""
    everyone: list[list[Finding]] = world.all_gather_object(own)
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


def _together(ranks: Ranks) -> Iterator[Finding]:
    topology = ranks.topology
    yield Finding(
        "ok", f"{topology.world_size} ranks connected over {ranks.backend} by {type(ranks.environment).__name__}"
    )
    machines: list[Machine] = topology.world.all_gather_object(this_machine())
    yield from layout(topology.nodes, machines)
    yield from control_port(topology, ranks.environment.main_address)
    yield threads(machines, topology.world.all_gather_object(torch.get_num_threads()))


def layout(nodes: Sequence[Sequence[int]], machines: Sequence[Machine]) -> Iterator[Finding]:
    """Report the nodes, and check that each is one machine."""
    shown = "; ".join(f"node {m} ({machines[node[0]].host}): {names_of_ranks(node)}" for m, node in enumerate(nodes))
    yield Finding("ok", shown if len(nodes) <= 16 else f"{len(nodes)} nodes of {len(nodes[0])} ranks")
    if len({len(node) for node in nodes}) > 1:
        least = min(map(len, nodes))
        yield Finding("note", f"nodes are unequal: only the first {least} ranks of each communicate with other nodes")
    homes = [{machines[rank].boot for rank in node} for node in nodes]
    if any(len(home) > 1 for home in homes):
        yield Finding(
            "FAIL", "a node has ranks on several machines", "omit ranks_per_node, or start ranks node by node"
        )
    elif len(nodes) > 1 and len(set.union(*homes)) < len(nodes):
        yield Finding("note", "several nodes are one machine: their traffic does not cross a network")
    elif len(nodes) == 1:
        yield Finding("note", "all ranks are one node: every scheme trains as DDP does")


def control_port(topology: Topology, host: str) -> Iterator[Finding]:
    """Check that every rank reaches rank 0 at a free port, as the control plane needs; collective."""
    port, seconds = round_trips(topology, host)
    shut_out = [rank for rank, own in enumerate(seconds) if own is None]
    if shut_out:
        yield Finding(
            "FAIL",
            f"{names_of_ranks(shut_out)} cannot reach {host}:{port}: failures would show after the timeout only",
            "open rank 0's ephemeral ports to the other nodes",
        )
    else:
        yield Finding("ok", f"every rank reaches an ephemeral port of {host}, as the control plane needs")
    trips = between_nodes(topology.nodes, seconds)
    if trips:
        yield distance(max(trips), window())


def distance(seconds: float, window: int | None) -> Finding:
    """Report the longest round trip, and the rate that the TCP window then leaves to one stream.

    Args:
        seconds: From a node to the first one and back.
        window: Most bytes in flight on a TCP connection, if known.
    """
    found = f"the longest round trip to the first node takes {1e3 * seconds:.3g} ms"
    if window is None or seconds < _FAR:
        return Finding("ok", found)
    return Finding(
        "note",
        f"{found}, so one TCP stream carries at most {8e-9 * window / seconds:.2g} Gbit/s",
        "on a faster link raise net.ipv4.tcp_rmem and tcp_wmem, or use several streams",
    )


def threads(machines: Sequence[Machine], per_rank: Sequence[int]) -> Finding:
    """Check that the ranks of a machine have no more threads than it has cores."""
    for boot in dict.fromkeys(machine.boot for machine in machines):
        here = [rank for rank, machine in enumerate(machines) if machine.boot == boot]
        wanted, cores = sum(per_rank[rank] for rank in here), machines[here[0]].processors
        if wanted > cores:
            crowd = f"{len(here)} ranks on {machines[here[0]].host} have {wanted} threads on {cores:g} cores"
            fitting = int(cores / len(here))
            return Finding("note", crowd, f"set OMP_NUM_THREADS={fitting}" if fitting else "start fewer ranks")
    return Finding("ok", f"{per_rank[0]} threads per rank, no more than cores")
