"""Base class of reducers, which average buckets between nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.nodes.bucket import BUCKETS_IN_FLIGHT, Bucket
from lightning_hiercomm.nodes.round import Round
from lightning_hiercomm.nodes.topology import Holders, Topology
from lightning_hiercomm.schemes.nonfinite import NonfiniteError
from lightning_hiercomm.schemes.preflight import Preflight
from lightning_hiercomm.schemes.reducers.disagreement import Disagreement
from lightning_hiercomm.schemes.reducers.pending import PendingBucket
from lightning_hiercomm.schemes.samples import SampleWeights

UpdateReference = Callable[[int, Tensor, Tensor], Tensor]
"""Updates this rank's reference parameters of a bucket (1-D, in place) by the nodes' mean minus them.

Returns the values that every rank merges instead of the mean.
"""


class Reducer(ABC):
    """Base class of reducers, which average buckets between nodes.

    Attributes:
        buckets: The buckets.
        topology: The nodes.
        references: This rank's reference parameters for every bucket, 1-D, if differences from them are sent.
        disagreement: The distance of this node from the received values.
    """

    buckets: Sequence[Bucket]
    topology: Topology
    references: Sequence[Tensor] = ()
    disagreement: Disagreement

    @abstractmethod
    def holders_of(self, index: int) -> Holders:
        """Return the ranks of this node that hold a bucket; each sends its shard of it to other nodes."""

    @abstractmethod
    def begin(
        self,
        step: int,
        number: int = 0,
        leaving: Sequence[Bucket] | None = None,
        samples: SampleWeights | None = None,
        fragments: Sequence[int] | None = None,
        inbound: Background | None = None,
    ) -> Preflight:
        """Launch the preflight of an exchange, which makes its round.

        Args:
            step: The optimizer steps this rank has taken.
            number: The number of the exchange.
            leaving: The buckets that are about to be sent. Default: all.
            samples: Weighs nodes with unequal data; only without ``inbound``.
            fragments: The fragments whose samples count. Default: all.
            inbound: The background of :meth:`start`. Its result is then known before the first bucket has arrived.
                Default: waits for it.

        Raises:
            CommunicationError: On all ranks, if they have taken unequal numbers of steps. Without ``inbound``.
            NonfiniteError: On all ranks, if a rank cannot send. Without ``inbound``.
        """

    @abstractmethod
    def start(
        self, index: int, preflight: Preflight, background: Background | None = None, keep_sent: bool = False
    ) -> PendingBucket:
        """Start to average a bucket.

        Args:
            index: Of the bucket.
            preflight: Of the exchange.
            background: Completes the exchange in parallel with training, in the order of the starts. None: waiting for
                the bucket completes it; training waits for all buckets soon, in the order of the starts.
            keep_sent: Whether to keep a copy of the sent values in :attr:`PendingBucket.sent`.
        """

    @torch.no_grad()
    def means(self, round_: Round, only: Sequence[int] | None = None) -> Iterator[tuple[Bucket, Tensor]]:
        """Average buckets, a few at a time, and yield each with its packed mean; blocks.

        Args:
            round_: The synchronization.
            only: The indexes of the buckets. Default: all.

        Raises:
            CommunicationError: If a rank died.
        """
        preflight, indexes = Preflight(self.topology, round_), range(len(self.buckets)) if only is None else only
        in_flight: deque[PendingBucket] = deque()
        for started, index in enumerate(indexes, start=1):
            in_flight.append(self.start(index, preflight))
            while in_flight and (len(in_flight) == BUCKETS_IN_FLIGHT or started == len(indexes)):
                pending = in_flight.popleft()
                pending.arrived.wait()
                streams.keep_here(pending.flat)  # a job may have allocated it
                yield self.buckets[pending.index], pending.flat

    def __call__(self, round_: Round, only: Sequence[int] | None = None) -> None:
        """Replace buckets by their :meth:`means`."""
        for bucket, mean in self.means(round_, only):
            bucket.unpack(mean)

    def error(self, step: int) -> NonfiniteError:
        """Return the error of an exchange that a rank could not send. Collective.

        Args:
            step: The optimizer steps that all ranks have taken.
        """
        raise NotImplementedError(f"{type(self).__name__} has no preflight over all ranks")

    @abstractmethod
    def set_references(self) -> None:
        """Set the reference values to the replica's current values, which are equal on all ranks."""

    @torch.no_grad()
    def whole(self, index: int, part: Tensor) -> Tensor:
        """Return a packed bucket, gathered from the parts of the node's ranks. Collective over the node."""
        holders = self.holders_of(index)
        flat = self.buckets[index].empty(holders.num_shards, dtype=part.dtype)
        holders.shard(flat).copy_(part)
        holders.gather(flat).wait()
        return flat

    def state_dict(self) -> dict[str, Any]:
        """Return the reference values, if any, and the error-feedback residuals."""
        return {"references": [reference.clone() for reference in self.references]} if self.references else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` (of a run with the same topology)."""
        if self.references:
            for reference, saved in zip(self.references, state["references"], strict=True):
                reference.copy_(saved)
