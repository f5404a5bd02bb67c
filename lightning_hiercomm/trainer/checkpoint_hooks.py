"""Checkpoints of a Trainer: they hold the averaged model, and the state of the schemes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_hiercomm._lightning.places import lost_places
from lightning_hiercomm._lightning.saves import copied_where, entries_of_rank, taking_shapes, with_base_io
from lightning_hiercomm._lightning.trainer import exception_of_tuner, is_of_tuner, raw_optimizer
from lightning_hiercomm._lightning.tree import fabric, pl
from lightning_hiercomm.checkpoints.durable import DurableCheckpointIO
from lightning_hiercomm.checkpoints.plain import remove_checkpoint, remove_replaced
from lightning_hiercomm.run.replicas import not_averaged
from lightning_hiercomm.trainer.elastic_refusals import check_first_values
from lightning_hiercomm.trainer.state import StrategyState


class CheckpointHooks(StrategyState):
    """Lightning's hooks for checkpoints, in the order in which it calls them: saving, then loading."""

    _write = pl.strategies.ParallelStrategy.save_checkpoint  # on rank 0, with `checkpoint_io`

    def averaged_model(self) -> AbstractContextManager[None]:
        """Inside, every rank's module holds the averaged parameters; afterwards training continues from its own."""
        return self._run.averaged_model() if self._may_communicate else nullcontext()

    # ---- saving --------------------------------------------------------------------------------------------------

    def _dumped(self, dump: Callable[..., dict[str, Any]], weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint that is made of the averaged model."""
        if not self._may_communicate:
            return dump(weights_only)
        run, model = self._run, self._run.averaged_model
        if run.has_finished:
            self._control.barrier()
            model.average_module()  # callbacks that average may have written to it
        elif model.is_asked_for:
            self._control.barrier()
        if model.is_asked_for or (run.has_finished and model.is_in_module):
            return dump(weights_only)
        with model():
            checkpoint = dump(weights_only)
            if not model.holds_own_values:
                return checkpoint
            return copied_where(checkpoint, run.replicas.sees_memory())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self._may_communicate:
            return super().optimizer_state(optimizer)
        raw = raw_optimizer(optimizer)
        if hasattr(raw, "consolidate_state_dict"):  # torch's ZeroRedundancyOptimizer, whose state Lightning gathers
            return super().optimizer_state(raw)
        return self._run.scheme_of(raw).optimizer_state(only_on=0)  # which writes

    @property
    @override
    def checkpoint_io(self) -> fabric.plugins.CheckpointIO:
        self._checkpoint_io = with_base_io(self._checkpoint_io, DurableCheckpointIO())
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: fabric.plugins.CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        self._control.note_progress("saving a checkpoint", self._trainer_or_none)
        if self._run_or_none is None:
            self._write(checkpoint, filepath, storage_options)
            return
        together, run, checkpoints = self._may_communicate, self._run, self._checkpoints
        of_tuner = is_of_tuner(filepath) and self._elastic_node is None
        has_sidecars = (checkpoints.with_replicas or of_tuner) and together
        entries = entries_of_rank(checkpoint) if has_sidecars else {}  # before they hold the mean
        checkpoints.add_to(checkpoint, run, self.batches, together)
        if together and self._elastic_node is None:
            for place in lost_places(self._module.trainer, has_sidecars, self._unequal is None):
                checkpoints.warnings.warn(place)
        if self._elastic_node is not None and not self._elastic_node.writes:
            return  # another node writes
        io, identity = self.checkpoint_io, None
        if has_sidecars:
            # a tuner restores its file before the epoch's dataloader draws a seed
            mid_epoch = not self._module.trainer.is_last_batch and not of_tuner
            identity = checkpoints.write_sidecars(checkpoint, run, io, filepath, mid_epoch, entries, storage_options)
        self._write(checkpoint, filepath, storage_options)
        if self.global_rank == 0:
            remove_replaced(io, filepath, identity)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.global_rank == 0 and (self._elastic_node is None or self._elastic_node.writes):
            remove_checkpoint(self.checkpoint_io, filepath)

    # ---- loading -------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        exception = exception_of_tuner()
        if exception is not None:
            self._control.note_exception(exception, self._module)
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._is_fitting:
            self._checkpoints.take(checkpoint, checkpoint_path, self.checkpoint_io, self._topology, weights_only)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with taking_shapes(self._module, not_averaged(self._module, self._settings.average_buffers)):
            super().load_model_state_dict(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._settings.elastic is not None:
            check_first_values(self._run)  # before restored values hide what was written in `on_fit_start`
        self._checkpoints.restore(self._run)
        if self._elastic_node is not None:
            self._elastic_node.prepare_loops()
