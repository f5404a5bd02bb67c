"""Leaves the user's autocast, which is for the model and not for collectives and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


def _accelerator() -> str:
    if not hasattr(torch, "accelerator"):  # before torch 2.6
        return "cuda"
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type


class Autocast:
    """The autocast of this thread when the object is created, which can be left and entered again.

    In manual optimization, Lightning steps optimizers inside the autocast of ``training_step``. There it would round an
    outer optimizer's products, and fail to stack tensors of different types.
    """

    def __init__(self) -> None:
        kinds = dict.fromkeys(["cpu", _accelerator()])
        self._on = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}

    @contextmanager
    def left(self) -> Iterator[None]:
        """Return a context in which autocast is disabled."""
        with ExitStack() as stack:
            for kind in self._on:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enable it again in the context."""
        with ExitStack() as stack:
            for kind, dtype in self._on.items():
                stack.enter_context(torch.autocast(kind, dtype))
            yield


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Disable autocast in the context, or in the decorated function."""
    with Autocast().left():
        yield
