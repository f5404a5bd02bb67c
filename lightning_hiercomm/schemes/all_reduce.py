"""Synchronous data-parallel training with a two-level all-reduce: the baseline."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm.base import Handle, finished
from lightning_hiercomm.comm.lane import Lane
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.replica import Replica
from lightning_hiercomm.schemes.averaging import Average
from lightning_hiercomm.schemes.base import Scheme
from lightning_hiercomm.topology import Topology


class AllReduce(Scheme):
    """Average gradients over all ranks at every step; nodes never differ.

    Numerically what DDP does. Between nodes it moves less: each bucket is reduce-scattered inside the node, part ``l``
    is all-reduced over lane ``l``, and the parts are gathered again, which sends ``2 (M - 1) / M`` of the gradients per
    node instead of DDP's ``2 (R - 1) / R``. The three stages of successive pieces of a bucket overlap with each other
    and with the backward pass.

    With ``wire_dtype`` the node's mean gradient is cast for its way between nodes.

    Float buffers (BatchNorm statistics) are averaged for a validation, a checkpoint and the end of the run.
    """

    gradients = "world"

    def bind(
        self, replica: Replica, topology: Topology, optimizer: Optimizer | None = None, wire: Wire | None = None
    ) -> None:
        super().bind(replica, topology, optimizer, wire)
        self._average = Average(Replica((), replica.buffers, replica.bucket_bytes), topology)
        if topology.num_nodes > 1 and not self.lanes:
            self._beside = topology.twin()
            self._inter_lane = Lane(replica.device, topology.meter, "inter")
            self._intra_lane = Lane(replica.device, topology.meter, "intra")
            self.lanes = [self._inter_lane, self._intra_lane]

    def reduce_gradients(self, bucket: Tensor) -> Handle:
        topology = self.topology
        if topology.num_nodes == 1:
            return super().reduce_gradients(bucket)
        bucket.mul_(topology.rank_weight)
        # DDP's buckets are too large for their three stages to overlap
        piece = max(1, self.replica.bucket_bytes // bucket.element_size())
        piece += -piece % topology.lanes
        *_, last = [self._sum_over_world(part) for part in bucket.split(piece)]
        return last

    def _sum_over_world(self, piece: Tensor) -> Handle:
        topology, beside, wire = self.topology, self._beside, self.wire
        flat = piece if piece.numel() % topology.lanes == 0 else _padded(piece, topology.lanes)
        part = topology.lane_part(flat)
        if topology.ranks_on_node == topology.lanes:
            node_sum = torch.empty_like(part)
            summed_in_node = topology.intra.reduce_scatter(node_sum, flat)
        else:  # a node with more ranks than there are lanes: everyone gets the sum, the first ranks carry it
            node_sum = part
            summed_in_node = topology.intra.all_reduce(flat)
        self._inter_lane.uses(node_sum)
        self._intra_lane.uses(flat)
        on_the_wire: list[tuple[Tensor, Handle]] = []

        def between_nodes() -> None:  # launched, not waited for: the next piece follows it onto the link
            summed_in_node.wait()
            sent = node_sum.to(wire.dtype) if wire.compresses(node_sum.dtype) else node_sum
            self._intra_lane.uses(sent)
            on_the_wire.append((sent, beside.inter.all_reduce(sent) if beside.inter is not None else finished))

        launched = self._inter_lane.submit(between_nodes)

        def inside_nodes() -> None:
            launched.wait()
            sent, summed = on_the_wire.pop()
            summed.wait()
            part.copy_(sent)
            beside.share_lane_parts(flat).wait()
            if flat is not piece:
                piece.copy_(flat[: piece.numel()])

        return self._intra_lane.submit(inside_nodes)

    def count_step(self) -> None:
        super().count_step()
        self.agreements += 1
        if not self.replica.buffers:
            self.unagreed_steps = 0


def _padded(flat: Tensor, multiple_of: int) -> Tensor:
    padded = flat.new_zeros(-(-flat.numel() // multiple_of) * multiple_of)
    padded[: flat.numel()].copy_(flat)
    return padded
