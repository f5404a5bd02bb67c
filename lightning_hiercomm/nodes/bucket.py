"""Buckets: tensors of one dtype and device that are sent together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_hiercomm.comm.spares import Spares

BUCKET_BYTES = 4 * 2**20
"""Default size of buckets, as with ``bucket_mb=4``."""

BUCKETS_IN_FLIGHT = 3
"""Number of buckets in flight in a synchronous exchange: one is sent, one gathered, one packed."""

CACHE_SIZED = 2**20
"""Bytes of a buffer so small that a few fit into a processor's cache."""


@dataclass(frozen=True)
class ShardSpec:
    """The position of a shard in the whole tensor of a node.

    Attributes:
        held_by: Name of the :class:`~lightning_hiercomm.nodes.topology.Holders` with the same shard.
        numel: Elements of the whole tensor.
        start: First element of a contiguous shard; None if it is not contiguous.
    """

    held_by: str
    numel: int
    start: int | None = None

    def run(self, first: int, last: int, held: int) -> tuple[int, int]:
        """Map elements ``first`` to ``last`` (exclusive) of the whole tensor to this shard of ``held`` elements.

        A shard that is not contiguous counts as spread evenly over the whole.
        """
        if self.start is not None:
            return min(max(first - self.start, 0), held), min(max(last - self.start, 0), held)
        return first * held // self.numel, last * held // self.numel


@dataclass(frozen=True)
class TensorSlice:
    """Consecutive elements of one tensor in a bucket: ``tensor.flatten()[start : start + length]``."""

    tensor: Tensor
    start: int
    length: int

    def covers_tensor(self) -> bool:
        return self.length == self.tensor.numel()


