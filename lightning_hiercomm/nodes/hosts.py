"""Which ranks form a node by default: what the cluster environment reports, compared with the ranks' host names."""

from __future__ import annotations

import socket
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lightning_hiercomm.nodes.topology import nodes_by_place


def this_host() -> tuple[str, str]:
    """Return the name of this host and its boot id, which differs between machines of one name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot_id.read_text().strip() if boot_id.exists() else ""


@dataclass(frozen=True)
class Place:
    """The node and host of a rank.

    Attributes:
        node: The number of its node, as the cluster environment reports it.
        local_rank: Its local rank, likewise.
        environment: The environment's name, for messages.
        nodes_share_hosts: Whether the environment may report several nodes of one rank on one host.
        host: Its host, see :func:`this_host`.
    """

    node: int
    local_rank: int
    environment: str = "the cluster environment"
    nodes_share_hosts: bool = True
    host: tuple[str, str] = field(default_factory=lambda: this_host())


def nodes_by_default(places: Sequence[Place]) -> tuple[list[list[int]], str | None]:
    """Group ranks into nodes where the user has not: as the environment reports them, unless host names contradict it.

    =====================================================  =========================  ===================
    the environment reports                                by                         what decides
    =====================================================  =========================  ===================
    the nodes that the host names give                     any                        the environment
    a node whose ranks are on several hosts                any                        host names, warning
    several nodes on a host, one of several ranks          any                        the environment
    several nodes on a host, each of one rank              torchrun: an agent a node  the environment
    several nodes on a host, each of one rank              MPI                        the environment
    several nodes on a host, each of one rank              Lightning, which starts    the environment
                                                           the ranks of each node
    several nodes on a host, each of one rank              Lightning, where LOCAL_    host names, warning
                                                           RANK was set for it
    several nodes on a host, each of one rank              SLURM, LSF, Kubeflow, the  host names, warning
                                                           user's own
    =====================================================  =========================  ===================

    Host names decide for all ranks or for none. ``ranks_per_node`` overrides both.

    Args:
        places: Of every rank.

    Returns:
        World ranks by node, and a warning if host names contradict the environment.
    """
    reported = nodes_by_place([(place.node, place.local_rank) for place in places])
    by_host = nodes_by_place([(place.host, place.local_rank) for place in places])
    hosts_of = [{places[rank].host for rank in ranks} for ranks in reported]
    nodes_of = defaultdict(list)
    for ranks in reported:
        nodes_of[places[ranks[0]].host].append(ranks)
    spans = any(len(hosts) > 1 for hosts in hosts_of)
    shares = any(
        len(nodes) > 1 and all(len(ranks) == 1 and not places[ranks[0]].nodes_share_hosts for ranks in nodes)
        for nodes in nodes_of.values()
    )
    if not spans and not shares:
        return reported, None
    names = list(dict.fromkeys(place.host[0] for place in places))
    sizes = [len(ranks) for ranks in reported]
    example = sizes[0] if len(set(sizes)) == 1 else sizes
    return by_host, (
        f"{places[0].environment} reports the nodes {_listed(reported)}, but by host name they are"
        f" {_listed(by_host)} (on {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}). The host names are used."
        f" Set ranks_per_node to choose the nodes, such as ranks_per_node={example} for those of the environment."
    )


@cache
def warn_once(message: str) -> None:
    """Warn once in this process, although nodes are found again for every ``fit``."""
    warnings.warn(message, stacklevel=3)


def _listed(nodes: Sequence[Sequence[int]]) -> str:
    return " ".join(str(list(ranks)) for ranks in nodes[:8]) + (" ..." if len(nodes) > 8 else "")
