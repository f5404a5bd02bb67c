"""Gradient averaging: over the node, over all ranks, or not at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import functional

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.autocast import outside_autocast
from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.base import Communicator, Completion, Handle, completed_future, finished
from lightning_hiercomm.comm.encoded_sum import Feedback
from lightning_hiercomm.comm.meter import Mark, Meter
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.round import Round
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.base import Gradients
from lightning_hiercomm.schemes.reducers.inter_node_sum import InterNodeSum

Contents = Iterable[tuple[Tensor, int]]
"""The model's parameters whose gradients a bucket holds, in their order, and the first element of each in it."""

Places = tuple[tuple[int, int], ...]
"""The same, with the index of each parameter in the model."""


class GradientPath(ABC):
    """Averages the gradients of one model, for all its optimizers, during the backward pass.

    Attributes:
        level: The level at which waits for gradients are measured: ``"intra"``, or ``"inter"`` between nodes.
        residuals: The error-feedback residuals, if gradients are encoded with a lossy codec that has them.
        round: The weights of all ranks, if their data are unequal. None: those of the topology.
    """

    level = "intra"
    residuals: Residuals | None = None
    round: Round | None = None
    _last: tuple[str, Mark] | None = None  # the level of the present backward pass, and when its last bucket left

    @abstractmethod
    def reduce(self, bucket: Tensor, index: int = 0, contents: Contents = ()) -> Handle:
        """Average a bucket of gradients in place.

        Args:
            bucket: 1-D, of any floating dtype and equal length on every rank.
            index: Its index among the model's buckets.
            contents: What it holds, if there are :attr:`residuals`.
        """

    def reduce_sparse(self, gradient: Tensor) -> Tensor:
        """Return the average of a sparse gradient in COO layout (``Embedding(sparse=True)``); blocks."""
        raise NotImplementedError(f"{type(self).__name__} averages dense gradients only")

    @outside_autocast()
    def reduce_bucket(self, bucket: Any) -> Future[Tensor]:
        """Start to average a ``torch.distributed.GradBucket``, whose gradients may be sparse; for DDP's hook."""
        gradients = bucket.buffer()
        if gradients.is_sparse:
            future = completed_future(self.reduce_sparse(gradients))
        else:
            contents = [] if self.residuals is None else [(parameter, 0) for parameter in bucket.parameters()]
            future = self.reduce(gradients, bucket.index(), contents).future(gradients)
        if bucket.is_last():
            self._last = self.level, Meter.mark(gradients.device)
        return future

    def end_backward(self, meter: Meter, device: torch.device) -> None:
        """Record the wait since the last bucket's hook, if this backward pass averaged gradients."""
        if self._last is not None:
            (level, start), self._last = self._last, None
            meter.add_wait(level, start, meter.mark(device))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for an exact resume."""
        return {} if self.residuals is None else self.residuals.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` (of a run with the same topology and wire); drop the state if it is empty."""
        if self.residuals is not None:
            self.residuals.load_state_dict(state)

    def close(self, timeout: float = 10.0) -> None:
        """End background threads, also after an error."""


class LocalGradients(GradientPath):
    """No average here: FSDP2 averages gradients in the node by itself."""

    def reduce(self, bucket: Tensor, index: int = 0, contents: Contents = ()) -> Handle:
        return finished

    def reduce_sparse(self, gradient: Tensor) -> Tensor:
        return gradient


