"""Weighted means of numbers that travel as they are, are added in a wider type, and are rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.codec import arithmetic_dtype


def is_short(dtype: torch.dtype) -> bool:
    """Whether sums of numbers of this type are to be made in a wider one: a third of 1.5 is none in bfloat16."""
    return dtype.is_floating_point and arithmetic_dtype(dtype) != dtype


@torch.no_grad()
def send_parts(group: Communicator, parts: Sequence[Tensor], weights: Sequence[float]) -> Callable[[], None]:
    """Let every member sum a part of everyone's numbers: a reduce-scatter, and as many bytes.

    Args:
        group: The members.
        parts: By member, what of this rank's numbers that member sums: 1-D, contiguous, of one length wherever it comes
            from, and of any number of elements, so also of none. They belong to the sum until it is completed.
        weights: By member.

    Returns:
        A function that waits, and leaves ``sum_m weights[m] x_m``, summed in member order in float32 (of more than 16
        bits in float64) and then rounded, in this rank's own part.
    """
    own = parts[group.rank]
    peers = [member for member in range(group.size) if member != group.rank]
    received = {peer: torch.empty_like(own) for peer in peers}
    arrived = group.exchange(
        [(parts[peer], peer) for peer in peers], [(buffer, peer) for peer, buffer in received.items()]
    )

    @torch.no_grad()
    def complete() -> None:
        arrived.wait()
        streams.keep_here(*received.values())  # made on the stream that launched
        first, *others = (own if member == group.rank else received[member] for member in range(group.size))
        wider = arithmetic_dtype(own.dtype) if is_short(own.dtype) else torch.promote_types(own.dtype, torch.float64)
        total = first.to(wider).mul_(weights[0])  # not zero plus that: -0.0 stays what it is
        for values, weight in zip(others, weights[1:], strict=True):
            total.add_(values, alpha=weight)
        own.copy_(total)

    return complete


class WideSum:
    """Weighted sums over a group, on every member.

    An all-reduce of weighted numbers would round them when they are weighted and at every addition, so that not even
    the mean of equal ones is what they are. Here every member gets a chunk of everyone's numbers, sums it in a wider
    type, rounds the sum once, and gives it to all: ``2 (M - 1) / M`` of the numbers' bytes, as in an all-reduce.

    Two members send each other all they have: as many bytes in one round.

    Args:
        first: Carries the chunks. The members, in group order.
        second: Carries the sums; a communicator of its own if sums are completed on another thread (or, on CUDA,
            stream) than launched.
    """

    def __init__(self, first: Communicator, second: Communicator) -> None:
        self._first = first
        self._second = second

    @torch.no_grad()
    def launch(self, part: Tensor, weights: Sequence[float]) -> Callable[[], None]:
        """Send a part on its way. All members launch their parts, and complete them, in the same order.

        Args:
            part: 1-D and contiguous; as long, and of the same type, on every member. It belongs to the sum until that
                is completed.
            weights: By member.

        Returns:
            A function that waits, and leaves the sum in ``part``.
        """
        members = self._first.size
        if members <= 2:
            return send_parts(self._first, [part] * members, weights)
        numel = part.numel()
        chunk = -(-numel // members)
        padded = part if chunk * members == numel else part.new_zeros(chunk * members)
        if padded is not part:
            padded[:numel].copy_(part)
        chunks = padded.view(members, chunk)
        summed = send_parts(self._first, chunks.unbind(), weights)

        def complete() -> None:
            streams.keep_here(padded)
            summed()
            self._second.all_gather(padded, chunks[self._first.rank]).wait()
            if padded is not part:
                part.copy_(padded[:numel])

        return complete
