"""Uses of private or fragile parts of Lightning's Trainer: one function each, with its reason and its test."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable
from itertools import chain, islice
from traceback import walk_tb
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from lightning_hiercomm._lightning import require_attribute
from lightning_hiercomm._lightning.saves import model_checkpoints
from lightning_hiercomm._lightning.tree import lr_finder, pl
from lightning_hiercomm.control.plane import ControlPlane


def replace_sigterm_broadcast(
    trainer: pl.Trainer, ranks: ControlPlane, leave: Callable[[], object] | None = None
) -> Callable[[], None]:
    """Replace Lightning's handling of SIGTERM and of SLURM's signal.

    ``_TrainingEpochLoop`` broadcasts a flag over the world before every batch, so nodes would wait for each other at
    every step. Its signal handler starts another broadcast, which matches the first only if rank 0 received the signal.
    The handler of SLURM's signal saves a file at once, when nodes may be at different steps and would deadlock.

    Args:
        trainer: The trainer that is being set up; its handlers are registered later.
        ranks: Decides at which batch all ranks stop, with a ``SIGTERMException``.
        leave: Called before they save to be queued again.

    Returns:
        A function that is called before every batch; Lightning calls it if there are several ranks.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    require_attribute(loop, "_broadcast_sigterm_tensor")
    require_attribute(connector, "_sigterm_notifier_fn")
    require_attribute(connector, "_slurm_sigusr_handler_fn")
    connector.__dict__.pop("_slurm_sigusr_handler_fn", None)
    save_and_requeue = connector._slurm_sigusr_handler_fn
    received: list[Any] = [signal.SIGUSR1]

    def before_batch() -> None:
        if not ranks.should_stop():
            return
        if ranks.stops_for == "requeue":
            if leave is not None:
                leave()
            if ranks.stops_together:
                save_and_requeue(received[-1], None)  # type: ignore[arg-type]  # the frame is not used
            ranks.stops_for = "stop"
        connector.received_sigterm = True
        raise pl.utilities.exceptions.SIGTERMException

    def requeue(signum: Any, frame: Any) -> None:
        if trainer.state.fn != pl.trainer.states.TrainerFn.FITTING:
            save_and_requeue(signum, frame)
            return
        received.append(signum)
        ranks.request_stop("requeue")

    def notify(signum: Any, _: Any) -> None:
        if trainer.strategy.launcher is not None and not connector.received_sigterm:
            trainer.strategy.launcher.kill(signum)  # pass it on to the processes that we launched
        ranks.request_stop()

    loop._broadcast_sigterm_tensor = before_batch  # type: ignore[method-assign]
    connector._sigterm_notifier_fn = notify  # type: ignore[method-assign]
    connector._slurm_sigusr_handler_fn = requeue  # type: ignore[method-assign, assignment]
    return before_batch


def restore_trainer(trainer: pl.Trainer) -> None:
    """Undo what this package has replaced in a trainer, so that it can be pickled and used with another strategy."""
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    epoch.__dict__.pop("_broadcast_sigterm_tensor", None)
    vars(epoch._results).pop("update_metrics", None)
    vars(fit).pop("setup_data", None)
    vars(fit._data_source).pop("dataloader", None)
    vars(trainer._checkpoint_connector).pop("dump_checkpoint", None)
    vars(trainer._data_connector).pop("_prepare_dataloader", None)
    for handler in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
        vars(trainer._signal_connector).pop(handler, None)
    for callback in model_checkpoints(trainer):
        vars(callback).pop("file_exists", None)


def mark_sigterm_received(trainer: pl.Trainer) -> None:
    """Mark a SIGTERM as received; ``Trainer.received_sigterm`` has no setter."""
    trainer._signal_connector.received_sigterm = True


def raw_optimizer(optimizer: Optimizer | pl.core.optimizer.LightningOptimizer) -> Optimizer:
    """Return the user's optimizer without Lightning's wrapper (``LightningOptimizer.optimizer`` is a property)."""
    return optimizer.optimizer if isinstance(optimizer, pl.core.optimizer.LightningOptimizer) else optimizer


