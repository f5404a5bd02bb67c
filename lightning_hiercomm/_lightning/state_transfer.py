"""Transfers the state of a Trainer to another one: Lightning's checkpoint, made between two batches."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from lightning_hiercomm._lightning import require_attribute
from lightning_hiercomm._lightning.places import drop_places, is_stateful, restores_module, set_epoch
from lightning_hiercomm._lightning.saves import model_checkpoints, taking_shapes, with_plain_numbers
from lightning_hiercomm._lightning.tree import fabric, pl

_FIT = "fit_loop"
_EPOCH = "epoch_loop"
_OF_SAVES = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""Attributes of a ``ModelCheckpoint`` that decide when it saves, and are not in its state."""


def state_of(trainer: pl.Trainer, moment: str) -> dict[str, Any]:
    """Return a checkpoint in memory from which another Trainer continues like this one; readable with ``weights_only``.

    Lightning makes checkpoints after a batch, inside a hook, and its loops correct their counters after loading. This
    checkpoint is made before a batch, where counters need no correction. So a recovered Trainer has the same counters
    as the others, and another one can recover from it.

    Args:
        trainer: The trainer, in the first callback's hook of that moment, on all ranks of its world.
        moment: ``"batch"``, before a batch that is not an epoch's first; ``"epoch"``, before an epoch; or ``"end"``.

    Warns:
        UserWarning: If an entry is left out, because ``weights_only`` loading cannot read it.
    """
    connector = trainer._checkpoint_connector
    require_attribute(connector, "dump_checkpoint")
    checkpoint = connector.dump_checkpoint(weights_only=False)
    drop_places(checkpoint)  # a joining node takes over another part of the data, from the next batch on
    loops = checkpoint["loops"][_FIT]
    for progress in (key for key in loops if key.startswith(f"{_EPOCH}.") and key.endswith("progress")):
        _only_completed(loops[progress], starts_over=moment == "epoch")
    batches = loops[f"{_EPOCH}.batch_progress"]
    batches["is_last_batch"] = False
    if moment == "epoch":
        epochs = loops["epoch_progress"]
        _only_completed(epochs)
        loops[f"{_EPOCH}.val_loop.batch_progress"]["total"] = dict.fromkeys(
            loops[f"{_EPOCH}.val_loop.batch_progress"]["total"], 0
        )
    checkpoint["callbacks"] = _plain(checkpoint["callbacks"])
    kept = ("state_dict", "loops", "callbacks", "optimizer_states", "lr_schedulers", "epoch", "global_step")
    taken = {key: checkpoint[key] for key in (*kept, "pytorch-lightning_version") if key in checkpoint}
    taken |= {key: with_plain_numbers(taken[key]) for key in ("optimizer_states", "lr_schedulers") if key in taken}
    others = _plain({key: value for key, value in checkpoint.items() if key not in taken})
    saved = checkpoint["state_dict"]
    module, logged = trainer.lightning_module, trainer._logger_connector
    require_attribute(logged, "_callback_metrics")
    return {
        "checkpoint": {**taken, **others},
        "moment": moment,
        "buffers": {name: buffer for name, buffer in module.named_buffers() if name not in saved},
        # nodes use these to decide when to save and to step; Lightning's checkpoints do not hold them
        "metrics": dict(logged._callback_metrics),
        "saves": {each.state_key: {name: vars(each)[name] for name in _OF_SAVES} for each in _savers(trainer)},
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "trains": [name for name, parameter in module.named_parameters() if parameter.requires_grad],
    }


