"""Communicators between nodes that come and go: they stay, and their members change from one agreement to the next."""

from __future__ import annotations

import contextlib
import io
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lightning_hiercomm.comm.base import CommunicationError, Communicator, Handle, Reduction, finished
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.staged import StagedCommunicator
from lightning_hiercomm.comm.torch import REDUCE_OPS, TorchCommunicator, pieces
from lightning_hiercomm.elastic.quorum import Quorum
from lightning_hiercomm.elastic.signature import Signer

T = TypeVar("T")


class Transport(Protocol):
    """How nodes reach each other."""

    def ask(self, address: str, work: Callable[[Store], T], patience: float | None = None) -> T:
        """What ``work`` finds in what a node keeps for others.

        Args:
            address: Of that node.
            work: May still be at it when nobody waits for it any more.
            patience: Seconds. Default: a short while.

        Raises:
            RuntimeError: If the node is not there, or does not answer.
        """

    def unreachable(self, addresses: Sequence[str]) -> Sequence[str]:
        """Those of these nodes that do not answer."""

    def glance(self, addresses: Sequence[str], name: str) -> Sequence[bytes]:
        """What those of these nodes that answer keep by this name; on any thread, beside all else."""

    def connect_group(self, quorum: Quorum, index: int, lane: str, meter: Meter) -> Communicator:
        """Connect this rank with the same local rank of all members.

        Args:
            quorum: Whose members.
            index: Of this node among them.
            lane: The local rank, and which of its lanes.
            meter: Counts the traffic.

        Raises:
            RuntimeError: If one of them is not there in time.
        """


class CircuitBreaker:
    """The first error of an exchange, after which nothing more of it is sent.

    An error is not raised where it happens: the other ranks of the node would wait for this one inside the node. It is
    kept until this rank is connected anew, later moves do nothing, and the vote at the end finds out. All connections
    of this rank are closed at once, so that whoever waits for it learns.
    """

    def __init__(self) -> None:
        self.error: str | None = None
        self.close: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    @property
    def is_intact(self) -> bool:
        """Whether nothing has gone wrong since :meth:`reset`."""
        return self.error is None

    def trip(self, error: str) -> None:
        """Something has gone wrong."""
        with self._lock:  # what is under way beside training may go wrong at the same time
            is_first, self.error = self.error is None, self.error or (error.splitlines()[0] if error else "unknown")
        if is_first:
            self.close()

    def reset(self) -> None:
        """Begin again."""
        self.error = None


class InterNodeGroup(Communicator):
    """The same local rank of all nodes that meet.

    Outside of an agreement it refuses to move anything: nobody would answer.

    Args:
        meter: Counts this rank's traffic.
        breaker: Learns of what goes wrong.
        is_beside: Whether it is for what leaves in an agreement and goes on beside training, so it is always open.
    """

    def __init__(self, meter: Meter, breaker: CircuitBreaker, is_beside: bool = False) -> None:
        super().__init__([0], 0, "inter", meter)
        self.is_open = is_beside
        self._carrier: Communicator | None = None
        self._breaker = breaker
        self._moves: weakref.WeakSet[_Guarded] = weakref.WeakSet()
        self._lock = threading.Lock()

    def connect(self, carrier: Communicator | None) -> None:
        """Go on with other members; None: there are no others."""
        self.disconnect()
        self._carrier = carrier
        self.rank, self.size = (0, 1) if carrier is None else (carrier.rank, carrier.size)
        self.ranks = tuple(range(self.size))

    def disconnect(self) -> None:
        """Let go of the connections, which closes them, and of everything under way."""
        with self._lock:
            moves, carrier, self._carrier = list(self._moves), self._carrier, None
        for move in moves:
            move.forget()
        self.meter.unawaited = None  # nobody is to wait for what was let go
        if carrier is not None:
            carrier.close()

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = []
        self._launch(lambda carrier: _gathered(carrier, value, values))
        return values if len(values) == self.size else [value] * self.size

    def _all_reduce(self, tensor: Tensor, op: Reduction, waiting: bool) -> Handle:
        return self._launch(lambda carrier: carrier.all_reduce(tensor, op, waiting))

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        return self._launch(lambda carrier: carrier.reduce_scatter(output, tensor))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        return self._launch(lambda carrier: carrier.all_gather(output, tensor))

    def _broadcast(self, tensor: Tensor, source: int) -> Handle:
        return self._launch(lambda carrier: carrier.broadcast(tensor, source))

    def _exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        return self._launch(lambda carrier: carrier.exchange(send, receive))

    def _count(self, sent_bytes: float, tier: str | None = None) -> None:
        """The carrier counts."""

    def _launch(self, start: Callable[[Communicator], Handle]) -> Handle:
        if not self.is_open:
            raise RuntimeError("elastic nodes talk to each other inside an agreement only")
        carrier = self._carrier
        if carrier is None and self.size > 1:
            self._breaker.trip("not connected")
        if not self._breaker.is_intact or carrier is None:
            return finished
        try:
            move = _Guarded(start(carrier), self._breaker)
        except CommunicationError as error:
            self._breaker.trip(str(error))
            return finished
        with self._lock:
            self._moves.add(move)
        return move


