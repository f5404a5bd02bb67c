"""Merged how: what a node makes of what arrives from the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.arguments import Value
from lightning_hiercomm.nodes.bucket import Bucket, in_cache_sized_parts
from lightning_hiercomm.schemes.reducers.base import Reducer
from lightning_hiercomm.schemes.reducers.in_flight import PendingBucket


class Merge(Value, ABC):
    """Brings one bucket of the replica and what has arrived for it together.

    It is configuration, and remembers nothing: an ``OuterOptimizer``, which does, makes what remembers.

    Attributes:
        needs_sent: Whether what the node sent must be kept apart from what arrives.
        makes_equal: Whether nodes that merge what they have just sent all hold the same values.
        keeps_reference: Whether there are reference parameters, which are neither a node's own values nor the nodes'
            mean. Each rank keeps them for its part of the model, differences from them travel, and
            :meth:`update_reference` steps them.
    """

    needs_sent: bool = False
    makes_equal: bool = True
    keeps_reference: bool = False

    @abstractmethod
    def __call__(self, bucket: Bucket, move: PendingBucket, staleness: int, nodes: int) -> None:
        """Change the bucket's tensors.

        Args:
            bucket: What is merged into; its values are those of now.
            move: What arrived, packed: the mean over the nodes. Its memory may be used up.
            staleness: S, optimizer steps since it was sent.
            nodes: M, over how many nodes the mean was taken.
        """

    def at_once(self, bucket: Bucket, mean: Tensor, nodes: int) -> None:
        """The same for what was sent just now: here, the mean takes the place of the bucket's values.

        Args:
            bucket: What is merged into.
            mean: Packed.
            nodes: M, over how many nodes it was taken.
        """
        bucket.unpack(mean)

    def update_reference(self, index: int, agreed: Tensor, difference: Tensor) -> Tensor:
        """Move a bucket's last agreed values where the nodes' mean says; called where :attr:`keeps_reference`.

        Args:
            index: Of the bucket.
            agreed: This rank's part of the values, 1-D, to be changed in place.
            difference: How far the nodes' mean is from them.

        Returns:
            What every node gets to merge, in place of the mean: here, the values themselves, moved to the mean.
        """
        return agreed.add_(difference)

    def build(self, reducer: Reducer, before: Any | None = None) -> Any | None:
        """Make the outer optimizer of a reducer's reference parameters, if the merge has one. Collective over the node.

        Args:
            reducer: Holds them.
            before: The one that has stepped them so far, perhaps in other buckets: its state is kept.
        """
        return None

    def scalars(self, outer: Any | None) -> dict[str, float]:
        """Return current values to log.

        Args:
            outer: The outer optimizer, if there is one.
        """
        return {}


class Replace(Merge):
    """The mean takes the place of the node's own values: ``x := mean``.

    Args:
        keep_local: Weight of the node's own values, from 0 to 1: ``x := keep_local x + (1 - keep_local) mean``.
            Streaming DiLoCo's alpha (Douillard et al. 2025, Eq. 2).

    Raises:
        ValueError: If ``keep_local`` is not a number from 0 to 1.
    """

    def __init__(self, keep_local: float = 0.0) -> None:
        if not 0.0 <= keep_local <= 1.0:
            raise ValueError(f"keep_local={keep_local} must be a weight from 0 (take what arrives) to 1 (ignore it)")
        self.keep_local = keep_local
        self.makes_equal = keep_local == 0.0

    def __call__(self, bucket: Bucket, move: PendingBucket, staleness: int, nodes: int) -> None:
        self.at_once(bucket, move.flat, nodes)

    def at_once(self, bucket: Bucket, mean: Tensor, nodes: int) -> None:
        if self.keep_local == 0.0:
            bucket.unpack(mean)
        else:
            bucket.mix(mean, 1.0 - self.keep_local)


class StaleSum(Merge):
    """DASO's Eq. 1: the node's own values weigh 2 S, what each of the P nodes sent S steps ago weighs 1.

    That is::

        x := (2 S x_local + sum of sent x) / (2 S + P)

    Local progress keeps the weight ``2 S / (2 S + P)``: half with 2 nodes, 3 % with 64 (S = 1).
    """

    @torch.no_grad()
    def __call__(self, bucket: Bucket, move: PendingBucket, staleness: int, nodes: int) -> None:
        local_weight = 2 * staleness
        for whole in bucket.aligned(move.flat):
            for local, mean in in_cache_sized_parts(*whole):
                local.lerp_(mean, nodes / (local_weight + nodes))  # what is equal stays so, in any type


class Delta(Merge):
    """All local progress is kept, and with it the mean over the nodes: ``x := x_local + mean of sent x - own sent``."""

    needs_sent = True

    @torch.no_grad()
    def __call__(self, bucket: Bucket, move: PendingBucket, staleness: int, nodes: int) -> None:
        for (whole, mean), (_, sent) in zip(bucket.aligned(move.flat), bucket.aligned(move.sent), strict=True):
            for local, arrived, left in in_cache_sized_parts(whole, mean, sent):
                # what is equal stays so, in any type: minus zero, too, of which zero may be taken, not added
                local.sub_(torch.sub(left, arrived, out=arrived))


MERGES: dict[str, Callable[[], Merge]] = {"replace": Replace, "eq1": StaleSum, "delta": Delta}
"""The merges that have a name."""
