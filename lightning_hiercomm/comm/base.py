"""Interface of communicators: the collectives of a group of ranks, for any backend."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hiercomm.comm import costs
from lightning_hiercomm.comm.meter import Meter

Reduction = Literal["sum", "max"]


class CommunicationError(RuntimeError):
    """A move between ranks failed: a peer died, raised, or took a different number of steps."""


class Handle(ABC):
    """A move in flight. Its tensors belong to it until :meth:`wait` returns: neither read nor write them before."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the result may be used on this rank (on CUDA: by the current stream). May be called again."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once."""

    def forget(self) -> None:
        """Discard the result, because it will not be waited for."""

    def future(self, value: Tensor) -> Future[Tensor]:
        """A torch future that completes with ``value`` when the move does, as DDP's communication hooks want it."""
        self.wait()
        return completed_future(value)


def completed_future(value: Tensor) -> Future[Tensor]:
    """A future that holds ``value``, ready on the current stream."""
    future = _future_of(value)
    future.set_result(value)
    return future


def _future_of(value: Tensor) -> Future[Tensor]:
    # a future that is told the device records, when it gets its result, the then current stream, and lets the stream of
    # whoever waits wait for that; one that is not told orders nothing
    # ("devices" in https://docs.pytorch.org/docs/stable/futures.html#torch.futures.Future)
    return Future(devices=[] if value.device.type == "cpu" else [value.device])


