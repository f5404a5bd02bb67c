"""Who writes checkpoints, and when it is done, as Lightning's plugins do it: one function a touch, with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.load import _METADATA_FILENAME as METADATA_FILENAME
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

__all__ = ["METADATA_FILENAME", "after_saves", "holds_averaged_weights", "wait_for_saves", "with_base_io"]


def holds_averaged_weights(checkpoint: Mapping[str, Any]) -> bool:
    """Whether the ``WeightAveraging`` callback put its average, made of one node's weights, into the ``state_dict``."""
    return "current_model_state" in checkpoint


def with_base_io(io: CheckpointIO | None, base: CheckpointIO) -> CheckpointIO:
    """The user's plugin, or ``base``, which is also what a plugin wraps that was given nothing else to wrap."""
    if io is None:
        return base
    if isinstance(io, _WrappingCheckpointIO):
        io.checkpoint_io = base  # which has no effect if there is one
    return io


def wait_for_saves(io: CheckpointIO) -> None:
    """Return when what a plugin saves beside training is saved; ``AsyncCheckpointIO`` can only be torn down.

    Raises:
        BaseException: What it met while it saved.
    """
    beside = _saves_beside_training(io)
    if beside is not None and beside._executor is not None:
        beside._executor.submit(lambda: None).result()
        if beside._error is not None:
            raise beside._error


def after_saves(io: CheckpointIO, action: Callable[[], None]) -> None:
    """Call ``action`` when all is saved that a plugin was told to: now, or beside training, unless a save failed.

    ``AsyncCheckpointIO`` saves later but removes at once, so the old checkpoint would go before the new one is there.
    """
    beside = _saves_beside_training(io)
    if beside is None or beside._executor is None:
        action()
        return

    def act() -> None:
        if beside._error is None:
            try:
                action()
            except BaseException as error:
                beside._error = error

    beside._executor.submit(act)


def _saves_beside_training(io: CheckpointIO | None) -> AsyncCheckpointIO | None:
    while isinstance(io, _WrappingCheckpointIO):
        if isinstance(io, AsyncCheckpointIO):
            return io
        io = io.checkpoint_io
    return None
