"""The topology of an elastic run as one rank sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.elastic.groups import InterNodeGroup, NodesWorld
from lightning_hiercomm.elastic.quorum import Quorum
from lightning_hiercomm.elastic.transport import GlooTransport
from lightning_hiercomm.nodes.topology import Holders, Topology


class ElasticTopology(Topology):
    """A topology whose communicators persist while their members and weights change with each quorum.

    It contains only this node before the first quorum, and ``world`` does outside of synchronizations.

    Args:
        own: This node, as a run of one node.

    Attributes:
        transaction: Runs synchronizations; None: they do nothing.
        connected_in: The quorum whose members this node is connected to; empty if it is not connected.
    """

    may_grow = True

    def __init__(self, own: Topology) -> None:
        self.inter_group = InterNodeGroup(own.meter)
        self.connected_in = ""
        self._nodes_world = NodesWorld(own.intra, self.inter_group if own.local_rank == 0 else None)
        made = {"world": self._nodes_world, "intra": own.intra, "inter": self.inter_group}

        def connect(groups: Sequence[Sequence[int]], level: str) -> Communicator | None:
            return made[level]

        super().__init__(own.nodes, own.rank, connect, own.meter, waits_on_host=True)  # GPU tensors are staged
        self._own = own
        self.transaction: Callable[[Callable[[], object], bool], None] | None = None

    def synchronize(self, work: Callable[[], object], admits: bool = False) -> None:
        if self.transaction is not None:
            self.transaction(work, admits)

    @property
    def nodes_in_world(self) -> int:
        return 1

    @property
    def is_one_node(self) -> bool:
        return False

    @property
    def has_all_ranks_in_groups(self) -> bool:
        return False  # a group may break on one rank only

    def connect_members(self, quorum: Quorum, index: int, transport: GlooTransport) -> str | None:
        """Connect to all members, of which this node is one; return the error of a rank. Collective over the node."""
        sizes, local, error = [member.ranks for member in quorum.members], self.local_rank, None
        has_group = len(sizes) > 1 and local < min(sizes)
        try:
            group = transport.connect_group(quorum, index, str(local), self.meter) if has_group else None
            self.inter_group.connect(group)
        except RuntimeError as raised:
            error = str(raised).splitlines()[0]
        errors: list[str] = [each for each in self.intra.all_gather_object(error) if each is not None]
        if errors:
            self.disconnect()
            return errors[0]
        self.reform(sizes, index)
        self.connected_in = quorum.group
        return None

    def disconnect(self) -> None:
        """Close all connections to other nodes, whose pending collectives fail at once. Not collective."""
        self.inter_group.disconnect()
        self.connected_in = ""

    def reform(self, sizes: Sequence[int], node: int) -> None:
        """Contain nodes of these sizes; ``node`` is the index of this one."""
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self.nodes = tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
        self.world_size = sum(sizes)
        self.node, self.rank = node, self.nodes[node][self.local_rank]
        self.num_shards = min(sizes)
        self.inter = self.inter_group if self.local_rank < self.num_shards else None
        self.holders["node"] = Holders(self.intra, self.num_shards)
        self.set_weights([1.0] * self.world_size)

    def open(self) -> None:
        """Begin a synchronization: ranks may communicate with other nodes."""
        self._nodes_world.reform(self.nodes, self.node)
        self.inter_group.is_open = True

    def shut(self) -> None:
        self._nodes_world.reform([range(self.intra.size)], 0)
        self.inter_group.is_open = False

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.disconnect()
            self._own.close()
