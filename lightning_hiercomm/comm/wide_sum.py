"""Weighted sums of unencoded values, added in a wider type and rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.codec import arithmetic_dtype


def is_short(dtype: torch.dtype) -> bool:
    """Whether sums of this type are calculated in a wider one (float16, bfloat16)."""
    return dtype.is_floating_point and arithmetic_dtype(dtype) != dtype


@torch.no_grad()
def send_parts(group: Communicator, parts: Sequence[Tensor], weights: Sequence[float]) -> Callable[[], None]:
    """Start a weighted reduce-scatter.

    Args:
        group: The members.
        parts: This rank's values that each member sums: 1-D, contiguous, of equal length on all ranks for one member,
            possibly empty. Do not use them before completion.
        weights: Of the members.

    Returns:
        A function that waits, and writes ``sum_m weights[m] x_m`` to this rank's own part. The sum is calculated in
        member order, in float32 (float64 for types of more than 16 bits), and then rounded.
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
        streams.keep_here(*received.values())  # allocated on the launching stream
        first, *others = (own if member == group.rank else received[member] for member in range(group.size))
        wider = arithmetic_dtype(own.dtype) if is_short(own.dtype) else torch.promote_types(own.dtype, torch.float64)
        total = first.to(wider).mul_(weights[0])  # 0.0 + x would change -0.0
        for values, weight in zip(others, weights[1:], strict=True):
            total.add_(values, alpha=weight)
        own.copy_(total)

    return complete


@torch.no_grad()
def wide_sum(first: Communicator, second: Communicator, part: Tensor, weights: Sequence[float]) -> Callable[[], None]:
    """Start a weighted all-reduce in a wider type. All members launch, and complete, their sums in the same order.

    An all-reduce of weighted values rounds them before and at every addition, so even the mean of equal values differs
    from them. Here every member sums a chunk in a wider type, rounds it once, and sends it to all: ``2 (M - 1) / M`` of
    the bytes, as in an all-reduce. Two members send each other everything: as many bytes, in one round.

    Args:
        first: The group, for the chunks.
        second: The same members, for the sums; a duplicate if sums are completed on another thread or stream than
            launched.
        part: 1-D and contiguous, of the same length and type on every member. Do not use it before completion.
        weights: Of the members.

    Returns:
        A function that waits, and writes the sum to ``part``.
    """
    if first.size <= 2:
        return send_parts(first, [part] * first.size, weights)
    numel = part.numel()
    chunk = -(-numel // first.size)
    padded = part if chunk * first.size == numel else part.new_zeros(chunk * first.size)
    if padded is not part:
        padded[:numel].copy_(part)
    chunks = padded.view(first.size, chunk)
    summed = send_parts(first, chunks.unbind(), weights)

    def complete() -> None:
        streams.keep_here(padded)
        summed()
        second.all_gather(padded, chunks[first.rank]).wait()
        if padded is not part:
            part.copy_(padded[:numel])

    return complete
