"""Finds parameters that change in training although no optimizer step is counted, so that nodes never synchronize."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter, is_
from weakref import ReferenceType, ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lightning_hiercomm.comm.dtensor import local
from lightning_hiercomm.run.checksums import Checksums
from lightning_hiercomm.run.replicas import Replicas, trained_by
from lightning_hiercomm.schemes import RunningScheme, Scheme

_FIRST_BATCHES = 3
"""Batches in which values are always compared, because writes to ``parameter.data`` change no version counter."""

_MOST_COMPARISONS = 16
"""The limit of comparisons, because a program that accumulates gradients may write equal values in every batch."""

_CHANGES, _CHANGES_IN_LOOPS = 2, 8
"""Changes that end the run. One may be an initialization from the first batch, or a clamp, in a program that
accumulates gradients. In a loop whose batches are not known, some may be steps of an inner loop that the program undoes
(MAML, Reptile)."""

_version = attrgetter("_version")


class _Watched:
    """Parameters that should change only in batches with a counted step."""

    def __init__(
        self, parameters: Mapping[str, Tensor], schemes: Sequence[RunningScheme[Scheme]], known: Checksums | None
    ) -> None:
        self._names = list(parameters)
        self.parameters = list(parameters.values())
        self._tensors = [tensor for tensor in map(local, self.parameters) if not tensor.is_inference()]
        self._schemes = schemes
        self._steps = self._steps_of_epochs = self._steps_now()
        self._version: int | None = self._version_now()
        self._first_batches, self._comparisons = _FIRST_BATCHES, _MOST_COMPARISONS
        self._known = known
        self.changed: list[str] = []
        self.changes = 0

    def _steps_now(self) -> int:
        return sum(scheme.state.steps for scheme in self._schemes)

    def _version_now(self) -> int:
        return sum(map(_version, self._tensors))

    def is_suspicious(self) -> bool:
        """Return whether, since the last call, no step was counted and the parameters may have changed."""
        steps = self._steps_now()
        if steps != self._steps:
            self._steps, self._version = steps, None  # reading the version counters takes time
            self._first_batches, self._known, self.changes = 0, None, 0
            return False
        before, self._version = self._version, self._version_now()
        has_trace = before not in (None, self._version)
        is_first, self._first_batches = self._first_batches > 0, max(0, self._first_batches - 1)
        if not (has_trace or is_first) or self._comparisons == 0:
            return False
        self._comparisons -= 1
        return True

    def is_idle(self) -> bool:
        """Return whether no step was counted in the epoch that ends."""
        steps = self._steps_now()
        before, self._steps_of_epochs = self._steps_of_epochs, steps
        return steps == before

    def compare(self, now: Checksums) -> None:
        """Count a change since the last comparison, if there is one."""
        known, self._known = self._known, now
        if known is not None and (changed := now.changed_since(known, self._names)):
            self.changed = changed
            self.changes += 1


class UncountedChanges:
    """Compares the parameters of a run before and after each batch. Not collective.

    It compares version counters after every batch, and values only if these differ and no step was counted. Parameters
    that no scheme trains count if an optimizer steps them with gradients of the run's own backward passes. A teacher
    that follows its student does not count.
    """

    def __init__(self, schemes: Sequence[RunningScheme[Scheme]], replicas: Replicas) -> None:
        self._schemes = schemes
        self._replicas = replicas
        self._watched: list[tuple[str, _Watched]] = []
        self._untrained: _Watched | None = None
        self._gradients: dict[int, ReferenceType[Tensor]] = {}  # of what no scheme trains
        self._stepped_by = ""
        self._seen: list[object] | None = None
        self._hook: RemovableHandle | None = None

    def begin(self, known: Checksums) -> None:
        self._seen = None
        self._follow(known)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Enclose a backward pass of the run."""
        untrained = [] if self._untrained is None else self._untrained.parameters
        before = [(p.grad, p.grad._version) if p.grad is not None else (None, 0) for p in untrained]
        yield
        for parameter, (grad, version) in zip(untrained, before, strict=True):
            now = parameter.grad
            if now is not None and (now is not grad or now._version != version):
                self._gradients[id(parameter)] = ref(now)
        if self._gradients:
            self._see_all_steps()

    def after_batch(self, is_known: bool) -> None:
        """End a batch in which a step was expected.

        Args:
            is_known: Whether a batch has ended. Otherwise a forward pass begins, which may belong to the same batch.
        """
        self._follow()
        suspected = [(kind, watched) for kind, watched in self._all() if watched.is_suspicious()]
        self._compare(suspected, _CHANGES if is_known else _CHANGES_IN_LOOPS)

    def end_epoch(self) -> None:
        """End an epoch or the run. Raises like :meth:`after_batch`."""
        self._compare([(kind, watched) for kind, watched in self._all() if watched.is_idle()], _CHANGES)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _compare(self, suspected: Sequence[tuple[str, _Watched]], most: int) -> None:
        if not suspected:
            return
        now = self._replicas.checksums()
        for kind, watched in suspected:
            watched.compare(now)
            if watched.changes >= most:
                raise RuntimeError(_message(kind, watched.changed, is_trained=watched is not self._untrained))

    def _all(self) -> list[tuple[str, _Watched]]:
        untrained = self._untrained
        if untrained is None:
            return self._watched
        if not self._watched and any(p.grad is not None or id(p) in self._gradients for p in untrained.parameters):
            return [(self._stepped_by, untrained)]  # if its class is known
        return [*self._watched, (self._stepped_by, untrained)] if self._stepped_by else self._watched

    def _follow(self, known: Checksums | None = None) -> None:
        """Watch the parameters that are trained now, if others were before."""
        replicas = [scheme.replica for scheme in self._schemes]
        if self._seen is not None and all(map(is_, replicas, self._seen)):
            return
        self._seen = [*replicas]
        parameters = list(self._replicas.module.named_parameters())
        ids = [set(map(id, replica.parameters)) for replica in replicas]
        self._watched = []
        for scheme, own in zip(self._schemes, ids, strict=True):
            sharing = [other for other, theirs in zip(self._schemes, ids, strict=True) if not own.isdisjoint(theirs)]
            watched = {name: parameter for name, parameter in parameters if id(local(parameter)) in own}
            if watched:
                self._watched.append((type(scheme.optimizer).__name__, _Watched(watched, sharing, known)))
        trained = {id(parameter) for optimizer in self._replicas.optimizers for parameter in trained_by(optimizer)}
        others = {name: p for name, p in parameters if p.requires_grad and p.numel() and id(p) not in trained}
        self._untrained = _Watched(others, (), known) if others else None
        if self._untrained is not None and not self._watched:
            self._see_all_steps()

    def _see_all_steps(self) -> None:
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._note_step)  # of all optimizers of the process

    def _note_step(self, optimizer: Optimizer, *_: object) -> None:
        if any(optimizer is known for known in self._replicas.optimizers):
            return
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not self._watched and self._untrained is not None:
            untrained = set(map(id, self._untrained.parameters))
            if any(id(parameter) in untrained for parameter in stepped):
                self._stepped_by = type(optimizer).__name__
        elif any(p.grad is not None and p.grad is self._gradients.get(id(p), _nothing)() for p in stepped):
            self._stepped_by = type(optimizer).__name__


def _nothing() -> None:
    return None


def _message(kind: str, names: Sequence[str], is_trained: bool) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    changed = f"{', '.join(names[:3])}{more} changed in several batches"
    if is_trained:
        return (
            f"{changed} in which the step() of {kind} was not called through what self.optimizers() returns: nodes"
            " count these calls to know when to synchronize, and never would. Call it instead of writing to parameters"
            " or stepping another optimizer (with Fabric: that of what fabric.setup returned). Give an optimizer that"
            " takes several steps, such as SAM, a closure: step(closure)"
        )
    by = f"{kind} trains them, which is not an optimizer of the run" if kind else "the run has no optimizer"
    return (
        f"{changed}, but {by}: nodes would never synchronize them. Return their optimizer from configure_optimizers and"
        " step what self.optimizers() returns (with Fabric: give it to fabric.setup)"
    )
