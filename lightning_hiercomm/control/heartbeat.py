"""What ranks report with each heartbeat, their processes, and the table of who waits where if no rank gets on."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import NamedTuple

ALIKE = (
    "All ranks must do the same after equally many steps. Give them equally many batches, or set limit_train_batches;"
    " call trainer.save_checkpoint, self.log(..., sync_dist=True), all_gather and barrier on all ranks; set"
    " trainer.should_stop, and end a loop of optimizer steps early, on all ranks alike, for instance by"
    " trainer.strategy.reduce_boolean_decision(kl > limit, all=False)"
)
_PACKAGE = re.escape(str(Path(__file__).parents[1]))
_OWNERS = re.compile(
    rf"(?P<wrapper><|{re.escape(os.path.dirname(os.__file__))}/(?!site-|dist-)|.*/torch/utils/_contextlib|.*/c10d_logger)"
    rf"|(?P<ours>{_PACKAGE}/(?!checkpoints|comm|control))"  # checkpoints write files
    rf"|(?P<collective>{_PACKAGE}/(comm|control)|.*/torch/(autograd/graph\.|nn/parallel/distributed\.|distributed/(?!checkpoint)))"
    rf"|(?P<library>.*/(site|dist)-packages/(torch(metrics)?|(pytorch_)?lightning(_fabric|_utilities)?)/|{_PACKAGE})"
)


class Status(NamedTuple):
    """A rank's heartbeat."""

    rank: int
    place: str  # its name in messages
    process: str  # its identity
    beats: int  # the number of this heartbeat
    batches: int  # begun
    collectives: int  # begun over all ranks
    idle: float  # seconds without progress
    doing: str
    call: str  # the function in which it waits for other ranks; empty if it does not
    line: str  # the user's line of code
    has_left: bool


def standstill(statuses: Sequence[Status], frozen: Sequence[int], timeout: float) -> tuple[str, bool]:
    """Return a table of who waits where if no rank makes progress, and whether the run must end.

    It must if all ranks wait in different places, or for ``frozen`` ones, which send nothing. Ranks that wait in the
    same place are slow, not stuck. The table is empty if a rank makes progress, or if none waits for others.
    """
    members = [status for status in statuses if not status.has_left and status.rank not in frozen]
    if any(member.idle < timeout for member in members) or not any(member.call for member in members):
        return "", False
    places = {(each.batches, each.call, each.line, each.collectives) for each in members}
    must_end = all(member.call for member in members) and (len(places) > 1 or len(members) < len(statuses))
    silent = [status.place for status in statuses if status.rank in frozen]
    ending = f"{', '.join(silent)} is frozen: it sent nothing" if silent else "the ranks wait for each other"
    ending = ending if must_end else "the run goes on"
    rows = [("rank", "waits in", "during", "line of the program")]
    for each in statuses[:32]:
        call = "has ended its run" if each.has_left else "is frozen" if each.rank in frozen else each.call or "is busy"
        rows.append((each.place, call[:80], each.doing[:80], each.line[:80]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = "\n".join(" | ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    remedy = f"\n{ALIKE}" if must_end and not silent else ""
    return f"no rank made progress for {timeout:g} s (hang_timeout): {ending}\n{table}{remedy}", must_end


def where_main_thread_waits() -> tuple[str, str]:
    """Return the function in which the main thread waits for other ranks, empty if it does not, and the user's line."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    return where_waits([frame for frame, _ in walk_stack(main)])


def where_waits(frames: Sequence[FrameType]) -> tuple[str, str]:
    """Return the same of a thread with these frames, from the innermost to the outermost.

    It waits if its innermost function calls collectives: one of ``torch.distributed``, of this package, or the backward
    pass, during which DDP does. Ranks in one exchange of this package are in different functions inside of it.
    """
    found = [(_OWNERS.match(frame.f_code.co_filename), frame) for frame in frames]
    owned = [(match.lastgroup if match else "user", frame) for match, frame in found]
    owned = [(owner, frame) for owner, frame in owned if owner != "wrapper"]
    inside = [*takewhile(lambda each: each[0] in ("collective", "ours"), owned)]
    ours = [frame.f_code.co_name for owner, frame in inside if owner == "ours"]
    other = inside[-1][1].f_code.co_name if inside else ""
    user = next((frame for owner, frame in owned if owner == "user"), None)
    line = f"{Path(user.f_code.co_filename).name}:{user.f_lineno} ({user.f_code.co_name})" if user else ""
    return f"{ours[-1]} (lightning_hiercomm)" if ours else other.removeprefix("_engine_run_"), line


def identity(process: int | str = "self") -> str:
    """Return a process's machine, container, process id and start time; empty if it has ended."""
    with suppress(OSError):
        stat = Path(f"/proc/{process}/stat").read_text()
        state, *others = stat.rpartition(")")[2].split()
        if state not in "ZX":
            return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')} {stat.split()[0]} {others[18]}"
    return ""


def has_ended(who: str) -> bool:
    """Return whether a process of this machine, given by its :func:`identity`, has ended."""
    return who != "" and who.split()[:2] == identity().split()[:2] and identity(who.split()[2]) != who


def end_frozen(who: str) -> None:
    """Kill another process of this machine, given by its :func:`identity`."""
    if who not in ("", identity()) and identity(pid := who.split()[2]) == who:  # process ids are reused
        with suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)
