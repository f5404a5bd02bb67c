"""What a rank reports to the others, and the messages that name the ranks that differ or wait for each other."""

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
_COLLECTIVES = "collectives (barrier, all_gather, all_reduce, self.log(..., sync_dist=True))"
Purpose = Literal["run", "average", "save", "reduce", "epoch", "end"]
_PURPOSES: dict[Purpose, tuple[str, str]] = {
    "run": ("called", "Call trainer.fit, validate, test and predict on all ranks alike"),
    "reduce": ("reduced a value", "Call self.log(..., sync_dist=True) and strategy.reduce on all ranks alike"),
    "save": (
        "called trainer.save_checkpoint",
        "Call trainer.save_checkpoint on all ranks; only rank 0 writes the file",
    ),
    "end": ("ended training", _STOP_ON_ALL_RANKS),
    "epoch": ("ended an epoch", _EQUAL_BATCHES),
    "average": ("asked for the averaged model", "All ranks must do that after equally many steps"),
}
"""Why ranks wait at a barrier: what a rank did, and the remedy if others did not. The likeliest cause comes first."""


@dataclass(frozen=True)
class Failure:
    """The first failure of any rank, which ends the run.

    Attributes:
        message: Names the rank that failed.
        by: The rank that reports it.
        is_own: Whether that rank has failed, by an exception, and so ends by itself.
        frozen: The identity of a process that must be killed.
    """

    message: str
    by: int
    is_own: bool = False
    frozen: Sequence[str] | None = None


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
            return f"{first._described()}, and {second._described()}. {_EQUAL_STEPS}"
        return None

    def _described(self) -> str:
        when = f" after {self.batches} batches of the run" if self.batches else ""
        steps = f" and {', '.join(map(str, self.steps))} optimizer steps" if when and self.steps else ""
        return f"{self.place} {_PURPOSES[self.purpose][0]}{self.what}{when}{steps}{in_line(self.line)}"


@dataclass(frozen=True, kw_only=True)
class Status(Position):
    """What a rank reports with each heartbeat.

    Attributes:
        process: Its identity.
        doing: What it does.
        has_begun: Whether it has reported any progress.
        idle: Seconds since then.
        batches: The number of batches it has begun.
        arrival: Why it waits at a barrier.
        has_left: Whether it has ended its run.
    """

    rank: int
    place: str
    process: Sequence[str] = ("", "", "")
    doing: str = "joining"
    has_begun: bool = False
    idle: float = 0.0
    batches: int = 0
    arrival: Purpose | None = None
    has_left: bool = False


def standstill(statuses: Sequence[Status], timeout: float) -> tuple[str, bool]:
    """Return a table of who waits where, and whether the ranks wait for each other; empty if they make progress.

    Ranks wait for each other if all of them have waited for ``timeout`` seconds in different places. Ranks that wait in
    the same place are slow, not stuck.
    """
    left = [status for status in statuses if status.has_left]
    members = [status for status in statuses if not status.has_left]
    waiting = [member for member in members if member.call and member.seconds >= timeout]
    places = {(each.batches, each.digest, each.collectives) for each in waiting}
    is_deadlock = len(waiting) == len(members) and (len(places) > 1 or bool(left))
    have_begun = bool(waiting) or all(member.has_begun for member in members)
    # a deadlock is found some heartbeats after the last progress
    if not is_deadlock and (not have_begun or any(member.idle < 1.2 * timeout for member in members)):
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
    if some_left or any(member.arrival == "end" for member in members):
        return f"training ended on some ranks only. {_STOP_ON_ALL_RANKS}"
    least = min(member.collectives for member in members)
    more = [member.rank for member in members if member.collectives > least]
    if more:
        return f"{names_of_ranks(more)} called more {_COLLECTIVES} than other ranks. Call them on all ranks alike"
    if all(member.call == "backward" or member.call.endswith("(lightning_hiercomm)") for member in members):
        return f"the ranks took unequal numbers of optimizer steps. {_EQUAL_STEPS}"
    return f"some ranks called other {_COLLECTIVES}, or more of them. Call them on all ranks alike"


def in_line(line: str) -> str:
    """Return where a line of the user's code is, for a message; empty if there is none."""
    return f" in {line}" if line else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
