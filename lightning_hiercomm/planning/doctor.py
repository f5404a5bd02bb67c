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
from typing import Literal

import torch
from packaging.requirements import Requirement

from lightning_hiercomm.control.bootstrap import names_of_ranks
from lightning_hiercomm.nodes.interfaces import interfaces, resolved, use_reachable_interface
from lightning_hiercomm.nodes.topology import nodes_by_count
from lightning_hiercomm.planning.network import measured
from lightning_hiercomm.planning.quantities import shown_rate, shown_seconds
from lightning_hiercomm.planning.ranks import Ranks, cluster_environment, connected, meet, this_machine

Level = Literal["ok", "note", "FAIL"]

_PATIENCE = timedelta(seconds=60)


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
    size, local_rank = environment.world_size(), environment.local_rank()
    # a single process does not know the later world size
    if ranks_per_node is not None and (size > 1 or ranks_per_node < 1):
        nodes_by_count(ranks_per_node, size)
    if size == 1:
        alone = Finding("note", "one process", "start this with torchrun, mpiexec or srun to check the network")
        return _show([*local_findings(size, local_rank), alone])
    reports, address = local_rank == 0, f"{environment.main_address}:{environment.main_port}"
    if reports:
        print(f"waiting at most {_PATIENCE.seconds} s for {size} ranks at {address}", flush=True)
    try:
        meeting = meet(environment, _PATIENCE)
        machines: list[tuple[str, str]] = meeting.gather(this_machine())
        found_interface = use_reachable_interface(environment.main_address, meeting.gather)
        own = [*local_findings(size, local_rank, is_alone=len({boot for _, boot in machines}) == 1)]
        if found_interface is not None:
            own.append(Finding("ok", found_interface))
        everyone = [[Finding(*found) for found in each] for each in meeting.gather([astuple(each) for each in own])]
    except (RuntimeError, OSError) as error:
        failed = _failed(f"not all ranks reached {address}", error, "start all ranks, and open that port between nodes")
        return _show([*local_findings(size, local_rank), failed]) if reports else 1
    status, is_first = _fails([*itertools.chain(*everyone)]), environment.global_rank() == 0
    if is_first:  # before ranks connect, which may fail
        _show(gathered(everyone))
    try:
        with connected(environment, meeting, ranks_per_node, _PATIENCE) as ranks:
            found = list(_together(ranks, type(environment).__name__, machines))
        reports = is_first
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


def _failed(text: str, error: Exception, remedy: str) -> Finding:
    reason = " ".join(str(error).split())[:200]
    return Finding("FAIL", f"{text} ({type(error).__name__}: {reason})", remedy)


# ---- checks of one process -------------------------------------------------------------------------------------------


def local_findings(world_size: int, local_rank: int = 0, is_alone: bool = False) -> Iterator[Finding]:
    """Run the checks of one process; ``is_alone``: all ranks are known to be on this machine."""
    yield versions(_installed)
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        gpus = f"{count} GPU{'' if count == 1 else 's'} ({torch.cuda.get_device_name()})"
        if local_rank < count:
            yield Finding("ok", f"{gpus}, backend nccl")
        else:
            yield Finding(
                "FAIL", f"{gpus}, but more ranks: nccl refuses two ranks on a GPU", "start one process per GPU"
            )
        yield interface("NCCL_SOCKET_IFNAME", os.environ, interfaces(), is_alone or world_size == 1)
    else:
        yield Finding("ok", "no GPU, backend gloo")
        yield interface("GLOO_SOCKET_IFNAME", os.environ, interfaces(), is_alone or world_size == 1)
    yield from addresses(os.environ, world_size, is_alone)


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


def interface(
    variable: str, environment: Mapping[str, str], known: Mapping[str, str | None], is_alone: bool
) -> Finding:
    """Check that the interface which the user has chosen for the backend exists, and leads to other machines.

    Args:
        variable: ``"GLOO_SOCKET_IFNAME"``, or ``"NCCL_SOCKET_IFNAME"``, which holds prefixes.
        environment: Environment variables.
        known: Interfaces with their addresses.
        is_alone: Whether all ranks are on this machine, as far as is known.
    """
    shown = ", ".join(f"{name} {address or 'without address'}" for name, address in known.items())
    wanted = environment.get(variable)
    if not wanted:
        how = "gloo uses that of the host name's address" if "GLOO" in variable else "nccl uses any except lo"
        return Finding("ok", f"interfaces {shown}; {variable} is not set, {how}")
    names, excludes = wanted.lstrip("^=").split(","), wanted.startswith("^")
    is_exact = "GLOO" in variable or "=" in wanted[:2]
    chosen = [
        one for one in known if any(one == name if is_exact else one.startswith(name) for name in names) != excludes
    ]
    if not chosen:
        return Finding("FAIL", f"{variable}={wanted}, but this machine has {shown}", f"set {variable} to one of these")
    if not is_alone and all((known[one] or "").startswith("127.") for one in chosen):
        return Finding(
            "FAIL",
            f"{variable}={wanted} is the loopback, which other machines cannot reach; this machine has {shown}",
            f"export {variable}=<the interface towards the other machines>",
        )
    return Finding("ok", f"interfaces {shown}; {variable}={wanted}")


def addresses(environment: Mapping[str, str], world_size: int, is_alone: bool) -> Iterator[Finding]:
    """Check that the names of the first rank and of this host resolve, to addresses that other machines reach."""
    master = environment.get("MASTER_ADDR")
    if master is not None:
        found = resolved(master)
        if found is None:
            yield Finding(
                "FAIL", f"MASTER_ADDR={master} does not resolve on {socket.gethostname()}", "set it to an IP address"
            )
        else:
            yield Finding("ok", f"MASTER_ADDR={master} is {found}")
    host = socket.gethostname()
    own = resolved(host)
    if own is not None and not own.startswith("127."):
        yield Finding("ok", f"the host name {host} is {own}")
        return
    problem = "does not resolve" if own is None else f"is {own}, which other machines cannot reach"
    if environment.get("GLOO_SOCKET_IFNAME") or (own is not None and is_alone):
        yield Finding("ok", f"the host name {host} {problem}, and is not used")
        return
    yield Finding(
        "note" if world_size == 1 or torch.cuda.is_available() else "FAIL",  # nccl does not use the name
        f"the host name {host} {problem}",
        "on several machines, export GLOO_SOCKET_IFNAME=<the interface towards the other machines>",
    )


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


def _together(ranks: Ranks, environment: str, machines: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    topology = ranks.topology
    yield Finding("ok", f"{topology.world_size} ranks connected over {ranks.backend} by {environment}")
    yield from layout(topology.nodes, machines)
    network = measured(topology, ranks.device)
    if network is not None:
        yield Finding(
            "ok", f"a node sends {shown_rate(network.rate)}, and a message takes {shown_seconds(network.latency)}"
        )


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
