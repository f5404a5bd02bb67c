"""Finds collectives that a program starts by itself, among those that torch counts per process group."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from lightning_hiercomm._lightning import require_attribute
from lightning_hiercomm.comm.torch import is_of_communicator

_TRACED = (10, 100, 1000)
"""The number of passes that are traced after the first, second and third pass with a collective."""

_MOST_UNEXPLAINED = 3
"""Tracing ends after so many traced passes whose collectives are not the program's."""

_LIBRARIES = {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_utilities"}
_LIBRARIES |= {"lightning_hiercomm", "typing_extensions", "contextlib", "functools"}  # the last for decorators
_METRICS = {"torchmetrics", "torcheval", "ignite"}


class CollectiveCounter:
    """Counts the collectives that a program starts on process groups with ranks outside a given set.

    Every process group has a sequence number, which each of its collectives increments. Groups of this package's
    communicators are excluded, because background threads use them. Only the training thread uses the default group.

    Args:
        ranks: Ranks of the default process group; collectives among them do not count.

    Attributes:
        is_excusing: Whether collectives that are started now do not count.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = frozenset(ranks)
        self._groups: list[Any] = []
        self._counted: list[Any] = []
        self._excused = 0
        self._is_closed = False
        self.is_excusing = False

    def count(self) -> int:
        """Return the number of collectives without excused ones; only differences have a meaning."""
        return self._total() - self._excused

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Return a context whose collectives are not counted."""
        outside, before = self.is_excusing, self._total() - self._excused
        self.is_excusing = True
        try:
            yield
        finally:
            self.is_excusing = outside
            self._excused = self._total() - before  # includes what was excused inside

    def watch(self, found: Callable[[str, str], None]) -> CollectiveWatch:
        """Return a watch that calls ``found``; see :class:`CollectiveWatch`."""
        return CollectiveWatch(self, found)

    def close(self) -> None:
        """Release the process groups, which have threads, and stop counting."""
        self._is_closed, self._groups, self._counted = True, [], []

    def _total(self) -> int:
        if self._is_closed or not dist.is_initialized():
            return 0
        groups = list(process_groups())
        if groups != self._groups:
            self._groups = groups
            outside = (group for group in groups if not self._ranks.issuperset(dist.get_process_group_ranks(group)))
            self._counted = [
                backend for group in outside if not is_of_communicator(group) for backend in counting_backends(group)
            ]
        return sum(backend._get_sequence_number_for_group() for backend in self._counted)


def process_groups() -> Iterable[Any]:
    """Return all process groups of this process; torch has no public list of them."""
    groups: Iterable[Any] = distributed_c10d._world.pg_map
    return groups


def collectives_begun() -> int:
    """Return how many collectives this process has begun, in all process groups together. For any thread."""
    return sum(map(_begun_in, [*process_groups()])) if dist.is_initialized() else 0


def collectives_of_default_group() -> int:
    """Return how many collectives this process has begun in the default process group. For any thread."""
    return _begun_in(dist.group.WORLD) if dist.is_initialized() else 0


def _begun_in(group: Any) -> int:
    with contextlib.suppress(RuntimeError):  # another thread may destroy a group meanwhile
        return sum(backend._get_sequence_number_for_group() for backend in counting_backends(group))
    return 0


def gpu_is_busy() -> bool:
    """Return whether a default stream of a GPU that this process uses has work to do. For any thread.

    torch has no public way to ask which GPUs those are, and asking another one would take memory there.
    """
    if not torch.cuda.is_initialized():
        return False
    is_used: Callable[[int], bool] = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    used = filter(is_used, range(torch.cuda.device_count()))
    return any(not torch.cuda.default_stream(index).query() for index in used)


def counting_backends(group: Any) -> list[Any]:
    """Return the backends of a process group, one per kind of device, that have a sequence number.

    The number of a group with several backends is that of only one of them.
    """
    require_attribute(group, "_device_types")
    require_attribute(group, "_get_backend")
    backends = {id(backend): backend for backend in map(group._get_backend, group._device_types)}
    counting = []
    for backend in backends.values():
        with contextlib.suppress(RuntimeError):  # backends of third parties need not have one
            backend._get_sequence_number_for_group()
            counting.append(backend)
    return counting


class CollectiveWatch:
    """Finds the line of the program that starts counted collectives in a repeated pass.

    It traces passes only after one with a collective, because tracing takes time. It ignores collectives of metric
    libraries and of other threads.

    Args:
        counter: Counts the collectives.
        found: Called once, with a description of the line and the name of the optimizer whose method contains it.
    """

    def __init__(self, counter: CollectiveCounter, found: Callable[[str, str], None]) -> None:
        self._counter = counter
        self._found = found
        self._windows = list(_TRACED)
        self._left = 0
        self._unexplained = _MOST_UNEXPLAINED
        self._tracing: _Tracing | None = None
        self._optimizer = ""
        self._began: tuple[int, bool, bool] | None = None

    def begin(self) -> None:
        self.end()
        if not self._unexplained:
            return
        outside, self._counter.is_excusing = self._counter.is_excusing, False
        if self._left and self._tracing is None and _get_current_dispatch_mode() is None:
            self._left -= 1
            self._tracing = _Tracing(self._counter)
            self._tracing.__enter__()  # type: ignore[no-untyped-call]
        self._began = self._counter.count(), outside, self._tracing is not None

    def end(self) -> None:
        frame = None
        if self._tracing is not None and _get_current_dispatch_mode() is self._tracing:  # or another mode
            self._tracing.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            frame, self._optimizer, self._tracing = self._tracing.frame, self._tracing.optimizer, None
        if self._began is None:
            return
        (before, self._counter.is_excusing, was_traced), self._began = self._began, None
        if frame is not None:
            self._unexplained = 0
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
            self._found(line, self._optimizer)
        elif self._counter.count() > before:
            if was_traced:
                self._unexplained -= 1
            elif not self._left:
                self._left = self._windows.pop(0) if self._windows else 0


class _Tracing(TorchDispatchMode):
    """Stores the first frame of the program that starts a counted collective in this thread."""

    def __init__(self, counter: CollectiveCounter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter
        self.frame: FrameType | None = None
        self.optimizer = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if self.frame is not None or "c10d" not in name or "barrier" in name or self._counter.is_excusing:
            return func(*args, **(kwargs or {}))
        before = self._counter.count()
        result = func(*args, **(kwargs or {}))
        if self._counter.count() > before:
            self.frame = _frame_of_program()
            self.optimizer = _optimizer_around(self.frame)
        return result


def _frame_of_program() -> FrameType | None:
    """Return the innermost frame outside of libraries; None if it is in a metric library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).split(".")[0]
        if package in _METRICS:
            return None
        if package not in _LIBRARIES:
            return frame
        frame = frame.f_back
    return None


def _optimizer_around(frame: FrameType | None) -> str:
    """Return the name of the optimizer whose method contains a frame, or an empty string; not of a closure's caller."""
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] != "lightning_hiercomm":
        owner = frame.f_locals.get("self")
        if isinstance(owner, Optimizer):
            return type(getattr(owner, "optimizer", owner)).__name__  # without Lightning's wrapper
        if isinstance(owner, nn.Module):
            return ""
        frame = frame.f_back
    return ""
