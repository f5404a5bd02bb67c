"""Synchronous data-parallel training with a two-level all-reduce: the baseline."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightning_hiercomm.schemes.base import Context, RunningScheme, Scheme
from lightning_hiercomm.schemes.requirements import Requirements


class AllReduce(Scheme):
    """Average gradients over all ranks at every step; nodes never differ.

    Numerically what DDP does. Between nodes it moves less: each bucket is reduce-scattered inside the node, part ``l``
    is all-reduced over lane ``l``, and the parts are gathered again, which sends ``2 (M - 1) / M`` of the gradients per
    node instead of DDP's ``2 (R - 1) / R``. The three stages of successive pieces of a bucket overlap with each other
    and with the backward pass.

    With ``wire_dtype="bfloat16"`` the node's mean gradient is cast for its way between nodes. ``"int8"`` and ``"int4"``
    quantize it in blocks, with error feedback: what rounding removes is added to the next gradient.

    Float buffers (BatchNorm statistics) are averaged for a validation, a checkpoint and the end of the run.

    A gradient that is not finite reaches all ranks at once, as with DDP, so no node can be left out:
    ``on_nonfinite="raise"`` looks at the parameters after every tenth step and at the end of an epoch, and ``"skip"``
    is refused. (A gradient scaler, as in ``precision="16-mixed"``, skips steps whose gradients overflow.)
    """

    gradients = "world"

    def build(self, context: Context) -> RunningAllReduce:
        return RunningAllReduce(self, context)

    @property
    def requirements(self) -> Requirements:
        return replace(
            super().requirements,
            needs_fixed_nodes="AllReduce lets all nodes wait for each other at every step, so none may leave: take"
            " PeriodicAveraging or DiLoCo",
        )


class RunningAllReduce(RunningScheme[AllReduce]):
    """Checks parameters every now and then, and averages float buffers."""

    def after_step(self, last: bool) -> None:
        self._after_synchronous_step()

    def end_epoch(self, loss: Tensor | None) -> None:
        self.guard.verify(self.state.steps)
        self._check_parameters()

    def _write_mean(self) -> bool:
        return self._write_mean_of_buffers()
