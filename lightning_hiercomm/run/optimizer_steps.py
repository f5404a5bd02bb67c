"""Watches the optimizers of a program: which steps count, and which communicate with nodes that differ."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol, TypeVar

from torch.optim import Optimizer

from lightning_hiercomm.schemes import RunningScheme, Scheme
from lightning_hiercomm.schemes.optimizer_state import inner_optimizers

T = TypeVar("T")


class Watch(Protocol):
    """Finds collectives in a repeated part of a program, such as the forward pass."""

    def begin(self) -> None:
        """Begin a pass through the repeated part."""

    def end(self) -> None:
        """End the pass, if one has begun."""


class Collectives(Protocol):
    """Counts collectives that a program starts by itself, with ranks that do not share its gradients."""

    def excused(self) -> AbstractContextManager[None]:
        """Return a context whose collectives are not counted."""

    def watch(self, found: Callable[[str, str], None]) -> Watch:
        """Call ``found`` once, with the line that starts a collective, and the optimizer if it is inside of a step."""

    def close(self) -> None:
        """Release the process groups, and stop counting."""


class OptimizerSteps:
    """Hooks into the steps of a run's optimizers.

    The step of an optimizer inside of another one that steps in halves, such as SAM, counts as a step of the outer one.
    Steps that are not counted raise an error, and so do collectives with nodes that hold other parameters.

    Attributes:
        before_inner_step: Called before the step of an inner optimizer; returns whether it counts.
    """

    def __init__(
        self,
        schemes: Sequence[RunningScheme[Scheme]],
        optimizers: Sequence[Optimizer],
        count: Callable[[Optimizer, Callable[[], Any]], Any],
        collectives: Collectives | None,
    ) -> None:
        self._optimizers = optimizers
        self._count = count
        self._collectives = collectives
        self._rank = schemes[0].topology.rank if schemes else 0
        self._scheme = schemes[0].config if schemes else None
        self._forward = None if collectives is None else collectives.watch(self._found_in_forward)
        self._step = None if collectives is None else collectives.watch(self._found_in_step)
        self._found: tuple[str, str] | None = None
        self._depth = 0  # of steps within a step
        self._ending: list[Callable[[], object]] = []
        self.is_stepping = False
        self.before_inner_step: Callable[[], bool] = lambda: True
        for scheme, optimizer in zip(schemes, optimizers, strict=True):
            if not scheme.is_alone:
                self._watch(optimizer, refuses=scheme.config.gradients != "world")

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Enclose an attempt to step that counts."""
        self.is_stepping, self._depth = True, 0
        try:
            yield
        finally:
            self.is_stepping = False
            if self._step is not None:
                self._step.end()  # after a step that has failed

    def excused(self) -> AbstractContextManager[None]:
        """Return a context whose collectives do not count as the program's own."""
        return nullcontext() if self._collectives is None else self._collectives.excused()

    def begin_forward(self) -> None:
        if self._forward is not None:
            self._forward.begin()

    def end_forward(self) -> None:
        if self._forward is not None:
            self._forward.end()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Enclose a forward pass, and in manual optimization also backward passes and steps."""
        if self._forward is None:
            yield
            return
        self.begin_forward()
        try:
            yield
        finally:
            self.end_forward()
        self._refuse()

    def close(self) -> None:
        """Remove all hooks from the optimizers."""
        while self._ending:
            self._ending.pop()()
        if self._collectives is not None:
            self._collectives.close()

    def _watch(self, optimizer: Optimizer, refuses: bool) -> None:
        inner = [each for each in inner_optimizers(optimizer) if not any(each is known for known in self._optimizers)]
        for each in inner:
            self._ending.append(_replace_step(each, functools.partial(self._step_inner, optimizer)))
        for each in (optimizer, *inner) if refuses else ():
            self._hook_into(each)

    def _hook_into(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, Optimizer):
            with suppress(AttributeError):  # of one that has not called the constructor of its base class
                self._ending.append(optimizer.register_step_pre_hook(self._before_step).remove)
                self._ending.append(optimizer.register_step_post_hook(self._after_step).remove)
                return
        self._ending.append(_replace_step(optimizer, functools.partial(self._step_with_hooks, optimizer)))

    def _step_with_hooks(self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = (optimizer, *args), kwargs
        (_, *positional), keywords = self._before_step(optimizer, *given) or given
        result = step(*positional, **keywords)
        self._after_step(optimizer)
        return result

    def _step_inner(self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Step an inner optimizer; this counts as a step of ``optimizer``, unless that is stepping already."""
        if self.is_stepping or not self.before_inner_step():
            return step(*args, **kwargs)
        undo = _replace_step(optimizer, lambda _, *args, **kwargs: step(*args, **kwargs))  # for schemes that replace it
        try:
            return self._count(optimizer, lambda: optimizer.step(*args, **kwargs))
        finally:
            undo()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_stepping:
            # torch.distributed.checkpoint steps with a learning rate of 0, to create the optimizer's state
            if any(float(group.get("lr", 1.0)) for group in optimizer.param_groups):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() was called on the optimizer itself: nodes do not count it, and"
                    " would never synchronize. Step what `self.optimizers()` returns (without"
                    " `use_pl_optimizer=False`), or with Fabric what `fabric.setup` returned"
                )
            return None
        if self._collectives is None or self._step is None:
            return None
        self._depth += 1
        if self._depth == 1:
            self._step.begin()
        excused = self._collectives.excused
        if callable(kwargs.get("closure")):  # the user's forward and backward pass, and callbacks
            return args, {**kwargs, "closure": _inside(excused, kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], _inside(excused, args[1]), *args[2:]), kwargs
        return None

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._step is None or not self.is_stepping:
            return
        self._depth -= 1
        if self._depth == 0:
            self._step.end()
            self._refuse(type(optimizer).__name__)

    def _found_in_step(self, line: str, _: str) -> None:
        self._found = line, ""

    def _found_in_forward(self, line: str, optimizer: str) -> None:
        if optimizer:  # an optimizer that steps in halves
            self._found = line, optimizer
        elif self._rank == 0:
            warnings.warn(
                f"{line}: a collective over several nodes in the forward pass or the loss. With {self._scheme!r} nodes"
                " hold different parameters, so it mixes values of different models, and all nodes wait for each"
                f" other. Use AllReduce(){self._inside_node('communicate inside the node: group=')}",
                stacklevel=2,
            )

    def _refuse(self, optimizer: str = "") -> None:
        if self._found is not None:
            line, name = self._found
            give = "give it, if it takes one, the process group of its node: process_group="
            raise RuntimeError(
                f"{name or optimizer}.step() communicates over several nodes ({line}). With {self._scheme!r} nodes hold"
                " different parameters and gradients, which it would mix. Use AllReduce()" + self._inside_node(give)
            )

    def _inside_node(self, remedy: str) -> str:
        if self._scheme is None or self._scheme.gradients != "node":
            return ""
        return f", or {remedy}self.trainer.strategy.node_process_group"


def _inside(context: Callable[[], AbstractContextManager[None]], call: Callable[..., T]) -> Callable[..., T]:
    def called(*args: Any, **kwargs: Any) -> T:
        with context():
            return call(*args, **kwargs)

    return called


def _replace_step(optimizer: Optimizer, step: Callable[..., Any]) -> Callable[[], None]:
    """Replace ``optimizer.step`` by ``step``, which gets the original as first argument; return an undo function."""
    original, held = optimizer.step, vars(optimizer).get("step")

    @functools.wraps(original)  # learning rate schedulers look for their own wrapper
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return step(original, *args, **kwargs)

    optimizer.step = replaced  # type: ignore[method-assign]

    def undo() -> None:
        if held is None:
            del optimizer.step
        else:
            optimizer.step = held  # type: ignore[method-assign]

    return undo