@dataclass(eq=False)
class Bucket:
    """Slices of tensors that are sent together.

    Attributes:
        slices: In order. Their tensors change if a layer replaces its buffers.
        numel: Elements of all slices.
        dtype: Of every slice.
        device: Of every slice.
        held_by: Name of the ranks that hold it in :attr:`~lightning_hiercomm.nodes.topology.Topology.holders`.
        keeps_equal: Whether the mean of equal values has to be bit-equal to them, for any number of nodes. Of buffers,
            which also differ inside a node.
    """

    slices: tuple[TensorSlice, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    held_by: str = "node"
    keeps_equal: bool = False

    def empty(self, multiple_of: int = 1, dtype: torch.dtype | None = None, spares: Spares | None = None) -> Tensor:
        """Return a 1-D buffer from the pool ``spares``, zero-padded to a multiple of ``multiple_of`` elements."""
        padded = -(-self.numel // multiple_of) * multiple_of
        dtype = dtype or self.dtype
        if spares is None:
            flat = torch.empty(padded, dtype=dtype, device=self.device)
        else:
            flat = spares.take(padded, dtype, self.device)
        flat[self.numel :].zero_()
        return flat

    def in_cache_sized(self) -> list[Bucket]:
        """Cut a bucket on the CPU into buckets that fit into its cache, so that several operations read memory once."""
        if self.device.type != "cpu":
            return [self]
        return self.cut(CACHE_SIZED)

    def cut(self, nbytes: int) -> list[Bucket]:
        """Cut the bucket into buckets of at most ``nbytes``."""
        return filled_buckets(self.slices, nbytes, self.held_by, self.keeps_equal)

    def between(self, begin: int, end: int) -> Bucket:
        """Return the elements from ``begin`` to ``end`` (exclusive), fewer if the bucket ends before."""
        found, offset = [], 0
        for part in self.slices:
            first, last = max(begin - offset, 0), min(end - offset, part.length)
            if first < last:
                found.append(TensorSlice(part.tensor, part.start + first, last - first))
            offset += part.length
        return replace(self, slices=tuple(found), numel=max(0, min(end, offset) - begin))

    def view(self, gradients: bool = False) -> Tensor | None:
        """Return all values, or gradients, as a 1-D view; None if they are not contiguous."""
        if len(self.slices) != 1:
            return None
        (part,) = self.slices
        tensor = part.tensor.grad if gradients else part.tensor
        if tensor is None or tensor.dtype != self.dtype or not tensor.is_contiguous():
            return None
        return tensor.detach().view(-1)[part.start : part.start + part.length]

    def elements(self) -> Iterator[Tensor]:
        """Return 1-D values of the slices: views of contiguous tensors, copies of others."""
        return map(_elements, self.slices)

    def pack(self, flat: Tensor | None = None, multiple_of: int = 1, weight: float = 1.0) -> Tensor:
        """Copy the slices, times ``weight``, into ``flat`` (default: a new buffer) and return it."""
        if flat is None:
            flat = self.empty(multiple_of)
        if weight != 1.0:
            for elements, (_, values) in zip(self.elements(), self.split(flat), strict=True):
                torch.mul(elements, weight, out=values)
        elif self.slices:
            torch.cat(list(self.elements()), out=flat[: self.numel])
        return flat

    def pack_gradients(self, flat: Tensor, weight: float = 1.0) -> Tensor:
        """Write the gradients, times ``weight``, to ``flat`` and return it; a missing gradient is zero."""
        for part, values in self.split(flat):
            gradient = part.tensor.grad
            if gradient is None:
                values.zero_()
            else:
                torch.mul(gradient.detach().reshape(-1)[part.start :][: part.length], weight, out=values)
        return flat

    def unpack(self, flat: Tensor) -> None:
        """Copy ``flat`` back into the tensors."""
        for elements, values in self.aligned(flat):
            elements.copy_(values)

    def add(self, flat: Tensor) -> None:
        """Add ``flat`` to the tensors, without a packed copy of them."""
        for elements, values in self.aligned(flat):
            elements.add_(values)

    def mix(self, flat: Tensor, weight: float) -> None:
        """Move the tensors towards ``flat``: ``x := (1 - weight) x + weight flat``."""
        for elements, values in self.aligned(flat):
            elements.lerp_(values, weight)

    def split(self, flat: Tensor) -> Iterator[tuple[TensorSlice, Tensor]]:
        """Return every slice and its 1-D view of ``flat``."""
        offset = 0
        for part in self.slices:
            yield part, flat[offset : offset + part.length]
            offset += part.length

    def aligned(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Return every slice's elements and its view of ``flat``, of one shape and detached."""
        for part, values in self.split(flat):
            tensor = part.tensor.detach()
            if part.covers_tensor():
                yield tensor, values.view(tensor.shape)
            else:
                yield tensor.view(-1)[part.start : part.start + part.length], values


def in_cache_sized_parts(*tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """Split tensors of one shape into parts that fit into a processor's cache."""
    if tensors[0].device.type != "cpu" or not all(tensor.is_contiguous() for tensor in tensors):
        return iter([tensors])
    numel = CACHE_SIZED // tensors[0].element_size()
    return zip(*(tensor.view(-1).split(numel) for tensor in tensors), strict=True)


def filled_buckets(
    slices: Sequence[TensorSlice],
    bucket_bytes: int,
    held_by: str = "node",
    keeps_equal: bool = False,
) -> list[Bucket]:
    """Fill buckets of at most ``bucket_bytes``, one dtype and device each; non-contiguous tensors are not cut."""
    buckets: list[Bucket] = []
    kinds = dict.fromkeys((part.tensor.dtype, part.tensor.device) for part in slices)
    for dtype, device in kinds:
        capacity = max(1, bucket_bytes // dtype.itemsize)
        held: list[TensorSlice] = []
        filled = 0
        for part in slices:
            if (part.tensor.dtype, part.tensor.device) != (dtype, device):
                continue
            start, end = part.start, part.start + part.length
            while start < end:
                room = capacity - filled if part.tensor.is_contiguous() else part.length
                length = min(end - start, room)
                held.append(TensorSlice(part.tensor, start, length))
                filled += length
                start += length
                if filled >= capacity:
                    buckets.append(Bucket(tuple(held), filled, dtype, device, held_by, keeps_equal))
                    held, filled = [], 0
        if held:
            buckets.append(Bucket(tuple(held), filled, dtype, device, held_by, keeps_equal))
    return buckets


def _elements(part: TensorSlice) -> Tensor:
    flat = part.tensor.detach().reshape(-1)
    return flat if part.covers_tensor() else flat[part.start : part.start + part.length]
