"""Where the main thread of a rank is, read from its Python stack, and whether it waits there for other ranks."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from traceback import walk_tb
from types import FrameType

_STANDARD_LIBRARY = os.path.dirname(os.__file__)
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = ("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_WRAPPERS = ("/torch/distributed/c10d_logger.py", "/torch/utils/_contextlib.py")
_COLLECTIVES = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/nn/functional.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/utils.py",
    "/torch/nn/parallel/distributed.py",
)
_EXCHANGES = ("comm", "control")
_CALLS_EXCHANGES = ("_lightning", "nodes", "run", "schemes", "trainer")
_IDLE = 0.2  # of a core


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a main thread is.

    Attributes:
        seconds: How long it has been there.
        call: The function that waits for other ranks, such as ``"torch.distributed.barrier"``; empty if none does.
        digest: Of the stack outside of this package; equal on ranks that wait in the same place.
        line: The user's line of code, such as ``"train.py:31 (on_train_batch_end)"``; empty if there is none.
        collectives: How many collectives over all ranks this rank has begun; equal on ranks that wait in the same one.
    """

    seconds: float = 0.0
    call: str = ""
    digest: str = ""
    line: str = ""
    collectives: int = 0


class MainThread:
    """Reports where the main thread of this process is.

    It waits for other ranks if the innermost function of its stack is a collective of ``torch.distributed`` or of this
    package. It also does if the process is idle, and that function calls collectives in C++, as DDP's backward pass
    does. Any other long call is no such wait.

    Args:
        count_collectives: Returns how many collectives this process has begun. A thread that begins more of them in the
            same place does not wait.
        count_of_all_ranks: Returns how many collectives over all ranks this process has begun. They count from here.
    """

    def __init__(
        self, count_collectives: Callable[[], int] = lambda: 0, count_of_all_ranks: Callable[[], int] = lambda: 0
    ) -> None:
        self._count_of_all_ranks, self._first_count = count_of_all_ranks, count_of_all_ranks()
        self._count_collectives = count_collectives
        self._here: object = None
        self._since = self._processor_time = 0.0

    def position(self) -> Position:
        """Return where the main thread is now."""
        frames = _frames(sys._current_frames().get(threading.main_thread().ident or 0))
        inside = [*takewhile(_is_inside, frames)]
        outside, now = frames[len(inside) :], time.monotonic()
        here = (*((frame.f_code, frame.f_lasti) for frame in outside), self._count_collectives())
        if here != self._here:
            self._here, self._since, self._processor_time = here, now, time.process_time()
        seconds, waits = now - self._since, _innermost_owner(frames)
        is_wait = waits in ("collective", "exchange") or (waits in ("backward", "caller") and self._is_idle(seconds))
        call = ("backward" if waits == "backward" else _call(inside)) if is_wait else ""
        functions = [(frame.f_code.co_filename, frame.f_code.co_name) for frame in outside]
        digest = hashlib.blake2b(repr((functions, call)).encode(), digest_size=8).hexdigest()
        collectives = self._count_of_all_ranks() - self._first_count
        return Position(seconds=seconds, call=call, digest=digest, line=_line(frames), collectives=collectives)

    def _is_idle(self, seconds: float) -> bool:
        """Return whether the process has used little processor time in the last seconds."""
        return time.process_time() - self._processor_time < _IDLE * max(seconds, 1.0)


def describe_caller() -> tuple[str, bool]:
    """Return the user's line of code that called this, and whether it is inside of ``Trainer.save_checkpoint``."""
    frames = _frames(sys._getframe())
    saves = (frame for frame in frames if frame.f_code.co_name == "save_checkpoint")
    return _line(frames), any(_owner_of(frame) == "library" for frame in saves)


def is_of_collective(error: BaseException) -> bool:
    """Return whether an exception was raised by a collective, whose peer may have died."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return _innermost_owner(frames[::-1]) in ("collective", "exchange", "backward", "caller")


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of a stack, the innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


@lru_cache(maxsize=4096)
def _owner(file: str) -> str:
    """Return whose code a file is; "exchange", "caller" and "package" are ours."""
    installed = next((part for part in _INSTALLED if part in file), None)
    if file.startswith("<") or file.endswith(_WRAPPERS) or (file.startswith(_STANDARD_LIBRARY) and installed is None):
        return "wrapper"
    if file.startswith(_PACKAGE):
        folder = file.removeprefix(_PACKAGE).split("/")[1]
        return "exchange" if folder in _EXCHANGES else "caller" if folder in _CALLS_EXCHANGES else "package"
    if file.endswith("/torch/autograd/graph.py"):
        return "backward"
    if file.endswith(_COLLECTIVES):
        return "collective"
    library = file.rpartition(installed)[2].partition("/")[0] if installed else ""
    return "library" if library in _LIBRARIES else "user"


def _owner_of(frame: FrameType) -> str:
    return _owner(frame.f_code.co_filename)


def _innermost_owner(frames: Iterable[FrameType]) -> str | None:
    return next((owner for owner in map(_owner_of, frames) if owner != "wrapper"), None)


def _is_inside(frame: FrameType) -> bool:
    """Return whether a frame is of a collective or of this package: these may differ between ranks of one exchange."""
    return _owner_of(frame) not in ("backward", "library", "user")


def _call(inside: Sequence[FrameType]) -> str:
    """Return the name of the outermost function of this package, which all ranks of an exchange share, or of torch."""
    of_torch = [frame.f_code.co_name for frame in inside if _owner_of(frame) == "collective"]
    ours = [frame.f_code.co_name for frame in inside if _owner_of(frame) in ("exchange", "caller", "package")]
    return f"{ours[-1]} (lightning_hiercomm)" if ours else f"torch.distributed.{of_torch[-1]}"


def _line(frames: Sequence[FrameType]) -> str:
    frame = next((frame for frame in frames if _owner_of(frame) == "user"), None)
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else ""
