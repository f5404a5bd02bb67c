"""Checks the first steps of a run for programs whose ranks would train different models until its end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch.optim import Optimizer

from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.dtensor import local
from lightning_hiercomm.nodes.checksums import print_of
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.shapes import are_equal
from lightning_hiercomm.schemes import RunningScheme, Scheme

_FIRST = 16  # batches and steps; programs that accumulate gradients by themselves step late


class Misuse:
    """Raises an error if no step is counted or an optimizer communicates; warns of gradients that were not averaged."""

    def __init__(self, schemes: Sequence[RunningScheme[Scheme]], replicas: Replicas, begun: Callable[[], int]) -> None:
        self._schemes = [each for each in schemes if not each.is_alone and each.config.gradients != "world"]
        self._replicas, self._begun = replicas, begun  # the collectives of this rank in the default process group
        self._attempts, self._expected, self._depth = dict[int, int](), 0, 0
        self.gradient_group: Communicator | None = None  # ranks that should share gradients, in manual optimization
        self.begin()

    def begin(self) -> None:
        """Begin to count batches, also after something else than training has changed parameters."""
        self._batches = 0 if self._schemes else _FIRST

    def end_batch(self) -> None:
        """End a batch in which a step was expected. Raises an error if parameters change without a counted step."""
        self._batches += 1
        if self._batches == 2:
            self._known = self._replicas.checksums()  # the first batch may have initialized parameters
        if self._batches != _FIRST:
            return
        now, named = self._replicas.checksums(), dict(self._replicas.module.named_parameters())
        if changed := [n for n, known in now.items() if named[n].requires_grad and known != self._known.get(n)]:
            raise RuntimeError(
                f"{', '.join(changed[:3])} changed in {_FIRST} batches without a counted optimizer step: nodes would"
                " never synchronize. Step what self.optimizers() returns (with Fabric: what fabric.setup returned), and"
                " give an optimizer that takes several steps, such as SAM, a closure: step(closure)"
            )

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Enclose an attempt to step, which counts. Raises an error if the optimizer communicates between nodes."""
        self._batches, self._depth = _FIRST, 0
        attempt = self._attempts[id(optimizer)] = self._attempts.get(id(optimizer), 0) + 1
        with ExitStack() as hooks:
            with suppress(AttributeError):  # of an optimizer that has not called the constructor of torch's
                if self._schemes and attempt <= _FIRST:
                    hooks.enter_context(optimizer.register_step_pre_hook(self._before_step))
                    hooks.enter_context(optimizer.register_step_post_hook(self._after_step))
            yield
        if self.gradient_group is not None and attempt <= 3:
            self._compare_gradients(optimizer, self.gradient_group)

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        if self._depth > 1:
            return None  # this is the step of a base class
        self._expected = self._begun()
        given = [self._closure()(each) if callable(each) else each for each in (*args, *kwargs.values())]
        return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))

    @contextmanager
    def _closure(self) -> Iterator[None]:
        before = self._begun()
        yield
        self._expected += self._begun() - before

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._begun() > self._expected:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() communicates over several nodes, which hold different parameters"
                f" with {self._schemes[0].config!r}. Use AllReduce(), or give it the process group of its node, if it"
                " takes one: process_group=self.trainer.strategy.node_process_group"
            )

    def _compare_gradients(self, optimizer: Optimizer, group: Communicator) -> None:
        own = set(map(id, self._replicas.module.parameters()))
        grads = [p.grad for p in self._replicas.trained_by(optimizer) if id(p) in own and p.grad is not None]
        if are_equal([int(print_of(local(grad).to_dense())) for grad in grads], group, self._replicas.device):
            return
        self.gradient_group = None
        if group.rank == 0:
            warnings.warn(
                f"{type(optimizer).__name__} stepped with gradients that ranks {', '.join(map(str, group.ranks[:8]))}"
                " should share, but that were not averaged over them: these ranks now train different models. In manual"
                " optimization, call self.manual_backward(loss) instead of loss.backward().",
                stacklevel=2,
            )
