"""What ranks report to each other, and the messages that name ranks that differ or wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hiercomm.control.bootstrap import names_of_ranks
from lightning_hiercomm.control.waiting import Position

_EQUAL_BATCHES = "All ranks must take equally many steps: give them equally many batches, or set limit_train_batches"
_EQUAL_STEPS = (
    f"{_EQUAL_BATCHES}, and in manual optimization call optimizer.step() equally often. A loop that stops early, by"
    " a KL divergence for instance, must stop on all ranks alike:"
    " trainer.strategy.reduce_boolean_decision(kl > limit, all=False)"
)
_STOP_ON_ALL_RANKS = (
    f"{_EQUAL_BATCHES}. If trainer.should_stop was set on some ranks only, set it on all ranks alike, for instance with"
    " trainer.strategy.reduce_boolean_decision(...)"
)
_SAVE_ON_ALL_RANKS = "Call trainer.save_checkpoint on all ranks; only rank 0 writes the file"
_COLLECTIVES = "collectives (barrier, all_gather, all_reduce, self.log(..., sync_dist=True))"
Purpose = Literal["run", "average", "save", "reduce", "epoch", "end"]
_PURPOSES: dict[Purpose, tuple[str, str]] = {
    "run": ("called", "Call trainer.fit, validate, test and predict on all ranks alike"),
    "reduce": ("reduced a value", "Call self.log(..., sync_dist=True) and strategy.reduce on all ranks alike"),
    "save": ("called trainer.save_checkpoint", _SAVE_ON_ALL_RANKS),
    "end": ("ended training", _STOP_ON_ALL_RANKS),
    "epoch": ("ended an epoch", _EQUAL_BATCHES),
    "average": ("asked for the averaged model", "All ranks must do that after equally many steps"),
}
"""Why ranks wait at a barrier: what a rank did, and the remedy if others did not."""


@dataclass(frozen=True)
class Failure:
    """The first failure of any rank, which ends the run."""

    message: str
    raised_by: int | None = None  # the rank that raised an exception, and so ends by itself
    silent: Sequence[int] = ()  # ranks whose processes must be killed
    is_frozen: bool = False  # a rank is: then all write their stacks
    is_stuck: bool = False  # the ranks wait for each other, so that none ends by itself


@dataclass(frozen=True)
class Arrival:
    """A rank's arrival at a barrier: why and after how many batches, from which line of the program."""

    number: int
    rank: int
    place: str
    purpose: Purpose
    what: str
    line: str
    batches: int
    steps: Sequence[int]  # of each optimizer

    def without_others(self, passed: str) -> str:
        """Return a message for a rank that cannot arrive any more, because it has ``passed`` this barrier."""
        return f"{self._described()}, and {passed}. {_PURPOSES[self.purpose][1]}"

    def difference(self, other: Arrival) -> str | None:
        """Return a message if two ranks at the same barrier have different reasons or numbers of steps."""
        first, second = sorted((self, other), key=lambda each: ([*_PURPOSES].index(each.purpose), each.rank))
        if (self.purpose, self.what) != (other.purpose, other.what):
            return first.without_others(second._described())
        if [*self.steps] != [*other.steps]:
            taken = [f"{each._described()} with {_optimizer_steps(each.steps)}" for each in (first, second)]
            return f"{taken[0]}, and {taken[1]}. {_EQUAL_STEPS}"
        return None

    def _described(self) -> str:
        when = f" after {self.batches} batches of the run" if self.batches else ""
        return f"{self.place} {_PURPOSES[self.purpose][0]}{self.what}{when}{in_line(self.line)}"


@dataclass(frozen=True, kw_only=True)
class Status(Position):
    """What a rank reports with each heartbeat."""

    rank: int
    place: str
    doing: str = "joining"
    progress: int = 0  # how often it has reported what it does
    idle: float = 0.0  # seconds since then
    batches: int = 0  # begun
    stuck: float = 0.0  # seconds for which its main thread or a worker has been stuck in the kernel
    arrival: Purpose | None = None  # at the barrier where it waits
    has_left: bool = False


def standstill(statuses: Sequence[Status], timeout: float, last_beats: float) -> tuple[str, bool]:
    """Return a table of who waits where if no rank makes progress, and whether the ranks wait for each other.

    They do if all of them have waited for ``timeout`` seconds in different places; ranks that wait in the same place
    are slow, not stuck. Such a deadlock shows in the ``last_beats``. The table is empty if a rank makes progress.
    """
    left = [status for status in statuses if status.has_left]
    members = [status for status in statuses if not status.has_left]
    waiting = [member for member in members if member.call and member.seconds >= timeout]
    places = {(each.batches, each.digest, each.collectives) for each in waiting}
    is_deadlock = bool(members) and len(waiting) == len(members) and (len(places) > 1 or bool(left))
    has_begun = all(member.progress for member in members) or bool(waiting)
    moves = any(member.idle <= timeout + last_beats or member.stuck > timeout / 2 for member in members)
    if not is_deadlock and (moves or not has_begun):
        return "", False
    rows = [("rank", "waits in", "during", "line of the program")]
    rows += [(each.place, (each.call or "is busy")[:80], each.doing[:80], each.line[:80] or "-") for each in members]
    rows += [(each.place, "has ended its run", "-", "-") for each in left]
    text, table = f"no rank made progress for {timeout:g} s (hang_timeout)", _table(rows[:33])
    if not is_deadlock:
        return f"{text}, and the run goes on\n{table}", False
    cause = _likely_cause(members, bool(left))
    return f"{text}: the ranks wait for each other in different places\n{table}\nLikely cause: {cause}", True


def _likely_cause(members: Sequence[Status], some_left: bool) -> str:
    saving = [member.rank for member in members if member.call == "trainer.save_checkpoint"]
    if 0 < len(saving) < len(members):
        return f"{names_of_ranks(saving)} called trainer.save_checkpoint and the others did not. {_SAVE_ON_ALL_RANKS}"
    if some_left or any(member.arrival == "end" or member.call.startswith("teardown") for member in members):
        return f"training ended on some ranks only. {_STOP_ON_ALL_RANKS}"
    least = min(member.collectives for member in members)
    more = [member.rank for member in members if member.collectives > least]
    if more:
        return f"{names_of_ranks(more)} called more {_COLLECTIVES} than other ranks. Call them on all ranks alike"
    done = [member.rank for member in members if member.arrival in ("epoch", "average")]
    others = [member for member in members if member.rank not in done]
    in_step = all(other.call == "backward" or other.call.endswith("(lightning_hiercomm)") for other in others)
    if others and in_step and (done or len({member.batches for member in members}) > 1):
        behind = names_of_ranks(other.rank for other in others)
        ended = f"{names_of_ranks(done)} ended a batch, and {behind} did not. " if done else ""
        return f"{ended}The ranks took unequal numbers of optimizer steps. {_EQUAL_STEPS}"
    return f"some ranks called other {_COLLECTIVES}, or more of them. Call them on all ranks alike"


def _optimizer_steps(counts: Sequence[int]) -> str:
    return f"{', '.join(map(str, counts))} optimizer step{'' if [*counts] == [1] else 's'}"


def in_line(line: str) -> str:
    """Return where a line of the user's code is, for a message; empty if there is none."""
    return f" in {line}" if line else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
