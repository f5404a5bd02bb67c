"""What the reports of all ranks say when a run stands still: who waits where, and the likely cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_hiercomm.control.bootstrap import names_of_ranks
from lightning_hiercomm.control.waiting import Wait

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
        did, remedy = _PURPOSES[self.purpose]
        when = f"after {self.batches} batches of the run{in_line(self.line)}"
        return f"{self.place} {did}{self.what} {when}, and {passed}. {remedy}"

    def difference(self, other: Arrival) -> str | None:
        """Return a message if two ranks at the same barrier have different reasons or numbers of steps."""
        pair = sorted((self, other), key=lambda each: ([*_PURPOSES].index(each.purpose), each.rank))
        if (self.purpose, self.what) != (other.purpose, other.what):
            did = [f"rank {each.rank} {_PURPOSES[each.purpose][0]}{each.what}" for each in pair]
            lines = [in_line(each.line) for each in pair]
            where = lines[0] if lines[0] != lines[1] else ""
            return f"{did[0]}{where}, and {did[1]}{lines[1]}. {_PURPOSES[pair[0].purpose][1]}"
        if [*self.steps] != [*other.steps]:
            first, second = pair
            taken = f"{first.place} has taken {_optimizer_steps(first.steps)}"
            return f"{taken} and {second.place} {_optimizer_steps(second.steps)}. {_EQUAL_STEPS}"
        return None


@dataclass(frozen=True)
class Status:
    """A rank's report.

    Attributes:
        progress: How often it has reported what it does.
        idle: Seconds since then.
        batches: The number of batches it has begun.
        wait: Of its main thread for other ranks.
        line: Of the user's code that its main thread runs if it does not wait.
        stuck: Seconds for which its main thread or a worker has been stuck in the kernel.
        arrival: At the barrier at which it waits.
        has_left: Whether it has ended its run.
    """

    rank: int
    place: str
    doing: str = "joining"
    progress: int = 0
    idle: float = 0.0
    batches: int = 0
    wait: Wait | None = None
    line: str = ""
    stuck: float = 0.0
    arrival: Purpose | None = None
    has_left: bool = False

    @staticmethod
    def of(values: dict[str, Any]) -> Status:
        """Return the report that JSON holds."""
        return Status(**{**values, "wait": Wait(**values["wait"]) if values["wait"] else None})


def deadlock(statuses: Sequence[Status], timeout: float) -> str | None:
    """Return a table if all ranks have waited for each other for ``timeout`` seconds in different places.

    A collective in which all ranks wait in the same place is slow, not stuck.
    """
    left = [status.place for status in statuses if status.has_left]
    members = [status for status in statuses if not status.has_left]
    waits = [status.wait for status in members if status.wait is not None and status.wait.seconds >= timeout]
    places = {(m.batches, wait.place, wait.collectives) for m, wait in zip(members, waits, strict=False)}
    if not members or len(waits) < len(members) or (len(places) == 1 and not left):
        return None
    rows = [("rank", "waits in", "during", "line of the program")]
    rows += [(m.place, w.call[:80], m.doing[:80], w.line[:80] or "-") for m, w in zip(members, waits, strict=True)]
    rows += [(place, "has ended its run", "-", "-") for place in left]
    return (
        f"no rank made progress for {timeout:g} s (hang_timeout): the ranks wait for each other in different"
        f" places\n{_table(rows[:33])}\nLikely cause: {_likely_cause(members, waits, bool(left))}"
    )


def standstill(statuses: Sequence[Status], timeout: float, last_beats: float) -> str | None:
    """Return what ranks do if all are alive and none has made progress; a deadlock shows in the ``last_beats``."""
    members = [status for status in statuses if not status.has_left]
    has_begun = all(m.progress for m in members) or any(m.wait and m.wait.seconds > timeout for m in members)
    moves = any(m.idle <= timeout + last_beats or m.stuck > timeout / 2 for m in members)
    if moves or not has_begun:
        return None
    where = "; ".join(
        f"{m.place}, {m.doing}, "
        + (f"waits in {m.wait.call}{in_line(m.wait.line)}" if m.wait else f"is busy{in_line(m.line)}")
        for m in members[:20]
    )
    return f"no rank made progress for {timeout:g} s (hang_timeout), and the run goes on: {where}"


def _likely_cause(members: Sequence[Status], waits: Sequence[Wait], some_left: bool) -> str:
    pairs = [*zip(members, waits, strict=True)]
    saving = [member.rank for member, wait in pairs if wait.call == "trainer.save_checkpoint"]
    if 0 < len(saving) < len(members):
        return f"{names_of_ranks(saving)} called trainer.save_checkpoint and the others did not. {_SAVE_ON_ALL_RANKS}"
    if some_left or any(m.arrival == "end" or wait.call.startswith("teardown") for m, wait in pairs):
        return f"training ended on some ranks only. {_STOP_ON_ALL_RANKS}"
    least = min(wait.collectives for wait in waits)
    more = [member.rank for member, wait in pairs if wait.collectives > least]
    if more:
        return f"{names_of_ranks(more)} called more {_COLLECTIVES} than other ranks. Call them on all ranks alike"
    done = [member.rank for member in members if member.arrival in ("epoch", "average")]
    others = [wait for member, wait in pairs if member.rank not in done]
    in_step = all(wait.call == "backward" or wait.call.endswith("(lightning_hiercomm)") for wait in others)
    if others and in_step and (done or len({member.batches for member in members}) > 1):
        behind = [member.rank for member in members if member.rank not in done]
        ended = f"{names_of_ranks(done)} ended a batch, and {names_of_ranks(behind)} did not. " if done else ""
        return f"{ended}The ranks took unequal numbers of optimizer steps. {_EQUAL_STEPS}"
    return f"some ranks called other {_COLLECTIVES}, or more of them. Call them on all ranks alike"


def _optimizer_steps(counts: Sequence[int]) -> str:
    if len(counts) == 1:
        return f"{counts[0]} optimizer step{'s' if counts[0] != 1 else ''}"
    return f"{', '.join(map(str, counts))} steps of its optimizers"


def in_line(line: str) -> str:
    """Return where a line of the user's code is, for a message; empty if there is none."""
    return f" in {line}" if line else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