class NodeMean(GradientPath):
    """The weighted mean over the ranks of a node."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def reduce(self, bucket: Tensor, index: int = 0, contents: Contents = ()) -> Handle:
        return self._topology.intra.all_reduce(bucket, weight=self._topology.weight_in_node)

    def reduce_sparse(self, gradient: Tensor) -> Tensor:
        return sparse_sum(gradient * self._topology.weight_in_node, self._topology.intra)


class WorldMean(GradientPath):
    """The weighted mean over all ranks: shards are reduced inside a node, then between ranks of equal local rank.

    With M nodes and R ranks, a node sends ``2 (M - 1) / M`` of the gradients, against ``2 (R - 1) / R`` in a ring over
    all ranks. The three stages of a bucket overlap with those of other buckets and with the backward pass. Sparse
    gradients are gathered from all ranks unencoded.

    On CPUs, and for GPUs over gloo or MPI, a bucket is cut into chunks that fit into a processor's cache, and whose
    stages overlap, too. Over nccl a bucket is not cut: each collective waits for the other nodes and takes the GPU from
    training, which costs more than the overlap within a bucket gains. There, with one rank per node and gradients that
    are not encoded, a bucket takes one all-reduce, as in DDP.

    Its arguments are those of :func:`gradient_path`.
    """

    level = "inter"

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        wire: Wire,
        chunk_bytes: int,
        parameters: Iterable[Tensor] = (),
    ) -> None:
        self._topology = topology
        self._duplicate = topology.duplicate()
        second = None if wire.codec.adds else topology.duplicate().inter
        self._sum = InterNodeSum(wire.codec, self._duplicate.inter, second)
        self.residuals = None if wire.codec.adds else Residuals(self._sum, parameters, device)
        self._codec = wire.codec
        self._chunk_bytes = None if streams.has(device) and not topology.waits_on_host else chunk_bytes
        self._outbound = Background(device, topology.meter)
        self._inbound = Background(device, topology.meter, defers=topology.waits_on_host)

    def reduce(self, bucket: Tensor, index: int = 0, contents: Contents = ()) -> Handle:
        topology, group = self._topology, self._duplicate.inter
        chunks: Sequence[Tensor] = [bucket]
        if self._chunk_bytes is not None:
            length = max(1, self._chunk_bytes // bucket.element_size())
            chunks = bucket.split(length + -length % topology.num_shards)
        elif group is not None and topology.world_size == topology.num_nodes and not self._codec.narrows(bucket.dtype):
            return group.all_reduce(bucket, weight=self._rank_weight)
        places = () if self.residuals is None else self.residuals.places_of(contents)
        averaged: Handle = finished
        for number, chunk in enumerate(chunks):
            averaged = self._average(chunk, (index, number), places, averaged)
        return averaged

    def _average(self, chunk: Tensor, key: tuple[int, int], places: Places, previous: Handle) -> Handle:
        """Average a chunk in three stages: in the node, between nodes, and back in the node.

        Each runs in another thread or stream, and ends without a wait, so that the next chunk follows immediately.
        """
        topology = self._topology
        padding = -chunk.numel() % topology.num_shards
        flat = functional.pad(chunk, (0, padding)) if padding else chunk
        shard = topology.own_shard(flat)
        if topology.ranks_on_node == topology.num_shards:
            reduced = topology.intra.reduce_scatter(shard, flat, weight=self._rank_weight)
        else:  # some ranks of the node are in no inter-node group
            reduced = topology.intra.all_reduce(flat, weight=self._rank_weight)
        self._outbound.uses(flat)
        self._inbound.uses(flat)
        sums: list[Callable[[], None]] = []

        def send() -> None:
            reduced.wait()
            feedback = None if self.residuals is None else self.residuals.of(shard, key, places)
            sums.append(self._sum.launch(shard, feedback))

        sent = self._outbound.submit(send)

        def collect() -> None:
            previous.wait()  # the last chunk's handle raises the error of any
            sent.wait()
            sums.pop()()
            self._duplicate.gather_shards(flat).wait()
            if padding:
                chunk.copy_(flat[: chunk.numel()])

        return self._inbound.submit(collect)

    def reduce_sparse(self, gradient: Tensor) -> Tensor:
        return sparse_sum(gradient * self._rank_weight, self._topology.world)

    @property
    def _rank_weight(self) -> float:
        return self._topology.rank_weight if self.round is None else self.round.weights[self._topology.rank]

    def close(self, timeout: float = 10.0) -> None:
        self._outbound.close(timeout)
        self._inbound.close(timeout)


class InterNodeMean(GradientPath):
    """The weighted mean over the nodes of gradients that are sharded inside a node (FSDP2)."""

    level = "inter"

    def __init__(self, topology: Topology, wire: Wire, parameters: Iterable[Tensor] = ()) -> None:
        parameters = [*parameters]
        self._topology = topology
        self._sum = InterNodeSum(wire.codec, topology.inter)
        device = parameters[0].device if parameters else None
        self.residuals = None if wire.codec.adds else Residuals(self._sum, parameters, device)

    @torch.no_grad()
    def reduce(
        self, bucket: Tensor, index: int = 0, contents: Contents = (), held_by: str = "rank", waiting: bool = True
    ) -> Handle:
        """Average a bucket in place.

        Args:
            bucket: 1-D, of as many equal shards as it has holders.
            index: As in :meth:`GradientPath.reduce`.
            contents: As in :meth:`GradientPath.reduce`.
            held_by: The group of ranks of the node that hold it.
            waiting: See :meth:`~lightning_hiercomm.comm.base.Communicator.all_reduce`.
        """
        holders, residuals = self._topology.holders[held_by], self.residuals
        shard = holders.shard(bucket.mul_(self._topology.node_weight))
        feedback = None if residuals is None else residuals.of(shard, (index, 0), residuals.places_of(contents))
        complete = self._sum.launch(shard, feedback, waiting)

        def gather() -> None:
            complete()
            holders.gather(bucket).wait()

        return Completion(gather)


class Residuals:
    """Error-feedback residuals of each chunk of each bucket, as long as buckets have the same contents.

    Parameters that are frozen during another optimizer's step have zeros in a bucket. Their residuals are kept until
    the bucket holds them again.

    Args:
        encoder: Encodes the chunks.
        parameters: The model's parameters, in their order.
        device: The device of the gradients.
    """

    def __init__(self, encoder: InterNodeSum, parameters: Iterable[Tensor], device: torch.device | None) -> None:
        self._encoder = encoder
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._device = device
        self._scale: float | None = None  # of the gradients; None if there is no gradient scaler
        # by the index of the bucket and of the chunk, and the contents of the bucket
        self._feedback: dict[tuple[int, int, Places], Feedback] = {}

    def places_of(self, contents: Contents) -> Places:
        """Return what a bucket holds of parameters that are trained now."""
        return tuple((self._places.get(id(tensor), -1), start) for tensor, start in contents if tensor.requires_grad)

    @torch.no_grad()
    def set_scale(self, scale: float) -> None:
        """Rescale the residuals to the new scale of a gradient scaler; no collective may be pending."""
        if self._scale is not None and self._scale != scale:
            for feedback in self._feedback.values():
                feedback.multiply(scale / self._scale)
        self._scale = scale

    def of(self, shard: Tensor, key: tuple[int, int], places: Places) -> Feedback | None:
        """Return the residual of a chunk; zero if the chunk held other parameters before.

        Args:
            shard: This rank's shard of the chunk.
            key: The index of the bucket, and of the chunk.
            places: The contents of the bucket when the chunk was launched; it is encoded on another thread.
        """
        known = self._feedback.get((*key, places))
        if known is None or known.sender.numel() != shard.numel():
            known = self._encoder.feedback(shard)
            if known is None:
                return None
            for other in [*self._feedback]:  # of these parameters in other buckets, because buckets may be rebuilt
                if (other[0], other[2]) != (key[0], places) and not set(other[2]).isdisjoint(places):
                    del self._feedback[other]
            self._feedback[(*key, places)] = known
        return known

    def state_dict(self) -> dict[str, Any]:
        feedback = [(index, chunk, each.state_dict(), of) for (index, chunk, of), each in self._feedback.items()]
        return {"feedback": feedback, "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._feedback.clear()
        if not state:  # it was saved in another phase, or the phase has ended
            return
        self._scale = state["scale"]
        for index, chunk, saved, places in state["feedback"]:
            tensors = (saved[name].to(device=self._device, copy=True) for name in ("sender", "reducer"))
            self._feedback[index, chunk, places] = Feedback(*tensors)


def sparse_sum(gradient: Tensor, group: Communicator) -> Tensor:
    """Return the sum of all ranks' sparse tensors, whose indices and values are gathered; blocks.

    Args:
        gradient: In COO layout, of the same shape on every rank, with any number of entries.
        group: The ranks.

    Returns:
        The sum, coalesced: an entry exists if any rank has it.
    """
    own = gradient.coalesce()
    counts = torch.empty(group.size, dtype=torch.int64, device=own.device)
    group.all_gather(counts, counts.new_tensor([own.indices().shape[1]])).wait()
    entries = counts.tolist()

    def gathered(rows: Tensor) -> Tensor:  # padded to the largest number of rows
        padded = rows.new_zeros(max(entries), *rows.shape[1:])
        padded[: len(rows)] = rows
        whole = rows.new_empty(group.size, *padded.shape)
        group.all_gather(whole.view(-1), padded.view(-1)).wait()
        return torch.cat([theirs[:count] for theirs, count in zip(whole, entries, strict=True)])

    indices, values = gathered(own.indices().T.contiguous()), gathered(own.values().contiguous())
    return torch.sparse_coo_tensor(indices.T, values, own.shape, check_invariants=False).coalesce()


def gradient_path(
    gradients: Gradients,
    topology: Topology,
    device: torch.device,
    wire: Wire,
    chunk_bytes: int,
    parameters: Iterable[Tensor] = (),
) -> GradientPath:
    """Return the gradient path of a scheme. Collective, because it may open communicators.

    Args:
        gradients: The ranks over which gradients are averaged.
        topology: The nodes.
        device: The device of the gradients.
        wire: The encoding between nodes.
        chunk_bytes: Upper bound of what is sent between nodes at once, except over nccl; see :class:`WorldMean`.
        parameters: The model's parameters in their order, which identify the contents of buckets.
    """
    if gradients == "world" and topology.num_nodes > 1:
        return WorldMean(topology, device, wire, chunk_bytes, parameters)
    return NodeMean(topology)
