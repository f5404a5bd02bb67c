"""Collectives that Lightning or a program starts, for metrics, logging and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.strategy import TBroadcast
from torch import Tensor
from typing_extensions import override

from lightning_hiercomm._lightning.trainer import is_between_batches
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.trainer.fabric_loop import FabricLoop
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
        with self._excused():
            return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._ranks_are_together:
            return
        try:
            with self._excused():
                super().barrier(*args, **kwargs)  # type: ignore[safe-super]
        except RuntimeError as error:
            if self._control.plane is not None:  # which explains it
                raise
            raise RuntimeError(
                f"rank {self.global_rank} waits for a rank that has ended. Call trainer.fit, validate, test, predict"
                " and save_checkpoint on all ranks, not inside `if trainer.is_global_zero:`"
            ) from error

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not self._ranks_are_together:
            return obj
        with self._excused():
            return super().broadcast(obj, src)  # type: ignore[safe-super]

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        with nullcontext() if tensor.requires_grad else self._excused():
            return super().all_gather(tensor, group, sync_grads)

    def _excused(self) -> AbstractContextManager[None]:
        """Inside, collectives do not count as the program's own."""
        return nullcontext() if self._run_or_none is None else self._run_or_none.optimizer_steps.excused()


class FabricCollectives(FabricDDPStrategy):
    """Collectives of Fabric, which do not count as the program's own."""

    _loop: FabricLoop

    @property
    def runs(self) -> list[TrainingRun]:
        """The runs of the modules that have an optimizer."""
        return self._loop.runs

    @override
    def all_reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any | None = "mean") -> Tensor:
        with self._excused():
            return super().all_reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        with nullcontext() if tensor.requires_grad else self._excused():
            return super().all_gather(tensor, group, sync_grads)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._excused():
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        with self._excused():
            return super().broadcast(obj, src)

    @contextmanager
    def _excused(self) -> Iterator[None]:
        with ExitStack() as excused:
            for run in self.runs:
                excused.enter_context(run.optimizer_steps.excused())
            yield
