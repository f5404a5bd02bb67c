"""Gradient averaging: over the node, over all ranks, or not at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hiercomm.comm.autocast import outside_autocast
from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.base import Communicator, Handle, completed_future, finished
from lightning_hiercomm.comm.encoded_sum import Feedback
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.base import Gradients
from lightning_hiercomm.schemes.reducers.inter_node_sum import InterNodeSum


class GradientPath(ABC):
    """Averages the gradients of one model, whatever the number of its optimizers, while the backward pass goes on.

    Attributes:
        tier: The level to which waits for gradients are counted: ``"intra"``, or ``"inter"`` between nodes.
        keeps_back: Whether buckets have error-feedback residuals, which depend on the parameters in them.
    """

    tier = "intra"
    keeps_back = False

    @abstractmethod
    def reduce(self, bucket: Tensor, index: int = 0) -> Handle:
        """Average a bucket of gradients in place.

        Args:
            bucket: 1-D, of any floating dtype; the same on every rank but for the values.
            index: Its place among the model's buckets.
        """

    def note_contents(self, index: int, contents: Iterable[tuple[Tensor, int]]) -> None:
        """Set the parameters whose gradients a bucket holds from now on.

        Args:
            index: Of the bucket.
            contents: The model's parameters in it, in their order, and with which element of each it begins.
        """

    def note_scale(self, scale: float) -> None:
        """Set the scale of a gradient scaler from now on; no collective may be pending."""

    def reduce_sparse(self, gradient: Tensor) -> Tensor:
        """The average of a sparse gradient (``Embedding(sparse=True)``); blocks.

        Args:
            gradient: In COO layout, with other indices on every rank; not changed.
        """
        raise NotImplementedError(f"{type(self).__name__} averages dense gradients only")

    @outside_autocast()
    def reduce_bucket(self, bucket: Any) -> Future[Tensor]:
        """Average a bucket of DDP's, whose gradients may be sparse.

        Args:
            bucket: A ``torch.distributed.GradBucket``.
        """
        gradients = bucket.buffer()
        if gradients.is_sparse:
            return completed_future(self.reduce_sparse(gradients))
        if self.keeps_back:
            self.note_contents(bucket.index(), ((parameter, 0) for parameter in bucket.parameters()))
        return self.reduce(gradients, bucket.index()).future(gradients)

    def forget(self) -> None:
        """Drop the error-feedback residuals."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank must know for an exact resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` (of a run with the same topology and wire)."""

    def close(self, timeout: float = 10.0) -> None:
        """End background threads, also after an error."""


class Untouched(GradientPath):
    """Every rank trains with its own gradients."""

    def reduce(self, bucket: Tensor, index: int = 0) -> Handle:
        return finished

    def reduce_sparse(self, gradient: Tensor) -> Tensor:
        return gradient


