"""The preflight of an exchange, which makes its round: equal steps on all ranks, and values that can be sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.background import Background, Reading
from lightning_hiercomm.comm.base import CommunicationError, Handle, finished
from lightning_hiercomm.nodes.round import Round
from lightning_hiercomm.nodes.topology import Topology


class Preflight(Handle):
    """The round of an exchange, and whether all ranks can send; overlapped exchanges learn the latter later.

    Args:
        topology: All ranks.
        round: The synchronization.
        pending: The numbers of :func:`launch`, if they are not known yet.
        flag: The flag on the device, for later work in the stream of the exchange: 1 if a rank cannot send.

    Attributes:
        counts: What all ranks have counted, in the order of the ranks, if samples are counted.
    """

    def __init__(
        self, topology: Topology, round: Round, pending: Reading | None = None, flag: Tensor | None = None
    ) -> None:
        self.round = round
        self.flag = flag
        self.counts: list[list[float]] = []
        self._topology = topology
        self._pending = pending
        self._is_unfit = False

    def wait(self) -> None:
        """Return when the result is known.

        Raises:
            CommunicationError: On all ranks, if they have taken unequal numbers of steps.
        """
        pending = self._pending  # the background may wait at the same time
        if pending is None:
            return
        numbers, topology, step = pending.numbers(), self._topology, self.round.step
        most, least, flag = map(int, numbers[:3])
        if not most == step == -least:
            raise CommunicationError(
                f"rank {topology.rank} (node {topology.node}) synchronizes after {step} optimizer"
                f" steps, others after {-least} to {most}. All ranks must take equally many steps: give all ranks"
                " dataloaders of equal length, or set limit_train_batches."
            )
        self._is_unfit, ranks = bool(flag), topology.world_size
        self.counts = [numbers[start : start + ranks] for start in range(3, len(numbers), ranks)]
        if self.counts:
            self.round = topology.new_round(step, self.round.number, self.counts[0])
        self._pending = None

    def is_done(self) -> bool:
        return self._pending is None or self._pending.is_done()

    @property
    def is_unfit(self) -> bool:
        """Whether a rank cannot send, so that the run ends; equal on all ranks. Waits."""
        self.wait()
        return self._is_unfit


def launch(
    topology: Topology,
    step: int,
    unfit: Tensor,
    number: int = 0,
    through: Topology | None = None,
    inbound: Background | None = None,
    counts: Sequence[float] = (),
) -> Preflight:
    """Launch one all-reduce (maximum): the step, minus the step, whether this rank cannot send, and its counts.

    It runs inside the node, then over each inter-node process group, and inside the node again if a rank may have no
    result of such a group. Without ``inbound`` it waits.

    Args:
        topology: All ranks; the training thread launches on its communicators.
        step: Optimizer steps that this rank has taken.
        unfit: An int64 scalar on the ranks' device: 1 if this rank cannot send, otherwise 0.
        number: The number of the exchange.
        through: The duplicate of ``topology`` whose communicators run the exchange. Default: the topology itself.
        inbound: The background thread that completes the exchange.
        counts: This rank's samples since the last synchronization, which weigh the ranks, and perhaps other counts.
            Only for exchanges that wait.
    """
    communicators = through or topology
    found = torch.full((3,), step, device=unfit.device)  # a copy from the host would wait for training
    found[1].neg_()
    found[2] = unfit
    if counts:
        of_ranks = torch.zeros(len(counts), topology.world_size, dtype=torch.float64, device=unfit.device)
        of_ranks[:, topology.rank] = torch.tensor(counts, dtype=torch.float64)
        found = torch.cat([found.double(), of_ranks.view(-1)])
    flag = found[2]
    if inbound is not None:
        inbound.uses(found)
    topology.intra.all_reduce(found, op="max").wait()
    launched = finished
    if communicators.inter is not None:
        launched = communicators.inter.all_reduce(found, op="max", waiting=inbound is None)

    def complete() -> Tensor:
        launched.wait()
        if not topology.has_all_ranks_in_groups:
            communicators.intra.all_reduce(found, op="max").wait()
        streams.keep_here(found)
        return found

    reading = Reading(finished, [complete()]) if inbound is None else inbound.read(complete)
    preflight = Preflight(topology, topology.new_round(step, number), reading, flag)
    if inbound is None:
        preflight.wait()
    return preflight
