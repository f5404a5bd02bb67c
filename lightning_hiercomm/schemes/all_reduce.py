"""Synchronous data-parallel training with a two-level all-reduce: the baseline."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightning_hiercomm.schemes.base import RunningScheme, Scheme
from lightning_hiercomm.schemes.context import Context
from lightning_hiercomm.schemes.requirements import Requirements


class AllReduce(Scheme):
    """Average gradients over all ranks at every step; nodes never differ.

    Example::

        HierarchicalStrategy(AllReduce(), wire_dtype="int8")

    The result is that of DDP, with less traffic between nodes. Each bucket is reduce-scattered inside the node, shard
    ``l`` is all-reduced over the inter-node process group of local rank ``l``, and the shards are all-gathered inside
    the node. With M nodes and R ranks this sends ``2 (M - 1) / M`` times the gradients per node, against ``2 (R - 1) /
    R`` in DDP. The three stages overlap with each other and with the backward pass.

    With ``wire_dtype="bfloat16"`` the node's mean gradient is cast before it is sent to other nodes. ``"int8"`` and
    ``"int4"`` quantize it in blocks, with error feedback: the rounding error is added to the next gradient.

    Float buffers (BatchNorm statistics) are averaged before a validation or a checkpoint and at the end of the run.

    A non-finite gradient reaches all ranks at once, as with DDP. The parameters are checked after every tenth step and
    at the end of each epoch. A gradient scaler, as in ``precision="16-mixed"``, skips steps whose gradients overflow.
    """

    gradients = "world"

    def build(self, context: Context) -> RunningAllReduce:
        return RunningAllReduce(self, context)

    @property
    def requirements(self) -> Requirements:
        return replace(
            super().requirements,
            needs_fixed_nodes="AllReduce waits for all nodes at every step, so none may leave: use"
            " PeriodicAveraging or DiLoCo",
            needs_equal_data=None,
        )


class RunningAllReduce(RunningScheme[AllReduce]):
    """Check parameters periodically, and average float buffers."""

    def after_step(self, last: bool) -> None:
        self._after_synchronous_step()

    def end_epoch(self, loss: Tensor | None) -> None:
        self._check_parameters()

    def _write_mean(self) -> None:
        self.guard.average(self.replica.buckets_of_buffers)
