"""What a user may choose about nodes that leave and join."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection
from dataclasses import dataclass

from lightning_hiercomm.arguments import checked_fields
from lightning_hiercomm.schemes import Scheme

MOST_NODES = 10**6
LONGEST_SILENCE = 24 * 3600


@checked_fields
@dataclass(frozen=True)
class Elastic:
    """Nodes may leave a run and join it, and the others go on.

    Every node is a ``torch.distributed`` world and a Trainer of its own, started with ``torchrun --nnodes=1``. A
    lighthouse, ``python -m lightning_hiercomm lighthouse``, knows which nodes are there. Needs the extra ``elastic``.

    Args:
        min_nodes: With fewer nodes the run waits.
        max_nodes: How many nodes take part at most; more wait for a place. None: any number.
        dead_after: Seconds of silence after which a node counts as gone: between agreements, and in one for every
            message of up to 4 MiB. Give the lighthouse the same number.
        lighthouse: Its ``"host:port"``. Default: the environment variable ``HIERCOMM_LIGHTHOUSE``.

    Raises:
        ValueError: For numbers that make no sense.
        TypeError: For arguments of a wrong type.
    """

    min_nodes: int = 1
    max_nodes: int | None = None
    dead_after: float = 5.0
    lighthouse: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= MOST_NODES:
            raise ValueError(f"min_nodes={self.min_nodes} must be a positive number of nodes, up to {MOST_NODES}")
        if self.max_nodes is not None and self.max_nodes < self.min_nodes:
            raise ValueError(f"max_nodes={self.max_nodes} must be at least min_nodes={self.min_nodes}, or None")
        if not 0.5 <= self.dead_after <= LONGEST_SILENCE:
            raise ValueError(f"dead_after={self.dead_after} must be a number of seconds from 0.5 to {LONGEST_SILENCE}")
        if self.lighthouse is not None:
            check_address(self.lighthouse, "elastic's lighthouse")

    @classmethod
    def of(cls, value: Elastic | str | None) -> Elastic | None:
        """What a strategy's ``elastic`` means: a string is the lighthouse's address."""
        return cls(lighthouse=value) if isinstance(value, str) else value

    def address(self) -> str:
        """The lighthouse's ``"host:port"``.

        Raises:
            ValueError: If nobody has said it.
        """
        address = self.lighthouse or os.environ.get("HIERCOMM_LIGHTHOUSE", "")
        if not address:
            raise ValueError(
                "elastic nodes meet at a lighthouse: start `python -m lightning_hiercomm lighthouse --min-nodes"
                f" {self.min_nodes}` on one machine, and give its HOST:PORT to every node as HIERCOMM_LIGHTHOUSE, or as"
                " elastic='HOST:PORT'"
            )
        return check_address(address, "HIERCOMM_LIGHTHOUSE")


def check_address(address: str, name: str) -> str:
    """``address``, if it is a ``host:port``; raises a ``ValueError`` that says whose it is if not."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and 0 <= int(port) < 65536) or "/" in host:  # torchft's own is an URL
        raise ValueError(f"{name}={address!r} must be HOST:PORT, such as '10.0.0.1:29510'")
    return address


def check_torchft() -> None:
    """See that torchft is there.

    Raises:
        ModuleNotFoundError: If not, naming the extra.
    """
    if importlib.util.find_spec("torchft") is None:
        raise ModuleNotFoundError("elastic nodes need torchft: pip install 'lightning-hiercomm[elastic]'")


_UNSUPPORTED = {
    "batches": "HeterogeneousBatches divides a batch among ranks that stay: leave batches out",
    "ranks_per_node": "every node is a world of its own: leave ranks_per_node out",
    "average_optimizer_state": "the optimizer's state is not rolled back: leave average_optimizer_state out",
    "checkpoint_replicas": "replicas of nodes that leave and join fit no later run: leave checkpoint_replicas out",
    "evaluate": "each would save and stop by metrics of its own model: leave evaluate out",
}


def check_supported(scheme: Scheme, changed: Collection[str], inter_node: str, on_nonfinite: str) -> None:
    """Refuse what elastic nodes cannot do yet, each with the remedy.

    Args:
        scheme: The scheme.
        changed: Names of the strategy's arguments that are not the default.
        inter_node: The library for traffic between nodes.
        on_nonfinite: What happens to non-finite parameters.

    Raises:
        ValueError: For the first that they cannot.
    """
    reasons = [reason for name, reason in _UNSUPPORTED.items() if name in changed]
    if inter_node == "mpi":
        reasons.append("MPI ends the run with the first rank that dies: take inter_node='torch'")
    if on_nonfinite == "skip":
        reasons.append("a node that is not finite is not healed: take on_nonfinite='raise' or 'ignore'")
    for reason in (scheme.profile.needs_nodes_that_stay, *reasons):
        if reason is not None:
            raise ValueError(f"elastic nodes: {reason}")
