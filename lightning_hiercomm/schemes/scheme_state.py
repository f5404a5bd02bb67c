"""The state of a running scheme: one dataclass whose fields are saved, restored and rolled back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from typing import Any, Protocol, runtime_checkable


class Scope(Enum):
    """Where a field of the state is saved."""

    SHARED = "equal on all ranks: in every checkpoint"
    LOCAL = "this rank's own: in its shard of a checkpoint"
    TRANSIENT = "in no checkpoint"


LOCAL = {"scope": Scope.LOCAL}
TRANSIENT = {"scope": Scope.TRANSIENT}


@runtime_checkable
class Stateful(Protocol):
    """A field that saves and restores itself, as in ``torch.distributed.checkpoint``."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


@dataclass
class SchemeState:
    """The counters that every scheme has.

    A scheme with more state derives a dataclass from this one. A field holds primitives, lists of them, or a
    :class:`Stateful`. A field is in every checkpoint, unless it has ``field(metadata=LOCAL)`` or ``TRANSIENT``.

    Attributes:
        steps: Optimizer-step attempts in this run, resumed runs included.
        step_in_epoch: Optimizer-step attempts in this epoch.
        epoch: The number of the epoch, from 0.
        synchronizations: How often the nodes have synchronized.
        unsynchronized_steps: Steps since the nodes last held the same parameters.
    """

    steps: int = 0
    step_in_epoch: int = 0
    epoch: int = 0
    synchronizations: int = 0
    unsynchronized_steps: int = field(default=0, metadata=LOCAL)

    @property
    def is_synchronized(self) -> bool:
        """Whether the replica already holds the averaged parameters."""
        return self.unsynchronized_steps == 0

    def settle(self) -> None:
        """Wait for pending exchanges, and keep the received values for their scheduled merge."""

    def saved(self, scope: Scope) -> dict[str, Any]:
        """Return the fields of one scope, as primitives and tensors."""
        return {
            name: value.state_dict() if isinstance(value, Stateful) else copy.deepcopy(value)
            for name, value, found in self._fields()
            if found is scope
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore :meth:`saved`. A local field that is missing gets its default: all ranks resume from equal values."""
        initial = type(self)()
        for name, value, scope in self._fields():
            if scope is Scope.SHARED or (scope is Scope.LOCAL and name in saved):
                if isinstance(value, Stateful):
                    value.load_state_dict(saved[name])
                else:
                    setattr(self, name, copy.deepcopy(saved[name]))
            elif scope is Scope.LOCAL and not isinstance(value, Stateful):
                setattr(self, name, getattr(initial, name))

    def undo_point(self) -> Callable[[], None]:
        """Store all fields except :class:`Stateful` ones; return a callback that restores them."""
        before = {name: copy.deepcopy(value) for name, value, _ in self._fields() if not isinstance(value, Stateful)}
        return partial(vars(self).update, before)

    def _fields(self) -> Iterator[tuple[str, Any, Scope]]:
        for each in fields(self):
            yield each.name, getattr(self, each.name), each.metadata.get("scope", Scope.SHARED)
