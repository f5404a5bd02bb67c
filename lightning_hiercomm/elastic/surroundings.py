"""The objects through which a node takes part in an elastic run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch.distributed import Store

from lightning_hiercomm.elastic.configuration import Elastic
from lightning_hiercomm.elastic.lighthouse import TorchftLighthouse
from lightning_hiercomm.elastic.topology import ElasticTopology
from lightning_hiercomm.elastic.transport import GlooTransport

T = TypeVar("T")


class Participant(Protocol):
    """The training of one rank."""

    def position(self) -> str:
        """Describe where training is; nodes at different positions cannot synchronize."""

    def before_change(self) -> Callable[[], None]:
        """Prepare for a change of nodes, which may fail; return a callback for after it."""

    def undo_point(self) -> Callable[[], None]:
        """Return a callback that rolls back a synchronization."""

    def leaves_by(self) -> BaseException | None:
        """Return the exception that ends training if this rank has to leave, otherwise None."""


@dataclass
class Surroundings:
    """The objects through which a node reaches the others.

    Attributes:
        elastic: The user's configuration.
        topology: Contains the members of each quorum.
        lighthouse: Forms quorums; on the node's first rank only.
        transport: Reaches other nodes.
        store: This node's store, which others read; on its first rank only.
    """

    elastic: Elastic
    topology: ElasticTopology
    lighthouse: TorchftLighthouse | None
    transport: GlooTransport
    store: Store | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank communicates for the node."""
        return self.topology.intra.rank == 0

    def shared(self, value: T) -> T:
        """Return the value of the node's first rank. Collective over the node."""
        shared: T = self.topology.intra.all_gather_object(value if self.is_first else None)[0]
        return shared
