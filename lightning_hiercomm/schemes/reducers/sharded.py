"""Two-level all-reduce: shards are reduced inside a node, then between nodes by ranks of equal local rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.base import Completion
from lightning_hiercomm.comm.encoded_sum import Feedback
from lightning_hiercomm.comm.wide_sum import send_parts
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.round import Round
from lightning_hiercomm.nodes.topology import Holders, OneSender, Topology
from lightning_hiercomm.schemes.nonfinite import NonfiniteError, find_unfit, is_unfit, values_of
from lightning_hiercomm.schemes.preflight import Preflight, launch
from lightning_hiercomm.schemes.reducers.base import Reducer, UpdateReference
from lightning_hiercomm.schemes.reducers.disagreement import Disagreement, sample
from lightning_hiercomm.schemes.reducers.inter_node_sum import InterNodeSum
from lightning_hiercomm.schemes.reducers.pending import PendingBucket
from lightning_hiercomm.schemes.samples import SampleWeights


class ShardedAllReduce(Reducer):
    """The weighted mean over all ranks of a replica's buckets, ``sum_m W_m x_m``.

    The ranks of a node hold the same parameters, so rank ``l`` of every node all-reduces only shard ``l`` of each
    bucket over its inter-node process group. Then the node gathers the shards, unless its ranks hold shards of the
    model anyway. A node sends ``2 (M - 1) / M`` of the model, spread over all its links. Buffers, which differ inside a
    node, are first averaged there by a reduce-scatter. While one bucket is gathered, the next ones are on the wire.

    All ranks end with identical bits. Means of 16-bit numbers are summed in float32, of statistics in float64, and
    rounded once (a node's mean is also rounded before it is sent), so equal values stay unchanged.

    Args:
        replica: The parameters and buffers to average.
        topology: The nodes.
        wire: The encoding between nodes. If it is lossy, differences from the reference parameters are sent (see
            :class:`~lightning_hiercomm.comm.wire.Wire`), which costs one copy of this rank's shard of the model.
        through: A :meth:`~lightning_hiercomm.nodes.topology.Topology.duplicate` with the communicators to use, if
            averages overlap with training. Default: the topology itself.
        second: Another duplicate, for the second round of an encoded sum, if sums overlap with training.
        buckets: The buckets of the replica to average. Default: all.
        update_reference: Updates the reference parameters by the nodes' mean, and returns the values that every rank
            gets. Default: the mean.
    """

    def __init__(
        self,
        replica: Replica,
        topology: Topology,
        wire: Wire | None = None,
        through: Topology | None = None,
        second: Topology | None = None,
        *,
        buckets: Sequence[Bucket] | None = None,
        update_reference: UpdateReference | None = None,
    ) -> None:
        self._replica = replica
        self.buckets = list(replica.buckets if buckets is None else buckets)
        self.topology = topology
        self._through = through or topology
        self._wire = wire or Wire()
        self._update_reference = update_reference
        self._sum = InterNodeSum(self._wire.codec, self._through.inter, None if second is None else second.inter)
        self._feedback: list[Feedback] = []
        self.disagreement = Disagreement()
        self.set_references()

    def set_references(self) -> None:
        differences_travel = not self._wire.raw and any(map(self._is_narrowed, self.buckets))
        if self._update_reference is not None or differences_travel:
            # buffers come last; they are sent unencoded, without a reference
            self.references = [
                self.remembered(bucket.pack(multiple_of=self.holders_of(index).num_shards), index).clone()
                for index, bucket in enumerate(self.buckets)
                if not bucket.keeps_equal
            ]
            feedback = [self._sum.feedback(reference) for reference in self.references]
            self._feedback = [each for each in feedback if each is not None]

    def begin(
        self,
        step: int,
        number: int = 0,
        leaving: Sequence[Bucket] | None = None,
        samples: SampleWeights | None = None,
        fragments: Sequence[int] | None = None,
        inbound: Background | None = None,
    ) -> Preflight:
        unfit = self._is_unfit(self.buckets if leaving is None else leaving)
        counts = () if samples is None else (samples.since(fragments),)
        preflight = launch(self.topology, step, unfit, number, self._through, inbound, counts)
        if inbound is None and preflight.is_unfit:
            raise self.error(step)
        if samples is not None:
            samples.round = preflight.round
        return preflight

    def _is_unfit(self, leaving: Sequence[Bucket]) -> Tensor:
        """Return an int64 scalar on the device: 1 if this rank cannot send some buckets, otherwise 0."""
        found = torch.zeros((), dtype=torch.int64, device=self._replica.device)
        limits: dict[float, list[Bucket]] = {}
        for bucket in leaving:
            limits.setdefault(self._largest(bucket), []).append(bucket)
        for largest, buckets in limits.items():
            found += is_unfit(values_of(buckets), largest).to(self._replica.device)
        return found.clamp_(max=1)

    def _largest(self, bucket: Bucket) -> float:
        """Return the largest absolute value of a bucket that can be sent."""
        if not self._is_narrowed(bucket):
            return math.inf
        # reference parameters are means of checked values, so half of the limit leaves room for the difference
        most = min(self._wire.codec.largest, torch.finfo(bucket.dtype).max)
        return most / 2 if self.references else most

    def error(self, step: int) -> NonfiniteError:
        largest = {id(piece.tensor): self._largest(bucket) for bucket in self.buckets for piece in bucket.slices}
        found = self.topology.world.all_gather_object(find_unfit(self._replica, largest))
        return NonfiniteError.of(dict(enumerate(found)), self.topology, step, self._wire.codec)

    # ---- one bucket ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(
        self, index: int, preflight: Preflight, background: Background | None = None, keep_sent: bool = False
    ) -> PendingBucket:
        bucket, round_, reference = self.buckets[index], preflight.round, None
        holders, is_narrowed = self.holders_of(index, round_), self._is_narrowed(bucket)
        sent = bucket.pack(multiple_of=self.holders_of(index).num_shards)
        flat = sent.clone() if keep_sent else sent
        if bucket.keeps_equal:  # buffers differ inside a node
            shards = [holders.shard(flat, place) for place in range(self.topology.ranks_on_node)]
            send_parts(self._through.intra, shards, round_.in_node(self.topology.node))()
        part = holders.shard(flat)
        numel = min(part.numel(), bucket.numel)
        own = sample(part[:numel])
        if self._update_reference is not None or (is_narrowed and self.references):
            reference = self.references[index]
            part.sub_(reference[: part.numel()])
        if background is not None:
            for tensor in (flat, *self.references[index : index + 1]):  # an aborted run frees these, too
                background.uses(tensor)
        feedback = self._feedback[index] if self._feedback and is_narrowed else None
        complete = self._sum.launch(part, feedback, background is None, round_.of_nodes, bucket.keeps_equal)

        def collect() -> None:
            complete()
            mean = sample(part[:numel])
            if reference is not None:
                mean.add_(sample(reference[:numel]))
            self.disagreement.compare(index, own, mean, numel)
            if reference is not None and self._update_reference is not None:
                self._update_part(index, reference, part, preflight)
            elif reference is not None:
                part.add_(reference[: part.numel()])
            holders.gather(flat).wait()
            if reference is not None and self._update_reference is None:
                reference.copy_(self.remembered(flat, index))

        arrived = Completion(collect) if background is None else background.submit(collect)
        return PendingBucket(index, flat, sent, arrived, self.topology.num_nodes)

    def _update_part(self, index: int, reference: Tensor, part: Tensor, preflight: Preflight) -> None:
        """Update the reference parameters, unless a rank cannot send; write the result to ``part``."""
        assert self._update_reference is not None
        if preflight.flag is not None and streams.has(part.device):
            # the host does not wait for the flag; if it is set, the run ends, with finite values until then
            part.copy_(torch.where(preflight.flag > 0, 0.0, part))
        elif preflight.is_unfit:
            return
        part.copy_(self._update_reference(index, reference, part))

    def remembered(self, flat: Tensor, index: int) -> Tensor:
        """Return the part of a packed bucket whose reference this rank stores; it begins with the shard it sends."""
        return self.holders_of(index).shard(flat)

    def holders_of(self, index: int, round_: Round | None = None) -> Holders:
        return self._through.holders[self.buckets[index].held_by]

    def _is_narrowed(self, bucket: Bucket) -> bool:
        # counters and variances among float buffers must not be rounded
        return self._wire.codec.narrows(bucket.dtype) and not bucket.keeps_equal

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._feedback:
            state["feedback"] = [feedback.state_dict() for feedback in self._feedback]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._feedback:
            for feedback, saved in zip(self._feedback, state["feedback"], strict=True):
                feedback.load_state_dict(saved)


class LeaderAllReduce(ShardedAllReduce):
    """Weighted mean over all ranks: one rank per node communicates between nodes and broadcasts inside its node.

    With a lossy wire every rank keeps the reference values of all parameters, because ranks take turns.
    """

    def holders_of(self, index: int, round_: Round | None = None) -> Holders:
        if round_ is None:
            return super().holders_of(index)
        return OneSender(self._through.intra, round_.number % self.topology.num_shards)

    def remembered(self, flat: Tensor, index: int) -> Tensor:
        return flat
