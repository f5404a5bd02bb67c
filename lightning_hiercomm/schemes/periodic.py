"""Node-based communication: gradients agree inside a node, parameters between nodes every now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

from torch import Tensor

from lightning_hiercomm.schemes.base import Scheme

T = TypeVar("T")


class PeriodicAveraging(Scheme):
    """Average gradients inside the node at every step, and parameters over all ranks every ``sync_every`` steps.

    With batch ``i = 1 .. K`` of an epoch, rank ``r`` of node ``m``::

        g   := sum over the node of (w_r / W_m) g_r             every step                       (Eq. 8)
        x   := optimizer(x, g)
        x   := sum over all nodes of W_m x_m                    if i % sync_every == 0 or i == K  (Eq. 9)

    With plain SGD and ``sync_every=1`` this is synchronous data-parallel training; on nodes of one rank, local SGD.

    Source: "Node-based communication" (eDNNcomm), Algorithm 2, Eq. 8 and 9. Paper settings: ``sync_every=50`` with
    batches of 64 (ImageNet, RNN), ``sync_every=None`` for CIFAR.

    Args:
        sync_every: Optimizer steps between agreements, counted from the start of each epoch. None: epoch ends only.
        at_epoch_end: Also agree after the last step of an epoch.
        order: ``"after_step"`` averages after the optimizer has stepped, so replicas are equal after an agreement.
            ``"before_step"`` averages before it, as Algorithm 2 is printed; replicas then differ by one local step.
            With manual optimization the last step of an epoch is not known beforehand, so it is averaged after it.

    Raises:
        ValueError: If ``sync_every`` is not positive, or nothing would ever agree.
    """

    def __init__(
        self,
        sync_every: int | None = 50,
        at_epoch_end: bool = True,
        order: Literal["after_step", "before_step"] = "after_step",
    ) -> None:
        super().__init__()
        if sync_every is not None and sync_every < 1:
            raise ValueError(f"sync_every={sync_every} must be a positive number of steps, or None for epoch ends only")
        if sync_every is None and not at_epoch_end:
            raise ValueError("sync_every=None needs at_epoch_end=True, or the nodes would never agree")
        if order not in ("after_step", "before_step"):
            raise ValueError(f"order={order!r} must be 'after_step' or 'before_step'")
        self.sync_every = sync_every
        self.at_epoch_end = at_epoch_end
        self.order = order
        self._averaged_before_last = False

    def begin_epoch(self, epoch: int, metrics: Mapping[str, Tensor]) -> None:
        super().begin_epoch(epoch, metrics)
        self._averaged_before_last = False

    def step(self, run: Callable[[], T], last: bool = False) -> T:
        if self.order == "after_step":
            return super().step(run, last)
        self._averaged_before_last = last and self.at_epoch_end
        due = self._is_due(self.step_in_epoch + 1) or self._averaged_before_last

        def update(optimizer_step: Callable[[], object]) -> None:
            if due:
                self.average()
            optimizer_step()

        result = self.run_with_update(run, update)
        self.count_step()
        return result

    def after_step(self) -> None:
        if self._is_due(self.step_in_epoch):
            self.average()

    def end_epoch(self, loss: Tensor | None) -> None:
        if self.at_epoch_end and self.unagreed_steps and not self._averaged_before_last:
            self.average()

    def scalars(self) -> dict[str, float]:
        return {"sync_every": float(self.sync_every or 0)}

    def _is_due(self, step: int) -> bool:
        return self.sync_every is not None and step % self.sync_every == 0
