"""Begins and ends epochs by a callback, because strategies have no such hooks, and checks the length of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning_hiercomm._lightning.trainer import accumulates, validates_by_the_clock
from lightning_hiercomm._lightning.tree import pl
from lightning_hiercomm.batches.running import RunningBatches
from lightning_hiercomm.nodes.connect import check_equal_work
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import Scheme
from lightning_hiercomm.trainer.watch import RunControl


class EpochClock(pl.Callback):
    """Begins and ends the epochs of a run, before the user's callbacks, validation and checkpoints."""

    def __init__(
        self,
        run: TrainingRun,
        batches: RunningBatches | None,
        control: RunControl,
        begin_validation: Callable[[], None],
    ) -> None:
        self._run = run
        self._batches = batches
        self._control = control
        self._begin_validation = begin_validation
        self._epoch_has_ended = True

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_epoch(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a batch, and an epoch in a run that was resumed at the end of an epoch."""
        self._control.before_batch()
        # such a run gets no `on_train_epoch_start`, and one that was resumed in the middle of an epoch must not begin
        # it again, unless the checkpoint is of another strategy. `batch_idx` counts from the resume if the step takes
        # batches from the loader itself
        is_new = trainer.fit_loop.batch_idx == 0 or not any(scheme.state.steps for scheme in self._run.schemes)
        if self._epoch_has_ended and is_new:
            self._begin_epoch(trainer)
        self._epoch_has_ended = False
        self._control.note_progress(f"training batch {batch_idx}", trainer)
        if self._batches is not None:
            self._batches.begin_step(batch_idx, trainer.accumulate_grad_batches)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a batch, and the epoch with its last batch: validation comes before ``on_train_epoch_end``."""
        self._control.note_progress(f"past training batch {batch_idx}", trainer)
        if self._batches is not None:
            self._batches.end_step()
        if not accumulates(trainer):
            self._run.misuse.end_batch()
        if trainer.is_last_batch:
            self._end_epoch()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a validation: the strategy's own hook comes after callbacks that swap weights."""
        self._begin_validation()

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._control.note_progress(f"validating batch {batch_idx}", trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._control.note_progress("past validation", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End an epoch that ``max_steps`` cuts short, which has no last batch."""
        self._end_epoch()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._control.note_progress("at the end of training", trainer)
        self._control.barrier("ended training")
        self._run.finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._control.note_exception(exception, pl_module)

    def _begin_epoch(self, trainer: pl.Trainer) -> None:
        self._epoch_has_ended = False
        if self._batches is not None:
            self._batches.begin_epoch(trainer.current_epoch)
        self._run.begin_epoch(trainer.current_epoch)

    def _end_epoch(self) -> None:
        if not self._epoch_has_ended:
            self._epoch_has_ended = True
            self._control.barrier("ended an epoch")  # schemes that synchronize here need equal numbers of steps
            self._run.end_epoch()


def check_training(trainer: pl.Trainer, scheme: Scheme, topology: Topology) -> None:
    """Check that ranks have equal work, and warn if the run is too short for its scheme. Collective."""
    check_equal_work(topology, trainer.num_training_batches)
    if validates_by_the_clock(trainer) and (topology.world_size > 1 or not topology.is_one_node):
        raise ValueError(
            "Trainer(val_check_interval=...) is a time, which every rank measures by its own clock, so ranks would"
            " validate after different batches: give a number of batches, or a fraction of the epoch"
        )
    steps_of_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
    _, steps = length_of_run(trainer)
    for warning in scheme.check_run(topology.num_nodes, steps_of_epoch, math.inf if steps is None else steps):
        pl.utilities.rank_zero_warn(warning)


def length_as_given(trainer: pl.Trainer) -> tuple[int | None, int | None]:
    """Return the epochs and optimizer steps after which a run ends, as the user has set them."""
    epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else None
    if epochs is not None:  # without the epoch that StochasticWeightAveraging adds to collect statistics
        averaging = (each for each in trainer.callbacks if isinstance(each, pl.callbacks.StochasticWeightAveraging))  # type: ignore[attr-defined]
        epochs = min([epochs, *(int(getattr(each, "swa_end", epochs)) + 1 for each in averaging)])
    return epochs, trainer.max_steps if trainer.max_steps >= 0 else None


def length_of_run(trainer: pl.Trainer) -> tuple[int | None, int | None]:
    """Return the epochs and optimizer steps after which a run will end, as far as they are known."""
    epochs, steps = length_as_given(trainer)
    # Lightning counts the steps of all optimizers of manual optimization together
    last_step = steps if trainer.lightning_module.automatic_optimization else None
    batches, factors = trainer.num_training_batches, _accumulation(trainer)
    if not 0 < batches < math.inf or (epochs is None and last_step is None):
        return epochs, steps
    epoch, step, progress = trainer.current_epoch, trainer.global_step, trainer.fit_loop.epoch_progress.current
    if progress.ready != progress.completed:  # resumed in an epoch, whose factor has not changed yet
        factor, done = trainer.accumulate_grad_batches, trainer.fit_loop.epoch_loop.batch_progress.current.ready
        epoch, step = epoch + 1, step + max(0, math.ceil(batches / factor) - done // factor)
    end = math.inf if epochs is None else epochs
    for change in (*sorted(first for first in factors if first > epoch), end):
        per_epoch = math.ceil(batches / factors[max(first for first in factors if first <= epoch)])
        left = min(change, end) - epoch
        if last_step is not None:
            left = min(left, math.ceil((last_step - step) / per_epoch))
        epoch, step = epoch + max(0, int(left)), step + max(0, int(left)) * per_epoch
    return epoch, step if steps is None else min(step, steps)


def _accumulation(trainer: pl.Trainer) -> dict[int, int]:
    """Return the number of batches over which gradients are accumulated, by the first epoch."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set, but not declared
        if isinstance(callback, pl.callbacks.GradientAccumulationScheduler):
            return {0: 1, **callback.scheduling}
    return {0: trainer.accumulate_grad_batches}
