"""Collectives of CUDA tensors over a CPU communicator, by way of pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.background import JobThread, Timed
from lightning_hiercomm.comm.base import Communicator, Connect, Handle, Reduction
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.torch import connect_torch, unprofiled

OnHost = Callable[[Tensor], Tensor]
"""Returns the host copy of a tensor."""


class StagedCommunicator(Communicator):
    """A communicator for CUDA and CPU tensors, over one for CPU tensors.

    A stream copies a CUDA tensor to pinned memory, a thread runs the collective, and the same stream copies the result
    back. Neither the host nor the stream of training waits until :meth:`Handle.wait`. Collectives run in the order of
    their launches. CPU tensors are not copied.

    Args:
        over_host: The communicator for host tensors, used only here.
        meter: Counts this rank's traffic; ``over_host`` has its own.
    """

    def __init__(self, over_host: Communicator, meter: Meter) -> None:
        super().__init__(over_host.ranks, over_host.ranks[over_host.rank], over_host.level, meter)
        self.over_host = over_host
        self._thread = JobThread("hiercomm-staged")
        self._copying: torch.cuda.Stream | None = None

    def all_gather_object(self, value: Any) -> list[Any]:
        gathered: list[list[Any]] = []
        self._thread.submit(lambda: gathered.append(self.over_host.all_gather_object(value))).wait()
        return gathered[0]

    def close(self) -> None:
        self.over_host.close()

    def _all_reduce(self, tensor: Tensor, op: Reduction, waiting: bool) -> Handle:
        return self._run(lambda host: self.over_host.all_reduce(host(tensor), op, waiting), [tensor], [tensor])

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        return self._run(lambda host: self.over_host.reduce_scatter(host(output), host(tensor)), [tensor], [output])

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        return self._run(lambda host: self.over_host.all_gather(host(output), host(tensor)), [tensor], [output])

    def _broadcast(self, tensor: Tensor, source: int) -> Handle:
        return self._run(lambda host: self.over_host.broadcast(host(tensor), source), [tensor], [tensor])

    def _exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        return self._run(
            lambda host: self.over_host.exchange(
                [(host(tensor), peer) for tensor, peer in send], [(host(buffer), peer) for buffer, peer in receive]
            ),
            [tensor for tensor, _ in send],
            [buffer for buffer, _ in receive],
        )

    def _run(self, launch: Callable[[OnHost], Handle], reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Handle:
        device = (*reads, *writes)[0].device
        if not streams.has(device):
            return Timed(launch(lambda tensor: tensor), self.meter, self.level, device)
        if self._copying is None:
            self._copying = streams.new(device)
        return _Staged(self, self._copying, device, launch, reads, writes)


class _Staged(Handle):
    def __init__(
        self,
        communicator: StagedCommunicator,
        copying: torch.cuda.Stream,
        device: torch.device,
        launch: Callable[[OnHost], Handle],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
    ) -> None:
        self._communicator = communicator
        self._device = device
        self._arrived: torch.cuda.Event | None = None
        copying.wait_stream(streams.current(device))
        on_host = {id(tensor): streams.host_memory(tensor) for tensor in writes}
        with streams.within(copying):
            on_host |= {id(tensor): streams.to_host(tensor) for tensor in dict.fromkeys(reads)}
            sent = streams.mark(device)
        streams.keep_for(copying, *reads, *writes)

        def run() -> None:
            streams.work_for(device)
            sent.synchronize()  # releases the interpreter lock
            with torch.inference_mode():  # tensors that were made in it cannot be written to outside of it
                launch(lambda tensor: on_host[id(tensor)]).wait()
                with streams.within(copying):
                    for tensor in writes:
                        tensor.copy_(on_host[id(tensor)], non_blocking=True)
                    self._arrived = streams.mark(device)

        self._job = communicator._thread.submit(run)

    def wait(self) -> None:
        communicator = self._communicator
        # the host waits, and training too if its stream has no work
        with communicator.meter.waiting(communicator.level, self._device):
            self._job.wait()
        assert self._arrived is not None
        streams.current(self._device).wait_event(self._arrived)

    def is_done(self) -> bool:
        return self._job.is_done() and self._arrived is not None and self._arrived.query()


def connect_gloo(meter: Meter, timeout: timedelta | None = None) -> Connect:
    """Return the :data:`~lightning_hiercomm.comm.base.Connect` over gloo, for any backend of the default group."""
    over_gloo = connect_torch(Meter(), timeout, launching=unprofiled, backend="gloo")

    def connect(groups: Sequence[Sequence[int]], level: str) -> Communicator | None:
        over_host = over_gloo(groups, level)
        return None if over_host is None else StagedCommunicator(over_host, meter)

    return connect