class _Guarded(Handle):
    def __init__(self, move: Handle, breaker: CircuitBreaker) -> None:
        self._move: Handle | None = move
        self._breaker = breaker

    def forget(self) -> None:
        """Let go of it: what is under way keeps connections open."""
        move, self._move = self._move, None
        if move is not None:
            move.forget()  # before it is dropped: training may launch another at this moment, and would be blamed

    def wait(self) -> None:
        move = self._move
        if move is None:
            return
        error = ""
        try:
            move.wait()
        except CommunicationError as raised:
            error = str(raised)  # not the error itself, whose traceback holds on to the move
        self._move = move = None
        if error:
            self._breaker.trip(error)

    def is_done(self) -> bool:
        return self._move is None or self._move.is_done()


class NodesWorld(Communicator):
    """All ranks of all nodes that meet: over the node, and its first rank's lane. Outside of an agreement, the node.

    It is for a few bytes: what it moves goes through one rank of each node, and is waited for.

    Args:
        intra: The ranks of this node.
        lane: The first ranks of all nodes; None on other ranks.
    """

    def __init__(self, intra: Communicator, lane: InterNodeGroup | None) -> None:
        super().__init__(range(intra.size), intra.rank, "world", Meter())
        self._intra = intra
        self._lane = lane
        self._nodes: Sequence[Sequence[int]] = [range(intra.size)]
        self._node = 0

    def reform(self, nodes: Sequence[Sequence[int]], node: int) -> None:
        """Take other nodes, given by their ranks, of which this is one."""
        self._nodes, self._node = nodes, node
        self.ranks = tuple(range(sum(map(len, nodes))))
        self.rank, self.size = nodes[node][self._intra.rank], len(self.ranks)

    def all_gather_object(self, value: Any) -> list[Any]:
        own = self._intra.all_gather_object(value)
        if self._lane is not None and len(self._nodes) > 1:
            own = [each for of_node in self._lane.all_gather_object(own) for each in of_node]
        gathered: list[Any] = self._intra.all_gather_object(own)[0]
        return gathered if len(gathered) == self.size else [value] * self.size  # nodes of unequal size, and it failed

    def _all_reduce(self, tensor: Tensor, op: Reduction, waiting: bool) -> Handle:
        self._intra.all_reduce(tensor, op).wait()
        return self._between_first_ranks(tensor, lambda lane: lane.all_reduce(tensor, op))

    def _broadcast(self, tensor: Tensor, source: int) -> Handle:
        node = next(m for m, ranks in enumerate(self._nodes) if source in ranks)
        if node == self._node:
            self._intra.broadcast(tensor, list(self._nodes[node]).index(source)).wait()
        return self._between_first_ranks(tensor, lambda lane: lane.broadcast(tensor, node))

    def _between_first_ranks(self, tensor: Tensor, move: Callable[[InterNodeGroup], Handle]) -> Handle:
        if self._lane is not None and len(self._nodes) > 1:
            move(self._lane).wait()
        if len(self._nodes) > 1:
            self._intra.broadcast(tensor, 0).wait()
        return finished

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        raise NotImplementedError("the world of elastic nodes reduces, broadcasts and gathers objects")

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        raise NotImplementedError("the world of elastic nodes reduces, broadcasts and gathers objects")

    def _exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        raise NotImplementedError("the world of elastic nodes reduces, broadcasts and gathers objects")


def _gathered(carrier: Communicator, value: Any, into: list[Any]) -> Handle:
    """Everyone's value, as what ``weights_only`` reads: nobody unpickles what another node sends."""
    own = packed(value)
    length = torch.tensor([own.numel()])
    lengths = torch.zeros(carrier.size, dtype=torch.int64)
    carrier.all_gather(lengths, length).wait()
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: own.numel()] = own
    everyone = torch.zeros(carrier.size * longest, dtype=torch.uint8)
    carrier.all_gather(everyone, padded).wait()
    into += [unpacked(part[:n]) for part, n in zip(everyone.chunk(carrier.size), lengths.tolist(), strict=True)]
    return finished


