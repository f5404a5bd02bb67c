"""Communication between elastic nodes: values in their stores, and process groups over gloo."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError, wait
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore
from typing_extensions import override

from lightning_hiercomm.comm.base import CommunicationError, Communicator, Reduction
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.staged import StagedCommunicator
from lightning_hiercomm.comm.torch import REDUCE_OPS, TorchCommunicator, messages_of
from lightning_hiercomm.elastic.quorum import Quorum

T = TypeVar("T")


class GlooTransport:
    """Queries other nodes' stores, and connects gloo groups through the first member's store."""

    def __init__(self, address: str, dead_after: float) -> None:
        self.address = address
        self._dead_after = timedelta(seconds=dead_after)
        self._set_up = timedelta(seconds=max(0.5, dead_after / 2))
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []  # that may still wait for an answer

    def ask(self, address: str, query: Callable[[Store], T], timeout: float | None = None) -> T:
        """Return ``query`` of a node's store, or raise a ``RuntimeError`` if the node does not answer in time."""
        answer = self._start(address, query, self._stores.pop(address, None))
        try:
            result, self._stores[address] = answer.result(self._set_up.total_seconds() if timeout is None else timeout)
        except TimeoutError:
            raise RuntimeError(f"the node at {address} does not answer") from None
        return result

    def ask_all(self, addresses: Sequence[str], query: Callable[[Store], T]) -> Mapping[str, T]:
        """Return ``query`` of the stores of all nodes that answer; safe in any thread."""
        asked = {address: self._start(address, query) for address in addresses}
        done, _ = wait(asked.values(), self._set_up.total_seconds())
        return {
            address: answer.result()[0]
            for address, answer in asked.items()
            if answer in done and not answer.exception()
        }

    def _start(self, address: str, query: Callable[[Store], T], client: Store | None = None) -> Future[tuple[T, Store]]:
        """Begin a question, by default with a client of its own."""
        # in a thread, which may be abandoned: a store's client waits forever for a stopped process
        answer: Future[tuple[T, Store]] = Future()

        def ask() -> None:
            host, _, port = address.rpartition(":")
            try:
                store = client or TCPStore(
                    host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=self._set_up
                )
                answer.set_result((query(store), store))
            except BaseException as error:
                answer.set_exception(error)

        thread = threading.Thread(target=ask, daemon=True, name="ask-node")
        thread.start()
        with self._lock:
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        return answer

    def finish(self) -> None:
        """Wait up to ``dead_after`` seconds for abandoned questions: one that ends at interpreter exit aborts it."""
        deadline = time.monotonic() + self._dead_after.total_seconds()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def connect_group(self, quorum: Quorum, index: int, name: str, meter: Meter) -> Communicator:
        """Connect this rank with the same local rank of all members, or raise a ``RuntimeError``.

        ``index`` is this node's among the members; ``name``, of the group, contains the local rank.
        """
        size, first = len(quorum.members), quorum.members[0].store
        prefix = f"{quorum.token}/{name}"

        def all_are_there(whole: Store) -> None:
            # finds an absent member in half of the time that a message may take
            store = PrefixStore(prefix, whole)
            store.set(f"here/{index}", "")
            store.wait([f"here/{member}" for member in range(size)], self._set_up)

        def connect(whole: Store) -> Any:
            options = cast(Any, dist.ProcessGroupGloo)._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address)]
            options._timeout = self._dead_after
            return dist.ProcessGroupGloo(PrefixStore(prefix, whole), index, size, options)

        seconds = self._set_up.total_seconds()
        self.ask(first, all_are_there, seconds + min(0.5, seconds / 4))  # longer, in case the first does not answer
        group = self.ask(first, connect, max(1.0, seconds))
        if torch.cuda.is_available():
            return StagedCommunicator(_GlooGroup(group, index, size, Meter()), meter)
        return _GlooGroup(group, index, size, meter)


class _GlooGroup(TorchCommunicator):
    """A gloo group that is not in torch's registry of groups, so torch's own functions do not reach it."""

    def __init__(self, group: Any, rank: int, size: int, meter: Meter) -> None:
        super().__init__(None, range(size), rank, "inter", meter)
        self._gloo = group

    @override
    def _is_nccl(self) -> bool:
        return False

    def close(self) -> None:
        self._gloo = None  # its connections close with the last reference

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather tensors and primitives from all members, without unpickling data of other nodes."""
        own = packed(value)
        length = torch.tensor([own.numel()])
        lengths = torch.zeros(self.size, dtype=torch.int64)
        self.all_gather(lengths, length).wait()
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        gathered = torch.zeros(self.size * longest, dtype=torch.uint8)
        self.all_gather(gathered, padded).wait()
        return [unpacked(data[:n]) for data, n in zip(gathered.chunk(self.size), lengths.tolist(), strict=True)]

    @override
    def _start_all_reduce(self, tensor: Tensor, op: Reduction) -> dist.Work | None:
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCE_OPS[op]
        work: dist.Work = self._required.allreduce([tensor], options)
        return work

    @override
    def _start_broadcast(self, tensor: Tensor, source: int) -> dist.Work | None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        work: dist.Work = self._required.broadcast([tensor], options)
        return work

    @override
    def _post(
        self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]], tag: int
    ) -> Sequence[dist.Work | None]:
        group = self._required
        return [
            *(group.recv([piece], peer, tag) for tensor, peer in receive for piece in messages_of(tensor)),
            *(group.send([piece], peer, tag) for tensor, peer in send for piece in messages_of(tensor)),
        ]

    @property
    def _required(self) -> Any:
        if self._gloo is None:
            raise CommunicationError("the connections of this group are closed")
        return self._gloo


def packed(value: Any) -> Tensor:
    """Return tensors and primitives as a 1-D tensor of bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpacked(data: Tensor) -> Any:
    """Undo :func:`packed`, with ``weights_only`` loading."""
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True, map_location="cpu")