def is_interrupted(trainer: pl.Trainer | None) -> bool:
    """Return whether an exception is being handled, when other ranks may not take part in a collective."""
    return trainer is not None and (
        trainer.state.status == pl.trainer.states.TrainerStatus.INTERRUPTED or exception_of_tuner() is not None
    )


def exception_of_tuner() -> BaseException | None:
    """Return the exception with which Lightning's learning rate finder ends, while it restores the state before.

    It restores in a ``finally`` block with barriers, before the strategy and callbacks receive the exception.
    """
    exception = sys.exc_info()[1]
    frames = walk_tb(exception.__traceback__) if exception is not None else ()
    return exception if any(frame.f_code is lr_finder._lr_find.__code__ for frame, _ in frames) else None


def is_of_tuner(filepath: Any) -> bool:
    """Return whether a checkpoint is that which Lightning's tuners save before and restore after a trial."""
    return os.path.basename(str(filepath)).startswith((".lr_find_", ".scale_batch_size_"))


def validates_by_the_clock(trainer: pl.Trainer) -> bool:
    """Return whether ``val_check_interval`` is a time, which earlier versions of Lightning do not support."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def names_logged_in_training(trainer: pl.Trainer) -> set[str]:
    """Return the names that training hooks have logged in this epoch, which callbacks may monitor."""
    logged = [result.meta for result in trainer.fit_loop.epoch_loop._results.values()]
    return {name for meta in logged for name in (meta.name, meta.forked_name(True), meta.forked_name(False))}


def put_callback_first(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Add a callback before the user's: strategies have no epoch hooks, and checkpoints are written by callbacks."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [callback, *(other for other in callbacks if type(other) is not type(callback))]


def remove_callback(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Undo :func:`put_callback_first`."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [other for other in callbacks if other is not callback]


def skips_backward(trainer: pl.Trainer) -> bool:
    """Return whether this epoch only collects BatchNorm statistics for ``StochasticWeightAveraging``."""
    return trainer.fit_loop._skip_backward


def accumulates(trainer: pl.Trainer) -> bool:
    """Return whether Lightning only accumulates gradients in this batch; False in manual optimization."""
    return trainer.lightning_module.automatic_optimization and trainer.fit_loop.epoch_loop._should_accumulate()


def is_between_batches(trainer: pl.Trainer) -> bool:
    """Return whether the present loop is before its first batch or past its last one.

    There Lightning averages a logged value at once; inside of a batch it does so at the batch's end.
    """
    return trainer._logger_connector._first_loop_iter is None


def batches_that_stepped(trainer: pl.Trainer) -> int:
    """Return the step that Lightning's loggers use: the number of batches in which any optimizer stepped."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def leave_train_dataloaders_alone(trainer: pl.Trainer) -> None:
    """Keep Lightning from adding a DistributedSampler to train dataloaders, but not to those of evaluation.

    ``Trainer(use_distributed_sampler=False)`` would switch it off for both.
    """
    connector = trainer._data_connector
    require_attribute(connector, "_prepare_dataloader")
    original = type(connector)._prepare_dataloader

    def prepare(dataloader: object, shuffle: bool, mode: pl.trainer.states.RunningStage) -> object:
        return (
            dataloader
            if mode == pl.trainer.states.RunningStage.TRAINING
            else original(connector, dataloader, shuffle, mode)
        )

    connector._prepare_dataloader = prepare  # type: ignore[method-assign]


def mark_means_of_a_step(trainer: pl.Trainer) -> None:
    """Make :func:`reduces_mean_of_a_step` True while ``self.log`` of a training hook reduces a value over the ranks.

    ``Strategy.reduce`` gets both the values of ``on_step=True``, which are means over a rank's batch, and the sums that
    ``on_epoch=True`` makes of them and of the batch sizes. Only the former need weights.
    """
    results = trainer.fit_loop.epoch_loop._results
    require_attribute(results, "update_metrics")
    original = type(results).update_metrics

    def update_metrics(key: str, value: Any, batch_size: int) -> None:
        vars(results)["_reduces_mean"] = True
        try:
            original(results, key, value, batch_size)
        finally:
            del vars(results)["_reduces_mean"]

    results.update_metrics = update_metrics


