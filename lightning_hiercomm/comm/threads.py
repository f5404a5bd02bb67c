"""N ranks as threads of one process: for exact tests in milliseconds, and for simulation."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_hiercomm.comm.base import CommunicationError, Communicator, Handle, Reduction
from lightning_hiercomm.comm.meter import Meter

T = TypeVar("T")


class ThreadWorld:
    """A world of ranks that are threads.

    Sums run in rank order, so every rank gets the same bits. The first rank that raises ends the others, as a dead
    process does in a real run.

    Args:
        size: Number of ranks.
        timeout: Seconds after which a wait for a peer becomes an error.

    Example::

        def train(rank: int, world: ThreadWorld) -> float:
            group = world.connect(rank)([range(world.size)], "world")
            x = torch.tensor([float(rank)])
            group.all_reduce(x).wait()
            return x.item()

        assert ThreadWorld(4).run(train) == [6.0] * 4
    """

    def __init__(self, size: int, timeout: float = 20.0) -> None:
        self.size = size
        self.timeout = timeout
        self._changed = threading.Condition()
        self._posts: dict[Hashable, dict[int, Any]] = defaultdict(dict)
        self._readers: dict[Hashable, int] = defaultdict(int)
        self._failure: tuple[int, BaseException] | None = None

    def run(self, work: Callable[[int, ThreadWorld], T]) -> list[T]:
        """Call ``work(rank, world)`` on every rank; return the results in rank order, or raise the first failure."""
        results: dict[int, T] = {}

        def body(rank: int) -> None:
            try:
                results[rank] = work(rank, self)
            except BaseException as error:
                with self._changed:
                    self._failure = self._failure or (rank, error)
                    self._changed.notify_all()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure[1]
        return [results[rank] for rank in range(self.size)]

    def connect(
        self, rank: int, meter: Meter | None = None
    ) -> Callable[[Sequence[Sequence[int]], str], Communicator | None]:
        """The :data:`~lightning_hiercomm.comm.base.Connect` of one rank."""
        meter = meter or Meter()
        made: dict[Hashable, int] = defaultdict(int)

        def connect(groups: Sequence[Sequence[int]], tier: str) -> Communicator | None:
            own = None
            for ranks in map(tuple, groups):
                made[tier, ranks] += 1
                if rank in ranks:
                    own = _ThreadCommunicator(self, ranks, rank, tier, meter, key=(tier, ranks, made[tier, ranks]))
            return own

        return connect

    def post(self, key: Hashable, rank: int, value: Any) -> None:
        """Leave ``value`` for whoever collects ``key``."""
        with self._changed:
            self._posts[key][rank] = value
            self._changed.notify_all()

    def collect(self, key: Hashable, senders: int, readers: int) -> dict[int, Any]:
        """Block until ``senders`` ranks posted ``key``; the last of ``readers`` to read clears it."""
        deadline = time.monotonic() + self.timeout
        with self._changed:
            while len(self._posts[key]) < senders:
                if self._failure is not None:
                    rank, error = self._failure
                    raise CommunicationError(f"rank {rank} failed: {error!r}") from error
                if time.monotonic() >= deadline:
                    missing = senders - len(self._posts[key])
                    raise CommunicationError(f"{missing} rank(s) did not join {key} within {self.timeout} s")
                self._changed.wait(timeout=1.0)
            values = self._posts[key]
            self._readers[key] += 1
            if self._readers[key] == readers:
                del self._posts[key], self._readers[key]
            return values

    def is_posted(self, key: Hashable, senders: int) -> bool:
        """Whether :meth:`collect` would return at once."""
        with self._changed:
            return len(self._posts.get(key, ())) >= senders


class _ThreadCommunicator(Communicator):
    def __init__(
        self, world: ThreadWorld, ranks: Sequence[int], rank: int, tier: str, meter: Meter, key: Hashable
    ) -> None:
        super().__init__(ranks, rank, tier, meter)
        self._world = world
        self._key = key
        self._moves = 0
        self._letters: dict[tuple[int, int], int] = defaultdict(int)

    def all_gather_object(self, value: Any) -> list[Any]:
        key = self._next_key()
        self._world.post(key, self.rank, value)
        values = self._world.collect(key, self.size, self.size)
        return [values[rank] for rank in range(self.size)]

    def _all_reduce(self, tensor: Tensor, op: Reduction, waiting: bool) -> Handle:
        def finish(parts: dict[int, Tensor]) -> None:
            tensor.copy_(self._reduce([parts[rank] for rank in range(self.size)], op))

        return self._collective(tensor, finish, (tensor,))

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        def finish(parts: dict[int, Tensor]) -> None:
            output.copy_(self._reduce([parts[rank].chunk(self.size)[self.rank] for rank in range(self.size)], "sum"))

        return self._collective(tensor, finish, (tensor,))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        def finish(parts: dict[int, Tensor]) -> None:
            output.copy_(torch.cat([parts[rank] for rank in range(self.size)]))

        return self._collective(tensor, finish, (tensor,))

    def _broadcast(self, tensor: Tensor, source: int) -> Handle:
        return self._collective(tensor, lambda parts: tensor.copy_(parts[source]), ())

    def _exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        for tensor, peer in send:
            self._world.post(self._letter(self.rank, peer), self.rank, tensor.clone())
        letters = [(buffer, self._letter(peer, self.rank)) for buffer, peer in receive]

        def finish() -> None:
            for buffer, key in letters:
                (value,) = self._world.collect(key, 1, 1).values()
                buffer.copy_(value)

        def is_done() -> bool:
            return all(self._world.is_posted(key, 1) for _, key in letters)

        device = (send[0] if send else receive[0])[0].device
        return _ThreadHandle(self, finish, is_done, device, [(tensor, tensor.clone()) for tensor, _ in send])

    def _collective(
        self, tensor: Tensor, finish: Callable[[dict[int, Tensor]], object], borrowed: Sequence[Tensor]
    ) -> Handle:
        key = self._next_key()
        self._world.post(key, self.rank, tensor.clone())
        return _ThreadHandle(
            self,
            lambda: finish(self._world.collect(key, self.size, self.size)),
            lambda: self._world.is_posted(key, self.size),
            tensor.device,
            [(tensor, tensor.clone()) for tensor in borrowed],
        )

    @staticmethod
    def _reduce(parts: Sequence[Tensor], op: Reduction) -> Tensor:
        result = parts[0].clone()
        for part in parts[1:]:
            result = torch.maximum(result, part) if op == "max" else result + part
        return result

    def _next_key(self) -> Hashable:
        self._moves += 1
        return (self._key, self._moves)

    def _letter(self, source: int, target: int) -> Hashable:
        self._letters[source, target] += 1
        return (self._key, source, target, self._letters[source, target])


class _ThreadHandle(Handle):
    """Also catches what real backends turn into silent corruption: a tensor that was changed while in flight."""

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
        for tensor, sent in self._borrowed:
            if not torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(sent)):
                raise CommunicationError(
                    f"rank {self._communicator.rank} changed a tensor while it was in flight in the"
                    f" {self._communicator.tier} group"
                )
        with self._communicator.meter.waiting(self._communicator.tier, self._device):
            self._finish()
        self._finish = None

    def is_done(self) -> bool:
        return self._finish is None or self._is_done()
