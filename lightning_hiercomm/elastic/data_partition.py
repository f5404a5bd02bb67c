"""Partitions the training data among the ranks of nodes that leave and join."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lightning_hiercomm.elastic.quorum import Quorum, in_order, random_index


@dataclass(frozen=True)
class DataPartition:
    """The number of shards of the data, and by replica id those of its ranks."""

    total: int = 0
    shards: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def partition_for_epoch(quorum: Quorum) -> DataPartition:
    """Give every rank a shard of its own, in the order of the nodes' names."""
    shards: dict[str, tuple[int, ...]] = {}
    total = 0
    for each in sorted((*quorum.members, *quorum.joining), key=in_order):
        shards[each.replica_id] = tuple(range(total, total + each.ranks))
        total += each.ranks
    return DataPartition(total, shards)


def partition_within_epoch(quorum: Quorum, current: DataPartition) -> DataPartition:
    """Give joining nodes the shards of lost nodes; the number of shards is constant until the epoch ends.

    If none are free, a joining node trains on shards of other nodes too. A fit begins with a shard for each rank of its
    first members.
    """
    if quorum.begins:
        current = partition_for_epoch(replace(quorum, joining=()))
    shards = {each.replica_id: current.shards[each.replica_id] for each in quorum.members}
    used = {shard for of_replica in shards.values() for shard in of_replica}
    left = [shard for shard in range(current.total) if shard not in used]
    for each in quorum.joining:
        any_shard = random_index(each.replica_id)
        shards[each.replica_id] = tuple(
            left.pop(0) if left else (any_shard + rank) % current.total for rank in range(each.ranks)
        )
    return replace(current, shards=shards)


class DataShards:
    """The data partition over time as one replica sees it."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self.current = self._for_epoch = DataPartition()

    def commit(self, quorum: Quorum) -> None:
        """Update after a synchronization."""
        self._for_epoch = partition_for_epoch(quorum)
        self.current = partition_within_epoch(quorum, self.current)

    def own(self) -> tuple[int, tuple[int, ...]]:
        """Return the number of shards of the data, and those of this replica's ranks; none before the first quorum."""
        return self.current.total, self.current.shards.get(self._replica_id, ())

    def begin_epoch(self) -> bool:
        """Partition the data among all nodes of the last quorum; return whether that changes this replica's shards."""
        before, self.current = self.own(), self._for_epoch
        return before != self.own()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return primitives for a joining node."""
        return asdict(self.current), asdict(self._for_epoch)

    def load(self, current: Mapping[str, Any], for_epoch: Mapping[str, Any]) -> None:
        """Restore another node's :meth:`state`."""
        self.current, self._for_epoch = DataPartition(**current), DataPartition(**for_epoch)
