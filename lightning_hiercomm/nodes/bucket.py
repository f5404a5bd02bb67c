"""A bucket: tensors of one type laid one behind the other, and the parts of it that ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hiercomm.comm.spares import Spares

BUCKET_BYTES = 4 * 2**20
"""Parameters travel in buckets of so many bytes by default, as ``bucket_mb=4`` says."""

BUCKETS_IN_FLIGHT = 3
"""So many of them are on their way at once where training waits: one is sent, one shared, one packed."""

# Bytes. A few such buffers stay in the processors' caches; smaller ones cost more calls than they save.
CACHE_SIZED = 2**20


@dataclass(frozen=True)
class Share:
    """What a tensor is of a whole one that the ranks of a node hold together.

    Attributes:
        held_by: Which ranks of the node hold the same share: the name of a
            :class:`~lightning_hiercomm.nodes.topology.Holders`.
        numel: Elements of the whole tensor.
        start: Where the share begins, if it is a run of the whole tensor's elements; None if it is not.
    """

    held_by: str
    numel: int
    start: int | None = None

    def run(self, first: int, last: int, held: int) -> tuple[int, int]:
        """Where elements ``first`` to ``last`` (not included) of the whole tensor begin and end in this share.

        A share that is no run counts as spread evenly over the whole.

        Args:
            first: From 0.
            last: At most :attr:`numel`.
            held: Elements of the share.
        """
        if self.start is not None:
            return min(max(first - self.start, 0), held), min(max(last - self.start, 0), held)
        return first * held // self.numel, last * held // self.numel


@dataclass(frozen=True)
class Piece:
    """A run of one tensor's elements inside a bucket: ``tensor.flatten()[start : start + length]``."""

    tensor: Tensor
    start: int
    length: int

    def covers_tensor(self) -> bool:
        """Whether the piece is the whole tensor."""
        return self.length == self.tensor.numel()


