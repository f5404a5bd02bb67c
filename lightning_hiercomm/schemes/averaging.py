"""The mean over all ranks, sharded over the ranks of a node and pipelined in buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm.base import CommunicationError, Handle, finished
from lightning_hiercomm.comm.lane import Lane
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.replica import Bucket, Replica
from lightning_hiercomm.topology import Topology

_BUCKETS_IN_FLIGHT = 3
_STEPS_TOLD_APART = 4096


class Average:
    """Replaces a replica's values by their weighted mean over all ranks, ``sum_m W_m x_m``.

    The ranks of a node hold the same parameters, so rank ``l`` of every node all-reduces only part ``l`` of each bucket
    over its lane, then the node gathers the parts: ``2 (M - 1) / M`` of the model per node, spread over all its links.
    While one bucket is gathered the next are already on the wire.

    All ranks end with identical bits.

    Args:
        replica: What agrees.
        topology: Between whom, and with which weights.
        wire: Payload type between nodes. With a narrower type the differences from the last agreed values travel
            (see :class:`~lightning_hiercomm.comm.wire.Wire`), which costs one copy of this rank's part of the model.
        through: A :meth:`~lightning_hiercomm.topology.Topology.twin` whose communicators carry it, where averages also
            run beside training. Default: the topology itself.
    """

    def __init__(
        self, replica: Replica, topology: Topology, wire: Wire | None = None, through: Topology | None = None
    ) -> None:
        self.replica = replica
        self.topology = topology
        self.wire = wire or Wire()
        self.through = through or topology
        self._anchors: list[Tensor] | None = None
        if self.wire.dtype is not None and not self.wire.raw:
            self.anchor()

    def anchor(self) -> None:
        """Take the replica's present values, equal on all ranks, as the last agreed ones."""
        if self.wire.dtype is not None and not self.wire.raw:
            whole = (bucket.pack(multiple_of=self.topology.lanes) for bucket in self.replica.buckets)
            self._anchors = [self.remembered(flat).clone() for flat in whole]

    @torch.no_grad()
    def __call__(self, step: int = 0, exact: bool = False) -> None:
        """Average now; blocks.

        Args:
            step: Must be equal on all ranks: the optimizer steps this rank has taken.
            exact: Use the parameters' own type on the wire, and leave the last agreed values as they are.

        Raises:
            CommunicationError: If a rank took another number of steps, or died.
        """
        topology = self.topology
        if topology.num_nodes == 1:
            return
        carries_step = self._carries_step(exact)
        check = finished if carries_step else same_step(self.through, step, self.replica.device)
        in_flight: deque[tuple[Bucket, Tensor, Callable[[], None]]] = deque()

        def finish() -> None:
            bucket, flat, complete = in_flight.popleft()
            complete()
            bucket.unpack(flat)

        for index, bucket in enumerate(self.replica.buckets):
            is_last = index + 1 == len(self.replica.buckets)
            flat = bucket.pack(bucket.empty(topology.lanes, extra=int(carries_step and is_last)))
            if carries_step and is_last:
                flat[-1] = step % _STEPS_TOLD_APART
            if not bucket.equal_in_node:
                self.through.intra.all_reduce(flat.mul_(topology.weight_in_node)).wait()
            _, complete = self._launch(index, flat, exact, waiting=True)
            in_flight.append((bucket, flat, complete))
            if len(in_flight) == _BUCKETS_IN_FLIGHT:
                finish()
        while in_flight:
            finish()
        check.wait()
        if carries_step:
            self._check_step(step, float(flat[-1]))

    @torch.no_grad()
    def start(self, index: int, flat: Tensor, lane: Lane) -> Handle:
        """Start to average one packed bucket beside training; it holds the mean when the handle has been waited for.

        Args:
            index: The bucket's place in the replica.
            flat: Its values, with room for :attr:`Topology.lanes` equal parts.
            lane: Where the node gets its parts, after those started before.
        """
        payload, complete = self._launch(index, flat, exact=False)
        lane.uses(flat)
        lane.uses(payload)
        return lane.submit(complete)

    def carried(self, flat: Tensor) -> Tensor:
        """The part of a packed bucket that this rank takes to the other nodes, as a view: here, its lane's."""
        return self.topology.lane_part(flat)

    def sharing(self) -> Callable[[Tensor], Handle]:
        """What gives every rank of the node all of a packed bucket that is launched now, in place."""
        return self.through.share_lane_parts

    def remembered(self, flat: Tensor) -> Tensor:
        """The part of a packed bucket whose last agreed values this rank may need; begins with what it carries."""
        return self.carried(flat)

    def state_dict(self) -> dict[str, Any]:
        """The last agreed values, if the wire needs them."""
        return {} if self._anchors is None else {"anchors": [anchor.clone() for anchor in self._anchors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` (of a run with the same topology)."""
        if self._anchors is not None:
            for anchor, saved in zip(self._anchors, state["anchors"], strict=True):
                anchor.copy_(saved)

    def _carries_step(self, exact: bool) -> bool:
        """Whether the step travels as one more element of the last bucket: half the latency of a small model.

        Its mean over all ranks then comes back. That takes a lane that carries whole buckets, in a type with digits.
        """
        if self.topology.lanes > 1 or not self.replica.buckets:
            return False
        dtype = self.replica.buckets[-1].dtype
        return dtype.itemsize >= 4 and (exact or not self.wire.compresses(dtype))

    def _check_step(self, step: int, mean: float) -> None:
        # if ranks differ, the furthest is at least half a step from the mean; rounding takes a hundredth
        if abs(mean - step % _STEPS_TOLD_APART) > 0.25:
            raise _unequal_steps(self.topology, step, "another number of them")

    def _launch(
        self, index: int, flat: Tensor, exact: bool, waiting: bool = False
    ) -> tuple[Tensor, Callable[[], None]]:
        """Send a packed bucket on its way between the nodes.

        Returns:
            What travels; and a function that waits for it, and leaves the mean in ``flat``.
        """
        part, share, weight = self.carried(flat), self.sharing(), self.topology.node_weight
        compress = not exact and self.wire.compresses(flat.dtype)
        anchor = self._anchors[index] if compress and self._anchors is not None else None
        if compress:  # weighted before it is rounded, so it is rounded once
            values = part if anchor is None else part - anchor[: part.numel()]
            payload = (values * weight).to(self.wire.dtype)
        else:
            payload = part.mul_(weight)
        inter = self.through.inter
        summed = inter.all_reduce(payload, waiting=waiting) if inter is not None else finished

        def complete() -> None:
            summed.wait()
            if compress:
                part.copy_(payload)
            if anchor is not None:
                part.add_(anchor[: part.numel()])
            share(flat).wait()
            if anchor is not None:
                anchor.copy_(self.remembered(flat))

        return payload, complete


def same_step(topology: Topology, step: int, device: torch.device) -> Handle:
    """Check, beside other moves, that the lane's ranks have taken the same number of steps; the wait raises if not."""
    if topology.inter is None or topology.inter.size == 1:
        return finished
    bounds = torch.tensor([step, -step], device=device)
    return _SameStep(topology, step, bounds, topology.inter.all_reduce(bounds, op="max"))


@torch.no_grad()
def average_optimizer_state(optimizer: Optimizer, replica: Replica, topology: Topology) -> None:
    """Replace momentum and moments by their weighted mean over all ranks; blocks.

    What counts is every floating tensor of the optimizer's state with the shape of its parameter; step counts are equal
    anyway.

    Raises:
        CommunicationError: If the nodes hold state for different parameters (some got no gradient on one of them).
    """
    state = [
        tensor
        for parameter in replica.parameters
        for _, tensor in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.shape == parameter.shape
    ]
    count = topology.world.all_gather_object(len(state))
    if len(set(count)) > 1:
        raise CommunicationError(
            f"average_optimizer_state=True needs the same optimizer state on every rank, but they hold {count} tensors:"
            " some parameters had no gradient on some ranks. Set average_optimizer_state=False."
        )
    Average(Replica(state, bucket_bytes=replica.bucket_bytes), topology)()


class _SameStep(Handle):
    def __init__(self, topology: Topology, step: int, bounds: Tensor, handle: Handle) -> None:
        self._topology = topology
        self._step = step
        self._bounds = bounds
        self._handle = handle

    def wait(self) -> None:
        self._handle.wait()
        most, least = self._bounds.tolist()
        if most != self._step or -least != self._step:
            raise _unequal_steps(self._topology, self._step, f"{-least} to {most}")

    def is_done(self) -> bool:
        return self._handle.is_done()


def _unequal_steps(topology: Topology, step: int, others: str) -> CommunicationError:
    return CommunicationError(
        f"rank {topology.rank} (node {topology.node}) came to an agreement after {step} optimizer steps, others after"
        f" {others}. All ranks must take equally many steps: give all ranks dataloaders of one length (or"
        " limit_train_batches)."
    )
