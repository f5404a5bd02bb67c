"""The distance between nodes, estimated from values that are exchanged anyway."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.codec import arithmetic_dtype

_SAMPLES = 4096


class Disagreement:
    """The relative distance of this node's parameters from others', as of the last exchange of every bucket.

    It samples at most 4096 evenly spaced elements of a bucket, and needs no communication::

        sqrt(share * sum over buckets of ||own - others'||^2 / sum over buckets of ||others'||^2)

    Args:
        share: Of the squared distance that counts: 1 if the others' values are the nodes' mean.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._squares: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}

    @torch.no_grad()
    def compare(self, index: int, own: Tensor, others: Tensor, of: int) -> None:
        """Store the distance of this node's values from the others', replacing the bucket's last one.

        Both are given by the same :func:`sample` ``of`` so many elements.
        """
        if not own.numel():  # another rank sends this bucket
            return
        wide = arithmetic_dtype(own.dtype)
        difference = own.to(wide) - others.to(wide)
        lengths = difference.abs(), others.to(wide).abs()  # of complex numbers, too
        squares = torch.stack([length.square().sum() for length in lengths]) * (of / own.numel())
        streams.keep_here(own, others)  # allocated on the stream of training
        self._squares[index] = squares, streams.mark(squares.device) if streams.has(squares.device) else None

    def relative(self) -> float | None:
        """The distance, not negative; None before anything has arrived."""
        known = [squares for squares, event in list(self._squares.values()) if event is None or event.query()]
        if not known:
            return None
        distance, norm = torch.stack(known).double().sum(0).tolist()
        return float((self._share * distance / norm) ** 0.5) if norm else 0.0

    def forget(self) -> None:
        """Reset, because the nodes are equal."""
        self._squares.clear()


def sample(part: Tensor, begin: int = 0, of: int | None = None) -> Tensor:
    """Return a copy of at most 4096 evenly spaced elements of a 1-D tensor.

    Args:
        part: The tensor, or a part of it.
        begin: The part's first element.
        of: Elements of the whole tensor. Default: those of ``part``.
    """
    every = max(1, -(-(part.numel() if of is None else of) // _SAMPLES))
    return part[-begin % every :: every].clone()
