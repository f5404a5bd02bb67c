"""Collectives of CPU tensors through memory that the ranks of a node share; gloo would use loopback sockets."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from lightning_hiercomm.comm.background import JobThread, Timed
from lightning_hiercomm.comm.base import Communicator, Connect, Handle, Reduction
from lightning_hiercomm.comm.torch import TorchCommunicator

T = TypeVar("T")

_logger = logging.getLogger(__name__)

# Bytes that a rank writes per round. Two such slots per rank stay in the processors' caches; smaller ones cost more
# rounds.
_SLOT = 2**21

# Up to so many bytes are reduced in one round, in which all ranks read everything. Otherwise each rank sums one part.
_ONE_ROUND = 2**12

_CONNECTING_SECONDS = 30.0

_OFF = "HIERCOMM_SHARED_MEMORY"


class SharedMemoryCommunicator(TorchCommunicator):
    """A process group whose members share memory. Tensors on other devices, exchanges and objects use the group itself.

    A collective has one or more rounds: every member writes to its slot, signals the others, waits for their signals
    and reads their slots. No member is ahead by more than one round, so a group has ``2 * size`` slots of 2 MiB.
    Collectives run one after another on a thread. Sums run in rank order, so every member gets the same bits.

    Signals are messages through sockets, so a waiting member sleeps in the kernel, and the death of one ends the wait.

    Args:
        communicator: The process group.
        sockets: A connected socket per member, in group order; None for this one.
        memory: The slots, mapped by all members.
        timeout: Of a wait for a member.
    """

    def __init__(
        self,
        communicator: TorchCommunicator,
        sockets: Sequence[socket.socket | None],
        memory: mmap.mmap,
        timeout: timedelta,
    ) -> None:
        ranks = communicator.ranks
        super().__init__(communicator.group, ranks, ranks[communicator.rank], communicator.level, communicator.meter)
        self.sockets = [each for each in sockets if each is not None]
        for each in self.sockets:
            each.settimeout(timeout.total_seconds())
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(2, self.size, _SLOT)
        self._round = 0
        self._jobs = JobThread("hiercomm-shared-memory")

    def close(self) -> None:
        self._close_sockets()
        self._slots = torch.empty(0)  # frees the memory
        super().close()

    def _all_reduce_weighted(self, tensor: Tensor, op: Reduction, waiting: bool, weight: float) -> Handle:
        if tensor.device.type != "cpu":
            return super()._all_reduce_weighted(tensor, op, waiting, weight)
        return self._do(tensor, partial(self._reduce, tensor.view(-1), op, weight))

    def _reduce_scatter_weighted(self, output: Tensor, tensor: Tensor, weight: float) -> Handle:
        if tensor.device.type != "cpu":
            return super()._reduce_scatter_weighted(output, tensor, weight)
        return self._do(tensor, partial(self._scatter_sums, output, tensor.view(self.size, -1), weight))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        if tensor.device.type != "cpu":
            return super()._all_gather(output, tensor)
        return self._do(tensor, partial(self._gather, output.view(self.size, -1), tensor))

    def _broadcast(self, tensor: Tensor, source: int) -> Handle:
        if tensor.device.type != "cpu":
            return super()._broadcast(tensor, source)
        return self._do(tensor, partial(self._spread, tensor.view(-1), source))

    # ---- collectives, on the thread ------------------------------------------------------------------------------

    def _reduce(self, flat: Tensor, op: Reduction, weight: float) -> None:
        for piece in self._pieces(flat):
            slots = self._next_slots(flat.dtype, piece.numel())
            _write(piece, weight, out=slots[self.rank])
            self._wait_for_members(piece)
            if self.size == 2 or piece.nbytes <= _ONE_ROUND:
                _combine(slots.unbind(), op, out=piece)
                continue
            own = slots.tensor_split(self.size, dim=1)[self.rank]
            results = self._next_slots(flat.dtype, piece.numel())
            _combine(own.unbind(), op, out=results[self.rank, : own.shape[1]])
            self._wait_for_members(piece)
            for part, result in zip(piece.tensor_split(self.size), results, strict=True):
                part.copy_(result[: part.numel()])

    def _scatter_sums(self, output: Tensor, whole: Tensor, weight: float) -> None:
        pieces = zip(self._pieces(output, self.size), self._pieces(whole, self.size), strict=True)
        for result, parts in pieces:
            slots = self._next_slots(whole.dtype, parts.numel()).view(self.size, *parts.shape)
            _write(parts, weight, out=slots[self.rank])
            self._wait_for_members(parts)
            _combine(slots[:, self.rank].unbind(), "sum", out=result)

    def _gather(self, whole: Tensor, own: Tensor) -> None:
        if whole[self.rank].data_ptr() != own.data_ptr():
            whole[self.rank].copy_(own)
        for piece, parts in zip(self._pieces(own), self._pieces(whole), strict=True):
            slots = self._next_slots(own.dtype, piece.numel())
            slots[self.rank].copy_(piece)
            self._wait_for_members(piece)
            for peer in self._peers():
                parts[peer].copy_(slots[peer])

    def _spread(self, flat: Tensor, source: int) -> None:
        for piece in self._pieces(flat):
            slot = self._next_slots(flat.dtype, piece.numel())[source]
            if self.rank == source:
                slot.copy_(piece)
            self._wait_for_members(piece)
            if self.rank != source:
                piece.copy_(slot)

    # ---- rounds --------------------------------------------------------------------------------------------------

    def _do(self, tensor: Tensor, collective: Callable[[], None]) -> Handle:
        def work() -> None:
            with torch.inference_mode():  # tensors that were made in it cannot be written to outside of it
                collective()

        return Timed(self._jobs.submit(work), self.meter, self.level, tensor.device)

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    @staticmethod
    def _pieces(tensor: Tensor, per_slot: int = 1) -> Sequence[Tensor]:
        """Split the last dimension, so that ``per_slot`` pieces fit into a slot."""
        pieces: Sequence[Tensor] = tensor.split(_SLOT // (per_slot * tensor.element_size()), dim=-1)
        return pieces

    def _next_slots(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Return all members' slots of the next round, ``size`` times ``numel`` elements."""
        self._round += 1
        return self._slots[self._round % 2].view(dtype)[:, :numel]

    def _wait_for_members(self, piece: Tensor) -> None:
        """Wait until every member has written its piece, which must be as large as this one's."""
        signal = struct.pack("=I", piece.nbytes)
        try:
            for each in self.sockets:
                each.send(signal)
            for each in self.sockets:
                received = each.recv(4)
                if not received:
                    raise ConnectionError("a member has gone")
                if received != signal:
                    raise ConnectionError("members reduce tensors of different sizes")
        except OSError as error:
            self._close_sockets()  # ends the waits of all others
            raise self.failure(RuntimeError(str(error) or "a member does not answer")) from error

    def _close_sockets(self) -> None:
        for each in self.sockets:
            each.close()


