"""Replace an optimizer's step by another function, without a change of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_hiercomm.comm.autocast import Autocast

Update = Callable[[Callable[..., object] | None], object]
"""A function that is called instead of an optimizer's step, when gradients are ready.

It gets the user's own step; or None where a gradient scaler skipped it, on this rank or on its node. The step takes a
context manager for ``looking``: around whatever evaluates the loss again.
"""


@contextmanager
def in_place_of_step(optimizer: Optimizer, update: Update) -> Iterator[None]:
    """Call ``update`` whenever ``optimizer.step`` is called in the context, by Lightning or a precision plugin.

    Args:
        optimizer: The user's.
        update: Called once, when the gradients are there, with the optimizer's own step; at the end, with None, if
            ``step`` was not called.
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

        def step_as_ever(looking: Callable[[], AbstractContextManager[object]] = nullcontext) -> Any:
            with autocast.entered():
                if closure is None:
                    return original(**arguments)
                return original(_EvaluatedOnce(optimizer, closure, loss, looking), **arguments)

        with autocast.left():
            update(step_as_ever)
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
    """A closure that has been called; it returns the same loss again while the gradients are unchanged.

    SAM's kind of optimizer moves the weights, and evaluates the loss there: its second gradients take a closure.

    Args:
        optimizer: Has the gradients.
        closure: What was called.
        loss: What it returned.
        looking: Around every further call.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        loss: Any,
        looking: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._optimizer = optimizer
        self._closure = closure
        self._loss = loss
        self._looking = looking
        self._left: list[tuple[int, int] | None] | None = self._gradients()

    def __call__(self) -> Any:
        left, self._left = self._left, None
        if left is not None and left == self._gradients():
            return self._loss
        with self._looking():
            return self._closure()

    def _gradients(self) -> list[tuple[int, int] | None]:
        """Return identities and versions of the gradients, which change if one is written or removed."""
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        return [None if p.grad is None else (id(p.grad), p.grad._version) for p in parameters]