class NodeMean(GradientPath):
    """The mean over the node, each rank contributing with its share ``w_r / W_m``.

    Args:
        topology: The nodes and the ranks' weights.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def reduce(self, bucket: Tensor, index: int = 0) -> Handle:
        return self._topology.intra.all_reduce(bucket, weight=self._topology.weight_in_node)

    def reduce_sparse(self, gradient: Tensor) -> Tensor:
        return sparse_sum(gradient * self._topology.weight_in_node, self._topology.intra)


Contents = tuple[tuple[int, int], ...]
"""The contents of a bucket: the index of each parameter in the model, and its first element in the bucket."""


class _KeptBack:
    """Error-feedback residuals of each piece of each bucket, as long as buckets have the same contents.

    The contents are captured when a piece is launched, because pieces are encoded on another thread. Parameters that
    are frozen during another optimizer's step have zeros in a bucket. Their residuals are kept until the bucket holds
    them again.

    Args:
        lane_sum: Encodes the pieces.
        parameters: Of the model, in its order.
        device: Where gradients live.
    """

    def __init__(
        self, lane_sum: InterNodeSum, parameters: Iterable[Tensor], device: torch.device | None = None
    ) -> None:
        self._lane_sum = lane_sum
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._device = device
        self._contents: dict[int, Contents] = {}
        self._feedback: dict[tuple[int, int], dict[Contents | None, Feedback]] = {}
        self._scale: float | None = None

    def note(self, index: int, contents: Iterable[tuple[Tensor, int]]) -> None:
        self._contents[index] = tuple(
            (self._places.get(id(parameter), -1), start) for parameter, start in contents if parameter.requires_grad
        )

    @torch.no_grad()
    def note_scale(self, scale: float) -> None:
        """Rescale the residuals to the new scale of the gradients."""
        if self._scale is not None and self._scale != scale:
            for held in self._feedback.values():
                for feedback in held.values():
                    feedback.multiply(scale / self._scale)
        self._scale = scale

    def contents(self, index: int) -> Contents | None:
        """Of a bucket, as noted last."""
        return self._contents.get(index)

    def of(self, part: Tensor, key: tuple[int, int], contents: Contents | None) -> Feedback | None:
        """Return the residual of a bucket's piece; empty if the piece held other parameters before.

        Args:
            part: This rank's part of the piece.
            key: The bucket's index, and the piece's.
            contents: Of the bucket, when the piece left.
        """
        held = self._feedback.get(key, {})
        known = held.get(contents)
        if known is None or known.sender.numel() != part.numel():
            known = self._lane_sum.feedback(part)
            if known is None:
                return None
            self._forget_others(key[0], contents)
        held[contents] = known
        self._feedback[key] = held
        return known

    def forget(self) -> None:
        """Drop all of it."""
        self._feedback.clear()

    def _forget_others(self, index: int, contents: Contents | None) -> None:
        """Drop residuals of these parameters in other buckets, because buckets may have been rebuilt."""
        for (other_index, _), held in self._feedback.items():
            for other in list(held):
                is_same = other_index == index and other == contents
                if other and contents and not is_same and not set(other).isdisjoint(contents):
                    del held[other]

    def state_dict(self) -> dict[str, Any]:
        feedback = [(*key, each.state_dict(), of) for key, held in self._feedback.items() for of, each in held.items()]
        return {"feedback": feedback, "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scale = state["scale"]
        self._feedback.clear()
        for index, piece, saved, contents in state["feedback"]:
            kept_back = (saved[name].to(device=self._device, copy=True) for name in ("sender", "reducer"))
            self._feedback.setdefault((index, piece), {})[contents] = Feedback(*kept_back)


class WorldSum(GradientPath):
    """Two-level mean over all ranks: shards are reduced inside a node, then between ranks of equal local rank.

    Between nodes ``2 (M - 1) / M`` of the gradients travel per node, against ``2 (R - 1) / R`` in a ring over all
    ranks. The three stages of successive pieces of a bucket overlap with each other and with the backward pass.

    Sparse gradients are gathered from all ranks as they are, whatever the wire.

    Args:
        topology: The nodes and the ranks' weights.
        device: Where the gradients live.
        wire: What they look like between nodes.
        piece_bytes: Upper bound of a piece's size: DDP's buckets are too large for their stages to overlap.
        parameters: Of the model, in its order, by which buckets are told apart.
    """

    tier = "inter"

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        wire: Wire,
        piece_bytes: int,
        parameters: Iterable[Tensor] = (),
    ) -> None:
        self._topology = topology
        self._device = device
        self._beside = topology.duplicate()
        second = None if wire.codec.adds else topology.duplicate().inter
        self._lane_sum = InterNodeSum(wire.codec, self._beside.inter, second)
        self.keeps_back = not wire.codec.adds
        self._kept_back = _KeptBack(self._lane_sum, parameters, device)
        self._piece_bytes = piece_bytes
        self._outbound = Background(device, topology.meter, "inter")
        self._inbound = Background(device, topology.meter, "inter", defers=topology.waits_on_host)

    def reduce(self, bucket: Tensor, index: int = 0) -> Handle:
        topology = self._topology
        piece = max(1, self._piece_bytes // bucket.element_size())
        piece += -piece % topology.num_shards
        *_, last = [self._sum_over_world(part, (index, i)) for i, part in enumerate(bucket.split(piece))]
        return last

    def note_contents(self, index: int, contents: Iterable[tuple[Tensor, int]]) -> None:
        self._kept_back.note(index, contents)

    def note_scale(self, scale: float) -> None:
        self._kept_back.note_scale(scale)

    def reduce_sparse(self, gradient: Tensor) -> Tensor:
        return sparse_sum(gradient * self._topology.rank_weight, self._topology.world)

    def close(self, timeout: float = 10.0) -> None:
        self._outbound.close(timeout)
        self._inbound.close(timeout)

    def forget(self) -> None:
        self._kept_back.forget()

    def state_dict(self) -> dict[str, Any]:
        return self._kept_back.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept_back.load_state_dict(state)

    def _sum_over_world(self, piece: Tensor, key: tuple[int, int]) -> Handle:
        topology, beside, kept_back = self._topology, self._beside, self._kept_back
        contents = kept_back.contents(key[0])
        flat = piece if piece.numel() % topology.num_shards == 0 else _padded(piece, topology.num_shards)
        part = topology.own_shard(flat)
        if topology.ranks_on_node == topology.num_shards:
            summed_in_node = topology.intra.reduce_scatter(part, flat, weight=topology.rank_weight)
        else:  # a node with more ranks than inter-node groups: all ranks get the sum, the first ones send it
            summed_in_node = topology.intra.all_reduce(flat, weight=topology.rank_weight)
        self._outbound.uses(flat)
        self._inbound.uses(flat)
        on_the_wire: list[Callable[[], None]] = []

        def between_nodes() -> None:  # launched, not waited for: the next piece follows it onto the link
            summed_in_node.wait()
            on_the_wire.append(self._lane_sum.launch(part, kept_back.of(part, key, contents)))

        launched = self._outbound.submit(between_nodes)

        def inside_nodes() -> None:
            launched.wait()
            on_the_wire.pop()()
            beside.gather_shards(flat).wait()
            if flat is not piece:
                piece.copy_(flat[: piece.numel()])

        return self._inbound.submit(inside_nodes)


class NodesMean(GradientPath):
    """The mean over the nodes of gradients that every rank holds for its part of the model.

    Args:
        topology: The nodes and their weights.
        wire: What gradients look like between nodes.
        parameters: Of the model, in its order, by which buckets are told apart.
    """

    tier = "inter"

    def __init__(self, topology: Topology, wire: Wire, parameters: Iterable[Tensor] = ()) -> None:
        parameters = [*parameters]
        self._topology = topology
        self._lane_sum = InterNodeSum(wire.codec, topology.inter)
        self.keeps_back = not wire.codec.adds
        self._kept_back = _KeptBack(self._lane_sum, parameters, parameters[0].device if parameters else None)

    @torch.no_grad()
    def reduce(self, bucket: Tensor, index: int = 0, held_by: str = "rank", waiting: bool = True) -> Handle:
        """Average a bucket in place.

        Args:
            bucket: 1-D, as many equal parts as it has holders.
            index: Its place among the model's buckets.
            held_by: Which ranks of the node hold it.
            waiting: See :meth:`~lightning_hiercomm.comm.base.Communicator.all_reduce`.
        """
        holders = self._topology.holders[held_by]
        part = holders.shard(bucket.mul_(self._topology.node_weight))
        feedback = self._kept_back.of(part, (index, 0), self._kept_back.contents(index))
        return _Completed(self._lane_sum.launch(part, feedback, waiting), lambda: holders.gather(bucket).wait())

    def note_contents(self, index: int, contents: Iterable[tuple[Tensor, int]]) -> None:
        self._kept_back.note(index, contents)

    def note_scale(self, scale: float) -> None:
        self._kept_back.note_scale(scale)

    def forget(self) -> None:
        self._kept_back.forget()

    def state_dict(self) -> dict[str, Any]:
        return self._kept_back.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept_back.load_state_dict(state)


class InPhases(GradientPath):
    """A gradient path for the first phase of a run, and another one after it.

    Args:
        first: The path of the first phase.
        then: The path after it, which has no residuals.

    Attributes:
        is_first: Whether the first phase lasts; set by the training run.
    """

    def __init__(self, first: GradientPath, then: GradientPath) -> None:
        self._first, self._then = first, then
        self.is_first: Callable[[], bool] = lambda: True

    @property
    def present(self) -> GradientPath:
        """The path that gradients take now."""
        if self.is_first():
            return self._first
        self._first.forget()
        return self._then

    @property
    def tier(self) -> str:  # type: ignore[override]
        return self.present.tier

    @property
    def keeps_back(self) -> bool:  # type: ignore[override]
        return self.present.keeps_back

    def reduce(self, bucket: Tensor, index: int = 0) -> Handle:
        return self.present.reduce(bucket, index)

    def note_contents(self, index: int, contents: Iterable[tuple[Tensor, int]]) -> None:
        self.present.note_contents(index, contents)

    def note_scale(self, scale: float) -> None:
        self.present.note_scale(scale)

    def reduce_sparse(self, gradient: Tensor) -> Tensor:
        return self.present.reduce_sparse(gradient)

    def state_dict(self) -> dict[str, Any]:
        return self.present.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._first.load_state_dict(state)
        else:
            self._first.forget()

    def close(self, timeout: float = 10.0) -> None:
        self._first.close(timeout)
        self._then.close(timeout)


class _Completed(Handle):
    def __init__(self, *steps: Callable[[], None]) -> None:
        self._steps = steps

    def wait(self) -> None:
        steps, self._steps = self._steps, ()
        for step in steps:
            step()

    def is_done(self) -> bool:
        return not self._steps


def sparse_sum(gradient: Tensor, group: Communicator) -> Tensor:
    """The sum of everyone's sparse tensors, whose indices and values are gathered; blocks.

    Args:
        gradient: In COO layout, of the same shape on every rank, with any number of entries.
        group: Whose.

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
    piece_bytes: int,
    parameters: Iterable[Tensor] = (),
    first: Gradients | None = None,
) -> GradientPath:
    """The path that a scheme asks for. Collective, for it may open communicators.

    Args:
        gradients: The scheme's :attr:`~lightning_hiercomm.schemes.base.Scheme.gradients`.
        topology: The nodes.
        device: Where the gradients live.
        wire: What they look like between nodes.
        piece_bytes: Upper bound in bytes of what travels between nodes at once.
        parameters: Of the model.
        first: The scheme's :attr:`~lightning_hiercomm.schemes.base.Scheme.first_gradients`.
    """
    if first is not None:
        in_first_phase = gradient_path(first, topology, device, wire, piece_bytes, parameters)
        return InPhases(in_first_phase, gradient_path(gradients, topology, device, wire, piece_bytes))
    if gradients == "none":
        return Untouched()
    if gradients == "world" and topology.num_nodes > 1:
        return WorldSum(topology, device, wire, piece_bytes, parameters)
    return NodeMean(topology)


def _padded(flat: Tensor, multiple_of: int) -> Tensor:
    padded = flat.new_zeros(-(-flat.numel() // multiple_of) * multiple_of)
    padded[: flat.numel()].copy_(flat)
    return padded