class Completion:
    """The end of something that another thread does, with or without an error, and the torch futures that follow it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._futures: list[tuple[Future[Tensor], Tensor]] = []

    def end(self, error: BaseException | None = None) -> None:
        """It has ended; to be called once, by the thread that does it."""
        self.error = error
        with self._lock:
            self._ended.set()
            futures, self._futures = self._futures, []
        for future, value in futures:
            self._complete(future, value)

    def wait(self) -> None:
        """Return when it has ended, or raise its error."""
        self._ended.wait()
        if self.error is not None:
            raise self.error

    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def future(self, value: Tensor) -> Future[Tensor]:
        """A future that completes with ``value``, or with the error."""
        future = _future_of(value)
        with self._lock:
            if not self._ended.is_set():
                self._futures.append((future, value))
                return future
        self._complete(future, value)
        return future

    def _complete(self, future: Future[Tensor], value: Tensor) -> None:
        error = self.error
        if error is None:
            future.set_result(value)
            return
        if not isinstance(error, Exception):  # torch's futures take no other: what was interrupted has failed, too
            error = CommunicationError(f"a move between ranks was ended by {error!r}")
        future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it so


class _Finished(Handle):
    def wait(self) -> None:
        pass

    def is_done(self) -> bool:
        return True


finished: Handle = _Finished()
"""The handle of a move with nothing to move."""


class _Watched(Handle):
    """What a communicator gives away: a handle that is dropped before anybody waited for it says so.

    Whoever forgets to wait reads a number of its own, and perhaps decides otherwise than other ranks: the run would
    stand still, in silence. So the rank's next move fails, and names the line that this one is from.
    """

    def __init__(self, handle: Handle, meter: Meter, move: str, place: FrameType) -> None:
        self._handle = handle
        self._meter = meter
        self._move = move
        self._code, self._line = place.f_code, place.f_lineno
        self._is_awaited = False

    def wait(self) -> None:
        self._is_awaited = True
        self._handle.wait()

    def is_done(self) -> bool:
        return self._handle.is_done()

    def future(self, value: Tensor) -> Future[Tensor]:
        self._is_awaited = True
        return self._handle.future(value)

    def forget(self) -> None:
        self._is_awaited = True

    def __del__(self) -> None:
        if not self._is_awaited:
            where = f"{self._code.co_filename}:{self._line}, in {self._code.co_name}"
            self._meter.unawaited = f"{self._move}(...) of {where}"


class Communicator(ABC):
    """The ranks of one group, seen from one of them.

    Every move is collective: all members call it, in the same order, with tensors of the same shape and dtype. It
    returns at once with a :class:`Handle`. Tensors are contiguous and of any dtype the backend can carry.

    Args:
        ranks: World ranks of the members, in group order.
        rank: World rank of this member.
        tier: ``"intra"`` (inside a node), ``"inter"`` (between nodes) or ``"world"``; what the meter files it under.
        meter: Counts this rank's traffic.

    Attributes:
        in_node: Group ranks that live on this rank's node where most do not: what is sent to them is no traffic between
            nodes, and filed under ``"intra"``.
    """

    def __init__(self, ranks: Sequence[int], rank: int, tier: str, meter: Meter) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.tier = tier
        self.meter = meter
        self.in_node: frozenset[int] = frozenset()

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", waiting: bool = False, weight: float = 1.0) -> Handle:
        """Replace ``tensor`` by its elementwise sum (or maximum) over the group, in place.

        Args:
            tensor: Of any shape.
            op: ``"sum"`` or ``"max"``.
            waiting: A promise that every member waits for it soon, and for several such moves in the order in which
                they were launched. The move may then need these waits to make progress, and be faster for it.
            weight: Factor of this member's tensor; others may have other ones. Not 1 for floating dtypes only.
        """
        _check_contiguous(tensor)
        if self.size == 1 or tensor.numel() == 0:
            if weight != 1.0:
                tensor.mul_(weight)
            return finished
        self._count(costs.all_reduce(self.size, _bytes(tensor)))
        return self._watched(self._all_reduce_weighted(tensor, op, waiting, weight))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, weight: float = 1.0) -> Handle:
        """Write the sum of everyone's ``rank``-th part of ``tensor`` to ``output``.

        Args:
            output: 1-D, ``n`` elements; may be this rank's own part of ``tensor``.
            tensor: 1-D, ``size * n`` elements. Its contents are undefined afterwards, except the output.
            weight: Factor of this member's tensor; others may have other ones. Not 1 for floating dtypes only.
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
        return self._watched(self._reduce_scatter_weighted(output, tensor, weight))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Write everyone's ``tensor`` to ``output``, in group order.

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
        return self._watched(self._all_gather(output, tensor))

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        """Replace ``tensor`` by that of the member with group rank ``source``, in place."""
        if not 0 <= source < self.size:
            raise ValueError(f"source must be a group rank from 0 to {self.size - 1}, not {source}")
        _check_contiguous(tensor)
        if self.size == 1 or tensor.numel() == 0:
            return finished
        self._check_awaited()
        if self.rank == source:
            self._count(costs.broadcast(self.size, _bytes(tensor)))
        return self._watched(self._broadcast(tensor, source))

    def exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        """Send tensors to, and receive tensors from, other members, all at once.

        Between two members, what is sent first arrives in what is received first.

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
        self._check_awaited()
        for tensor, peer in send:
            self._count(_bytes(tensor), "intra" if peer in self.in_node else self.tier)
        return self._watched(self._exchange(send, receive))

    def expect_exchanges(self) -> None:
        """Say that there will be exchanges in which only some members take part. Collective; blocks."""

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Everyone's ``value`` (small, picklable), in group order. Blocks."""

    def barrier(self) -> None:
        """Return when every member has called it."""
        self.all_gather_object(None)

    def close(self) -> None:
        """Give back what the backend holds for this group (sockets, buffers). Nothing may be in flight. Collective."""

    def _all_reduce_weighted(self, tensor: Tensor, op: Reduction, waiting: bool, weight: float) -> Handle:
        """For a backend to override that can scale while it copies, without another pass over memory."""
        if weight != 1.0:
            tensor.mul_(weight)
        return self._all_reduce(tensor, op, waiting)

    def _reduce_scatter_weighted(self, output: Tensor, tensor: Tensor, weight: float) -> Handle:
        """For a backend to override, likewise."""
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

    def _count(self, sent_bytes: float, tier: str | None = None) -> None:
        self._check_awaited()
        self.meter.count(tier or self.tier, sent_bytes)

    def _watched(self, handle: Handle) -> Handle:
        caller = sys._getframe(1)  # of the move, which is the caller of this
        place = caller.f_back
        return handle if place is None else _Watched(handle, self.meter, f"{self.tier}.{caller.f_code.co_name}", place)

    def _check_awaited(self) -> None:
        move, self.meter.unawaited = self.meter.unawaited, None
        if move is not None:
            raise CommunicationError(
                f"rank {self.ranks[self.rank]} did not wait for {move}: a move returns at once, and what it brings is"
                " there when its handle's wait() has returned. Write .wait() behind it"
            )

    def _check_parts(self, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != self.size * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"the whole ({whole.numel()} x {whole.dtype}) must hold {self.size} parts of"
                f" {part.numel()} x {part.dtype}"
            )
        _check_contiguous(whole)
        _check_contiguous(part)


Connect = Callable[[Sequence[Sequence[int]], str], Communicator | None]
"""Makes one communicator per group of world ranks, for a tier; returns this rank's, or None if it is in no group.

Collective over the world: every rank calls it with the same groups.
"""


def _check_contiguous(tensor: Tensor) -> None:
    # a backend that is handed an address would move the wrong bytes, in silence
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous:"
            " move a contiguous copy"
        )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def wait_all(handles: Sequence[Handle]) -> None:
    """Wait for every handle."""
    for handle in handles:
        handle.wait()
