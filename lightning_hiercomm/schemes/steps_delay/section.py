"""How a server's parameters are cut into sections, of which every node holds a shard."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm.spares import Spares
from lightning_hiercomm.nodes.bucket import Bucket, TensorSlice
from lightning_hiercomm.nodes.replica import Replica

ShardOn = Literal["elements", "parameters"]


# A section's push follows its push before: the more sections, the less a link idles between pushes. Very small ones
# cost the processors more time than the link.
LEAST_SECTIONS = 8
LEAST_SECTION_BYTES = 2**18


@dataclass(frozen=True)
class Section:
    """Parameters of one param group, dtype and device, or parts of them, as one flat tensor of equal shards.

    Attributes:
        group: Index of the param group.
        bucket: The parameters.
        shards: Number of shards.
    """

    group: int
    bucket: Bucket
    shards: int

    @property
    def shard_numel(self) -> int:
        """Elements of one shard; the last ones may be padding."""
        return -(-self.bucket.numel // self.shards)

    @property
    def dtype(self) -> torch.dtype:
        """Of every parameter."""
        return self.bucket.dtype

    def empty(self, dtype: torch.dtype | None = None, spares: Spares | None = None) -> Tensor:
        """A new flat tensor, zero where it is padded: 1-D, ``shards * shard_numel`` elements."""
        return self.bucket.empty(self.shards, dtype=dtype, spares=spares)

    def pack(self) -> Tensor:
        """The parameters' values as a flat tensor."""
        return self.bucket.pack(self.empty())

    def pack_gradients(self, flat: Tensor, begin: int, weight: float) -> None:
        """Write ``weight`` times their gradients, from element ``begin`` on; no gradient counts as zero."""
        end = max(begin, min(begin + flat.numel(), self.bucket.numel))
        flat[end - begin :].zero_()
        for overlap in self.overlaps(begin, end):
            values, gradient = flat[overlap.at :][: overlap.numel], overlap.tensor.grad
            if gradient is None:
                values.zero_()
            else:
                torch.mul(gradient.reshape(-1)[overlap.start : overlap.end], weight, out=values)

    def overlaps(self, begin: int, end: int) -> Iterator[Overlap]:
        """What elements ``begin`` to ``end`` of the flat tensor hold of the bucket's pieces, counted from ``begin``."""
        pieces, offsets = self.bucket.slices, self._offsets
        for place in range(max(0, bisect_right(offsets, begin) - 1), len(pieces)):
            offset, piece = offsets[place], pieces[place]
            if offset >= end:
                return
            first, last = max(begin - offset, 0), min(end - offset, piece.length)
            if first < last:
                yield Overlap(place, piece.tensor, piece.start + first, piece.start + last, offset + first - begin)

    def split(self, flat: Tensor, start: int = 0) -> Iterator[tuple[Overlap, Tensor]]:
        """What lies of the pieces in a part of every shard, from element ``start`` on, and its values in ``flat``."""
        for shard, part in enumerate(flat.chunk(self.shards)):
            begin = shard * self.shard_numel + start
            for overlap in self.overlaps(begin, begin + part.numel()):
                yield overlap, part[overlap.at :][: overlap.numel]

    @cached_property
    def _offsets(self) -> list[int]:
        """Where each piece begins."""
        return list(accumulate((piece.length for piece in self.bucket.slices[:-1]), initial=0))


@dataclass(frozen=True)
class Overlap:
    """Elements ``start`` to ``end`` of a parameter, of which the bucket has a piece in ``place``; they lie ``at``."""

    place: int
    tensor: Tensor
    start: int
    end: int
    at: int

    @property
    def numel(self) -> int:
        """How many."""
        return self.end - self.start


def _sections(
    parameters: Sequence[Tensor], optimizer: Optimizer, shards: int, shard_on: ShardOn, bucket_bytes: int
) -> Iterator[Section]:
    trained = {id(parameter) for parameter in parameters}
    for group, values in enumerate(optimizer.param_groups):
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in values["params"]:
            if id(parameter) in trained:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for tensors in kinds.values():
            even = shard_on == "elements"
            cut = _even_buckets(tensors, bucket_bytes) if even else [_bucket_of_whole_tensors(tensors, shards)]
            for bucket in cut:
                yield Section(group, bucket, shards)


def _even_buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> list[Bucket]:
    """Tensors in their order, cut anywhere."""
    whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    fine = max(LEAST_SECTION_BYTES, -(-whole // LEAST_SECTIONS))
    return Replica(tensors, bucket_bytes=min(bucket_bytes, fine)).buckets


def _bucket_of_whole_tensors(tensors: Sequence[Tensor], shards: int) -> Bucket:
    """Tensors in such an order, and padded so, that each lies in one shard: the largest first, to the emptiest."""
    placed: list[list[Tensor]] = [[] for _ in range(shards)]
    loads = [0] * shards
    for tensor in sorted(tensors, key=lambda tensor: -tensor.numel()):
        shard = min(range(shards), key=lambda i: loads[i])
        placed[shard].append(tensor)
        loads[shard] += tensor.numel()
    padding = tensors[0].new_zeros(max(loads) - min(loads))
    pieces = []
    for held, load in zip(placed, loads, strict=True):
        whole = [*held, padding[: max(loads) - load]]
        pieces += [TensorSlice(tensor, 0, tensor.numel()) for tensor in whole if tensor.numel()]
    return Bucket(tuple(pieces), shards * max(loads), tensors[0].dtype, tensors[0].device, equal_in_node=True)
