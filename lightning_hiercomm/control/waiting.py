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
from pathlib import Path
from types import CodeType, FrameType

_STANDARD_LIBRARY = os.path.dirname(os.__file__)
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = ("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_COLLECTIVES = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/distributed/nn/functional.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/utils.py",
    "/torch/nn/parallel/distributed.py",
)
_BACKWARD = "/torch/autograd/graph.py"
_WAITING = tuple(f"{_PACKAGE}/{folder}/" for folder in ("comm", "control"))
_CALLING = tuple(f"{_PACKAGE}/{folder}/" for folder in ("_lightning", "nodes", "run", "schemes", "trainer"))
_WRAPPERS = ("/torch/utils/_contextlib.py", "/torch/futures/__init__.py")
_IDLE = 0.2  # of a core


@dataclass(frozen=True)
class Wait:
    """A wait of a main thread for other ranks.

    Attributes:
        seconds: How long the thread has waited in this call.
        call: The function that waits, such as ``"torch.distributed.barrier"``.
        place: A digest of the stack outside of this package; equal on ranks that wait in the same place.
        line: The user's line of code, such as ``"train.py:31 (on_train_batch_end)"``; empty if there is none.
        collectives: How many collectives over all ranks this rank has begun; equal on ranks that wait in the same one.
    """

    seconds: float
    call: str
    place: str
    line: str
    collectives: int = 0


class MainThread:
    """Watches whether the main thread of this process waits for other ranks.

    It does if the innermost function of its stack is a collective of ``torch.distributed`` or of this package. It also
    does if the process is idle, and that function calls collectives in C++ (DDP's backward pass and its broadcast of
    buffers) or ``wait`` of an object in C++ (a ``Work`` or a ``Future``). Any other long call (a computation, a
    download, a debugger, ``time.sleep``) is no such wait.

    Args:
        count_collectives: Returns how many collectives this process has begun. A thread that begins more of them in the
            same place does not wait.
        gpu_is_busy: Returns whether a GPU of this process has work to do.
        count_of_all_ranks: Returns how many collectives over all ranks this process has begun. They count from here,
            because ranks may have begun unequal numbers before.
    """

    def __init__(
        self,
        count_collectives: Callable[[], int] = lambda: 0,
        gpu_is_busy: Callable[[], bool] = lambda: False,
        count_of_all_ranks: Callable[[], int] = lambda: 0,
    ) -> None:
        self._count_of_all_ranks, self._first_count = count_of_all_ranks, count_of_all_ranks()
        self._count_collectives = count_collectives
        self._gpu_is_busy = gpu_is_busy
        self._position: object = None
        self._since = 0.0
        self._processor_time = 0.0

    def wait(self) -> Wait | None:
        """Return the wait of the main thread; None if it does not wait for other ranks."""
        frames = _frames_of_main_thread()
        kind = _kind_of_wait(frames)
        now = time.monotonic()
        _, outer = _split(frames)
        position = (*((each.f_code, each.f_lasti) for each in outer), self._count_collectives())
        if position != self._position:
            self._position, self._since, self._processor_time = position, now, time.process_time()
        seconds = now - self._since
        if kind is None or (kind != "collective" and not self._is_idle(seconds)):
            return None
        call = "trainer.save_checkpoint" if _is_saving(frames) else _call(frames, kind)
        collectives = self._count_of_all_ranks() - self._first_count
        return Wait(seconds, call, _place(frames), _line(frames), collectives)

    def line(self) -> str:
        """Return the user's line of code that the main thread runs; empty if there is none."""
        return _line(_frames_of_main_thread())

    def _is_idle(self, seconds: float) -> bool:
        """Return whether the process has used little processor time in the last seconds, or waits for its GPU."""
        if time.process_time() - self._processor_time < _IDLE * max(seconds, 1.0):
            return True
        return seconds > 5.0 and self._gpu_is_busy()  # later than the capture of a CUDA graph, which allows no queries


def describe_caller() -> tuple[str, bool]:
    """Return the user's line of code that called this, and whether it is inside of ``Trainer.save_checkpoint``."""
    frames = _frames(sys._getframe())
    return _line(frames), _is_saving(frames)


