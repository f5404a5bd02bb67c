"""Ranks as threads of one process, for tests and simulation."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.base import CommunicationError, Communicator, Handle, Reduction
from lightning_hiercomm.comm.meter import Meter

T = TypeVar("T")


class ThreadWorld:
    """A world of ranks that are threads.

    Sums run in rank order, so every rank gets the same bits. The first error ends all ranks, as in a real run.

    Args:
        size: Number of ranks.
        timeout: Seconds after which a wait for a peer becomes an error.
        one_processor: Run all ranks on one processor (Linux only), because passing the interpreter lock between
            processors takes several times longer. Use False if large models should compute in parallel.

    Example::

        def train(rank: int, world: ThreadWorld) -> float:
            group = world.connect(rank)([range(world.size)], "world")
            x = torch.tensor([float(rank)])
            group.all_reduce(x).wait()
            return x.item()

        assert ThreadWorld(4).run(train) == [6.0] * 4
    """

    def __init__(self, size: int, timeout: float = 20.0, one_processor: bool = True) -> None:
        self.size = size
        self.timeout = timeout
        self.one_processor = one_processor
        self._lock = threading.Lock()
        self._slots: dict[Hashable, _Slot] = defaultdict(_Slot)
        self._groups: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        self._failure: tuple[int, BaseException] | None = None

    def run(self, work: Callable[[int, ThreadWorld], T]) -> list[T]:
        """Call ``work(rank, world)`` on every rank; return the results in rank order, or raise the first failure."""
        results: dict[int, T] = {}

        def body(rank: int) -> None:
            try:
                results[rank] = work(rank, self)
            except BaseException as error:
                self.fail(rank, error)

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.size)]
        with on_one_processor(self.one_processor):
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure[1]
        return [results[rank] for rank in range(self.size)]

    def fail(self, rank: int, error: BaseException) -> None:
        """Let every wait for a peer, now and later, raise the error of a failed rank."""
        with self._lock:
            self._failure = self._failure or (rank, error)
            for slot in self._slots.values():
                slot.is_over.set()

    def connect(
        self, rank: int, meter: Meter | None = None
    ) -> Callable[[Sequence[Sequence[int]], str], Communicator | None]:
        """Return the :data:`~lightning_hiercomm.comm.base.Connect` of one rank."""
        meter = meter or Meter()
        made: dict[Hashable, int] = defaultdict(int)

        def connect(groups: Sequence[Sequence[int]], level: str) -> Communicator | None:
            own = next((ranks for ranks in groups if rank in ranks), None)
            if own is None:
                return None
            number, ranks = self._numbered(tuple(own))
            made[level, number] += 1
            return _ThreadCommunicator(self, ranks, rank, level, meter, key=(level, number, made[level, number]))

        return connect

    def _numbered(self, ranks: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return a number for these ranks, to hash as a key in each collective, and one tuple for all of them."""
        with self._lock:
            return self._groups.setdefault(ranks, (len(self._groups), ranks))

    def post(self, key: Hashable, rank: int, value: Any, senders: int) -> None:
        """Store the value of one of ``senders`` ranks for as many that collect ``key``."""
        with self._lock:
            slot = self._slots[key]
            slot.values[rank] = value
            if len(slot.values) == senders:
                slot.is_over.set()

    def collect(self, key: Hashable, senders: int, together: Callable[[dict[int, Any]], T]) -> T:
        """Block until ``senders`` ranks have posted ``key``.

        Args:
            key: Of the slot; the last of its readers deletes it.
            senders: The number of ranks that post, and of those that collect.
            together: Combines all values, by rank. The first reader calls it for all readers.

        Returns:
            Its result, which must not be changed.
        """
        with self._lock:
            slot = self._slots[key]
            if self._failure is not None:
                slot.is_over.set()
        if not slot.is_over.wait(self.timeout):
            missing = senders - len(slot.values)
            raise CommunicationError(f"{missing} rank(s) did not join {key} within {self.timeout} s")
        if len(slot.values) < senders:
            assert self._failure is not None
            rank, error = self._failure
            raise CommunicationError(f"rank {rank} failed: {error!r}") from error
        with slot.reading:
            if slot.readers == 0:
                slot.result = together(slot.values)
            slot.readers += 1
            if slot.readers == senders:
                with self._lock:
                    del self._slots[key]
        result: T = slot.result
        return result

    def is_posted(self, key: Hashable, senders: int) -> bool:
        """Whether :meth:`collect` would return at once."""
        with self._lock:
            return key in self._slots and len(self._slots[key].values) >= senders


@contextmanager
def on_one_processor(wanted: bool = True) -> Iterator[None]:
    """Keep threads that are started in the context on the present processor, if the system supports it."""
    statistics = Path("/proc/thread-self/stat")
    if not wanted or not hasattr(os, "sched_setaffinity") or not statistics.exists():
        yield
        return
    allowed = os.sched_getaffinity(0)
    current = int(statistics.read_text().rsplit(")", 1)[1].split()[36])  # field 39 of proc(5); names may have spaces
    os.sched_setaffinity(0, {current})  # new threads inherit it
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class _Slot:
    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.is_over = threading.Event()
        self.reading = threading.Lock()
        self.readers = 0
        self.result: Any = None


