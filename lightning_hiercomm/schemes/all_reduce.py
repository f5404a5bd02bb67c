"""Synchronous data-parallel training with a two-level all-reduce: the baseline."""

from __future__ import annotations

from lightning_hiercomm.schemes.averaging import Average
from lightning_hiercomm.schemes.base import Scheme


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

    def after_step(self, last: bool) -> None:
        self.agreements += 1
        if not self.replica.buffers:
            self.unagreed_steps = 0

    def exact_mean(self) -> None:
        """Write the weighted mean of the float buffers over all ranks; blocks. Parameters never differ."""
        Average(self.replica, self.topology, buckets=self.replica.buckets_of_buffers)(self.steps)