def _frames_of_main_thread() -> list[FrameType]:
    return _frames(sys._current_frames().get(threading.main_thread().ident or 0))


def _frames(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE)


def _is_standard(file: str) -> bool:
    return file.startswith("<") or (file.startswith(_STANDARD_LIBRARY) and not any(part in file for part in _INSTALLED))


def _is_wrapper(file: str) -> bool:
    return _is_standard(file) or file.endswith(_WRAPPERS)


def _kind_of_wait(frames: Sequence[FrameType]) -> str | None:
    """Return "collective", "collective if idle", "backward" or "work"; None if the innermost function is another."""
    for frame in frames:
        file = frame.f_code.co_filename
        if _is_wrapper(file):
            continue
        if file.endswith(_COLLECTIVES) or file.startswith(_WAITING):
            return "collective"
        if file.endswith(_BACKWARD):
            return "backward"
        if file.startswith(_CALLING):
            return "collective if idle"
        is_work = all(inner.f_code.co_filename.endswith(_WRAPPERS) for inner in frames[: frames.index(frame)])
        return "work" if is_work and _calls_wait(frame.f_code, frame.f_lasti) else None
    return None


@lru_cache(maxsize=64)
def _calls_wait(code: CodeType, offset: int) -> bool:
    before = (each for each in dis.get_instructions(code) if each.offset <= offset)
    names = [each.argval for each in before if each.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    return names[-1:] == ["wait"]


def _split(frames: Sequence[FrameType]) -> tuple[list[FrameType], list[FrameType]]:
    """Split a stack into the inner frames, of collectives and of this package, and the outer ones.

    Inner frames may differ between ranks with different roles in one exchange.
    """
    inner = 0
    for frame in frames:
        file = frame.f_code.co_filename
        if not (_is_wrapper(file) or _is_ours(file) or file.endswith(_COLLECTIVES)):
            break
        inner += 1
    return list(frames[:inner]), list(frames[inner:])


def _call(frames: Sequence[FrameType], kind: str) -> str:
    """Return the name of the outermost among the innermost functions of one library."""
    if kind == "backward":
        return "backward"
    if kind == "work":
        return "torch.distributed.Work.wait"
    name, owner = "", ""
    for frame in frames:
        file = frame.f_code.co_filename
        if _is_wrapper(file) or file.endswith("c10d_logger.py"):
            continue
        its_owner = "lightning_hiercomm" if _is_ours(file) else "torch.distributed"
        if (owner and its_owner != owner) or not (_is_ours(file) or file.endswith(_COLLECTIVES)):
            break
        name, owner = frame.f_code.co_name, its_owner
    return f"{owner}.{name}" if owner == "torch.distributed" else f"{name} ({owner})"


def _place(frames: Sequence[FrameType]) -> str:
    inner, outer = _split(frames)
    functions = [(frame.f_code.co_filename, frame.f_code.co_name) for frame in outer]
    is_direct = bool(inner) and not any(_is_ours(frame.f_code.co_filename) for frame in inner)
    call = _call(frames, "collective") if is_direct else ""
    return hashlib.blake2b(repr((functions, call)).encode(), digest_size=8).hexdigest()


def _line(frames: Sequence[FrameType]) -> str:
    for frame in frames:
        file = frame.f_code.co_filename
        if _is_standard(file) or _is_ours(file) or _library(file) in _LIBRARIES:
            continue
        return f"{os.path.basename(file)}:{frame.f_lineno} ({frame.f_code.co_name})"
    return ""


def _library(file: str) -> str:
    """Return the name of a file's installed package; empty for files that are not installed."""
    for part in _INSTALLED:
        if part in file:
            return file.rpartition(part)[2].partition("/")[0]
    return ""


def _is_saving(frames: Sequence[FrameType]) -> bool:
    return any(
        frame.f_code.co_name == "save_checkpoint"
        and not _is_ours(frame.f_code.co_filename)
        and _library(frame.f_code.co_filename) in _LIBRARIES
        for frame in frames
    )
