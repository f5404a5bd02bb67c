"""Which rank lives on which node, and who talks to whom."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache

from torch import Tensor

from lightning_hiercomm.comm.base import Communicator, Connect, Handle, finished, wait_all
from lightning_hiercomm.comm.meter import Meter


class Holders:
    """The ranks of a node that hold the same values, seen from one of them: each carries a part between the nodes.

    Args:
        group: These ranks. None: this one alone.
        lanes: Into how many equal parts the values are cut; ranks beyond these carry none.
    """

    def __init__(self, group: Communicator | None = None, lanes: int = 1) -> None:
        self.group = group
        self.lanes = lanes
        self.size = 1 if group is None else group.size
        self.place = 0 if group is None else group.rank

    def part(self, flat: Tensor, place: int | None = None) -> Tensor:
        """What a holder carries: a view, empty if that is nothing.

        Args:
            flat: 1-D, a multiple of :attr:`lanes` elements.
            place: Of the holder. Default: this rank's.
        """
        place = self.place if place is None else place
        part = flat.numel() // self.lanes
        return flat[place * part : (place + 1) * part] if place < self.lanes else flat[:0]

    def share(self, flat: Tensor) -> Handle:
        """Give every holder all parts of ``flat``, in place."""
        if self.group is None or self.size == self.lanes == 1:
            return finished
        if self.size == self.lanes:
            return self.group.all_gather(flat, self.part(flat))
        part = flat.numel() // self.lanes
        return _All([self.group.broadcast(flat[i * part : (i + 1) * part], source=i) for i in range(self.lanes)])

    def broadcast(self, flat: Tensor, source: int) -> Handle:
        """Give every holder what the one in place ``source`` has, in place."""
        return finished if self.group is None else self.group.broadcast(flat, source)


class Topology:
    """The nodes of a run, seen from one rank, with its communicators and the ranks' weights.

    A *lane* joins the ranks with the same local index, one per node. There are as many lanes as the smallest node has
    ranks, so ranks beyond that carry nothing between nodes. Every lane moves its own part of a tensor, so the links
    of all ranks of a node work at once.

    Args:
        nodes: World ranks of every node, ``nodes[m]`` being those of node ``m`` in local order.
        rank: This rank.
        connect: Makes the communicators. Collective over the world.
        meter: Counts this rank's traffic; the one ``connect`` files it in.
        weights: A positive weight per world rank, in proportion to the samples it contributes; normalised to sum 1.
            Default: all equal.
        waits_on_host: Whether the host waits where moves of CUDA tensors between nodes are waited for; the same on all
            ranks, also on those that are in no lane.
        world: All ranks, if somebody has them already. Default: ``connect`` makes them.

    Attributes:
        world: All ranks; a twin has those of its elder, so only the training thread may use them.
        intra: The ranks of this node.
        inter: The ranks of this rank's lane, or None if this rank is in none.
        holders: Who holds what this rank holds: ``"node"``, all ranks of its node; ``"rank"``, it alone; and the groups
            that ``divide`` has made.
        waits_on_host: As above.
        is_closed: Whether the communicators have been closed; nodes and weights can still be asked for.
        is_left_behind: Whether a run that broke off has left them, perhaps with others stuck in them: others are made.
        may_grow: Whether other nodes may come and go.
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
        self.lanes = min(map(len, self.nodes))
        self._connect = connect
        self._siblings: list[Topology] = []
        self._groups: dict[str, Sequence[Sequence[int]]] = {}
        self.is_closed = False
        self.is_left_behind = False
        self.waits_on_host = waits_on_host
        self._owns_world = world is None
        self.world = world or self._require(connect([range(self.world_size)], "world"))
        self.intra = self._require(connect(self.nodes, "intra"))
        self.inter = connect([[ranks[lane] for ranks in self.nodes] for lane in range(self.lanes)], "inter")
        self.holders = {"node": Holders(self.intra, self.lanes), "rank": Holders()}
        self.set_weights(weights or [1.0] * self.world_size)

    def set_weights(self, weights: Sequence[float]) -> None:
        """Give the ranks new weights (the same on every rank); they are normalised to sum 1."""
        if len(weights) != self.world_size or min(weights) <= 0:
            raise ValueError(f"weights must be {self.world_size} positive numbers, not {list(weights)}")
        self._given_weights = tuple(weights)
        self.weights, self._node_weights = _shares(self._given_weights, self.nodes)
        for sibling in self._siblings:
            sibling.set_weights(weights)

    @property
    def num_nodes(self) -> int:
        """The number of nodes, M."""
        return len(self.nodes)

    @property
    def is_one_node(self) -> bool:
        """Whether there is one node, and never more."""
        return self.num_nodes == 1 and not self.may_grow

    def synchronize(self, work: Callable[[], object], admits: bool = False, brings: bool = True) -> None:
        """Do what nodes do together: whoever lets them talk to each other does it in here, where they come and go.

        Args:
            work: Called perhaps more than once, if nodes are lost meanwhile; then all that it did is taken back before.
            admits: Whether a node that comes may begin after it with what one of the others has.
            brings: Whether nodes know of each other's steps after it; not if something leaves in it for a later one.
        """
        work()

    @property
    def ranks_on_node(self) -> int:
        """The number of ranks on this node."""
        return len(self.nodes[self.node])

    @property
    def rank_weight(self) -> float:
        """This rank's share of the world, w_r; all of them sum to 1."""
        return self.weights[self.rank]

    @property
    def node_weights(self) -> tuple[float, ...]:
        """Each node's share of the world, W_m: the sum over its ranks."""
        return self._node_weights

    @property
    def node_weight(self) -> float:
        """This node's share of the world, W_m."""
        return self.node_weights[self.node]

    def of_nodes(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Each node's sum of what its ranks have."""
        return _of_nodes(weights, self.nodes)

    def in_node(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Each rank's share of what the ranks of this node have, in local order."""
        own = [weights[rank] for rank in self.nodes[self.node]]
        return tuple(weight / (sum(own) or 1.0) for weight in own)

    @property
    def weight_in_node(self) -> float:
        """This rank's share of its node, w_r / W_m; over a node they sum to 1."""
        return self.rank_weight / self.node_weight

    def lane_part(self, flat: Tensor) -> Tensor:
        """The part of ``flat`` that this rank's lane carries: a view, empty for a rank in no lane.

        Args:
            flat: 1-D, a multiple of :attr:`lanes` elements.
        """
        return self.holders["node"].part(flat)

    def share_lane_parts(self, flat: Tensor) -> Handle:
        """Give every rank of the node all lanes' parts of ``flat``, in place."""
        return self.holders["node"].share(flat)

    def divide(self, groups: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Tell groups of ranks apart, inside the nodes, which hold values that the rest of their node does not.

        Args:
            groups: By name, disjoint groups that hold every rank once, of one size, and alike on all nodes.

        Collective.
        """
        for name, ranks in groups.items():
            self._groups[name] = ranks
            self.holders[name] = Holders(self._require(self._connect(ranks, "intra")), len(ranks[0]))

    def duplicate(self) -> Topology:
        """The same nodes with communicators of their own, for moves launched beside the training thread. Collective.

        What joins all ranks is not made anew: it is for the training thread. The twin goes by this topology's weights,
        and is closed together with it.
        """
        sibling = self._sibling(self.nodes)
        sibling.divide(self._groups)
        return sibling

    def ranks_as_nodes(self) -> Topology:
        """The same ranks with the same weights, each as a node of its own. Collective; closed together with this."""
        flat = self._sibling([[rank] for rank in range(self.world_size)])
        self._require(flat.inter).in_node = frozenset(self.nodes[self.node])
        return flat

    def _sibling(self, nodes: Sequence[Sequence[int]]) -> Topology:
        # what was given, for shares divided by their sum once more may have another last bit
        given = self._given_weights
        sibling = Topology(nodes, self.rank, self._connect, self.meter, given, self.waits_on_host, self.world)
        self._siblings.append(sibling)
        return sibling

    def close(self) -> None:
        """Close all communicators, those of siblings too. Nothing may be in flight. Collective."""
        if self.is_closed:
            return
        self.is_closed = True
        for sibling in self._siblings:
            sibling.close()
        divided = [self.holders[name].group for name in self._groups]
        for communicator in (self.world if self._owns_world else None, self.intra, self.inter, *divided):
            if communicator is not None:
                communicator.close()

    @staticmethod
    def _require(communicator: Communicator | None) -> Communicator:
        if communicator is None:
            raise RuntimeError("`connect` left this rank out of its world or of its node")
        return communicator


# Simulations have topologies for thousands of ranks in one process, which all know the same.


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
    """Of each rank, and of each node; each sums to 1."""
    total = float(sum(weights))
    of_ranks = tuple(weight / total for weight in weights)
    return of_ranks, _of_nodes(of_ranks, nodes)


def _of_nodes(weights: Sequence[float], nodes: Sequence[Sequence[int]]) -> tuple[float, ...]:
    return tuple(sum(weights[rank] for rank in ranks) for ranks in nodes)


class _All(Handle):
    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        wait_all(self._handles)

    def is_done(self) -> bool:
        return all(handle.is_done() for handle in self._handles)


def nodes_by_place(places: Sequence[tuple[Hashable, int]]) -> list[list[int]]:
    """Group ranks by where they say they live.

    Args:
        places: For every world rank, its node (anything hashable: a node number, a host name) and its local rank.

    Returns:
        World ranks by node, nodes in the order of their lowest rank, ranks of a node in the order of their local rank.
    """
    by_node: dict[Hashable, list[int]] = {}
    for rank, (node, _) in enumerate(places):
        by_node.setdefault(node, []).append(rank)
    return [sorted(ranks, key=lambda rank: (places[rank][1], rank)) for ranks in by_node.values()]


def nodes_by_count(ranks_per_node: int | Sequence[int], world_size: int) -> list[list[int]]:
    """Split consecutive ranks into nodes.

    Args:
        ranks_per_node: The size of every node, or a list with one size per node.
        world_size: Number of ranks.

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