def take_state(trainer: pl.Trainer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Make a Trainer that is being set up continue from :func:`state_of`, which its connector restores like a file.

    Returns:
        The checkpoint.
    """
    # of Lightning, about a file whose place in the data is lost; this process takes over a place that is known
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
    connector = trainer._checkpoint_connector
    require_attribute(connector, "_loaded_checkpoint")
    checkpoint: dict[str, Any] = dict(state["checkpoint"])
    connector._loaded_checkpoint = checkpoint
    with taking_shapes(trainer.lightning_module):  # buffers may have grown since the run began
        connector.restore_model()
    connector.restore_datamodule()
    if restores_module(trainer, checkpoint):
        warnings.warn(
            "elastic nodes: the data module of this node gets the state of another node's. If that is a place in the"
            " data, this node repeats samples of the other one.",
            stacklevel=2,
        )
    connector.restore_callbacks()
    for name, buffer in trainer.lightning_module.named_buffers():  # including non-persistent ones
        given = state["buffers"].get(name)
        if given is not None and given.shape == buffer.shape:
            buffer.copy_(given)
    trainer._logger_connector._callback_metrics = dict(state["metrics"])
    for callback in _savers(trainer):
        vars(callback).update(state["saves"].get(callback.state_key, {}))
    return checkpoint


def _savers(trainer: pl.Trainer) -> list[pl.callbacks.ModelCheckpoint]:
    for each in (found := model_checkpoints(trainer)):
        for name in _OF_SAVES:
            require_attribute(each, name)
    return found


def begin_as(trainer: pl.Trainer, state: Mapping[str, Any]) -> None:
    """Start the loops where :func:`state_of` was called; when training starts, after the callbacks' hooks.

    A loaded loop counts as restarting. Before an epoch it need not. Before a batch Lightning may skip a validation and
    count the last batch twice.

    Changes that programs make when an epoch starts (accumulation, unfreezing) are not repeated in a Trainer that starts
    later.
    """
    fit, moment = trainer.fit_loop, state["moment"]
    loop = fit.epoch_loop
    require_attribute(loop, "_should_check_val_fx")
    trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
    trains = set(state["trains"])
    for name, parameter in trainer.lightning_module.named_parameters():
        if parameter.requires_grad != (name in trains):
            parameter.requires_grad_(name in trains)
    fit._restarting = False  # otherwise schedulers at this epoch's end would not step
    if moment == "epoch":
        loop._restarting = False
    elif moment == "batch" and fit._data_fetcher is not None and loop._should_check_val_fx(fit._data_fetcher):
        loop._batches_that_stepped -= 1


def skip_sanity_check(trainer: pl.Trainer) -> None:
    """Skip the sanity check of a recovered Trainer after its loops are restored.

    Lightning runs it in a Trainer that resumes at an epoch's end, and it resets all metrics.
    """
    require_attribute(trainer.fit_loop.epoch_loop.val_loop, "restarting")
    trainer.fit_loop.epoch_loop.val_loop.restarting = True


def end_training(trainer: pl.Trainer) -> None:
    """End the loop of a Trainer before it starts, because the other nodes have finished."""
    trainer.should_stop = True
    loop = trainer.fit_loop
    require_attribute(loop, "max_epochs")
    epochs: Any = loop.epoch_progress.current
    loop.max_epochs = epochs.processed = max(1, epochs.processed)


def note_stage_of_dataloaders(
    trainer: pl.Trainer, stage: list[pl.trainer.states.RunningStage | None], batches_done: Callable[[], int]
) -> None:
    """Set ``stage[0]`` to the stage for which Lightning makes a sampler, which it does not pass to strategies.

    Args:
        trainer: The strategy's trainer.
        stage: A list of one element.
        batches_done: Returns how many batches of the epoch a new train dataloader skips.
    """
    connector = trainer._data_connector
    require_attribute(connector, "_prepare_dataloader")
    original = type(connector)._prepare_dataloader

    def prepare(dataloader: object, shuffle: bool, mode: pl.trainer.states.RunningStage) -> object:
        stage[0] = mode
        try:
            prepared = original(connector, dataloader, shuffle, mode)
        finally:
            stage[0] = None
        if mode == pl.trainer.states.RunningStage.TRAINING and (done := batches_done()):
            epochs: Any = trainer.fit_loop.epoch_progress.current
            has_begun = _begin_later(prepared, done, epochs.processed)
            if not has_begun and is_stateful(prepared):
                warnings.warn(
                    f"elastic nodes: this node joins in mid-epoch, where {type(prepared).__name__} starts at the"
                    " beginning of its stream, because other nodes do not know its place. Use a dataset with a length"
                    " to train on each sample once.",
                    stacklevel=2,
                )
        return prepared

    connector._prepare_dataloader = prepare  # type: ignore[method-assign]


def reload_train_data_when_due(trainer: pl.Trainer, is_due: Callable[[], bool]) -> None:
    """Make Lightning reload the train dataloaders before an epoch if ``is_due()``, as it may every n epochs."""
    loop = trainer.fit_loop
    require_attribute(loop, "setup_data")
    require_attribute(loop, "_combined_loader")
    original = type(loop).setup_data

    def setup_data() -> None:
        if is_due():
            loop._combined_loader = None
        original(loop)

    loop.setup_data = setup_data  # type: ignore[method-assign]


class _Later(Iterable[Any]):
    """Yields batches of indices; in the first iteration it skips some."""

    def __init__(self, batches: Any, done: int) -> None:
        self._batches = batches
        self._done = done

    def __iter__(self) -> Iterator[Any]:
        done, self._done = self._done, 0  # when the first is drawn: a loader with workers makes two iterators at first
        yield from islice(iter(self._batches), done, None)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:  # other attributes are those of the sampler
        return getattr(self._batches, name)


def _begin_later(dataloader: Any, done: int, epoch: int) -> bool:
    """Make a dataloader's next iteration the rest of an epoch, before its workers start; return whether it is.

    torch does not allow replacing a loader's sampler, but reads it when an iteration starts. A loader without batches
    of indices, or with an ``IterableDataset``, resumes by itself.
    """
    batches = getattr(dataloader, "batch_sampler", None)
    length = fabric.utilities.data.sized_len(batches)
    if not length:
        return False
    set_epoch(dataloader, epoch)
    vars(dataloader)["batch_sampler"] = _Later(batches, done % length)
    return True


def _progresses(progress: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "current" in progress:
        yield progress
        return
    for part in progress.values():
        if isinstance(part, dict):
            yield from _progresses(part)


def _only_completed(progress: dict[str, Any], starts_over: bool = False) -> None:
    for each in _progresses(progress):
        each["total"] = dict.fromkeys(each["total"], each["total"]["completed"])
        each["current"] = dict.fromkeys(each["current"], 0 if starts_over else each["current"]["completed"])


def _plain(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that a joining node can load."""
    plain = {key: state for key, state in states.items() if _is_plain(state)}
    for key in states.keys() - plain.keys():
        warnings.warn(
            f"elastic nodes: a joining node begins without the state of {key}, which `weights_only` loading does not"
            " read: keep numbers, strings, tensors, and lists and dictionaries of them",
            stacklevel=2,
        )
    return plain


def _is_plain(value: object) -> bool:
    """Return whether ``weights_only`` loading reads a value."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception:
        return False
    return True
