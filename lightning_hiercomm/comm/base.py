"""Interface of communicators: the collectives of a group of ranks, for any backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hiercomm.comm import costs
from lightning_hiercomm.comm.meter import Meter

Reduction = Literal["sum", "max"]


class CommunicationError(RuntimeError):
    """A collective failed: a peer died, raised an error, or took a different number of steps."""


class Handle(ABC):
    """A collective in flight, like ``torch.distributed.Work``; do not use its tensors before :meth:`wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the result may be used on this rank (on CUDA: by the current stream). May be called again."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once."""

    def future(self, value: Tensor) -> Future[Tensor]:
        """Return a future that completes with ``value`` after the collective, as DDP's communication hooks need it."""
        self.wait()
        return completed_future(value)


def completed_future(value: Tensor) -> Future[Tensor]:
    """Return a completed future that holds ``value``, ready on the current stream."""
    future = future_of(value)
    future.set_result(value)
    return future


def future_of(value: Tensor) -> Future[Tensor]:
    """Return a future for ``value``."""
    # with `devices`, streams that wait for the future wait for the stream that was current when its result was set
    # (https://docs.pytorch.org/docs/stable/futures.html#torch.futures.Future)
    return Future(devices=[] if value.device.type == "cpu" else [value.device])


class Together(Handle):
    """Several collectives as one."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()

    def is_done(self) -> bool:
        return all(handle.is_done() for handle in self._handles)


class Completion(Handle):
    """A collective whose first wait also runs ``work``, which uses the result, on the thread that waits."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()

    def is_done(self) -> bool:
        return self._work is None


finished: Handle = Together(())
"""The handle of a collective that has nothing to send."""


class Communicator(ABC):
    """A group of ranks, from the view of one member.

    All members call each collective in the same order, with contiguous tensors of the same shape and dtype. It returns
    a :class:`Handle` at once.

    Args:
        ranks: World ranks of the members, in group order.
        rank: World rank of this member.
        level: The level whose traffic this is: ``"intra"`` (inside a node), ``"inter"`` (between nodes) or ``"world"``.
        meter: Counts this rank's traffic.
    """

    def __init__(self, ranks: Sequence[int], rank: int, level: str, meter: Meter) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.level = level
        self.meter = meter

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", waiting: bool = False, weight: float = 1.0) -> Handle:
        """Replace ``tensor`` by its elementwise sum (or maximum) over the group, in place.

        Args:
            tensor: Of any shape.
            op: ``"sum"`` or ``"max"``.
            waiting: Whether every member waits for it soon, and for several such collectives in the order of their
                launch. They may then make progress only in these waits, which is faster.
            weight: Factor of this member's tensor. Others may have other factors; 1 for integers.
        """
        _check_contiguous(tensor)
        if self.size == 1 or tensor.numel() == 0:
            if weight != 1.0:
                tensor.mul_(weight)
            return finished
        self._count(costs.all_reduce(self.size, _bytes(tensor)))
        return self._all_reduce_weighted(tensor, op, waiting, weight)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, weight: float = 1.0) -> Handle:
        """Write the sum of all members' ``rank``-th parts of ``tensor`` to ``output``.

        Args:
            output: 1-D, ``n`` elements; may be this rank's own part of ``tensor``.
            tensor: 1-D, ``size * n`` elements. Its contents are undefined afterwards, except the output.
            weight: As in :meth:`all_reduce`.
        """
        self._check_parts(whole=tensor, part=output)
        if self.size == 1:
            if weight != 1.0:
                torch.mul(tensor, weight, out=output)
            elif output.data_ptr() != tensor.data_ptr():
                output.copy_(tensor)
            return finished
        if tensor.numel() == 0:
            return finished
        self._count(costs.reduce_scatter(self.size, _bytes(tensor)))
        return self._reduce_scatter_weighted(output, tensor, weight)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Write all members' ``tensor`` to ``output``, in group order.

        Args:
            output: 1-D, ``size * n`` elements.
            tensor: 1-D, ``n`` elements; may be this rank's own part of ``output``.
        """
        self._check_parts(whole=output, part=tensor)
        if self.size == 1:
            output.copy_(tensor)
            return finished
        if tensor.numel() == 0:
            return finished
        self._count(costs.all_gather(self.size, _bytes(output)))
        return self._all_gather(output, tensor)

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        """Replace ``tensor`` by that of the member with group rank ``source``, in place."""
        if not 0 <= source < self.size:
            raise ValueError(f"source must be a group rank from 0 to {self.size - 1}, not {source}")
        _check_contiguous(tensor)
        if self.size == 1 or tensor.numel() == 0:
            return finished
        if self.rank == source:
            self._count(costs.broadcast(self.size, _bytes(tensor)))
        return self._broadcast(tensor, source)

    def exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        """Send tensors to other members, and receive tensors from them, all at once.

        Messages between two members arrive in the order in which they were sent.

        Args:
            send: Pairs of a tensor and the group rank it goes to.
            receive: Pairs of a buffer and the group rank it comes from. No buffer may be a tensor that is sent.
        """
        for tensor, peer in (*send, *receive):
            _check_contiguous(tensor)
            if not 0 <= peer < self.size or peer == self.rank:
                raise ValueError(f"rank {self.rank} cannot exchange with group rank {peer} of {self.size}")
        send = [(tensor, peer) for tensor, peer in send if tensor.numel()]
        receive = [(buffer, peer) for buffer, peer in receive if buffer.numel()]
        if not send and not receive:
            return finished
        for tensor, _ in send:
            self._count(_bytes(tensor), self.level)
        return self._exchange(send, receive)

    def expect_exchanges(self) -> None:
        """Prepare for exchanges in which only some members take part. Collective; blocks."""

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all members (small, picklable), in group order; blocks."""

    def barrier(self) -> None:
        """Return when every member has called it."""
        self.all_gather_object(None)

    def close(self) -> None:
        """Free the sockets and buffers of this group. Nothing may be in flight. Collective."""

    def failure(self, error: BaseException) -> CommunicationError:
        """Return the error of a lost group."""
        some = f"{list(self.ranks[:8])}{f' and {self.size - 8} more' if self.size > 8 else ''}"
        return CommunicationError(f"rank {self.ranks[self.rank]} lost its {self.level} group (ranks {some}): {error}")

    def _all_reduce_weighted(self, tensor: Tensor, op: Reduction, waiting: bool, weight: float) -> Handle:
        """All-reduce; a backend overrides it if it can scale while it copies."""
        if weight != 1.0:
            tensor.mul_(weight)
        return self._all_reduce(tensor, op, waiting)

    def _reduce_scatter_weighted(self, output: Tensor, tensor: Tensor, weight: float) -> Handle:
        """Reduce-scatter; overridden for the same reason."""
        if weight != 1.0:
            tensor.mul_(weight)
        return self._reduce_scatter(output, tensor)

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: Reduction, waiting: bool) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle: ...

    @abstractmethod
    def _all_gather(self, output: Tensor, tensor: Tensor) -> Handle: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int) -> Handle: ...

    @abstractmethod
    def _exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle: ...

    def _count(self, sent_bytes: float, level: str | None = None) -> None:
        self.meter.count(level or self.level, sent_bytes)

    def _check_parts(self, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != self.size * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"the whole ({whole.numel()} x {whole.dtype}) must hold {self.size} parts of"
                f" {part.numel()} x {part.dtype}"
            )
        _check_contiguous(whole)
        _check_contiguous(part)


Connect = Callable[[Sequence[Sequence[int]], str], Communicator | None]
"""Creates a communicator for each group of world ranks of a level, and returns this rank's (None: it is in no group).

Collective over the world: every rank calls it with the same groups.
"""


def _check_contiguous(tensor: Tensor) -> None:
    if not tensor.is_contiguous():  # a backend that takes an address would send the wrong bytes
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous:"
            " send a contiguous copy"
        )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
