"""Saves checkpoints with Lightning's plugins: one function per private use, with its reason."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from lightning_hiercomm._lightning import require_attribute
from lightning_hiercomm._lightning.tree import fabric, pl, wrapper

METADATA_FILENAME = fabric.utilities.load._METADATA_FILENAME
T = TypeVar("T")

_OF_ALL_RANKS = {"epoch", "global_step", "pytorch-lightning_version", "optimizer_states"}
_OF_ALL_RANKS |= {"state_dict", "current_model_state", "hparams_name", "hyper_parameters", "hparams_type"}
_OF_ALL_RANKS |= {"datamodule_hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_type", "hiercomm"}


def holds_averaged_weights(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether the ``WeightAveraging`` callback wrote its average of one node's weights to the ``state_dict``."""
    return "current_model_state" in checkpoint


def entries_of_rank(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this rank's callbacks, module, datamodule, schedulers and loaders put into a checkpoint.

    A plain file has rank 0's. The ``state_dict`` holds averaged weights and the extra state of layers only.
    """
    entries = {key: value for key, value in checkpoint.items() if key not in _OF_ALL_RANKS}
    if "lr_schedulers" in entries:
        entries["lr_schedulers"] = with_plain_numbers(entries["lr_schedulers"])
    is_averaged = holds_averaged_weights(checkpoint)
    own = {
        name: value
        for name, value in checkpoint.get("state_dict", {}).items()
        if is_averaged or name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX
    }
    return {**entries, "state_dict": own} if own else entries


def take_entries(checkpoint: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Replace rank 0's entries with :func:`entries_of_rank`, before anything is restored from the checkpoint.

    A key that this rank did not save keeps rank 0's value, as hooks often save on rank 0 only. A callback that saved
    nothing on this rank gets nothing.
    """
    entries = dict(entries)
    checkpoint.get("state_dict", {}).update(entries.pop("state_dict", {}))
    checkpoint.update(entries)


def dump_within(trainer: pl.Trainer, around: Callable[..., dict[str, Any]]) -> None:
    """Make ``around`` create the checkpoints of a trainer on all ranks; it gets Lightning's function and its argument.

    Lightning reads the module's weights first and calls ``on_save_checkpoint`` at the end. Adapters and pruned weights,
    which modules save in that hook, must come from the same model.
    """
    connector = trainer._checkpoint_connector
    require_attribute(connector, "dump_checkpoint")
    dump = type(connector).dump_checkpoint
    connector.dump_checkpoint = partial(around, partial(dump, connector))  # type: ignore[method-assign]


def number_names_by_own_files(trainer: pl.Trainer) -> None:
    """Make every ``ModelCheckpoint`` number its files by those in its state.

    Lightning's reads the folder, whose contents differ when other nodes have saved earlier.
    """
    for callback in model_checkpoints(trainer):
        require_attribute(callback, "file_exists")

        def file_exists(filepath: Any, trainer: pl.Trainer, callback: pl.callbacks.ModelCheckpoint = callback) -> bool:
            return filepath in (*callback.best_k_models, callback.best_model_path, callback.last_model_path)

        callback.file_exists = file_exists  # type: ignore[method-assign]


def model_checkpoints(trainer: pl.Trainer) -> list[pl.callbacks.ModelCheckpoint]:
    """Return the ``ModelCheckpoint`` callbacks."""
    return [each for each in trainer.callbacks if isinstance(each, pl.callbacks.ModelCheckpoint)]  # type: ignore[attr-defined]


def with_plain_numbers(value: Any) -> Any:
    """Return state with Python's numbers instead of numpy's, which ``weights_only`` loading does not read."""
    if type(value) is dict:
        return {name: with_plain_numbers(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(with_plain_numbers, value))
    return value.item() if type(value).__module__ == "numpy" and not value.shape else value


def copied_where(value: T, is_held: Callable[[Tensor], bool]) -> T:
    """Return a checkpoint with copies of the tensors that will be written to."""
    if isinstance(value, Tensor):
        if not is_held(value):
            return value
        copied = value.detach().clone()
        return nn.Parameter(copied, value.requires_grad) if isinstance(value, nn.Parameter) else copied  # type: ignore
    if type(value) in (dict, OrderedDict):
        same = copy.copy(value)  # a state_dict also has metadata
        for key, part in value.items():  # type: ignore[attr-defined]
            same[key] = copied_where(part, is_held)  # type: ignore[index]
        return same
    if type(value) in (list, tuple):
        return type(value)(copied_where(part, is_held) for part in value)  # type: ignore
    return value


@contextmanager
def taking_shapes(module: nn.Module, names: Collection[str] | None = None) -> Iterator[None]:
    """Inside, ``load_state_dict`` gives buffers and frozen parameters the shapes that it loads.

    torch itself raises an error for other shapes, also with ``strict=False``. The hook is private in torch 2.4.
    """
    require_attribute(module, "_register_load_state_dict_pre_hook")

    def take_shapes(state_dict: Mapping[str, Any], *others: object) -> None:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            loaded = state_dict.get(name)
            may_differ = not tensor.requires_grad and (names is None or name in names)
            if may_differ and isinstance(loaded, Tensor) and loaded.shape != tensor.shape:
                owner, _, own_name = name.rpartition(".")
                empty = torch.empty(loaded.shape, dtype=tensor.dtype, device=tensor.device)
                is_parameter = isinstance(tensor, nn.Parameter)
                replacement = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
                setattr(module.get_submodule(owner), own_name, replacement)

    handle = module._register_load_state_dict_pre_hook(take_shapes)
    try:
        yield
    finally:
        handle.remove()


def with_base_io(
    io: fabric.plugins.CheckpointIO | None, base: fabric.plugins.CheckpointIO
) -> fabric.plugins.CheckpointIO:
    """Return the user's plugin, or ``base``; a plugin that wraps nothing wraps ``base``."""
    if io is None:
        return base
    if isinstance(io, wrapper._WrappingCheckpointIO):
        io.checkpoint_io = base  # which has no effect if there is one
    return io


def wait_for_saves(io: fabric.plugins.CheckpointIO) -> None:
    """Wait for the asynchronous saves of a plugin. ``AsyncCheckpointIO`` has no method for this except its teardown.

    Raises:
        BaseException: The error of a save.
    """
    saves = _asynchronous_saves(io)
    if saves is not None and saves._executor is not None:
        saves._executor.submit(lambda: None).result()
        if saves._error is not None:
            raise saves._error


def after_saves(io: fabric.plugins.CheckpointIO, action: Callable[[], None]) -> None:
    """Call ``action`` after the pending saves of a plugin, unless one fails; asynchronously, if the plugin is.

    ``AsyncCheckpointIO`` saves later but removes at once, so it would remove the old checkpoint before the new one is
    written.
    """
    saves = _asynchronous_saves(io)
    if saves is None or saves._executor is None:
        action()
        return

    def act() -> None:
        if saves._error is None:
            try:
                action()
            except BaseException as error:
                saves._error = error

    saves._executor.submit(act)


def _asynchronous_saves(io: fabric.plugins.CheckpointIO | None) -> pl.plugins.AsyncCheckpointIO | None:
    while isinstance(io, wrapper._WrappingCheckpointIO):
        if isinstance(io, pl.plugins.AsyncCheckpointIO):
            return io
        io = io.checkpoint_io
    return None
