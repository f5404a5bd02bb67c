"""The configuration of a run whose nodes leave and join."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from lightning_hiercomm.arguments import as_call, checked_fields

LONGEST_SILENCE = 24 * 3600


@checked_fields
@dataclass(frozen=True)
class Elastic:
    """Nodes may leave a run and join it while the others train on.

    Every node is a ``torch.distributed`` world and a Trainer of its own, started with ``torchrun --nnodes=1``. Nodes
    find each other at a lighthouse, ``python -m lightning_hiercomm lighthouse``. Needs the extra ``elastic``.

    Example::

        strategy = HierarchicalStrategy(DiLoCo(sync_every=100), elastic=Elastic(min_nodes=2))

    Args:
        min_nodes: With fewer nodes the run waits.
        dead_after: Seconds of silence after which a node counts as lost, also for each message of up to 4 MiB. Give
            the lighthouse the same number.
        lighthouse: Its ``"host:port"``. Default: the environment variable ``HIERCOMM_LIGHTHOUSE``.

    Raises:
        ValueError: For numbers out of range.
        TypeError: For arguments of a wrong type.
    """

    min_nodes: int = 1
    dead_after: float = 5.0
    lighthouse: str | None = None

    __repr__ = as_call

    def __post_init__(self) -> None:
        if self.min_nodes < 1:
            raise ValueError(f"min_nodes={self.min_nodes} must be positive")
        if not 0.5 <= self.dead_after <= LONGEST_SILENCE:
            raise ValueError(f"dead_after={self.dead_after} must be a number of seconds from 0.5 to {LONGEST_SILENCE}")
        if self.lighthouse is not None:
            check_address(self.lighthouse, "elastic's lighthouse")

    @classmethod
    def of(cls, value: Elastic | str | None) -> Elastic | None:
        """Return the value of a strategy's ``elastic``; a string is the lighthouse's address."""
        return cls(lighthouse=value) if isinstance(value, str) else value

    def address(self) -> str:
        """Return the lighthouse's ``"host:port"``.

        Raises:
            ValueError: If it is not configured.
        """
        address = self.lighthouse or os.environ.get("HIERCOMM_LIGHTHOUSE", "")
        if not address:
            raise ValueError(
                "elastic nodes need a lighthouse: start `python -m lightning_hiercomm lighthouse` on one machine, and"
                " give its HOST:PORT to every node as HIERCOMM_LIGHTHOUSE, or as elastic='HOST:PORT'"
            )
        return check_address(address, "HIERCOMM_LIGHTHOUSE")


def check_address(address: str, name: str) -> str:
    """Return the address if it is ``host:port``; otherwise raise a ``ValueError`` that contains its name."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and 0 <= int(port) < 65536) or "/" in host:  # torchft's own is an URL
        raise ValueError(f"{name}={address!r} must be HOST:PORT, such as '10.0.0.1:29510'")
    return address


def check_torchft() -> None:
    """Raise a ``ModuleNotFoundError`` with the remedy if torchft is not installed."""
    if importlib.util.find_spec("torchft") is None:
        raise ModuleNotFoundError("elastic nodes need torchft: pip install torchft==0.2.0")
