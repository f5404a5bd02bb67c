"""The nodes of a run whose nodes change, seen from one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.elastic.groups import CircuitBreaker, InterNodeGroup, NodesWorld
from lightning_hiercomm.nodes.topology import Holders, Topology


class ElasticTopology(Topology):
    """A topology that is formed anew when nodes come or go: its communicators stay, their members and weights change.

    Until nodes have met it holds this node alone, and ``world`` is the node outside of agreements at any time.

    Args:
        own: This node, as a run of one node.
        elder: Of which it is a twin.
    """

    may_grow = True

    def __init__(self, own: Topology, elder: ElasticTopology | None = None) -> None:
        self.breaker: CircuitBreaker = CircuitBreaker() if elder is None else elder.breaker
        self.lane = InterNodeGroup(own.meter, self.breaker, is_beside=elder is not None)
        if elder is None:
            self.breaker.close = self.disconnect
        self._twins: list[ElasticTopology] = []
        world = NodesWorld(own.intra, self.lane if own.local_rank == 0 else None)
        self._world = world
        made = {"world": world, "intra": own.intra, "inter": self.lane}

        def connect(groups: Sequence[Sequence[int]], tier: str) -> Communicator | None:
            return made[tier]

        super().__init__(own.nodes, own.rank, connect, own.meter, waits_on_host=True)  # num_shards of GPUs are staged
        self._own = own
        self._agreement: Callable[[Callable[[], object], bool, bool], None] | None = None

    def agree_by(self, agreement: Callable[[Callable[[], object], bool, bool], None] | None) -> None:
        """Let ``agreement`` do what is done between nodes; None: nothing is."""
        self._agreement = agreement

    def synchronize(self, work: Callable[[], object], admits: bool = False, brings: bool = True) -> None:
        if self._agreement is not None:
            self._agreement(work, admits, brings)

    @property
    def all_groups(self) -> list[InterNodeGroup]:
        """This rank's own, and those of its twins."""
        return [self.lane, *(twin.lane for twin in self._twins)]

    def disconnect(self) -> None:
        """Let go of all connections to other nodes."""
        for lane in self.all_groups:
            lane.disconnect()

    def reform(self, sizes: Sequence[int], node: int) -> None:
        """Hold other nodes.

        Args:
            sizes: Their numbers of ranks.
            node: Which of them this one is.
        """
        starts = [sum(sizes[:m]) for m in range(len(sizes))]
        self.nodes = tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
        self.world_size = sum(sizes)
        self.node, self.rank = node, self.nodes[node][self.local_rank]
        self.num_shards = min(sizes)
        self.inter = self.lane if self.local_rank < self.num_shards else None
        self.holders["node"] = Holders(self.intra, self.num_shards)
        self.set_weights([1.0] * self.world_size)
        for twin in self._twins:
            twin.reform(sizes, node)

    def open(self) -> None:
        """An agreement begins: ranks may talk to other nodes."""
        self._world.reform(self.nodes, self.node)
        self.lane.is_open = True

    def shut(self) -> None:
        """It is over."""
        self._world.reform([range(self.intra.size)], 0)
        self.lane.is_open = False

    def duplicate(self) -> ElasticTopology:
        twin = ElasticTopology(self._own.duplicate(), self)
        self._twins.append(twin)
        return twin

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.disconnect()
            self._own.close()
