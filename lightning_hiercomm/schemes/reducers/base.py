"""Reducers: which rank sends which part of a bucket to other nodes, and how the node gathers the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.base import Handle
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.health.preflight import Verdict
from lightning_hiercomm.schemes.reducers.disagreement import Disagreement
from lightning_hiercomm.schemes.reducers.in_flight import PendingBucket

UpdateReference = Callable[[int, Tensor, Tensor], Tensor]
"""Updates reference parameters (of a bucket, this rank's part, 1-D, in place) by the nodes' mean minus them.

It returns the values that every rank merges instead of the mean.
"""


class Reducer(ABC):
    """Base class of reducers, which average buckets between nodes.

    Attributes:
        buckets: What it carries.
        topology: The nodes and their weights.
        through: The duplicate of it whose communicators are used.
        wire: What is sent.
        turn: How many exchanges came before the last one.
        references: The reference values of this rank's part of every bucket, 1-D, if differences from them are sent.
        disagreement: How far this node was from what came back.
    """

    buckets: Sequence[Bucket]
    topology: Topology
    through: Topology
    wire: Wire
    turn: int = 0
    references: Sequence[Tensor] = ()
    disagreement: Disagreement

    def weights(self, index: int) -> Sequence[float]:
        """Return the ranks' weights in the average of a bucket; they sum to 1."""
        return self.topology.weights

    @abstractmethod
    def parts_of(self, index: int) -> int:
        """Into how many equal parts a packed bucket is cut."""

    @abstractmethod
    def begin(
        self, step: int, turn: int, only: Sequence[int], background: Background, outbound: Background | None = None
    ) -> Verdict:
        """Launch the preflight of buckets that are to be started.

        Args:
            step: The optimizer steps this rank has taken.
            turn: How many exchanges came before this one.
            only: The buckets, by their indexes.
            background: As in :meth:`start`.
            outbound: As in :meth:`start`.

        Returns:
            Its result, known before the first bucket has arrived.
        """

    @abstractmethod
    def start(
        self, index: int, background: Background, keep_sent: bool = False, outbound: Background | None = None
    ) -> PendingBucket:
        """Start to average a bucket, overlapped with training.

        Args:
            index: Of the bucket.
            background: Where the node gets what arrives, after what was started before.
            keep_sent: Whether what this node sends must be known when the mean has arrived.
            outbound: Where values that differ inside the node leave it. Only these need it.
        """

    @abstractmethod
    def __call__(
        self,
        step: int = 0,
        turn: int = 0,
        only: Sequence[int] | None = None,
        take: Callable[[Bucket, Tensor], None] = Bucket.unpack,
    ) -> Verdict:
        """Carry buckets now; blocks.

        Args:
            step: Must be equal on all ranks: the optimizer steps this rank has taken.
            turn: How many exchanges came before this one.
            only: The buckets, by their indexes. Default: all.
            take: Gets every bucket and what has arrived for it, packed. Default: replaces the bucket's values.

        Returns:
            The known result of the preflight. If it is flagged, no bucket has left any rank.

        Raises:
            CommunicationError: If a rank took another number of steps, or died.
        """

    @abstractmethod
    def carried(self, flat: Tensor, index: int) -> Tensor:
        """The part of a packed bucket that this rank takes to the other nodes, as a view; empty if it takes none."""

    @abstractmethod
    def share(self, flat: Tensor, index: int) -> Handle:
        """Give every rank of the node all of a packed bucket, in place."""

    @abstractmethod
    def set_references(self) -> None:
        """Set the reference values to the replica's current values, which are equal on all ranks."""

    def restart(self, indexes: Sequence[int]) -> None:
        """Continue from the replica's current values of some buckets, which were averaged elsewhere."""

    @torch.no_grad()
    def whole(self, index: int, part: Tensor) -> Tensor:
        """A packed bucket, made of the parts of the node's ranks; of the part's dtype. Collective over the node."""
        flat = self.buckets[index].empty(self.parts_of(index), dtype=part.dtype)
        self.carried(flat, index).copy_(part)
        self.share(flat, index).wait()
        return flat

    def state_dict(self) -> dict[str, Any]:
        """Return the reference values, if any, and the error-feedback residuals."""
        return {"references": [reference.clone() for reference in self.references]} if self.references else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` (of a run with the same topology)."""
        if self.references:
            for reference, saved in zip(self.references, state["references"], strict=True):
                reference.copy_(saved)
