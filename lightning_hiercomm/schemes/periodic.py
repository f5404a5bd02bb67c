"""Average gradients inside a node at every step and parameters between nodes periodically."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from lightning_hiercomm.schemes.components.schedules import Every
from lightning_hiercomm.schemes.context import Context
from lightning_hiercomm.schemes.exchange import RunningParameterSync, SyncState
from lightning_hiercomm.schemes.in_place_of_step import Update
from lightning_hiercomm.schemes.parameter_sync import ParameterSync
from lightning_hiercomm.schemes.requirements import Requirements
from lightning_hiercomm.schemes.scheme_state import TRANSIENT


class PeriodicAveraging(ParameterSync):
    """Average gradients inside the node at every step, and parameters over all ranks every ``sync_every`` steps.

    With batch ``i = 1 .. K`` of an epoch, rank ``r`` of node ``m``::

        g   := sum over the node of (w_r / W_m) g_r             every step                       (Eq. 8)
        x   := optimizer(x, g)
        x   := sum over all nodes of W_m x_m                    if i % sync_every == 0 or i == K  (Eq. 9)

    In the first ``warmup_steps`` of a run, all nodes hold equal parameters (post-local SGD). At every step the gradient
    is averaged over all nodes, encoded with ``wire_dtype`` and error feedback::

        g   := sum over all ranks of w_r g_r
        x   := optimizer(x, g)

    Parameter averaging costs most accuracy early in a run, while learning rates are large. This example uses all-reduce
    for the first quarter of the run, then averages every 4 steps::

        HierarchicalStrategy(PeriodicAveraging(4, warmup_steps=0.25), wire_dtype="int4")

    With plain SGD and ``sync_every=1`` this is synchronous data-parallel training; on nodes of one rank, local SGD.

    Source: "Node-based communication" (eDNNcomm), Algorithm 2, Eq. 8 and 9. Paper settings: ``sync_every=50`` with
    batches of 64 (ImageNet, RNN); it gives no number for CIFAR. ``warmup_steps``: Lin et al. 2018, "Don't Use
    Large Mini-Batches, Use Local SGD", section 3 (post-local SGD), which switches when the learning rate first falls.

    Args:
        sync_every: Optimizer steps between synchronizations, counted from the start of each epoch. None: synchronize at
            the ends of epochs only.
        at_epoch_end: Also synchronize after the last step of each epoch.
        order: ``"after_step"`` averages after the optimizer has stepped, so replicas are equal after a synchronization.
            The paper does not specify this default. ``"before_step"`` averages before it, as in the printed Algorithm
            2; replicas then differ by one local step. Manual optimization does not announce the last step of an epoch,
            so ``at_epoch_end`` averages after that step.
        warmup_steps: Length of the initial phase in which gradients are averaged over all nodes, as in ``AllReduce``: a
            number of optimizer steps, or a fraction of the run (a float below 1). Default: 0, no such phase.

    Raises:
        ValueError: If ``sync_every`` is not positive, the nodes would never synchronize, or arguments contradict each
            other.
    """

    def __init__(
        self,
        sync_every: int | None = 50,
        at_epoch_end: bool = True,
        order: Literal["after_step", "before_step"] = "after_step",
        warmup_steps: int | float = 0,
    ) -> None:
        if sync_every is not None and sync_every < 1:
            raise ValueError(f"sync_every={sync_every} must be a positive number of steps, or None for epoch ends only")
        if sync_every is None and not at_epoch_end:
            raise ValueError("sync_every=None needs at_epoch_end=True, or the nodes would never synchronize")
        super().__init__(schedule=Every(sync_every, of="epoch"))
        self.sync_every = sync_every
        self.at_epoch_end = at_epoch_end
        self.order = order
        self.warmup_steps = warmup_steps
        self._begin_synchronously(warmup_steps)

    def build(self, context: Context) -> RunningPeriodicAveraging:
        return RunningPeriodicAveraging(self, context)

    def check_run(self, nodes: int, steps_of_epoch: float, steps: float) -> Iterator[str]:
        yield from self._check_first_phase(steps)
        if isinstance(self.sync_every, int) and 1 < steps_of_epoch < self.sync_every:
            yield (
                f"PeriodicAveraging(sync_every={self.sync_every}) counts from the start of each epoch, which has"
                f" {math.ceil(steps_of_epoch)} optimizer steps: nodes synchronize at epoch ends only. Choose a"
                " smaller sync_every."
            )

    @property
    def requirements(self) -> Requirements:
        if self.order == "after_step":
            return super().requirements
        unequal = "order='before_step' leaves the nodes unequal after a synchronization: use order='after_step'"
        return replace(super().requirements, needs_fixed_nodes=unequal, needs_equal_data=unequal)


@dataclass
class PeriodicState(SyncState):
    """The state of periodic averaging.

    Attributes:
        averaged_before_last: Whether parameters were averaged before the last step of the epoch.
    """

    averaged_before_last: bool = field(default=False, metadata=TRANSIENT)


class RunningPeriodicAveraging(RunningParameterSync[PeriodicAveraging]):
    """Run periodic averaging before or after optimizer steps and at the ends of epochs."""

    state: PeriodicState
    state_type = PeriodicState

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        self.state.averaged_before_last = False

    def before_step(self, last: bool) -> Update | None:
        super().before_step(last)
        if self.config.order == "after_step":
            return None
        self.state.averaged_before_last = last and self.config.at_epoch_end
        is_due = self._is_due(self.state.step_in_epoch + 1) or self.state.averaged_before_last
        return self._average_and_step if is_due else None

    def _average_and_step(self, optimizer_step: Callable[[], object] | None) -> None:
        self.average()
        if optimizer_step is not None:
            optimizer_step()

    def after_step(self, last: bool) -> None:
        if self.config.order == "after_step" and self._is_due(self.state.step_in_epoch):
            self.average()

    def end_epoch(self, loss: Tensor | None) -> None:
        super().end_epoch(loss)
        if self._in_first_phase:
            return
        if self.config.at_epoch_end and self.state.unsynchronized_steps and not self.state.averaged_before_last:
            self.average()

    def _is_due(self, step: int) -> bool:
        return bool(self.schedule.due(step, step, fragments=1))
