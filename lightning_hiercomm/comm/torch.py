"""Over torch.distributed process groups: gloo on CPU, nccl on GPU."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.background import Timed, Turns
from lightning_hiercomm.comm.base import CommunicationError, Communicator, Connect, Handle, Reduction
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.spares import Spares

Launch = Callable[[], Sequence[dist.Work | None]]
"""Sets messages going, without waiting for them; torch gives None for what is done."""

# Elements of one message. gloo uses a link in one direction at a time for a single large message; with several in
# flight both directions are busy.
_PIECE = 2**20

# The most members of a group between nodes that reduce small tensors by messages between all pairs, and how many bytes
# they send each other whole, in one round, or in parts, in two. gloo's ring takes two rounds for every member, but uses
# the links better for large tensors.
_MOST_DIRECT_PEERS = 16
_ONE_ROUND = 2**11
_TWO_ROUNDS = 2**19

# Exchanges have a tag of their own: a message of another move, launched meanwhile, must not be taken for theirs. Moves
# of two rounds count their tags from here.
_EXCHANGE = 1

# Of objects and greetings, far from all others'.
_WORDS = 2**30

# Bytes that an object may have, on the average, to be gathered in one message per member and way; what is longer takes
# a second one.
_SHORT = 128

_groups: WeakSet[dist.ProcessGroup] = WeakSet()
"""Process groups that :func:`connect_torch` has made."""

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class TorchCommunicator(Communicator):
    """The members of one process group.

    Args:
        group: The process group, or None for the default one.
        ranks: World ranks of its members, in group order.
        rank: World rank of this member.
        tier: See :class:`~lightning_hiercomm.comm.base.Communicator`.
        meter: Counts this rank's traffic.
        launching: Makes a context in which moves are launched.

    Attributes:
        group: The process group.
        is_nccl: Whether nccl carries it, which moves CUDA tensors only.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        rank: int,
        tier: str,
        meter: Meter,
        launching: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(ranks, rank, tier, meter)
        self.group = group
        self._launching = launching
        self._last_tag = _EXCHANGE
        self.is_nccl = self._is_nccl()
        self._has_met = False
        self._spares = Spares()
        # a link that carries messages from and to several other nodes at once takes up to a half longer for all of them
        self._turns = None if tier != "inter" or self.size == 2 or self.is_nccl else Turns()

    def _is_nccl(self) -> bool:
        # "cpu:gloo,cuda:nccl" has one for each kind of device
        return "nccl" in dist.get_backend(self.group).replace(",", ":").split(":")

    def all_gather_object(self, value: Any) -> list[Any]:
        try:
            if not self.is_nccl and dist.get_backend(self.group) == "gloo":
                return [pickle.loads(each) for each in self._gather_words(pickle.dumps(value))]
            values: list[Any] = [None] * self.size
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise self.failure(error) from error
        return values

    def _gather_words(self, own: bytes) -> list[bytes]:
        """What every member says, up a tree to the first one and down again: twice as many messages as members.

        (By itself torch lets the sizes, and then the objects, go round a ring: twice the square of the members.)
        Member ``i`` hears from ``i + 1``, ``i + 2``, ``i + 4``..., up to its lowest set bit, and tells ``i`` less that
        bit what they all said: gloo's broadcast goes the same way, so a group that connects when needed needs no more.
        """
        said = [own]
        step = 1
        while step < self.size and not self.rank & step:
            if self.rank + step < self.size:
                said += self._hear(self.rank + step, min(step, self.size - self.rank - step))
            step *= 2
        if self.rank:
            self._say(said, self.rank - step)
            said = self._hear(self.rank - step, self.size)
        while step > 1:
            step //= 2
            if self.rank + step < self.size:
                self._say(said, self.rank + step)
        return said

    def _say(self, words: list[bytes], peer: int) -> None:
        """Tell another member something, in one message if it is short."""
        message = pickle.dumps(words)
        whole = torch.frombuffer(bytearray(len(message).to_bytes(8, "little") + message), dtype=torch.uint8)
        first = torch.zeros(_room(len(words)), dtype=torch.uint8)
        begun, rest = whole[: len(first)], whole[len(first) :]
        first[: len(begun)] = begun
        for part in (first, rest) if len(rest) else (first,):
            dist.send(part, self.ranks[peer], self.group, _WORDS)

    def _hear(self, peer: int, members: int) -> list[bytes]:
        """What another member tells of so many."""
        first = torch.empty(_room(members), dtype=torch.uint8)
        dist.recv(first, self.ranks[peer], self.group, _WORDS)
        size, begun = int.from_bytes(bytes(first[:8].tolist()), "little"), first[8:]
        rest = torch.empty(max(0, size - len(begun)), dtype=torch.uint8)
        if len(rest):
            dist.recv(rest, self.ranks[peer], self.group, _WORDS)
        words: list[bytes] = pickle.loads((begun.numpy().tobytes() + rest.numpy().tobytes())[:size])
        return words

    def greet_neighbours(self) -> None:
        """Send the next member of the ring a word, and hear one from the last: who is out of reach shows now."""
        ends = [(move, (self.rank + way) % self.size) for move, way in ((dist.irecv, -1), (dist.isend, 1))]
        words = [dist.P2POp(move, torch.zeros(1), self.ranks[peer], self.group, _WORDS) for move, peer in ends]
        for work in dist.batch_isend_irecv(words):
            work.wait()

    def expect_exchanges(self) -> None:
        # "if this API is the first collective call in the group, all ranks of the group must participate in this API
        # call; otherwise, the behavior is undefined", of nccl's messages
        # (https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.batch_isend_irecv)
        if self.is_nccl and not self._has_met:
            self.barrier()
            self._has_met = True

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)

    def _all_reduce(self, tensor: Tensor, op: Reduction, waiting: bool) -> Handle:
        if self.tier == "inter" and self.size <= _MOST_DIRECT_PEERS and not streams.has(tensor.device):
            sent = tensor.numel() * tensor.element_size()
            in_one_round = self.size == 2 or sent <= _ONE_ROUND
            if in_one_round or (waiting and sent <= _TWO_ROUNDS):
                return self._all_reduce_directly(tensor.view(-1), op, in_one_round)
        return self._launch(partial(self._start_all_reduce, tensor, op), [tensor])

    def _start_all_reduce(self, tensor: Tensor, op: Reduction) -> Sequence[dist.Work | None]:
        return [dist.all_reduce(tensor, REDUCE_OPS[op], group=self.group, async_op=True)]

    def _all_reduce_directly(self, tensor: Tensor, op: Reduction, in_one_round: bool) -> Handle:
        """All-reduce by messages between all pairs: in two rounds as many bytes as gloo's ring, in one round more.

        gloo does two all-reduces at a time, on threads that share the cores with training: the link waits for them.
        In the first of two rounds everyone gets everyone's values for its own part, in the second their sums.
        """
        parts = [tensor] * self.size if in_one_round else tensor.tensor_split(self.size)
        own = parts[self.rank]
        spare = self._spares.take((self.size - 1) * own.numel(), own.dtype, own.device)
        others = spare.view(self.size - 1, -1)
        received = [*others[: self.rank], own, *others[self.rank :]]

        def combine() -> None:
            if self.size == 2:
                (torch.add if op == "sum" else torch.maximum)(own, others[0], out=own)
            elif op == "sum":
                torch.sum(torch.stack(received), 0, dtype=own.dtype, out=own)
            else:
                torch.amax(torch.stack(received), 0, out=own)
            self._spares.give_back(spare)

        second_round = None
        if not in_one_round:
            self._last_tag += 1  # a tag of its own: what is launched between the rounds must not mix with them
            second_round = partial(self._swap, [own] * self.size, parts, tag=self._last_tag)
        return self._launch(partial(self._swap, parts, received), [tensor, others], combine, second_round)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        if self.is_nccl:
            if tensor.is_complex():  # of torch's moves this one alone does not look at the real numbers by itself
                output, tensor = (torch.view_as_real(each).flatten() for each in (output, tensor))
            return self._launch(
                lambda: [dist.reduce_scatter_tensor(output, tensor, group=self.group, async_op=True)], [output, tensor]
            )
        # gloo's own reduce-scatter is an all-reduce inside: it moves twice the bytes. Everyone sends everyone its
        # part and adds up what arrives.
        parts = tensor.chunk(self.size)
        if self.size == 2 and not streams.has(tensor.device):
            theirs = self._spares.take(output.numel(), output.dtype, output.device)

            def add() -> None:
                torch.add(theirs, parts[self.rank], out=output)
                self._spares.give_back(theirs)

            return self._launch(partial(self._swap, parts, [theirs] * 2), [tensor, theirs], finish=add)
        arrived = torch.empty_like(tensor)
        if streams.has(tensor.device):
            start: Launch = partial(self._works, dist.all_to_all_single, arrived, tensor)
        else:
            arrived.chunk(self.size)[self.rank].copy_(parts[self.rank])
            start = partial(self._swap, parts, arrived.chunk(self.size))

        def sum_up() -> None:
            streams.keep_here(arrived)  # made on the stream that launched
            torch.sum(arrived.view(self.size, -1), dim=0, dtype=output.dtype, out=output)

        return self._launch(start, [output, tensor, arrived], finish=sum_up)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        if self.is_nccl or streams.has(tensor.device):
            return self._launch(partial(self._works, dist.all_gather_into_tensor, output, tensor), [output, tensor])
        parts = output.chunk(self.size)
        if parts[self.rank].data_ptr() != tensor.data_ptr():
            parts[self.rank].copy_(tensor)
        return self._launch(partial(self._swap, [tensor] * self.size, parts), [output, tensor])

    def _works(self, move: Callable[..., dist.Work | None], *tensors: Tensor) -> Sequence[dist.Work | None]:
        return [move(*tensors, group=self.group, async_op=True)]

    def _swap(self, sent: Sequence[Tensor], received: Sequence[Tensor], tag: int = 0) -> Sequence[dist.Work | None]:
        """Send ``sent[i]`` to rank ``i`` and take ``received[i]`` from it, for all others."""
        targets = [(self.rank + offset) % self.size for offset in range(1, self.size)]
        sources = [(self.rank - offset) % self.size for offset in range(1, self.size)]
        return self._post([(sent[peer], peer) for peer in targets], [(received[peer], peer) for peer in sources], tag)

    def _post(
        self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]], tag: int
    ) -> Sequence[dist.Work | None]:
        """Launch messages, in pieces (see ``_PIECE``): gloo's own all-to-all and all-gather take a quarter longer."""
        operations = [
            dist.P2POp(move, piece, self.ranks[peer], self.group, tag)
            for move, messages in ((dist.irecv, receive), (dist.isend, send))
            for tensor, peer in messages
            for piece in pieces(tensor)
        ]
        works: Sequence[dist.Work | None] = dist.batch_isend_irecv(operations)
        return works

    def _broadcast(self, tensor: Tensor, source: int) -> Handle:
        return self._launch(partial(self._start_broadcast, tensor, source), [tensor])

    def _start_broadcast(self, tensor: Tensor, source: int) -> Sequence[dist.Work | None]:
        return [dist.broadcast(tensor, src=self.ranks[source], group=self.group, async_op=True)]

    def _exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        tensors = [tensor for tensor, _ in (*send, *receive)]
        device = tensors[0].device
        if streams.has(device) and not self.is_nccl:
            return self._exchange_on_host(send, receive)
        launch = partial(self._launch, partial(self._post, send, receive, _EXCHANGE), tensors)
        if self._turns is None or streams.has(device):
            return launch()
        return Timed(self._turns.take(lambda: launch().wait()), self.meter, self.tier, device)

    def _exchange_on_host(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        """Without the address of a GPU's memory: gloo would hand it to a socket, and the host would read there.

        ("GPU" in the table of https://docs.pytorch.org/docs/stable/distributed.html#backends has no send and no recv
        for gloo; its collectives copy by themselves.) The host waits for the copies here:
        :class:`~lightning_hiercomm.comm.staged.StagedCommunicator` spares it that.
        """
        sent = [(streams.to_host(tensor), peer) for tensor, peer in send]
        received = [(streams.host_memory(buffer), peer) for buffer, peer in receive]
        streams.mark((*send, *receive)[0][0].device).synchronize()

        def finish() -> None:
            for (buffer, _), (copy, _) in zip(receive, received, strict=True):
                buffer.copy_(copy, non_blocking=True)

        copies = [copy for copy, _ in (*sent, *received)]
        return self._launch(partial(self._post, sent, received, _EXCHANGE), copies, finish)

    def _launch(
        self,
        start: Launch,
        tensors: Sequence[Tensor],
        finish: Callable[[], object] | None = None,
        second_round: Launch | None = None,
    ) -> Handle:
        try:
            with self._launching():
                works = [work for work in start() if work is not None]
            return _TorchHandle(self, works, tensors, finish, second_round)
        except RuntimeError as error:
            raise self.failure(error) from error

    def failure(self, error: RuntimeError) -> CommunicationError:
        some = f"{list(self.ranks[:8])}{f' and {self.size - 8} more' if self.size > 8 else ''}"
        return CommunicationError(f"rank {self.ranks[self.rank]} lost its {self.tier} group (ranks {some}): {error}")


class _TorchHandle(Handle):
    def __init__(
        self,
        communicator: TorchCommunicator,
        works: list[dist.Work],
        tensors: Sequence[Tensor],
        finish: Callable[[], object] | None,
        second_round: Launch | None,
    ) -> None:
        self._communicator = communicator
        self._works = works
        # keeps the memory alive that the backend reads and writes. (torch keeps it for nccl until wait(), too, and no
        # longer calls record_stream: https://github.com/pytorch/pytorch/pull/148590. So what another stream has made
        # than the one that waits must be kept for that one by whoever launches: streams.keep_here.)
        self._tensors = tensors
        self._finish = finish
        self._second_round = second_round

    def wait(self) -> None:
        if not self._tensors:
            return
        communicator = self._communicator
        try:
            # nccl leaves the waiting to the stream: for it wait() is cudaStreamWaitEvent, and the host goes on
            # ("wait()" in https://docs.pytorch.org/docs/stable/distributed.html#synchronous-and-asynchronous-collective-operations);
            # with gloo the host waits, and training as long as its stream has nothing to do
            with communicator.meter.waiting(communicator.tier, self._tensors[0].device):
                for work in self._works:
                    work.wait()
                if self._finish is not None:
                    self._finish()
                if self._second_round is not None:
                    with communicator._launching():
                        second_works = self._second_round()
                    for second_work in second_works:
                        if second_work is not None:
                            second_work.wait()
        except RuntimeError as error:
            raise communicator.failure(error) from error
        self._tensors, self._works = (), []

    def future(self, value: Tensor) -> Future[Tensor]:
        # gloo's futures know nothing of the stream that copies a result back to the GPU in releases of torch before
        # https://github.com/pytorch/pytorch/pull/170812, and DDP would read the bucket too early: wait() orders it
        by_way_of_host = streams.has(value.device) and not self._communicator.is_nccl
        if by_way_of_host or self._finish is not None or len(self._works) != 1:
            return super().future(value)
        tensors = self._tensors
        return self._works[0].get_future().then(lambda _: (value, tensors)[0])

    def is_done(self) -> bool:
        if self._second_round is not None:
            return not self._tensors
        return all(work.is_completed() for work in self._works)


def _room(members: int) -> int:
    """Bytes of the first message with what so many say."""
    return 64 + _SHORT * members


def pieces(tensor: Tensor) -> Sequence[Tensor]:
    """The messages that carry a tensor, 1-D views of it."""
    views: Sequence[Tensor] = tensor.view(-1).split(_PIECE)
    return views


def _in_order(ranks: Sequence[int]) -> dict[str, Any]:
    """Make ``new_group`` keep the order of ``ranks``; by itself it sorts them, and parts would land elsewhere."""
    if list(ranks) == sorted(ranks):
        return {}
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise RuntimeError(
            f"torch {torch.__version__} cannot make a process group of ranks in the order {list(ranks)}."
            " Install a newer torch, or start the ranks of each node in the order of their local ranks."
        )
    return {"sort_ranks": False}


def connect_torch(
    meter: Meter,
    timeout: timedelta | None = None,
    launching: Callable[[], AbstractContextManager[None]] = nullcontext,
    backend: str | None = None,
) -> Connect:
    """The :data:`~lightning_hiercomm.comm.base.Connect` over the initialised default process group.

    That group itself is the ``world``: another one would be a full mesh of sockets, on gloo, which says nothing that
    this one cannot. Moves over it belong to the training thread, as those of Lightning and of the user do.

    Args:
        meter: Counts the traffic.
        timeout: Of the process groups.
        launching: Makes a context in which moves between nodes are launched.
        backend: Of the process groups. Default: that of the default one.
    """

    def connect(groups: Sequence[Sequence[int]], tier: str) -> Communicator | None:
        rank = dist.get_rank()
        if tier == "world" and backend is None and list(groups[0]) == [*range(dist.get_world_size())]:
            return TorchCommunicator(None, groups[0], rank, tier, meter)
        own = next((ranks for ranks in groups if rank in ranks), None)
        is_lazy = own is not None and len(own) > _MOST_DIRECT_PEERS
        with connecting_when_needed() if is_lazy else nullcontext():
            group = _own_group(groups, own, timeout, backend)
        if own is None or group is None:
            return None
        communicator = TorchCommunicator(group, own, rank, tier, meter, launching if tier == "inter" else nullcontext)
        if is_lazy and "gloo" in dist.get_backend_config(group):
            communicator.greet_neighbours()
        return communicator

    return connect


def _own_group(
    groups: Sequence[Sequence[int]], own: Sequence[int] | None, timeout: timedelta | None, backend: str | None
) -> dist.ProcessGroup | None:
    """Make the process group that this rank is in, and none of those that it is not in.

    Every rank calls ``new_group`` once, at the same place of the same program; a rank in no group, for one of its own
    that it gives back at once. Three things depend on it:

    - Names. A group's name comes from its ranks and from how many groups its members have made; members who counted
      differently would wait for each other in the store for ever. (Before torch 2.14 they counted the groups that they
      are *in*, pytorch/pytorch#189073: there all ranks make all groups.)
    - ``ncclCommSplit``. If the default group has a ``device_id``, which Lightning gives it, torch connects a new group
      at once, used or not (eager_connect_single_device in its distributed_c10d.py), by splitting the default group's
      communicator, and "all ranks in the communicator must call" that
      (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/comms.html#ncclcommsplit). Where all ranks make all
      groups it is one split of the whole world per group; here it is a single one, with as many colours. A rank splits
      it without a colour, too, for each group that it makes and is not in, also of gloo, which lets nobody in it split:
      so every rank is in one group, those in none in one of their own.
    - The order of launches. Two communicators of nccl on one device must be used in an order that is the same on all
      ranks, for each holds the device until its peers are there, too
      (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html, "Using multiple NCCL
      communicators concurrently"). So no group is made when it is first needed, which may be in a background thread on
      one rank and not yet on another: a topology's are made in its constructor, a duplicate's when a scheme begins. The
      one group that a topology and its duplicate share, the world's, is used by the training thread only, in the order
      of the program; what a background stream launches has a duplicate's own groups.
    """
    wanted, how = [own or [dist.get_rank()]], dict[str, Any](use_local_synchronization=True)
    if not group_names_agree() or dist.get_backend() == "mpi":
        others = sorted({*range(dist.get_world_size())}.difference(*groups))
        wanted, how = [*groups, *[others] * bool(others)], {}
    with without_splitting_gloo():
        made = [dist.new_group(list(ranks), timeout, backend, **how, **_in_order(ranks)) for ranks in wanted]
    group = next((group for group in made if isinstance(group, dist.ProcessGroup)), None)
    if own is None and group is not None:
        dist.destroy_process_group(group)
        return None
    if group is not None:
        _groups.add(group)
    return group


def is_of_communicator(group: dist.ProcessGroup) -> bool:
    """Whether a process group was made for a communicator; the default group was not."""
    return group in _groups


def group_names_agree() -> bool:
    """Whether members of a group give it one name, even if they have been in unequal numbers of groups before."""
    major, minor = (int(number) for number in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 14)


@contextmanager
def without_splitting_gloo() -> Iterator[None]:
    """Let torch not split the default group's communicator where that is gloo's, which has none to split.

    With a device, which Lightning gives to the default group of every backend, torch does so for groups of a mesh, and
    for one that this rank is not in, and ends in a TypeError or an AttributeError (seen in torch 2.11 and 2.14).
    """
    default = dist.distributed_c10d._get_default_group()
    device = default.bound_device_id
    if device is None or "nccl" in dist.get_backend_config(default):
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


@contextmanager
def connecting_when_needed() -> Iterator[None]:
    """Let gloo connect two members of a group when they first have something to say to each other, and not all at once.

    In a large group most never have: its collectives are rings and trees. A new group then costs each member one word
    in the store and no socket; in a full mesh, one socket and two words per other member. In a small group everyone
    talks to everyone (see ``_MOST_DIRECT_PEERS``), and a full mesh shows from the beginning who is out of reach.

    gloo reads this variable whenever a group is made (torch 2.8 and newer; before, groups are full meshes). Whoever has
    set it himself gets what it says.
    """
    if "TORCH_GLOO_LAZY_INIT" in os.environ:
        yield
        return
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCH_GLOO_LAZY_INIT"]


@contextmanager
def unprofiled() -> Iterator[None]:
    """Keep torch's profiler from recording what this thread does.

    A move that is launched while the profiler records, and ends in parallel with training when it has stopped, would
    write to a record that is gone: a segmentation fault.
    """
    if not torch.autograd.profiler._is_profiler_enabled:  # the process's; not all modes show in the thread's own flag
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)