def _write(values: Tensor, weight: float, out: Tensor) -> None:
    if weight == 1.0:
        out.copy_(values)
    else:
        torch.mul(values, weight, out=out)


def _combine(tensors: Sequence[Tensor], op: Reduction, out: Tensor) -> None:
    combine = torch.add if op == "sum" else torch.maximum
    first, second, *others = tensors
    combine(first, second, out=out)
    for other in others:
        combine(out, other, out=out)


# ---- connecting ------------------------------------------------------------------------------------------------------


def sharing_memory(connect: Connect, timeout: timedelta | None = None, levels: Sequence[str] = ("intra",)) -> Connect:
    """Let the groups of ``connect`` share memory if all their members can.

    They cannot on systems other than Linux, in containers with different network namespaces, or if a member has
    ``HIERCOMM_SHARED_MEMORY=0`` in its environment. nccl groups need no shared memory.

    Args:
        connect: Creates the groups.
        timeout: Of a wait for a member. Default: 30 minutes, as torch's.
        levels: The levels whose groups share memory.
    """

    def connect_and_share(groups: Sequence[Sequence[int]], level: str) -> Communicator | None:
        own = connect(groups, level)
        if level in levels and isinstance(own, TorchCommunicator) and own.size > 1 and not own.is_nccl:
            return _share(own, timeout or timedelta(minutes=30)) or own
        return own

    return connect_and_share


