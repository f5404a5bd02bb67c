"""The nodes of a run and their process groups, a 2-D mesh: inside nodes and between nodes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache

from torch import Tensor

from lightning_hiercomm.comm.base import Communicator, Connect, Handle, Together, finished
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.nodes.round import Round


class Holders:
    """The ranks of a node that hold the same values; each sends one shard of them to other nodes.

    Args:
        group: These ranks. None: this rank alone.
        num_shards: Number of equal shards; ranks beyond it send none.
    """

    def __init__(self, group: Communicator | None = None, num_shards: int = 1) -> None:
        self.group = group
        self.num_shards = num_shards
        self.size = 1 if group is None else group.size
        self.place = 0 if group is None else group.rank

    def shard(self, flat: Tensor, place: int | None = None) -> Tensor:
        """Return a view of a holder's shard, empty if it has none; the default ``place`` is this rank's."""
        place = self.place if place is None else place
        part = flat.numel() // self.num_shards
        return flat[place * part : (place + 1) * part] if place < self.num_shards else flat[:0]

    def gather(self, flat: Tensor) -> Handle:
        """Gather all shards of ``flat`` on every holder, in place."""
        if self.group is None or self.size == self.num_shards == 1:
            return finished
        if self.size == self.num_shards:
            return self.group.all_gather(flat, self.shard(flat))
        part = flat.numel() // self.num_shards
        return Together(
            [self.group.broadcast(flat[i * part : (i + 1) * part], source=i) for i in range(self.num_shards)]
        )


class OneSender(Holders):
    """Ranks of a node that hold the same values, of which one sends all and broadcasts what it receives.

    Args:
        group: These ranks. None: this rank alone.
        sender: The index of the one that sends.

    Attributes:
        sends: Whether this rank is the one.
    """

    def __init__(self, group: Communicator | None, sender: int) -> None:
        super().__init__(group)
        self._sender = sender
        self.sends = self.place == sender

    def shard(self, flat: Tensor, place: int | None = None) -> Tensor:
        return flat if (self.place if place is None else place) == self._sender else flat[:0]

    def gather(self, flat: Tensor) -> Handle:
        return finished if self.group is None else self.group.broadcast(flat, self._sender)


class Topology:
    """The nodes of a run as one rank sees them, with its communicators and the ranks' weights.

    An *inter-node group* joins the ranks with the same local index, one per node. There are as many groups as the
    smallest node has ranks; other ranks send nothing between nodes. Each group sends its own shard of a tensor, so all
    links of a node are busy at the same time.

    Args:
        nodes: World ranks of every node, ``nodes[m]`` being those of node ``m`` in local order.
        rank: This rank.
        connect: Creates the communicators. Collective over the world.
        meter: Counts this rank's traffic, as used by ``connect``.
        weights: A positive weight per world rank, in proportion to its samples. Default: all equal.
        waits_on_host: Whether waiting for an inter-node collective of CUDA tensors blocks the host.
        world: All ranks. Default: ``connect`` creates them.

    Attributes:
        world: All ranks; duplicates share it, so only the training thread may use it.
        intra: The ranks of this node.
        inter: This rank's inter-node group, or None.
        num_shards: Number of inter-node groups.
        holders: Ranks that hold the same values: ``"node"``, all ranks of the node; ``"rank"``, this rank alone; and
            the groups of ``divide``.
        node_weights: Each node's share of the world, W_m: the sum over its ranks.
        weight_in_node: This rank's share of its node, w_r / W_m; over a node they sum to 1.
        is_left_behind: Whether a failed run has abandoned the communicators.
        may_grow: Whether nodes may join and leave.
    """

    may_grow = False

    def __init__(
        self,
        nodes: Sequence[Sequence[int]],
        rank: int,
        connect: Connect,
        meter: Meter,
        weights: Sequence[float] | None = None,
        waits_on_host: bool = False,
        world: Communicator | None = None,
    ) -> None:
        self.nodes = _checked(tuple(map(tuple, nodes)))
        self.rank = rank
        self.meter = meter
        self.world_size = sum(map(len, self.nodes))
        self.node = next(m for m, ranks in enumerate(self.nodes) if rank in ranks)
        self.local_rank = self.nodes[self.node].index(rank)
        self.num_shards = min(map(len, self.nodes))
        self.connect = connect
        self.duplicates: list[Topology] = []
        self._groups: dict[str, Sequence[Sequence[int]]] = {}
        self.is_closed = False
        self.is_left_behind = False
        self.waits_on_host = waits_on_host
        self._owns_world = world is None
        self.world = world or self._require(connect([range(self.world_size)], "world"))
        self.intra = self._require(connect(self.nodes, "intra"))
        self.inter = connect([[ranks[shard] for ranks in self.nodes] for shard in range(self.num_shards)], "inter")
        self.holders = {"node": Holders(self.intra, self.num_shards), "rank": Holders()}
        self.set_weights(weights or [1.0] * self.world_size)

    def set_weights(self, weights: Sequence[float]) -> None:
        """Set the ranks' weights (the same on every rank), normalized to sum 1."""
        if len(weights) != self.world_size or min(weights) <= 0:
            raise ValueError(f"weights must be {self.world_size} positive numbers, not {list(weights)}")
        self._given_weights = tuple(weights)
        self.weights, self.node_weights = _shares(self._given_weights, self.nodes)
        self.weight_in_node = self.rank_weight / self.node_weight
        for other in self.duplicates:
            other.set_weights(weights)

    def new_round(self, step: int = 0, number: int = 0, samples: Sequence[float] = ()) -> Round:
        """Return a synchronization of all ranks.

        Args:
            step: The optimizer steps that all ranks have taken.
            number: How many synchronizations came before it.
            samples: The samples of each rank, by which it is weighed. Default, or if all are 0: the set weights.
        """
        weights, _ = _shares(tuple(samples), self.nodes) if any(samples) else (self.weights, None)
        return Round(number, step, self.nodes, weights)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, M."""
        return len(self.nodes)

    @property
    def nodes_in_world(self) -> int:
        """Number of nodes over which ``world`` sums outside of synchronizations, such as their traffic."""
        return self.num_nodes

    @property
    def is_one_node(self) -> bool:
        """Whether there is one node, and no other can join."""
        return self.num_nodes == 1

    def synchronize(self, work: Callable[[], object], admits: bool = False) -> None:
        """Run communication between nodes; elastic nodes roll back and repeat it if a node fails.

        Args:
            work: The communication.
            admits: Whether a joining node may start after it, from the state of another node.
        """
        work()

    @property
    def has_all_ranks_in_groups(self) -> bool:
        """Whether every rank of this node gets the results of an inter-node group itself."""
        return self.ranks_on_node <= self.num_shards

    @property
    def ranks_on_node(self) -> int:
        """Number of ranks on this node."""
        return len(self.nodes[self.node])

    @property
    def rank_weight(self) -> float:
        """This rank's share of the world, w_r; all of them sum to 1."""
        return self.weights[self.rank]

    @property
    def node_weight(self) -> float:
        """This node's share of the world, W_m."""
        return self.node_weights[self.node]

    def own_shard(self, flat: Tensor) -> Tensor:
        """Return this rank's shard of ``flat`` as a view, empty for a rank in no inter-node group."""
        return self.holders["node"].shard(flat)

    def gather_shards(self, flat: Tensor) -> Handle:
        """Gather all shards of ``flat`` on every rank of the node, in place."""
        return self.holders["node"].gather(flat)

    def divide(self, groups: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Divide the nodes into groups of ranks that hold the same values; collective.

        Each value of ``groups`` has every rank once, in groups of one size, in the same order on all nodes.
        """
        for name, ranks in groups.items():
            self._groups[name] = ranks
            self.holders[name] = Holders(self._require(self.connect(ranks, "intra")), len(ranks[0]))

    def duplicate(self) -> Topology:
        """Duplicate the communicators, for asynchronous collectives outside of the training thread; collective.

        The world's communicator is shared. The duplicate has the same weights, and is closed together with this.
        """
        # the given weights: normalizing twice may change the last bit
        given = self._given_weights
        other = Topology(self.nodes, self.rank, self.connect, self.meter, given, self.waits_on_host, self.world)
        self.duplicates.append(other)
        other.divide(self._groups)
        return other

    def close(self) -> None:
        """Close all communicators, also of duplicates. Nothing may be in flight. Collective."""
        if self.is_closed:
            return
        self.is_closed = True
        for other in self.duplicates:
            other.close()
        divided = [self.holders[name].group for name in self._groups]
        for communicator in (self.world if self._owns_world else None, self.intra, self.inter, *divided):
            if communicator is not None:
                communicator.close()

    @staticmethod
    def _require(communicator: Communicator | None) -> Communicator:
        if communicator is None:
            raise RuntimeError("`connect` left this rank out of its world or of its node")
        return communicator


# Simulations have topologies of thousands of ranks in one process.


@lru_cache(maxsize=8)
def _checked(nodes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    world_size = sum(map(len, nodes))
    if sorted(rank for ranks in nodes for rank in ranks) != list(range(world_size)) or not all(nodes):
        raise ValueError(f"nodes must hold every rank from 0 to {world_size - 1} once, not {nodes}")
    return nodes


@lru_cache(maxsize=8)
def _shares(
    weights: tuple[float, ...], nodes: tuple[tuple[int, ...], ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    total = float(sum(weights))
    of_ranks = tuple(weight / total for weight in weights)
    return of_ranks, Round(0, 0, nodes, of_ranks).of_nodes


def nodes_by_place(places: Sequence[tuple[Hashable, int]]) -> list[list[int]]:
    """Group world ranks by their reported nodes and local ranks; nodes are ordered by their lowest rank."""
    by_node: dict[Hashable, list[int]] = {}
    for rank, (node, _) in enumerate(places):
        by_node.setdefault(node, []).append(rank)
    return [sorted(ranks, key=lambda rank: (places[rank][1], rank)) for ranks in by_node.values()]


def nodes_by_count(ranks_per_node: int | Sequence[int], world_size: int) -> list[list[int]]:
    """Split consecutive ranks into nodes, of one size or a list of sizes.

    Raises:
        ValueError: If the sizes do not add up to the world.
    """
    if isinstance(ranks_per_node, int):
        if ranks_per_node < 1 or world_size % ranks_per_node:
            raise ValueError(
                f"ranks_per_node={ranks_per_node} does not divide the world of {world_size} ranks."
                f" Give a divisor of {world_size}, or a list with the size of every node that sums to it."
            )
        ranks_per_node = [ranks_per_node] * (world_size // ranks_per_node)
    sizes = list(ranks_per_node)
    if any(size < 1 for size in sizes) or sum(sizes) != world_size:
        raise ValueError(
            f"ranks_per_node={sizes} adds up to {sum(sizes)}, but the world has {world_size} ranks."
            " Give one positive size per node that together make the world."
        )
    starts = [sum(sizes[:m]) for m in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
