"""Flat buckets of parameters, cut into one shard per owner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm.spares import Spares
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.replica import Replica

# A bucket's push follows its previous one, so with more buckets a link idles less between pushes. Very small ones cost
# the processors more time than the link.
MIN_BUCKETS = 8
MIN_BUCKET_BYTES = 2**18


@dataclass(frozen=True)
class Slice:
    """Elements ``start`` to ``end`` of a parameter, which lie in a flat tensor from element ``offset`` on."""

    piece: int
    tensor: Tensor
    start: int
    end: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.start


@dataclass(frozen=True)
class ShardedBucket:
    """Parameters of one param group, dtype and device, or slices of them, as a flat tensor of equal shards.

    Attributes:
        group: Index of the param group.
        bucket: The parameters.
        shards: Number of shards. The last ones may end with padding.
    """

    group: int
    bucket: Bucket
    shards: int

    @property
    def shard_numel(self) -> int:
        """Elements of one shard."""
        return -(-self.bucket.numel // self.shards)

    def empty(self, dtype: torch.dtype | None = None, spares: Spares | None = None) -> Tensor:
        """Return a new 1-D tensor of ``shards * shard_numel`` elements, with zeros as padding."""
        return self.bucket.empty(self.shards, dtype=dtype, spares=spares)

    def pack(self) -> Tensor:
        """Return the parameters' values as a flat tensor."""
        return self.bucket.pack(self.empty())

    def pack_gradients(self, flat: Tensor, begin: int, weight: float) -> None:
        """Write ``weight`` times the gradients from element ``begin`` on; a parameter without gradient has zeros."""
        end = max(begin, min(begin + flat.numel(), self.bucket.numel))
        flat[end - begin :].zero_()
        for part in self.slices(begin, end):
            values, gradient = flat[part.offset :][: part.numel], part.tensor.grad
            if gradient is None:
                values.zero_()
            else:
                torch.mul(gradient.reshape(-1)[part.start : part.end], weight, out=values)

    def slices(self, begin: int, end: int) -> Iterator[Slice]:
        """Yield the slices in elements ``begin`` to ``end`` of the flat tensor, with offsets from ``begin``."""
        offset = 0
        for index, piece in enumerate(self.bucket.slices):
            first, last = max(begin - offset, 0), min(end - offset, piece.length)
            if first < last:
                yield Slice(index, piece.tensor, piece.start + first, piece.start + last, offset + first - begin)
            offset += piece.length


def sharded_buckets(
    parameters: Sequence[Tensor], optimizer: Optimizer, shards: int, bucket_bytes: int
) -> Iterator[ShardedBucket]:
    """Cut the trained parameters of each param group into buckets of at most so many bytes."""
    trained = {id(parameter) for parameter in parameters}
    for group, values in enumerate(optimizer.param_groups):
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in values["params"]:
            if id(parameter) in trained:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for tensors in kinds.values():
            whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            fine = max(MIN_BUCKET_BYTES, -(-whole // MIN_BUCKETS))
            for bucket in Replica(tensors, bucket_bytes=min(bucket_bytes, fine)).buckets:
                yield ShardedBucket(group, bucket, shards)
