"""What a user may choose about nodes that leave and join."""

from __future__ import annotations

import importlib.util
import os
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


def check_supported(
    scheme: Scheme,
    *,
    batches: object = None,
    ranks_per_node: object = None,
    inter_node: str = "torch",
    average_optimizer_state: bool = False,
    checkpoint_replicas: bool = False,
    on_nonfinite: str = "raise",
    evaluate: str = "consensus",
) -> None:
    """Refuse what elastic nodes cannot do yet, each with what to take instead.

    Raises:
        ValueError: For the first that they cannot.
    """
    if (reason := scheme.requirements.needs_fixed_nodes) is not None:
        raise ValueError(f"elastic nodes: {reason}")
    reasons = [
        (batches is not None, "HeterogeneousBatches divides a batch among ranks that stay: leave batches out"),
        (ranks_per_node is not None, "every node is a world of its own: leave ranks_per_node out"),
        (inter_node == "mpi", "MPI ends the run with the first rank that dies: take inter_node='torch'"),
        (average_optimizer_state, "the optimizer's state is not rolled back: leave average_optimizer_state out"),
        (checkpoint_replicas, "replicas of nodes that come and go fit no later run: leave checkpoint_replicas out"),
        (evaluate == "replica", "each would save and stop by numbers of its own model: leave evaluate out"),
        (on_nonfinite == "skip", "a node that is not finite is not healed: take on_nonfinite='raise' or 'ignore'"),
    ]
    for holds, reason in reasons:
        if holds:
            raise ValueError(f"elastic nodes: {reason}")