@dataclass(eq=False)
class Bucket:
    """Pieces that travel together.

    Attributes:
        pieces: What it holds, in order; of other tensors by and by, where those are buffers that layers assign anew.
        numel: Elements of all pieces.
        dtype: Of every piece.
        device: Of every piece.
        equal_in_node: Whether the ranks of a node hold identical values (parameters do; BatchNorm statistics, fed by
            each rank's own samples, do not).
        held_by: Which ranks of the node hold it: see :attr:`~lightning_hiercomm.nodes.topology.Topology.holders`.
        keeps_equal: Whether the mean of equal values has to be those values to the bit, of any number of nodes.
        is_outdated: Whether the module holds something of another shape instead of one of the tensors, on this rank.
    """

    pieces: tuple[Piece, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    equal_in_node: bool
    held_by: str = "node"
    keeps_equal: bool = False
    is_outdated: bool = False

    def empty(self, multiple_of: int = 1, dtype: torch.dtype | None = None, spares: Spares | None = None) -> Tensor:
        """A new 1-D buffer with room for the bucket, zero-padded to a multiple of ``multiple_of`` elements.

        Args:
            multiple_of: The number of equal parts into which the buffer will be cut.
            dtype: Of the buffer. Default: the bucket's.
            spares: Where its memory is from, and is to be given back. Default: fresh memory.
        """
        padded = -(-self.numel // multiple_of) * multiple_of
        dtype = dtype or self.dtype
        if spares is None:
            flat = torch.empty(padded, dtype=dtype, device=self.device)
        else:
            flat = spares.take(padded, dtype, self.device)
        flat[self.numel :].zero_()
        return flat

    def in_cache_sized(self) -> list[Bucket]:
        """The same pieces as buckets small enough for a processor's cache, in order; on other devices, itself.

        Several operations in turn on each of them then take as long as one on the whole.
        """
        if self.device.type != "cpu":
            return [self]
        return self.cut(CACHE_SIZED)

    def cut(self, nbytes: int) -> list[Bucket]:
        """The same pieces as buckets of at most so many bytes, in order."""
        return list(filled_buckets(self.pieces, nbytes, self.equal_in_node, self.held_by, self.keeps_equal))

    def view(self, gradients: bool = False) -> Tensor | None:
        """All values, or all gradients, as they lie in memory, 1-D; None if they do not lie in one place."""
        if len(self.pieces) != 1:
            return None
        (piece,) = self.pieces
        tensor = piece.tensor.grad if gradients else piece.tensor
        if tensor is None or tensor.dtype != self.dtype or not tensor.is_contiguous():
            return None
        return tensor.detach().view(-1)[piece.start : piece.start + piece.length]

    def elements(self) -> Iterator[Tensor]:
        """The pieces' values, each 1-D: as views, where their tensors are contiguous."""
        return map(_elements, self.pieces)

    def pack(self, flat: Tensor | None = None, multiple_of: int = 1, weight: float = 1.0) -> Tensor:
        """Copy the pieces, times ``weight``, into ``flat`` (or a new buffer) and return it."""
        if flat is None:
            flat = self.empty(multiple_of)
        if weight != 1.0:
            for elements, (_, values) in zip(self.elements(), self.split(flat), strict=True):
                torch.mul(elements, weight, out=values)
        elif self.pieces:
            torch.cat(list(self.elements()), out=flat[: self.numel])
        return flat

    def pack_gradients(self, flat: Tensor) -> Tensor:
        """Copy the pieces' gradients into ``flat`` and return it; no gradient counts as zero."""
        for piece, values in self.split(flat):
            gradient = piece.tensor.grad
            if gradient is None:
                values.zero_()
            else:
                values.copy_(gradient.detach().reshape(-1)[piece.start : piece.start + piece.length])
        return flat

    def unpack(self, flat: Tensor) -> None:
        """Copy ``flat`` back into the tensors."""
        for elements, values in self.beside(flat):
            elements.copy_(values)

    def add(self, flat: Tensor) -> None:
        """Add ``flat`` to the tensors, without a packed copy of them."""
        for elements, values in self.beside(flat):
            elements.add_(values)

    def mix(self, flat: Tensor, weight: float) -> None:
        """Move the tensors towards ``flat``: ``x := (1 - weight) x + weight flat``."""
        for elements, values in self.beside(flat):
            elements.lerp_(values, weight)

    def split(self, flat: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Every piece, and a 1-D view of its part of ``flat``."""
        offset = 0
        for piece in self.pieces:
            yield piece, flat[offset : offset + piece.length]
            offset += piece.length

    def beside(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Every piece's elements and its part of ``flat``, as views of one shape that no graph knows."""
        for piece, values in self.split(flat):
            tensor = piece.tensor.detach()
            if piece.covers_tensor():
                yield tensor, values.view(tensor.shape)
            else:
                yield tensor.view(-1)[piece.start : piece.start + piece.length], values


def in_cache_sized_parts(*tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """Tensors of one shape by parts that fit into a processor's cache; see :meth:`Bucket.in_cache_sized`."""
    if tensors[0].device.type != "cpu" or not all(tensor.is_contiguous() for tensor in tensors):
        return iter([tensors])
    numel = CACHE_SIZED // tensors[0].element_size()
    return zip(*(tensor.view(-1).split(numel) for tensor in tensors), strict=True)


def filled_buckets(
    pieces: Sequence[Piece],
    bucket_bytes: int,
    equal_in_node: bool,
    held_by: str = "node",
    keeps_equal: bool = False,
) -> Iterator[Bucket]:
    """The pieces in buckets of at most so many bytes, cut where one is full; dtypes and devices apart."""
    kinds = dict.fromkeys((piece.tensor.dtype, piece.tensor.device) for piece in pieces)
    for dtype, device in kinds:
        capacity = max(1, bucket_bytes // dtype.itemsize)
        held: list[Piece] = []
        filled = 0
        for piece in pieces:
            if (piece.tensor.dtype, piece.tensor.device) != (dtype, device):
                continue
            start, end = piece.start, piece.start + piece.length
            while start < end:
                room = capacity - filled if piece.tensor.is_contiguous() else piece.length
                length = min(end - start, room)
                held.append(Piece(piece.tensor, start, length))
                filled += length
                start += length
                if filled >= capacity:
                    yield Bucket(tuple(held), filled, dtype, device, equal_in_node, held_by, keeps_equal)
                    held, filled = [], 0
        if held:
            yield Bucket(tuple(held), filled, dtype, device, equal_in_node, held_by, keeps_equal)


def _elements(piece: Piece) -> Tensor:
    flat = piece.tensor.detach().reshape(-1)
    return flat if piece.covers_tensor() else flat[piece.start : piece.start + piece.length]
