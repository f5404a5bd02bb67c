"""Communicators over process groups of torch.distributed: gloo on CPU, nccl on GPU."""

from __future__ import annotations

import inspect
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.background import JobThread, Timed
from lightning_hiercomm.comm.base import Communicator, Connect, Handle, Reduction
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.spares import Spares

Launch = Callable[[], Sequence[dist.Work | None]]
"""Starts messages; torch returns None for messages that are already done."""

_OPEN_FILES = 2**16  # enough for 8,192 ranks
MOST_IN_MESH = 64
"""Number of ranks up to which gloo connects all pairs of them at the start."""

# Elements of one message. gloo uses one direction of a link at a time for a single large message, and both directions
# for several.
_MESSAGE_NUMEL = 2**20

# Groups between nodes of at most so many members reduce small tensors by messages between all pairs: whole, in one
# round, or in parts, in two rounds. gloo's ring has two rounds per member, but uses links better for large tensors.
_MOST_DIRECT_PEERS = 16
_ONE_ROUND = 2**11
_TWO_ROUNDS = 2**19

# The tag of exchanges, whose messages must not mix with those of other collectives. Second rounds count from here.
_EXCHANGE = 1

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class TorchCommunicator(Communicator):
    """The members of one process group.

    Args:
        group: The process group, or None for the default one.
        ranks: World ranks of its members, in group order.
        rank: World rank of this member.
        level: See :class:`~lightning_hiercomm.comm.base.Communicator`.
        meter: Counts this rank's traffic.
        launching: Returns a context in which collectives are launched.

    Attributes:
        group: The process group.
        is_nccl: Whether its backend is nccl, which takes CUDA tensors only.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        rank: int,
        level: str,
        meter: Meter,
        launching: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(ranks, rank, level, meter)
        self.group = group
        self.launching = launching
        self._last_tag = _EXCHANGE
        self.is_nccl = self._is_nccl()
        self._is_connected = False
        self._spares = Spares()
        # messages to several nodes at once take up to a half longer in all
        in_order = level == "inter" and self.size > 2 and not self.is_nccl
        self._thread = JobThread("hiercomm-exchanges") if in_order else None

    def _is_nccl(self) -> bool:
        # "cpu:gloo,cuda:nccl" has one for each kind of device
        return "nccl" in dist.get_backend(self.group).replace(",", ":").split(":")

    def all_gather_object(self, value: Any) -> list[Any]:
        with self.naming_errors():
            if not self.is_nccl and dist.get_backend(self.group) == "gloo":
                return self._gather_over_tree(value)
            values: list[Any] = [None] * self.size
            dist.all_gather_object(values, value, group=self.group)
        return values

    def _gather_over_tree(self, own: Any) -> list[Any]:
        """Gather objects up a binomial tree to the first member, and send them down again.

        Member ``i`` receives from ``i + 1``, ``i + 2``, ``i + 4``..., up to its lowest set bit, and sends to ``i`` less
        that bit. These are ``2 (n - 1)`` objects in all; torch's own gather passes ``n (n - 1)`` round a ring. gloo's
        broadcast uses the same pairs, so a group that connects when needed opens no more sockets.
        """
        gathered = [own]
        step = 1
        while step < self.size and not self.rank & step:
            if self.rank + step < self.size:
                gathered += self._receive_object(self.rank + step)
            step *= 2
        if self.rank:
            self._send_object(gathered, self.rank - step)
            gathered = self._receive_object(self.rank - step)
        while step > 1:
            step //= 2
            if self.rank + step < self.size:
                self._send_object(gathered, self.rank + step)
        return gathered

    def _send_object(self, value: Any, peer: int) -> None:
        dist.send_object_list([value], self.ranks[peer], self.group)

    def _receive_object(self, peer: int) -> Any:
        received = [None]
        dist.recv_object_list(received, self.ranks[peer], self.group)
        return received[0]

    def connect_neighbors(self) -> None:
        """Send a message around the ring, so that an unreachable member raises an error now."""
        ends = [(dist.irecv, (self.rank - 1) % self.size), (dist.isend, (self.rank + 1) % self.size)]
        messages = [dist.P2POp(start, torch.zeros(1), self.ranks[peer], self.group) for start, peer in ends]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    def expect_exchanges(self) -> None:
        # nccl: "if this API is the first collective call in the group, all ranks of the group must participate"
        # (https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.batch_isend_irecv)
        if self.is_nccl and not self._is_connected:
            self.barrier()
            self._is_connected = True

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)

    def _all_reduce(self, tensor: Tensor, op: Reduction, waiting: bool) -> Handle:
        if self.level == "inter" and self.size <= _MOST_DIRECT_PEERS and not streams.has(tensor.device):
            sent = tensor.numel() * tensor.element_size()
            in_one_round = self.size == 2 or sent <= _ONE_ROUND
            if in_one_round or (waiting and sent <= _TWO_ROUNDS):
                return self._all_reduce_directly(tensor.view(-1), op, in_one_round)
        with self._launches():
            return _TorchHandle(self, [self._start_all_reduce(tensor, op)], [tensor])

    def _start_all_reduce(self, tensor: Tensor, op: Reduction) -> dist.Work | None:
        return dist.all_reduce(tensor, REDUCE_OPS[op], group=self.group, async_op=True)

    def _all_reduce_directly(self, tensor: Tensor, op: Reduction, in_one_round: bool) -> Handle:
        """All-reduce by messages between all pairs.

        gloo runs two all-reduces at a time, on threads that share the cores with training, so the link idles. Two
        rounds (reduce-scatter, all-gather) send as many bytes as gloo's ring, one round sends more.
        """
        parts = [tensor] * self.size if in_one_round else tensor.tensor_split(self.size)
        own = parts[self.rank]
        second_round: Launch | None = None
        if not in_one_round:
            self._last_tag += 1  # collectives that are launched between the rounds must not mix with them
            second_round = partial(self._swap, [own] * self.size, parts, tag=self._last_tag)
        return self._combine(parts, op, own, second_round)

    def _combine(self, parts: Sequence[Tensor], op: Reduction, output: Tensor, second_round: Launch | None) -> Handle:
        """Send ``parts[i]`` to every other member ``i``, and combine those that arrive with this member's own."""
        own = parts[self.rank]
        spare = self._spares.take(self.size * own.numel(), own.dtype, own.device)
        rows = spare.view(self.size, own.numel())

        def combine() -> None:
            if self.size == 2:
                (torch.add if op == "sum" else torch.maximum)(own, rows[1 - self.rank], out=output)
            else:
                rows[self.rank].copy_(own)
                if op == "sum":
                    torch.sum(rows, 0, dtype=own.dtype, out=output)
                else:
                    torch.amax(rows, 0, out=output)
            self._spares.give_back(spare)

        with self._launches():
            return _TorchHandle(self, self._swap(parts, [*rows]), [*parts, spare], combine, second_round)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        if self.is_nccl:
            if tensor.is_complex():  # the only collective of torch that does not convert complex tensors itself
                output, tensor = (torch.view_as_real(each).flatten() for each in (output, tensor))
            with self._launches():
                work = dist.reduce_scatter_tensor(output, tensor, group=self.group, async_op=True)
            return _TorchHandle(self, [work], [output, tensor])
        # gloo's own reduce-scatter is an all-reduce, with twice the bytes
        if not streams.has(tensor.device):
            return self._combine(tensor.chunk(self.size), "sum", output, None)
        arrived = torch.empty_like(tensor)

        def sum_up() -> None:
            streams.keep_here(arrived)  # allocated on the launching stream
            torch.sum(arrived.view(self.size, -1), dim=0, dtype=output.dtype, out=output)

        with self._launches():
            work = dist.all_to_all_single(arrived, tensor, group=self.group, async_op=True)
        return _TorchHandle(self, [work], [output, tensor, arrived], sum_up)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        if self.is_nccl or streams.has(tensor.device):
            with self._launches():
                work = dist.all_gather_into_tensor(output, tensor, group=self.group, async_op=True)
            return _TorchHandle(self, [work], [output, tensor])
        parts = output.chunk(self.size)
        if parts[self.rank].data_ptr() != tensor.data_ptr():
            parts[self.rank].copy_(tensor)
        with self._launches():
            return _TorchHandle(self, self._swap([tensor] * self.size, parts), [output, tensor])

    def _swap(self, sent: Sequence[Tensor], received: Sequence[Tensor], tag: int = 0) -> Sequence[dist.Work | None]:
        """Send ``sent[i]`` to every other rank ``i``, and receive ``received[i]`` from it."""
        targets = [(self.rank + offset) % self.size for offset in range(1, self.size)]
        sources = [(self.rank - offset) % self.size for offset in range(1, self.size)]
        return self._post([(sent[peer], peer) for peer in targets], [(received[peer], peer) for peer in sources], tag)

    def _post(
        self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]], tag: int
    ) -> Sequence[dist.Work | None]:
        """Launch point-to-point messages; gloo's own all-to-all and all-gather take a quarter longer.

        nccl cuts large messages itself.
        """
        operations = [
            dist.P2POp(start, message, self.ranks[peer], self.group, tag)
            for start, tensors in ((dist.irecv, receive), (dist.isend, send))
            for tensor, peer in tensors
            for message in ([tensor] if self.is_nccl else messages_of(tensor))
        ]
        works: Sequence[dist.Work | None] = dist.batch_isend_irecv(operations)
        return works

    def _broadcast(self, tensor: Tensor, source: int) -> Handle:
        with self._launches():
            return _TorchHandle(self, [self._start_broadcast(tensor, source)], [tensor])

    def _start_broadcast(self, tensor: Tensor, source: int) -> dist.Work | None:
        return dist.broadcast(tensor, src=self.ranks[source], group=self.group, async_op=True)

    def _exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        tensors = [tensor for tensor, _ in (*send, *receive)]
        device = tensors[0].device
        if streams.has(device) and not self.is_nccl:
            return self._exchange_on_host(send, receive)

        def launch() -> Handle:
            with self._launches():
                return _TorchHandle(self, self._post(send, receive, _EXCHANGE), tensors)

        if self._thread is None or streams.has(device):
            return launch()
        return Timed(self._thread.submit(lambda: launch().wait()), self.meter, self.level, device)

    def _exchange_on_host(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        """Exchange host copies of CUDA tensors, because gloo's send and recv take CPU tensors only.

        (See the table of https://docs.pytorch.org/docs/stable/distributed.html#backends; its collectives copy by
        themselves.) The host waits for the copies, unlike in
        :class:`~lightning_hiercomm.comm.staged.StagedCommunicator`.
        """
        sent = [(streams.to_host(tensor), peer) for tensor, peer in send]
        received = [(streams.host_memory(buffer), peer) for buffer, peer in receive]
        streams.mark((*send, *receive)[0][0].device).synchronize()

        def finish() -> None:
            for (buffer, _), (copy, _) in zip(receive, received, strict=True):
                buffer.copy_(copy, non_blocking=True)

        copies = [copy for copy, _ in (*sent, *received)]
        with self._launches():
            return _TorchHandle(self, self._post(sent, received, _EXCHANGE), copies, finish)

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Raise torch's errors in the context as errors of this group."""
        try:
            yield
        except RuntimeError as error:
            raise self.failure(error) from error

    @contextmanager
    def _launches(self) -> Iterator[None]:
        """Launch collectives in the context."""
        with self.naming_errors(), self.launching():
            yield


class _TorchHandle(Handle):
    def __init__(
        self,
        communicator: TorchCommunicator,
        works: Sequence[dist.Work | None],
        tensors: Sequence[Tensor],
        finish: Callable[[], object] | None = None,
        second_round: Launch | None = None,
    ) -> None:
        self._communicator = communicator
        self._works = [work for work in works if work is not None]
        # keeps the memory alive until wait(). torch no longer calls record_stream
        # (https://github.com/pytorch/pytorch/pull/148590), so callers call streams.keep_here if another stream waits
        self._tensors = tensors
        self._finish = finish
        self._second_round = second_round

    def wait(self) -> None:
        if not self._tensors:
            return
        communicator = self._communicator
        # with nccl only the stream waits
        # (https://docs.pytorch.org/docs/stable/distributed.html#synchronous-and-asynchronous-collective-operations);
        # with gloo the host waits, and training too if its stream has no work
        waiting = communicator.meter.waiting(communicator.level, self._tensors[0].device)
        with communicator.naming_errors(), waiting:
            for work in self._works:
                work.wait()
            if self._finish is not None:
                self._finish()
            if self._second_round is not None:
                with communicator.launching():
                    second = self._second_round()
                for work in filter(None, second):
                    work.wait()
        self._tensors, self._works = (), []

    def future(self, value: Tensor) -> Future[Tensor]:
        # before https://github.com/pytorch/pytorch/pull/170812, gloo's futures do not wait for the stream that copies
        # results back to the GPU, so DDP would read the bucket too early
        by_way_of_host = streams.has(value.device) and not self._communicator.is_nccl
        if by_way_of_host or self._finish is not None or len(self._works) != 1:
            return super().future(value)
        tensors = self._tensors
        return self._works[0].get_future().then(lambda _: (value, tensors)[0])

    def is_done(self) -> bool:
        if self._second_round is not None:
            return not self._tensors
        return all(work.is_completed() for work in self._works)


def messages_of(tensor: Tensor) -> Sequence[Tensor]:
    """Split a tensor into 1-D views, each sent as one message."""
    views: Sequence[Tensor] = tensor.view(-1).split(_MESSAGE_NUMEL)
    return views


def _in_order(ranks: Sequence[int]) -> dict[str, Any]:
    """Return arguments that let ``new_group`` keep the order of ``ranks``, which it sorts by default."""
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
    """Return the :data:`~lightning_hiercomm.comm.base.Connect` over the initialized default process group.

    The ``world`` is the default group itself, because another one costs a full mesh of sockets on gloo. Only the
    training thread may use it, as Lightning and the user do.

    Args:
        meter: Counts the traffic.
        timeout: Of the process groups.
        launching: Returns a context in which collectives between nodes are launched.
        backend: Of the process groups. Default: that of the default one.
    """

    def connect(groups: Sequence[Sequence[int]], level: str) -> Communicator | None:
        rank = dist.get_rank()
        if level == "world" and backend is None and list(groups[0]) == [*range(dist.get_world_size())]:
            return TorchCommunicator(None, groups[0], rank, level, meter)
        own = next((ranks for ranks in groups if rank in ranks), None)
        is_lazy = own is not None and len(own) > _MOST_DIRECT_PEERS
        with connecting_when_needed() if is_lazy else nullcontext():
            group = _own_group(groups, own, timeout, backend)
        if own is None or group is None:
            return None
        communicator = TorchCommunicator(group, own, rank, level, meter, launching if level == "inter" else nullcontext)
        if is_lazy and "gloo" in dist.get_backend_config(group):
            communicator.connect_neighbors()
        return communicator

    return connect


def _own_group(
    groups: Sequence[Sequence[int]], own: Sequence[int] | None, timeout: timedelta | None, backend: str | None
) -> dist.ProcessGroup | None:
    """Create the process group of this rank only, not those of other ranks.

    Every rank calls ``new_group`` once; a rank in no group creates one of its own and destroys it. Reasons:

    - Names. A group's name comes from its ranks and from the number of groups that its members have created. Members
      with different counts would wait for each other forever. Before torch 2.14 they counted the groups that they are
      in (pytorch/pytorch#189073), so there all ranks create all groups.
    - ``ncclCommSplit``. Lightning gives the default group a ``device_id``, so torch connects each new group at once by
      splitting the default group's communicator (``eager_connect_single_device``), and "all ranks in the communicator
      must call" that (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/comms.html#ncclcommsplit). If all
      ranks create all groups, there is one split of the world per group; otherwise a single one for all.
    - The order of launches. All ranks must use nccl communicators of one device in one order, because each holds the
      device until its peers arrive ("Using multiple NCCL communicators concurrently",
      https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html). So groups are not created on
      first use, which may be in a background thread, but with a topology or its duplicate.
    """
    wanted, how = [own or [dist.get_rank()]], dict[str, Any](use_local_synchronization=True)
    if not group_names_are_equal() or dist.get_backend() == "mpi":
        others = sorted({*range(dist.get_world_size())}.difference(*groups))
        wanted, how = [*groups, *[others] * bool(others)], {}
    with without_splitting_gloo():
        made = [dist.new_group(list(ranks), timeout, backend, **how, **_in_order(ranks)) for ranks in wanted]
    group = next((group for group in made if isinstance(group, dist.ProcessGroup)), None)
    if own is None and group is not None:
        dist.destroy_process_group(group)
        return None
    return group


def group_names_are_equal() -> bool:
    """Whether members name a group alike, even if they were in unequal numbers of groups before."""
    return torch_version() >= (2, 14)


def torch_version() -> tuple[int, ...]:
    """Return the installed torch's major and minor version."""
    return tuple(map(int, torch.__version__.split(".")[:2]))


@contextmanager
def without_splitting_gloo() -> Iterator[None]:
    """Keep torch from splitting the default group's communicator with a gloo backend, which has none.

    If the default group has a device, as with Lightning, torch tries to split it for groups of a mesh, and for groups
    without this rank. It raises a TypeError or an AttributeError (torch 2.11 and 2.14).
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


def raise_limit_on_open_files() -> None:
    """Raise the limit, usually 1,024: a connection is an open file, and rank 0 has two per rank to the store alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS allows less than its own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def connecting_when_needed() -> Iterator[None]:
    """Let gloo connect two members of a new group with their first message, instead of all pairs at once.

    A full mesh costs one socket and two store entries per pair, which collectives of large groups (rings and trees) do
    not need. Small groups need it (see ``_MOST_DIRECT_PEERS``), and it reports unreachable members at once.

    gloo reads the variable when a group is created (torch 2.8 and newer). A value set by the user is kept.
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
    """Keep torch's profiler from recording this thread.

    An asynchronous collective that ends after the profiler has stopped would write to freed memory and crash.
    """
    if not torch.autograd.profiler._is_profiler_enabled:  # the process's; not all modes show in the thread's own flag
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)
