"""The user's autocast: it is for a model's arithmetic, and not for what ranks make of each other's numbers."""

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
    """The autocast that is on in this thread when this is made; it may be left for a while, and entered again inside.

    Lightning's manual optimization steps optimizers inside that of ``training_step``, and backward passes run in it
    there. It would narrow an outer optimizer's products, and refuses to stack float16 where it makes bfloat16.
    """

    def __init__(self) -> None:
        kinds = dict.fromkeys(["cpu", _accelerator()])
        self._on = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}

    @contextmanager
    def left(self) -> Iterator[None]:
        """Inside, there is none."""
        with ExitStack() as stack:
            for kind in self._on:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, it is as it was."""
        with ExitStack() as stack:
            for kind, dtype in self._on.items():
                stack.enter_context(torch.autocast(kind, dtype))
            yield


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Inside, or in the function that it decorates, there is no autocast."""
    with Autocast().left():
        yield
