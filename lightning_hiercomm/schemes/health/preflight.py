"""Preflight checks of an exchange: equal steps on all ranks, and values that can be sent."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.base import CommunicationError, Handle, finished
from lightning_hiercomm.nodes.topology import Topology


class Verdict(Handle):
    """The known result of a preflight.

    Args:
        is_flagged: Whether a rank cannot send, so that the run ends.
    """

    def __init__(self, is_flagged: bool = False) -> None:
        self._is_flagged = is_flagged

    def wait(self) -> None:
        """Return when the result is known.

        Raises:
            CommunicationError: On all ranks, if they have taken unequal numbers of steps.
        """

    def is_done(self) -> bool:
        return True

    def is_flagged(self) -> bool:
        """Wait, and return whether a rank cannot send; equal on all ranks."""
        self.wait()
        return self._is_flagged


class Preflight(Verdict):
    """One all-reduce (maximum) of three numbers: the step, minus the step, and whether this rank cannot send.

    It runs inside the node, then over each inter-node process group, and inside the node again if a rank is in no such
    group or a group may break. Without ``inbound`` the constructor waits for it.

    Args:
        topology: All ranks; the training thread launches on its communicators.
        step: Optimizer steps that this rank has taken.
        unfit: An int64 scalar on the ranks' device: 1 if this rank cannot send, otherwise 0.
        through: The duplicate of ``topology`` whose communicators run the exchange. Default: the topology itself.
        inbound: The background thread that completes the exchange.

    Attributes:
        flag: The flag on the device, for later work in the stream of the exchange.
    """

    def __init__(
        self,
        topology: Topology,
        step: int,
        unfit: Tensor,
        through: Topology | None = None,
        inbound: Background | None = None,
    ) -> None:
        super().__init__()
        self._topology = topology
        self._step = step
        self._is_known = False
        communicators = through or topology
        found = torch.full((3,), step, device=unfit.device)  # a copy from the host would wait for training
        found[1].neg_()
        found[2] = unfit
        self.flag = found[2]
        if inbound is not None:
            inbound.uses(found)
        topology.intra.all_reduce(found, op="max").wait()
        launched = finished
        if communicators.inter is not None:
            launched = communicators.inter.all_reduce(found, op="max", waiting=inbound is None)

        def complete() -> Tensor:
            launched.wait()
            if topology.ranks_on_node > topology.num_shards or topology.may_grow:
                communicators.intra.all_reduce(found, op="max").wait()
            streams.keep_here(found)
            return found

        self._found = complete() if inbound is None else inbound.read(complete)
        if inbound is None:
            self.wait()

    def wait(self) -> None:
        if self._is_known:
            return
        numbers = self._found.tolist() if isinstance(self._found, Tensor) else self._found.numbers()
        most, least, flag = (int(number) for number in numbers)
        # elastic nodes compare their steps when they form a quorum
        if not self._topology.may_grow and not most == self._step == -least:
            raise CommunicationError(
                f"rank {self._topology.rank} (node {self._topology.node}) synchronizes after {self._step} optimizer"
                f" steps, others after {-least} to {most}. All ranks must take equally many steps: give all ranks"
                " dataloaders of equal length, or set limit_train_batches."
            )
        self._is_flagged, self._is_known = bool(flag), True

    def is_done(self) -> bool:
        return isinstance(self._found, Tensor) or self._found.is_done()
