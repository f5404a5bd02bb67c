"""Where the main thread of a rank waits for other ranks, read from its Python stack."""

from __future__ import annotations

import dis
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, takewhile
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType

_STANDARD_LIBRARY = os.path.dirname(os.__file__)
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = ("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_COLLECTIVES = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/nn/functional.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/utils.py",
    "/torch/nn/parallel/distributed.py",
)
_FUTURES = ("/torch/utils/_contextlib.py", "/torch/futures/__init__.py")
_WRAPPERS = (*_FUTURES, "/torch/distributed/c10d_logger.py")
_IDLE = 0.2  # of a core


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a main thread is, and for how long."""

    seconds: float = 0.0
    call: str = ""  # the function that waits for other ranks, such as "torch.distributed.barrier"; empty if none does
    digest: str = ""  # of the stack outside of this package; equal on ranks that wait in the same place
    line: str = ""  # the user's line of code, such as "train.py:31 (on_train_batch_end)"; empty if there is none
    collectives: int = 0  # over all ranks, begun by a rank that waits; equal on ranks that wait in the same one


class MainThread:
    """Reports where the main thread of this process is, and whether it waits there for other ranks.

    It does if the innermost function of its stack is a collective of ``torch.distributed`` or of this package. It also
    does if the process is idle, and that function calls collectives in C++ (DDP's backward pass and its broadcast of
    buffers) or ``wait`` of an object in C++ (a ``Work`` or a ``Future``). Any other long call is no such wait.

    Args:
        count_collectives: Returns how many collectives this process has begun. A thread that begins more of them in the
            same place does not wait.
        gpu_is_busy: Returns whether a GPU of this process has work to do.
        count_of_all_ranks: Returns how many collectives over all ranks this process has begun. They count from here.
    """

    def __init__(
        self,
        count_collectives: Callable[[], int] = lambda: 0,
        gpu_is_busy: Callable[[], bool] = lambda: False,
        count_of_all_ranks: Callable[[], int] = lambda: 0,
    ) -> None:
        self._count_of_all_ranks, self._first_count = count_of_all_ranks, count_of_all_ranks()
        self._count_collectives, self._gpu_is_busy = count_collectives, gpu_is_busy
        self._here: object = None
        self._since = self._processor_time = 0.0

    def position(self) -> Position:
        """Return where the main thread is now."""
        frames = _frames(sys._current_frames().get(threading.main_thread().ident or 0))
        inside = [*takewhile(_is_inside, frames)]
        outside, kind, now = frames[len(inside) :], _kind_of_wait(frames), time.monotonic()
        here = (*((frame.f_code, frame.f_lasti) for frame in outside), self._count_collectives())
        if here != self._here:
            self._here, self._since, self._processor_time = here, now, time.process_time()
        seconds = now - self._since
        is_direct = kind == "collective" and not any(map(_is_ours, inside))
        call = _call(inside, kind) if kind == "collective" or (kind and self._is_idle(seconds)) else ""
        functions = [(frame.f_code.co_filename, frame.f_code.co_name) for frame in outside]
        return Position(
            seconds=seconds,
            call="trainer.save_checkpoint" if call and _is_saving(frames) else call,
            digest=hashlib.blake2b(repr((functions, call if is_direct else "")).encode(), digest_size=8).hexdigest(),
            line=_line(frames),
            collectives=self._count_of_all_ranks() - self._first_count if call else 0,
        )

    def _is_idle(self, seconds: float) -> bool:
        """Return whether the process has used little processor time in the last seconds, or waits for its GPU."""
        if time.process_time() - self._processor_time < _IDLE * max(seconds, 1.0):
            return True
        return seconds > 5.0 and self._gpu_is_busy()  # later than the capture of a CUDA graph, which allows no queries


def describe_caller() -> tuple[str, bool]:
    """Return the user's line of code that called this, and whether it is inside of ``Trainer.save_checkpoint``."""
    frames = _frames(sys._getframe())
    return _line(frames), _is_saving(frames)


def is_of_collective(error: BaseException) -> bool:
    """Return whether an exception was raised by a collective, whose peer may have died."""
    return _kind_of_wait([frame for frame, _ in walk_tb(error.__traceback__)][::-1]) is not None


def _frames(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


@lru_cache(maxsize=4096)
def _owner(file: str) -> str:
    """Return whose code a file is."""
    installed = next((part for part in _INSTALLED if part in file), None)
    if file.startswith("<") or file.endswith(_WRAPPERS) or (file.startswith(_STANDARD_LIBRARY) and installed is None):
        return "wrapper"
    if file.startswith(_PACKAGE):
        folder = file.removeprefix(_PACKAGE).split("/")[1]
        waits, calls = ("comm", "control"), ("_lightning", "nodes", "run", "schemes", "trainer")
        return "our exchange" if folder in waits else "our call" if folder in calls else "our other"
    if file.endswith("/torch/autograd/graph.py"):
        return "backward"
    if file.endswith(_COLLECTIVES):
        return "collective"
    library = file.rpartition(installed)[2].partition("/")[0] if installed else ""
    return "library" if library in _LIBRARIES else "user"


def _owner_of(frame: FrameType) -> str:
    return _owner(frame.f_code.co_filename)


def _kind_of_wait(frames: Sequence[FrameType]) -> str | None:
    """Return "collective", "collective if idle", "backward" or "work"; None if the innermost function is another."""
    inner = [*takewhile(lambda frame: _owner_of(frame) == "wrapper", frames)]
    if len(inner) == len(frames):
        return None
    frame = frames[len(inner)]
    owner = _owner_of(frame)
    if owner in ("collective", "our exchange"):
        return "collective"
    if owner in ("backward", "our call"):
        return "backward" if owner == "backward" else "collective if idle"
    is_work = all(each.f_code.co_filename.endswith(_FUTURES) for each in inner)
    return "work" if is_work and _calls_wait(frame.f_code, frame.f_lasti) else None


@lru_cache(maxsize=64)
def _calls_wait(code: CodeType, offset: int) -> bool:
    before = (each for each in dis.get_instructions(code) if each.offset <= offset)
    return [each.argval for each in before if each.opname in ("LOAD_ATTR", "LOAD_METHOD")][-1:] == ["wait"]


def _is_ours(frame: FrameType) -> bool:
    return _owner_of(frame).startswith("our")


def _is_inside(frame: FrameType) -> bool:
    """Return whether a frame is of a collective or of this package: these may differ between ranks of one exchange."""
    return _owner_of(frame) in ("wrapper", "collective") or _is_ours(frame)


def _call(inside: Sequence[FrameType], kind: str) -> str:
    """Return the name of the outermost among the innermost functions of one library."""
    if kind in ("backward", "work"):
        return "backward" if kind == "backward" else "torch.distributed.Work.wait"
    is_ours, innermost = next(groupby((frame for frame in inside if _owner_of(frame) != "wrapper"), _is_ours))
    name = [*innermost][-1].f_code.co_name
    return f"{name} (lightning_hiercomm)" if is_ours else f"torch.distributed.{name}"


def _line(frames: Sequence[FrameType]) -> str:
    frame = next((frame for frame in frames if _owner_of(frame) == "user"), None)
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else ""


def _is_saving(frames: Sequence[FrameType]) -> bool:
    return any(frame.f_code.co_name == "save_checkpoint" and _owner_of(frame) == "library" for frame in frames)
