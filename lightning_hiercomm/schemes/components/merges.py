"""Merges: how a node combines its own parameters with the received mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.arguments import Value
from lightning_hiercomm.nodes.bucket import Bucket, in_cache_sized_parts
from lightning_hiercomm.schemes.reducers.base import Reducer
from lightning_hiercomm.schemes.reducers.pending import PendingBucket


class Merge(Value, ABC):
    """Base class of rules that merge a received mean into a bucket of the replica.

    It is configuration without state. An ``OuterOptimizer`` builds a separate object that has state.

    Attributes:
        needs_sent: Whether the sent values must be stored in addition to the received ones.
        makes_equal: Whether all nodes hold the same values after a merge with staleness 0.
        keeps_reference: Whether there are reference parameters, which are neither a node's own values nor the nodes'
            mean. Each rank stores them for its shard of the model, nodes send differences from them, and
            :meth:`update_reference` updates them.
    """

    needs_sent: bool = False
    makes_equal: bool = True
    keeps_reference: bool = False

    @abstractmethod
    def __call__(self, bucket: Bucket, received: PendingBucket, staleness: int, nodes: int) -> None:
        """Change the bucket's tensors.

        Args:
            bucket: The bucket to change; it holds the current values.
            received: The received mean over the nodes, packed. Its memory may be overwritten.
            staleness: S, optimizer steps since it was sent.
            nodes: M, the number of nodes in the mean.
        """

    def at_once(self, bucket: Bucket, mean: Tensor, nodes: int) -> None:
        """Merge a mean of current values (staleness 0); by default it replaces the bucket's values.

        Args:
            bucket: The bucket to change.
            mean: The mean over the nodes, packed.
            nodes: M, the number of nodes in the mean.
        """
        bucket.unpack(mean)

    def update_reference(self, index: int, reference: Tensor, difference: Tensor) -> Tensor:
        """Update a bucket's reference parameters from the nodes' mean; called if :attr:`keeps_reference`.

        Args:
            index: The index of the bucket.
            reference: This rank's shard of the reference parameters, 1-D, to be changed in place.
            difference: The nodes' mean minus the reference parameters.

        Returns:
            The values that every node merges instead of the mean: by default, the updated reference parameters.
        """
        return reference.add_(difference)

    def build(self, reducer: Reducer, before: Any | None = None) -> Any | None:
        """Make the outer optimizer of a reducer's reference parameters, if the merge has one. Collective over the node.

        Args:
            reducer: The reducer that holds the reference parameters.
            before: The previous outer optimizer, perhaps with other buckets; its state is kept.
        """
        return None


class Replace(Merge):
    """Replace the node's own values by the mean: ``x := mean``.

    Args:
        keep_local: Weight of the node's own values, from 0 to 1: ``x := keep_local x + (1 - keep_local) mean``.
            Streaming DiLoCo's alpha (Douillard et al. 2025, Eq. 2).

    Raises:
        ValueError: If ``keep_local`` is not a number from 0 to 1.
    """

    def __init__(self, keep_local: float = 0.0) -> None:
        if not 0.0 <= keep_local <= 1.0:
            raise ValueError(f"keep_local={keep_local} must be a weight from 0 (take the mean) to 1 (ignore it)")
        self.keep_local = keep_local
        self.makes_equal = keep_local == 0.0

    def __call__(self, bucket: Bucket, received: PendingBucket, staleness: int, nodes: int) -> None:
        self.at_once(bucket, received.flat, nodes)

    def at_once(self, bucket: Bucket, mean: Tensor, nodes: int) -> None:
        if self.keep_local == 0.0:
            bucket.unpack(mean)
        else:
            bucket.mix(mean, 1.0 - self.keep_local)


class StaleSum(Merge):
    """Merge by DASO's Eq. 1: weight 2 S for the node's own values, 1 for each of the P values sent S steps ago.

    The merged parameters are::

        x := (2 S x_local + sum of sent x) / (2 S + P)

    Local progress keeps the weight ``2 S / (2 S + P)``: half with 2 nodes, 3 % with 64 (S = 1).
    """

    @torch.no_grad()
    def __call__(self, bucket: Bucket, received: PendingBucket, staleness: int, nodes: int) -> None:
        local_weight = 2 * staleness
        for whole in bucket.aligned(received.flat):
            for local, mean in in_cache_sized_parts(*whole):
                local.lerp_(mean, nodes / (local_weight + nodes))  # lerp keeps equal values unchanged


class Delta(Merge):
    """Keep all local progress and preserve the mean over the nodes: ``x := x_local + mean of sent x - own sent``."""

    needs_sent = True

    @torch.no_grad()
    def __call__(self, bucket: Bucket, received: PendingBucket, staleness: int, nodes: int) -> None:
        for (whole, mean), (_, sent) in zip(bucket.aligned(received.flat), bucket.aligned(received.sent), strict=True):
            for local, arrived, left in in_cache_sized_parts(whole, mean, sent):
                # subtracting a difference of zero preserves every value; adding it would turn -0.0 into 0.0
                local.sub_(torch.sub(left, arrived, out=arrived))


MERGES: dict[str, Callable[[], Merge]] = {"replace": Replace, "eq1": StaleSum, "delta": Delta}
"""The merges by name."""
