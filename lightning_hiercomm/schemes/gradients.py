"""The way of a model's gradients: over the node, over the world, or nowhere."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.base import Handle, finished
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.schemes.base import Gradients
from lightning_hiercomm.topology import Topology


class GradientPath(ABC):
    """Averages the gradients of one model, whatever the number of its optimizers, while the backward pass goes on.

    Attributes:
        tier: What waiting for gradients is filed under: ``"intra"``, or ``"inter"`` if they cross nodes.
    """

    tier = "intra"

    @abstractmethod
    def reduce(self, bucket: Tensor) -> Handle:
        """Average a bucket of gradients in place.

        Args:
            bucket: 1-D, of any floating dtype; the same on every rank but for the values.
        """

    def close(self, timeout: float = 10.0) -> None:
        """End background threads, also after an error."""


class Untouched(GradientPath):
    """Every rank trains with its own gradients."""

    def reduce(self, bucket: Tensor) -> Handle:
        return finished


class NodeMean(GradientPath):
    """The mean over the node, each rank contributing with its share ``w_r / W_m``.

    Args:
        topology: The nodes and the ranks' weights.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def reduce(self, bucket: Tensor) -> Handle:
        topology = self._topology
        if topology.intra.size > 1:
            bucket.mul_(topology.weight_in_node)
        return topology.intra.all_reduce(bucket)


class WorldSum(GradientPath):
    """The mean over all ranks: summed inside the node by parts, part ``l`` between the nodes over lane ``l``.

    Between nodes ``2 (M - 1) / M`` of the gradients travel per node, against ``2 (R - 1) / R`` in a ring over all
    ranks. The three stages of successive pieces of a bucket overlap with each other and with the backward pass.

    Args:
        topology: The nodes and the ranks' weights.
        device: Where the gradients live.
        wire: What they look like between nodes.
        piece_bytes: Upper bound of a piece's size: DDP's buckets are too large for their stages to overlap.
    """

    tier = "inter"

    def __init__(self, topology: Topology, device: torch.device, wire: Wire, piece_bytes: int) -> None:
        self._topology = topology
        self._beside = topology.twin()
        self._wire = wire
        self._piece_bytes = piece_bytes
        self._outbound = Background(device, topology.meter, "inter")
        self._inbound = Background(device, topology.meter, "intra")

    def reduce(self, bucket: Tensor) -> Handle:
        topology = self._topology
        bucket.mul_(topology.rank_weight)
        piece = max(1, self._piece_bytes // bucket.element_size())
        piece += -piece % topology.lanes
        *_, last = [self._sum_over_world(part) for part in bucket.split(piece)]
        return last

    def close(self, timeout: float = 10.0) -> None:
        self._outbound.close(timeout)
        self._inbound.close(timeout)

    def _sum_over_world(self, piece: Tensor) -> Handle:
        topology, beside, wire = self._topology, self._beside, self._wire
        flat = piece if piece.numel() % topology.lanes == 0 else _padded(piece, topology.lanes)
        part = topology.lane_part(flat)
        if topology.ranks_on_node == topology.lanes:
            node_sum = torch.empty_like(part)
            summed_in_node = topology.intra.reduce_scatter(node_sum, flat)
        else:  # a node with more ranks than there are lanes: everyone gets the sum, the first ranks carry it
            node_sum = part
            summed_in_node = topology.intra.all_reduce(flat)
        self._outbound.uses(node_sum)
        self._inbound.uses(flat)
        on_the_wire: list[tuple[Tensor, Handle]] = []

        def between_nodes() -> None:  # launched, not waited for: the next piece follows it onto the link
            summed_in_node.wait()
            sent = node_sum.to(wire.dtype) if wire.compresses(node_sum.dtype) else node_sum
            self._inbound.uses(sent)
            on_the_wire.append((sent, beside.inter.all_reduce(sent) if beside.inter is not None else finished))

        launched = self._outbound.submit(between_nodes)

        def inside_nodes() -> None:
            launched.wait()
            sent, summed = on_the_wire.pop()
            summed.wait()
            part.copy_(sent)
            beside.share_lane_parts(flat).wait()
            if flat is not piece:
                piece.copy_(flat[: piece.numel()])

        return self._inbound.submit(inside_nodes)


def gradient_path(
    gradients: Gradients, topology: Topology, device: torch.device, wire: Wire, piece_bytes: int
) -> GradientPath:
    """The path that a scheme asks for. Collective, for it may open communicators.

    Args:
        gradients: The scheme's :attr:`~lightning_hiercomm.schemes.base.Scheme.gradients`.
        topology: The nodes.
        device: Where the gradients live.
        wire: What they look like between nodes.
        piece_bytes: Upper bound in bytes of what travels between nodes at once.
    """
    if gradients == "none":
        return Untouched()
    if gradients == "world" and topology.num_nodes > 1:
        return WorldSum(topology, device, wire, piece_bytes)
    return NodeMean(topology)


def _padded(flat: Tensor, multiple_of: int) -> Tensor:
    padded = flat.new_zeros(-(-flat.numel() // multiple_of) * multiple_of)
    padded[: flat.numel()].copy_(flat)
    return padded