def packed(value: Any) -> Tensor:
    """Tensors and primitives as bytes, 1-D."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpacked(data: Tensor) -> Any:
    """Undo :func:`packed`; nothing but tensors and primitives comes out of it."""
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True, map_location="cpu")


class _GlooGroup(TorchCommunicator):
    """Members of a gloo group that torch's registry of groups does not know."""

    def __init__(self, group: Any, rank: int, size: int, meter: Meter) -> None:
        super().__init__(None, range(size), rank, "inter", meter)
        self._gloo = group

    def _is_nccl(self) -> bool:
        return False

    def close(self) -> None:
        self._gloo = None  # the last reference: its connections close

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = []
        _gathered(self, value, values)
        return values

    def _start_all_reduce(self, tensor: Tensor, op: Reduction) -> Sequence[dist.Work | None]:
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCE_OPS[op]
        return [self._required.allreduce([tensor], options)]

    def _start_broadcast(self, tensor: Tensor, source: int) -> Sequence[dist.Work | None]:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return [self._required.broadcast([tensor], options)]

    def _post(
        self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]], tag: int
    ) -> Sequence[dist.Work | None]:
        group = self._required
        return [
            *(group.recv([piece], peer, tag) for tensor, peer in receive for piece in pieces(tensor)),
            *(group.send([piece], peer, tag) for tensor, peer in send for piece in pieces(tensor)),
        ]

    @property
    def _required(self) -> Any:
        if self._gloo is None:
            raise CommunicationError("the connections of this lane are closed")
        return self._gloo


class GlooTransport:
    """Over gloo groups, which members of a meeting find at a store of the first of them.

    Args:
        address: Of this machine, which other nodes can reach.
        dead_after: Seconds of silence after which a message counts as lost.
        signer: Names what members look for in a store.
    """

    def __init__(self, address: str, dead_after: float, signer: Signer | None = None) -> None:
        self.address = address
        self._signer = signer or Signer()
        self._dead_after = timedelta(seconds=dead_after)
        self._set_up = timedelta(seconds=max(0.5, dead_after / 2))
        self._stores: dict[str, Store] = {}

    def ask(self, address: str, work: Callable[[Store], T], patience: float | None = None) -> T:
        # a store's client waits for ever for a process that is stopped: on a thread of its own, which may be left there
        answer: Future[T] = Future()
        store = self._stores.get(address)

        def ask() -> None:
            nonlocal store
            try:
                if store is None:
                    host, _, port = address.rpartition(":")
                    store = TCPStore(
                        host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=self._set_up
                    )
                answer.set_result(work(store))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True, name="ask-node").start()
        try:
            result = answer.result(self._set_up.total_seconds() if patience is None else patience)
        except TimeoutError:
            self._stores.pop(address, None)
            raise RuntimeError(f"the node at {address} does not answer") from None
        except BaseException:
            self._stores.pop(address, None)
            raise
        if store is not None:
            self._stores[address] = store
        return result

    def unreachable(self, addresses: Sequence[str]) -> Sequence[str]:
        silent = []

        def look(address: str) -> None:
            try:
                self.ask(address, lambda store: store.check([""]))
            except RuntimeError:
                silent.append(address)

        _of_each(addresses, look)
        return silent

    def glance(self, addresses: Sequence[str], name: str) -> Sequence[bytes]:
        beside, found = GlooTransport(self.address, self._dead_after.total_seconds()), []

        def look(address: str) -> None:
            with contextlib.suppress(RuntimeError):
                found.append(beside.ask(address, lambda store: store.get(name) if store.check([name]) else b""))

        _of_each(addresses, look)
        return found

    def connect_group(self, quorum: Quorum, index: int, lane: str, meter: Meter) -> Communicator:
        size, first = len(quorum.members), quorum.members[0].store
        name = self._signer.key(f"{quorum.token}/{lane}")

        def all_are_there(whole: Store) -> None:
            # who is not there is missed here, in half the time that a message may take
            store = PrefixStore(name, whole)
            store.set(f"here/{index}", "")
            store.wait([f"here/{member}" for member in range(size)], self._set_up)

        def connect(whole: Store) -> Any:
            store = PrefixStore(name, whole)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address)]
            options._timeout = self._dead_after
            return dist.ProcessGroupGloo(store, index, size, options)

        set_up = self._set_up.total_seconds()
        self.ask(first, all_are_there, set_up + min(0.5, set_up / 4))  # or the first of them itself does not answer
        group = self.ask(first, connect, max(1.0, set_up))
        if torch.cuda.is_available():
            return StagedCommunicator(_GlooGroup(group, index, size, Meter()), meter)
        return _GlooGroup(group, index, size, meter)


def _of_each(addresses: Sequence[str], look: Callable[[str], None]) -> None:
    """Look at all of them at a time."""
    looking = [threading.Thread(target=look, args=(address,), daemon=True) for address in addresses]
    for thread in looking:
        thread.start()
    for thread in looking:
        thread.join()
