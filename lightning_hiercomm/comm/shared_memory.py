"""Through memory that the ranks of a node share: on CPU, where gloo sends everything through loopback sockets."""

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

from lightning_hiercomm.comm.background import Timed, Turns
from lightning_hiercomm.comm.base import Communicator, Connect, Handle, Reduction
from lightning_hiercomm.comm.torch import TorchCommunicator

T = TypeVar("T")

_logger = logging.getLogger(__name__)

# Bytes that a rank writes before it lets the others read. Two such slots per rank stay in the processors' caches; a
# smaller slot costs more waits for peers.
_SLOT = 2**21

# The most bytes that many ranks reduce by reading everything of everyone, in one round. Beyond, each sums one part.
_ONE_ROUND = 2**12

_CONNECTING_SECONDS = 30.0

_OFF = "HIERCOMM_SHARED_MEMORY"


class SharedMemoryCommunicator(TorchCommunicator):
    """The members of one process group that can share memory; what lies elsewhere than on the CPU goes over the group.

    A move is a number of rounds. In each, every member writes to its slot, tells the others, hears from all of them and
    reads theirs. Nobody is ahead by more than one round, so two slots per member are enough: a group holds
    ``2 * size`` slots of 2 MiB, whatever it moves. Moves go one after another, on a thread of their own. Sums run in
    rank order, so every member gets the same bits.

    What members tell each other goes through sockets. They sleep in the kernel while they wait, which leaves the core
    to the rank they wait for, and hear at once of one that died. Exchanges and objects go over the process group.

    Args:
        communicator: The group, over torch.
        lines: A connected socket per member, in group order; None for this one.
        memory: Mapped by all members, their slots.
        timeout: Of a wait for a member.
    """

    def __init__(
        self,
        communicator: TorchCommunicator,
        lines: Sequence[socket.socket | None],
        memory: mmap.mmap,
        timeout: timedelta,
    ) -> None:
        ranks = communicator.ranks
        super().__init__(communicator.group, ranks, ranks[communicator.rank], communicator.tier, communicator.meter)
        self.lines = [line for line in lines if line is not None]
        for line in self.lines:
            line.settimeout(timeout.total_seconds())
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(2, self.size, _SLOT)
        self._round = 0
        self._moves = Turns()

    def close(self) -> None:
        self._hang_up()
        self._slots = torch.empty(0)  # the memory goes with its last view
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

    # ---- moves, on the thread ------------------------------------------------------------------------------------

    def _reduce(self, flat: Tensor, op: Reduction, weight: float) -> None:
        for piece in self._pieces(flat):
            slots = self._next_slots(flat.dtype, piece.numel())
            _write(piece, weight, out=slots[self.rank])
            self._meet(piece)
            if self.size == 2 or piece.nbytes <= _ONE_ROUND:
                _combine(slots.unbind(), op, out=piece)
                continue
            own = slots.tensor_split(self.size, dim=1)[self.rank]
            results = self._next_slots(flat.dtype, piece.numel())
            _combine(own.unbind(), op, out=results[self.rank, : own.shape[1]])
            self._meet(piece)
            for part, result in zip(piece.tensor_split(self.size), results, strict=True):
                part.copy_(result[: part.numel()])

    def _scatter_sums(self, output: Tensor, whole: Tensor, weight: float) -> None:
        pieces = zip(self._pieces(output, self.size), self._pieces(whole, self.size), strict=True)
        for result, parts in pieces:
            slots = self._next_slots(whole.dtype, parts.numel()).view(self.size, *parts.shape)
            _write(parts, weight, out=slots[self.rank])
            self._meet(parts)
            _combine(slots[:, self.rank].unbind(), "sum", out=result)

    def _gather(self, whole: Tensor, own: Tensor) -> None:
        if whole[self.rank].data_ptr() != own.data_ptr():
            whole[self.rank].copy_(own)
        for piece, parts in zip(self._pieces(own), self._pieces(whole), strict=True):
            slots = self._next_slots(own.dtype, piece.numel())
            slots[self.rank].copy_(piece)
            self._meet(piece)
            for peer in self._peers():
                parts[peer].copy_(slots[peer])

    def _spread(self, flat: Tensor, source: int) -> None:
        for piece in self._pieces(flat):
            slot = self._next_slots(flat.dtype, piece.numel())[source]
            if self.rank == source:
                slot.copy_(piece)
            self._meet(piece)
            if self.rank != source:
                piece.copy_(slot)

    # ---- rounds --------------------------------------------------------------------------------------------------

    def _do(self, tensor: Tensor, move: Callable[[], None]) -> Handle:
        def work() -> None:
            # without it, torch keeps another thread from writing to tensors that were made in inference mode
            with torch.inference_mode():
                move()

        return Timed(self._moves.take(work), self.meter, self.tier, tensor.device)

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    @staticmethod
    def _pieces(tensor: Tensor, per_slot: int = 1) -> Sequence[Tensor]:
        """Pieces of the last dimension, of which ``per_slot`` fit into a slot."""
        pieces: Sequence[Tensor] = tensor.split(_SLOT // (per_slot * tensor.element_size()), dim=-1)
        return pieces

    def _next_slots(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Everyone's slots of the next round, ``size`` times ``numel`` elements."""
        self._round += 1
        return self._slots[self._round % 2].view(dtype)[:, :numel]

    def _meet(self, piece: Tensor) -> None:
        """Return when every member has written its piece, which must be as large as this one's."""
        written = piece.nbytes
        try:
            for line in self.lines:
                line.send(struct.pack("=I", written))
            for line in self.lines:
                news = line.recv(4)
                if not news:
                    raise ConnectionError("a member has gone")
                if struct.unpack("=I", news) != (written,):
                    raise ConnectionError("members move tensors of different sizes")
        except OSError as error:
            self._hang_up()  # so that all others hear of it
            raise self.failure(RuntimeError(str(error) or "a member does not answer")) from error

    def _hang_up(self) -> None:
        for line in self.lines:
            line.close()


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


def sharing_memory(connect: Connect, timeout: timedelta | None = None, tiers: Sequence[str] = ("intra",)) -> Connect:
    """Let groups that ``connect`` makes over torch share memory, where all their members can.

    They cannot on other systems than Linux, in containers without a common network namespace, or if a member has
    ``HIERCOMM_SHARED_MEMORY=0`` in its environment: then they have what ``connect`` gave them. So they have over nccl,
    which moves nothing that lies on the CPU.

    Args:
        connect: Makes the groups.
        timeout: Of a wait for a member. Default: 30 minutes, as torch's.
        tiers: Of the groups that try.
    """

    def connect_and_share(groups: Sequence[Sequence[int]], tier: str) -> Communicator | None:
        own = connect(groups, tier)
        if tier in tiers and isinstance(own, TorchCommunicator) and own.size > 1 and not own.is_nccl:
            return _share(own, timeout or timedelta(minutes=30)) or own
        return own

    return connect_and_share


def _share(group: TorchCommunicator, timeout: timedelta) -> SharedMemoryCommunicator | None:
    """Share memory among all members, or none. Collective over the group.

    Sockets and memory have no place in a file system: nothing stays behind when a rank is killed, and the size of
    ``/dev/shm``, 64 MB in a container by default, does not matter.
    """
    lines: list[socket.socket | None] = [None] * group.size
    with ExitStack() as unless_shared, ExitStack() as while_connecting:

        def listen() -> tuple[socket.socket, bytes, int]:
            if os.environ.get(_OFF) == "0":
                raise OSError(f"{_OFF}=0")
            listener = while_connecting.enter_context(_socket())
            address = b"\0hiercomm-" + secrets.token_hex(16).encode()  # the zero keeps it out of the file system
            listener.bind(address)
            listener.listen(group.size)  # so no call waits for its answer
            if group.rank != 0:
                return listener, address, -1
            file = os.memfd_create("hiercomm")
            while_connecting.callback(os.close, file)
            os.ftruncate(file, 2 * group.size * _SLOT)
            return listener, address, file

        def connect() -> mmap.mmap:
            for peer in range(group.rank):
                lines[peer] = line = unless_shared.enter_context(_socket())
                line.connect(addresses[peer])
                line.send(bytes([group.rank % 256, group.rank // 256]))
            while None in lines[group.rank + 1 :]:
                line = unless_shared.enter_context(listener.accept()[0])
                line.settimeout(_CONNECTING_SECONDS)
                if _user_of(line) == os.geteuid():  # all users of the machine can see the address
                    low, high = line.recv(2)
                    lines[low + 256 * high] = line
            if group.rank == 0:
                for callee in lines[1:]:
                    socket.send_fds(cast(socket.socket, callee), [b"memory"], [file])
                return mmap.mmap(file, 0)
            _, (received,), _, _ = socket.recv_fds(cast(socket.socket, lines[0]), 6, 1)
            while_connecting.callback(os.close, received)
            return mmap.mmap(received, 0)

        listening, failure = _attempt(listen)
        said = group.all_gather_object((failure, listening and listening[1], _reach()))
        apart = [f"out of reach of rank {group.ranks[0]}" if reach != said[0][2] else "" for _, _, reach in said]
        if _have_failed(group, [said[rank][0] or apart[rank] for rank in range(group.size)]):
            return None
        listener, _, file = cast(tuple[socket.socket, bytes, int], listening)
        addresses = [address for _, address, _ in said]
        memory, failure = _attempt(connect)
        if _have_failed(group, group.all_gather_object(failure)):
            return None
        unless_shared.pop_all()
        return SharedMemoryCommunicator(group, lines, cast(mmap.mmap, memory), timeout)


def _attempt(attempt: Callable[[], T]) -> tuple[T | None, str]:
    """The attempt's result, or why it has none."""
    try:
        return attempt(), ""
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: this system has no such thing
        return None, str(error) or type(error).__name__


def _have_failed(group: TorchCommunicator, failures: Sequence[str]) -> bool:
    """Whether any member's attempt has."""
    reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in zip(group.ranks, failures, strict=True) if reason)
    if reasons:
        _logger.debug("the ranks %s share no memory: %s", list(group.ranks), reasons)
    return bool(reasons)


def _reach() -> list[str]:
    """Equal for processes that see each other's addresses: of one kernel, in one network namespace."""
    reach = []
    with suppress(OSError):
        reach.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        reach.append(os.readlink("/proc/self/ns/net"))
    return reach


def _socket() -> socket.socket:
    """One that keeps messages apart and gives up after a while."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(_CONNECTING_SECONDS)
    return made


def _user_of(line: socket.socket) -> int:
    _, user, _ = struct.unpack("=3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)