class _Parcel:
    """A tensor of one rank's stream that other ranks use."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._made = streams.mark(tensor.device) if streams.has(tensor.device) else None

    def open(self) -> Tensor:
        """Return the tensor, for use in the current stream."""
        if self._made is not None:
            streams.current(self._tensor.device).wait_event(self._made)
            streams.keep_here(self._tensor)
        return self._tensor


class _ThreadCommunicator(Communicator):
    def __init__(
        self, world: ThreadWorld, ranks: Sequence[int], rank: int, level: str, meter: Meter, key: Hashable
    ) -> None:
        super().__init__(ranks, rank, level, meter)
        self._world = world
        self._key = key
        self._collectives = 0
        self._messages: dict[tuple[int, int], int] = defaultdict(int)

    def all_gather_object(self, value: Any) -> list[Any]:
        key = self._next_key()
        self._world.post(key, self.rank, value, self.size)
        return self._world.collect(key, self.size, lambda values: [values[rank] for rank in range(self.size)]).copy()

    def _all_reduce(self, tensor: Tensor, op: Reduction, waiting: bool) -> Handle:
        return self._collective(tensor, partial(self._reduce, op=op), tensor.copy_, borrowed=True)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        def finish(whole: Tensor) -> None:
            output.copy_(whole.view(self.size, *output.shape)[self.rank])

        return self._collective(tensor, self._reduce, finish, borrowed=True)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        def together(parts: dict[int, Tensor]) -> Tensor:
            return torch.cat([parts[rank] for rank in range(self.size)])

        return self._collective(tensor, together, output.copy_, borrowed=True)

    def _broadcast(self, tensor: Tensor, source: int) -> Handle:
        return self._collective(tensor, lambda parts: parts[source], tensor.copy_, borrowed=False)

    def _exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        sent = [tensor.clone() for tensor, _ in send]
        for copy, (_, peer) in zip(sent, send, strict=True):
            self._world.post(self._message(self.rank, peer), self.rank, _Parcel(copy), 1)
        messages = [(buffer, self._message(peer, self.rank)) for buffer, peer in receive]

        def finish() -> None:
            for buffer, key in messages:
                buffer.copy_(self._world.collect(key, 1, lambda values: next(iter(values.values()))).open())

        def is_done() -> bool:
            return all(self._world.is_posted(key, 1) for _, key in messages)

        device = (send[0] if send else receive[0])[0].device
        borrowed = [(tensor, copy) for copy, (tensor, _) in zip(sent, send, strict=True)]
        return _ThreadHandle(self, finish, is_done, device, borrowed)

    def _collective(
        self,
        tensor: Tensor,
        together: Callable[[dict[int, Tensor]], Tensor],
        finish: Callable[[Tensor], object],
        borrowed: bool,
    ) -> Handle:
        key, sent = self._next_key(), tensor.detach().clone()
        self._world.post(key, self.rank, _Parcel(sent), self.size)

        def gathered(parcels: Mapping[int, _Parcel]) -> _Parcel:
            return _Parcel(together({rank: parcel.open() for rank, parcel in parcels.items()}))

        return _ThreadHandle(
            self,
            lambda: finish(self._world.collect(key, self.size, gathered).open()),
            lambda: self._world.is_posted(key, self.size),
            tensor.device,
            [(tensor, sent)] if borrowed else [],
        )

    @staticmethod
    def _reduce(parts: Mapping[int, Tensor], op: Reduction = "sum") -> Tensor:
        result = parts[0].clone()
        for rank in range(1, len(parts)):
            (torch.maximum if op == "max" else torch.add)(result, parts[rank], out=result)
        return result

    def _next_key(self) -> Hashable:
        self._collectives += 1
        return (self._key, self._collectives)

    def _message(self, source: int, target: int) -> Hashable:
        self._messages[source, target] += 1
        return (self._key, source, target, self._messages[source, target])


class _ThreadHandle(Handle):
    """A handle that also detects changes of tensors in flight, which corrupt results of real backends."""

    def __init__(
        self,
        communicator: _ThreadCommunicator,
        finish: Callable[[], object],
        is_done: Callable[[], bool],
        device: torch.device,
        borrowed: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self._communicator = communicator
        self._finish: Callable[[], object] | None = finish
        self._is_done = is_done
        self._device = device
        self._borrowed = borrowed

    def wait(self) -> None:
        if self._finish is None:
            return
        for tensor, sent in self._borrowed if not streams.has(self._device) else ():  # where it waits for nothing
            if not torch.equal(tensor, sent) and not torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(sent)):
                raise CommunicationError(
                    f"rank {self._communicator.rank} changed a tensor while it was in flight in the"
                    f" {self._communicator.level} group"
                )
        with self._communicator.meter.waiting(self._communicator.level, self._device):
            self._finish()
        self._finish = None

    def is_done(self) -> bool:
        return self._finish is None or self._is_done()
