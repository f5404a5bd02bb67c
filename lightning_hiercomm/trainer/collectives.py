"""Collectives that Lightning or a program starts, for metrics, logging and checkpoints."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_hiercomm._lightning.trainer import is_between_batches
from lightning_hiercomm._lightning.tree import fabric
from lightning_hiercomm.trainer.state import StrategyState


class TrainerCollectives(StrategyState):
    """Collectives of a Trainer. They do nothing while this rank handles an exception that others may not have."""

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any | None = "mean") -> Tensor:
        if not self._ranks_are_together:
            return tensor
        if isinstance(tensor, Tensor) and str(reduce_op).lower() in ("mean", "avg"):
            if not tensor.is_floating_point():
                tensor = tensor.float()  # the mean of integers is seldom an integer
            if self._means.apply_now and self.batches is not None and group is None:
                tensor, reduce_op = tensor * self.batches.share, "sum"
        trainer = self._trainer_or_none
        if isinstance(tensor, Tensor) and group is None and trainer is not None and is_between_batches(trainer):
            operation = getattr(reduce_op, "op", reduce_op)  # the text of a ReduceOp differs between ranks
            what = f" ({operation} of {str(tensor.dtype).removeprefix('torch.')})"
            self._control.barrier("reduce", what)  # a value that only some ranks log must not mix with others
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._ranks_are_together:
            return
        try:
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]
        except RuntimeError as error:
            if self._control.plane is not None:  # which explains it
                raise
            raise RuntimeError(
                f"rank {self.global_rank} waits for a rank that has ended. Call trainer.fit, validate, test, predict"
                " and save_checkpoint on all ranks, not inside `if trainer.is_global_zero:`"
            ) from error

    @override
    def broadcast(
        self, obj: fabric.strategies.strategy.TBroadcast, src: int = 0
    ) -> fabric.strategies.strategy.TBroadcast:
        if not self._ranks_are_together:
            return obj
        return super().broadcast(obj, src)  # type: ignore[safe-super]
