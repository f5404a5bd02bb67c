"""CUDA tensors over a communicator of the CPU: they pass through pinned memory, in parallel with training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.background import Timed, Turns
from lightning_hiercomm.comm.base import Communicator, Connect, Handle, Reduction
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.torch import connect_torch, unprofiled

OnHost = Callable[[Tensor], Tensor]
"""Where a tensor lies on the host."""


class StagedCommunicator(Communicator):
    """The members of a group whose messages are those of the CPU, wherever the tensors are.

    A CUDA tensor is copied to pinned memory in a stream for copies, moved by a thread when it is there, and copied back
    in the same stream: the host that launches it goes on at once, and training's stream waits for nothing until
    somebody waits for the move. Moves go one after another, as they were launched. CPU tensors are moved where they
    are.

    Args:
        over_host: The communicator for host tensors, used only here.
        meter: Counts this rank's traffic; the over_host has one of its own.
    """

    def __init__(self, over_host: Communicator, meter: Meter) -> None:
        super().__init__(over_host.ranks, over_host.ranks[over_host.rank], over_host.tier, meter)
        self._over_host = over_host
        self._turns = Turns()
        self._copying: torch.cuda.Stream | None = None

    def all_gather_object(self, value: Any) -> list[Any]:
        gathered: list[list[Any]] = []
        self._turns.take(lambda: gathered.append(self._over_host.all_gather_object(value))).wait()
        return gathered[0]

    def close(self) -> None:
        self._over_host.close()

    def _all_reduce(self, tensor: Tensor, op: Reduction, waiting: bool) -> Handle:
        return self._move(lambda host: self._over_host.all_reduce(host(tensor), op, waiting), [tensor], [tensor])

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        return self._move(lambda host: self._over_host.reduce_scatter(host(output), host(tensor)), [tensor], [output])

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        return self._move(lambda host: self._over_host.all_gather(host(output), host(tensor)), [tensor], [output])

    def _broadcast(self, tensor: Tensor, source: int) -> Handle:
        return self._move(lambda host: self._over_host.broadcast(host(tensor), source), [tensor], [tensor])

    def _exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        return self._move(
            lambda host: self._over_host.exchange(
                [(host(tensor), peer) for tensor, peer in send], [(host(buffer), peer) for buffer, peer in receive]
            ),
            [tensor for tensor, _ in send],
            [buffer for buffer, _ in receive],
        )

    def _move(self, launch: Callable[[OnHost], Handle], reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Handle:
        device = (*reads, *writes)[0].device
        if not streams.has(device):
            return Timed(launch(lambda tensor: tensor), self.meter, self.tier, device)
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

        def move() -> None:
            streams.work_for(device)
            sent.synchronize()  # a thread of its own waits, and lets go of the interpreter's lock meanwhile
            with torch.inference_mode():  # an averaged model may be looked at in that, and is written to in no other
                launch(lambda tensor: on_host[id(tensor)]).wait()
                with streams.within(copying):
                    for tensor in writes:
                        tensor.copy_(on_host[id(tensor)], non_blocking=True)
                    self._arrived = streams.mark(device)

        self._job = communicator._turns.take(move)

    def wait(self) -> None:
        communicator = self._communicator
        # the host waits, and training as long as its stream has nothing to do
        with communicator.meter.waiting(communicator.tier, self._device):
            self._job.wait()
        assert self._arrived is not None
        streams.current(self._device).wait_event(self._arrived)

    def is_done(self) -> bool:
        return self._job.is_done() and self._arrived is not None and self._arrived.query()


def connect_gloo(meter: Meter, timeout: timedelta | None = None) -> Connect:
    """The :data:`~lightning_hiercomm.comm.base.Connect` over gloo, whatever the default process group's backend.

    Args:
        meter: Counts the traffic.
        timeout: Of the process groups.
    """
    over_gloo = connect_torch(Meter(), timeout, launching=unprofiled, backend="gloo")

    def connect(groups: Sequence[Sequence[int]], tier: str) -> Communicator | None:
        over_host = over_gloo(groups, tier)
        return None if over_host is None else StagedCommunicator(over_host, meter)

    return connect