def reduces_mean_of_a_step(trainer: pl.Trainer) -> bool:
    """Return whether Lightning now reduces a mean over a rank's batch, after :func:`mark_means_of_a_step`."""
    return "_reduces_mean" in vars(trainer.fit_loop.epoch_loop._results)


def takes_dataloader_iter(module: pl.LightningModule) -> bool:
    """Return whether the training step fetches its batches itself."""
    return pl.utilities.signature_utils.is_param_in_hook_signature(
        module.training_step, "dataloader_iter", explicit=True
    )


def draw_first_indices(trainer: pl.Trainer) -> None:
    """Make samplers of the train dataloaders draw the seed of the epoch that has started.

    torch's ``DataLoader`` without workers would draw it when it loads the first batch.
    """
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    assert combined._iterator is not None
    for iterator in combined._iterator.iterators:
        if type(iterator) is _SingleProcessDataLoaderIter:
            iterator._sampler_iter = chain([*islice(iterator._sampler_iter, 1)], iterator._sampler_iter)


def restart_train_dataloaders(trainer: pl.Trainer) -> None:
    """Restart the iteration of the train dataloaders, which Lightning starts when it makes them."""
    assert trainer.fit_loop._data_fetcher is not None
    iter(trainer.fit_loop._data_fetcher)


def wrap_train_dataloaders(trainer: pl.Trainer, wrap: Callable[[Any], object]) -> None:
    """Replace what ``train_dataloader`` returns, before Lightning measures its length."""
    source = trainer.fit_loop._data_source
    require_attribute(source, "dataloader")
    original = type(source).dataloader
    source.__dict__["dataloader"] = lambda: wrap(original(source))


def batches_begun(trainer: pl.Trainer) -> int:
    """Return the number of batches that have begun in this epoch, also before a resume in the middle of it."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def parts_of_loader(loader: Any) -> tuple[Any, Any]:
    """Return the loaders in a ``CombinedLoader`` and its mode, which has no public name; else Lightning's default."""
    return (
        (loader.iterables, loader._mode)
        if isinstance(loader, pl.utilities.CombinedLoader)
        else (loader, "max_size_cycle")
    )


_NOTHING = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}


def share_logged_names(trainer: pl.Trainer, gather: Callable[[Any], list[Any]]) -> None:
    """Register values that other ranks log with ``sync_dist=True``, as nothing, before Lightning reduces an epoch.

    A rank that has logged no such value in this epoch would not take part, and ranks would reduce different values.

    Args:
        trainer: The trainer.
        gather: Returns the objects of all ranks.
    """
    results = trainer.fit_loop.epoch_loop._results
    own: dict[str, dict[str, Any]] = {}
    for key, result in results.valid_items():
        meta = result.meta
        if result.is_tensor and meta.on_epoch and meta.sync.should and meta.sync.group is None:
            names = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")
            arguments = {name: getattr(meta, name) for name in names}
            own[key] = {**arguments, "reduce_fx": meta.reduce_fx.__name__, "value": result.value.dtype}
    everyone = gather(own)
    if all([*each] == [*own] for each in everyone):
        return
    every = {key: arguments for each in everyone for key, arguments in each.items()}
    for key, arguments in every.items():
        if key not in own:
            strategy, nothing = trainer.strategy, _NOTHING[arguments["reduce_fx"]]
            value = torch.tensor(nothing, dtype=arguments["value"], device=strategy.root_device)
            arguments = {**arguments, "value": value}
            results.log(**arguments, sync_dist=True, sync_dist_fn=strategy.reduce, batch_size=0)
    # they are reduced in this order
    ordered = {key: results[key] for key in (*every, *(key for key in results if key not in every))}
    results.clear()
    results.update(ordered)
