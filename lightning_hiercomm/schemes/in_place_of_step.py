"""Replacement of an optimizer's step by another function, for any training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_hiercomm.comm.autocast import Autocast

Update = Callable[[Callable[..., object] | None], object]
"""A function that is called instead of an optimizer's step, when gradients are ready.

Its argument is the user's own step, or None if a gradient scaler skipped it, on this rank or on its node. The step
takes a function that returns a context manager, in which an optimizer such as SAM evaluates the loss again.
"""


@contextmanager
def in_place_of_step(optimizer: Optimizer, update: Update) -> Iterator[None]:
    """Call ``update`` instead of ``optimizer.step`` in the context.

    Args:
        optimizer: The user's.
        update: Called when gradients are ready, with the optimizer's own step; or at the end of the context, with None,
            if ``step`` was not called.
    """
    patched_by_others = vars(optimizer).get("step")  # a learning-rate scheduler counts calls this way
    original = optimizer.step
    was_called = False

    def step(closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        nonlocal was_called
        was_called = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        autocast = Autocast()

        def own_step(evaluating: Callable[[], AbstractContextManager[object]] = nullcontext) -> Any:
            with autocast.entered():
                if closure is None:
                    return original(**arguments)
                return original(_EvaluatedOnce(optimizer, closure, loss, evaluating), **arguments)

        with autocast.left():
            update(own_step)
        return loss

    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if patched_by_others is None:
            del optimizer.step
        else:
            optimizer.step = patched_by_others  # type: ignore[method-assign]
    if not was_called:
        update(None)


class _EvaluatedOnce:
    """A closure that was called once, and returns its loss again while the gradients are unchanged.

    An optimizer such as SAM changes the parameters, and then calls the closure for gradients at the new values.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        loss: Any,
        evaluating: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._optimizer = optimizer
        self._closure = closure
        self._loss = loss
        self._evaluating = evaluating
        self._unchanged: list[tuple[int, int] | None] | None = self._gradients()

    def __call__(self) -> Any:
        unchanged, self._unchanged = self._unchanged, None
        if unchanged is not None and unchanged == self._gradients():
            return self._loss
        with self._evaluating():
            return self._closure()

    def _gradients(self) -> list[tuple[int, int] | None]:
        """Return identities and versions of the gradients, which change if one is written or removed."""
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        return [None if p.grad is None else (id(p.grad), p.grad._version) for p in parameters]