def _share(group: TorchCommunicator, timeout: timedelta) -> SharedMemoryCommunicator | None:
    """Share memory among all members, or return None on all. Collective over the group.

    Neither sockets nor memory are files: nothing is left after a rank is killed, and ``/dev/shm``, often limited to
    64 MB in containers, is not used.
    """
    sockets: list[socket.socket | None] = [None] * group.size
    with ExitStack() as unless_shared, ExitStack() as while_connecting:

        def listen() -> tuple[socket.socket, bytes, int]:
            if os.environ.get(_OFF) == "0":
                raise OSError(f"{_OFF}=0")
            listener = while_connecting.enter_context(_socket())
            address = b"\0hiercomm-" + secrets.token_hex(16).encode()  # the zero keeps it out of the file system
            listener.bind(address)
            listener.listen(group.size)
            if group.rank != 0:
                return listener, address, -1
            file = os.memfd_create("hiercomm")
            while_connecting.callback(os.close, file)
            os.ftruncate(file, 2 * group.size * _SLOT)
            return listener, address, file

        def connect() -> mmap.mmap:
            for peer in range(group.rank):
                sockets[peer] = own = unless_shared.enter_context(_socket())
                own.connect(addresses[peer])
                own.send(struct.pack("=I", group.rank))
            while None in sockets[group.rank + 1 :]:
                accepted = unless_shared.enter_context(listener.accept()[0])
                accepted.settimeout(_CONNECTING_SECONDS)
                if _user_of(accepted) == os.geteuid():  # all users of the machine can connect to the address
                    (peer,) = struct.unpack("=I", accepted.recv(4))
                    sockets[peer] = accepted
            if group.rank == 0:
                for each in sockets[1:]:
                    socket.send_fds(cast(socket.socket, each), [b"memory"], [file])
                return mmap.mmap(file, 0)
            _, (received,), _, _ = socket.recv_fds(cast(socket.socket, sockets[0]), 6, 1)
            while_connecting.callback(os.close, received)
            return mmap.mmap(received, 0)

        listening, failure = _attempt(listen)
        gathered = group.all_gather_object((failure, listening and listening[1], _machine()))
        first = gathered[0][2]
        out_of_reach = f"out of reach of rank {group.ranks[0]}"
        if _have_failed(group, [failed or ("" if own == first else out_of_reach) for failed, _, own in gathered]):
            return None
        listener, _, file = cast(tuple[socket.socket, bytes, int], listening)
        addresses = [address for _, address, _ in gathered]
        memory, failure = _attempt(connect)
        if _have_failed(group, group.all_gather_object(failure)):
            return None
        unless_shared.pop_all()
        return SharedMemoryCommunicator(group, sockets, cast(mmap.mmap, memory), timeout)


def _attempt(attempt: Callable[[], T]) -> tuple[T | None, str]:
    try:
        return attempt(), ""
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: not on this system
        return None, str(error) or type(error).__name__


def _have_failed(group: TorchCommunicator, failures: Sequence[str]) -> bool:
    reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in zip(group.ranks, failures, strict=True) if reason)
    if reasons:
        _logger.debug("the ranks %s share no memory: %s", list(group.ranks), reasons)
    return bool(reasons)


def _machine() -> list[str]:
    """Return the kernel and the network namespace, equal for processes that can connect to each other's sockets."""
    machine = []
    with suppress(OSError):
        machine.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        machine.append(os.readlink("/proc/self/ns/net"))
    return machine


def _socket() -> socket.socket:
    """Return a socket that keeps message boundaries and has a timeout."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(_CONNECTING_SECONDS)
    return made


def _user_of(peer: socket.socket) -> int:
    _, user, _ = struct.unpack("=3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)
