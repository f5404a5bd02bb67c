"""Reports and receives failures of ranks, and lets all ranks stop at the same batch, by keys in torch's store."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch.distributed import PrefixStore, Store

from lightning_hiercomm.control import heartbeat
from lightning_hiercomm.control.bootstrap import LOST_STORE, connect_again
from lightning_hiercomm.control.heartbeat import Status

_BEAT = 1.0  # seconds between heartbeats of a rank
_GRACE = 4.0  # seconds from receiving a failure until this process is ended, unless it ended by itself


class RankFailure(RuntimeError):
    """Another rank died or raised."""


class ControlPlane:
    """A rank's part in the control plane, which has keys in torch's store.

    - ``status/<rank>``: a rank's heartbeat, with what it does and where it waits
    - ``failure``, ``broken``: the first failure of any rank, which ends the run; how many collectives broke
    - ``stop``, ``hold/<rank>``: why all ranks stop; the next batch of each: all stop at the largest
    - ``arrival/<n>``, ``arrived/<n>``, ``left``: why the first rank came to barrier n; how many came; how many left

    After a collective broke, ranks without heartbeats have died. Without progress for ``hang_timeout`` seconds, a rank
    reads the status of all: the run ends if they wait for each other, or for a rank that sends nothing.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        place: str = "rank 0",
        hang_timeout: float | None = None,
        timeout: float | None = None,
        count_collectives: Callable[[], tuple[int, int]] = lambda: (0, 0),
        first_rank: int = 0,
    ) -> None:
        self.rank, self.size, self.place, self._first_rank = rank, size, place, first_rank
        self._timeout, self._count_collectives = timeout, count_collectives
        self._hang_timeout, self._interval = hang_timeout or 1e9, max(_BEAT, size / 1000)
        self._lock = threading.Lock()  # guards what both threads write
        self._failed, self._is_closing = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self.is_connected, self.stops_together = False, True  # it sends heartbeats; if it stops, all do
        self.failure: str | None = None
        self.doing = "starting"
        self.steps: Callable[[], Sequence[int]] | None = None  # of each optimizer
        self.progress = self._batch = self._barriers = 0
        self.stops_for = self._asked = ""
        self._hold_at: int | None = None  # the batch at which this rank waits until it knows when all stop
        self._stop_at: int | None = None
        self._beats = self._idle = 0  # heartbeats, and those without progress; clocks go on while a process is stopped
        # what counts as progress, at the last heartbeat and at the last table
        self._moved = self._told = (-1, -1, "", "")
        self._before: list[Status] = []  # those of all ranks, at half of `hang_timeout`
        self._watched: dict[int, Status] = {}  # heartbeats of ranks whose processes this one watches
        self._has_other_left = False

    def start(self, store: Store, name: str) -> None:
        """Start to send heartbeats to the part of a store with this name, new and the same for all ranks."""
        self._store = PrefixStore(name, connect_again(store))  # a blocking call holds up all others of a connection
        for key in ("failure", "stop"):
            self._store.compare_set(key, "", "")  # readers would wait for a missing key
        self._store.add("left", 0)
        self._write_status()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._run, self._watch_store)]
        self.is_connected, self.stops_together = True, False
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Leave; this does not count as a failure."""
        self.is_connected = False
        self._is_closing.set()
        for thread in self._threads:
            thread.join(timeout=max(2.0, 2 * self._interval) + _GRACE / 2)

    def _run(self) -> None:
        try:
            self._beat()
            while self.failure is None and not self._is_closing.wait(self._interval):
                self._beat()
            self._leave()
        except RuntimeError:  # of torch's store
            if not self._has_other_left and not self._is_closing.is_set():
                self._learn(LOST_STORE)

    def _beat(self) -> None:
        """Write this rank's status, and read what concerns all ranks: two requests to the store."""
        own = self._write_status()
        failure, stop, left = (value.decode() for value in self._store.multi_get(["failure", "stop", "left"]))
        self._has_other_left = left != "0"
        if failure:
            self._learn(*json.loads(failure))
        else:
            self._follow_stop(stop)
            self._look_at_machine()
            self._look_at_all(own)

    def _write_status(self, has_left: bool = False) -> Status:
        over_all_ranks, in_all_groups = self._count_collectives()
        moved = (self.progress, in_all_groups, *heartbeat.where_main_thread_waits())  # one that waits stays there
        self._beats, self._idle, self._moved = self._beats + 1, self._idle + 1 if moved == self._moved else 0, moved
        counts = self._beats, self._batch, over_all_ranks, self._idle * self._interval
        own = Status(self.rank, self.place, heartbeat.identity(), *counts, self.doing, *moved[2:], has_left)
        self._store.set(f"status/{self.rank}", json.dumps(own))
        return own

    def _statuses(self, ranks: Sequence[int]) -> list[Status]:
        return [Status(*json.loads(each)) for each in self._store.multi_get([f"status/{rank}" for rank in ranks])]

    def _silent_since(self, before: Sequence[Status], now: Sequence[Status]) -> list[Status]:
        return [late for early, late in zip(before, now, strict=True) if early == late and not late.has_left]

    def _look_at_machine(self) -> None:
        """End the run if a process of this machine has ended without leaving: that of rank 0, the first or the next."""
        for rank in {0, self._first_rank, (self.rank + 1) % self.size}:
            known = self._watched.get(rank)
            if known is None and self._store.check([f"status/{rank}"]):
                self._watched[rank] = self._statuses([rank])[0]
            elif known and heartbeat.has_ended(known.process) and not self._statuses([rank])[0].has_left:
                self._fail(f"{known.place} died")

    def _look_at_all(self, own: Status) -> None:
        """End the run if no rank has made progress for ``hang_timeout`` seconds, and all wait for each other."""
        if own.idle < self._hang_timeout / 2:
            self._before = []
        elif not self._before:
            self._before = self._statuses(range(self.size))
        elif own.idle >= self._hang_timeout and self._beats % max(10, self.size // 100) == 0:
            frozen = self._silent_since(self._before, now := self._statuses(range(self.size)))
            table, must_end = heartbeat.standstill(now, [status.rank for status in frozen], self._hang_timeout)
            if must_end:
                self._fail(table, [status.process for status in frozen])
            elif table and self.rank == 0 and self._told != self._moved:
                self._told = self._moved
                print(f"lightning_hiercomm: {table}", file=sys.stderr, flush=True)

    def _watch_store(self) -> None:
        """End this rank if the store does not answer: a call has no timeout if the store's process is stopped."""
        while self.failure is None:
            before = self._beats
            if self._is_closing.wait(self._hang_timeout) or self._is_closing.wait(2 * self._interval):
                return
            if self._beats == before and self._threads[0].is_alive():
                hosts = [known.process for known in self._watched.values() if known.rank == 0]
                self._learn("rank 0, or torchrun's agent there, is frozen: torch's store does not answer", hosts)

    def _leave(self) -> None:
        if self.failure is None:
            self._write_status(has_left=True)
        deadline = time.monotonic() + max(2.0, 2 * self._interval)
        left = self._store.add("left", 1)
        while self.rank == 0 and left < self.size and time.monotonic() < deadline:
            time.sleep(0.02)  # other ranks would take the end of this process, which has the store, for a death
            left = self._store.add("left", 0)

    def report_failure(self, error: BaseException) -> str:
        """Report to all ranks that this one raised, and return the message."""
        failed = f"failed: {type(error).__name__}: {error}"
        message = f"{self.place} {'was interrupted' if isinstance(error, KeyboardInterrupt) else failed}"
        if self.is_connected:
            with suppress(RuntimeError):  # the other threads also find that the store is lost
                self._fail(message[:2000], ends_by_itself=True)
        return message

    def wait_for_failure(self, timeout: float, collective_broke: bool = False) -> str | None:
        """Wait up to ``timeout`` seconds for a failure, and return the first one of any rank."""
        if self.is_connected:
            with suppress(RuntimeError):
                if collective_broke and self.failure is None and self._store.add("broken", 1) <= 3:
                    before, timeout = self._statuses(range(self.size)), timeout - 3 * self._interval
                    self._failed.wait(3 * self._interval)
                    for dead in self._silent_since(before, self._statuses(range(self.size))):
                        self._fail(f"{dead.place} died")
            self._failed.wait(max(timeout, 0.0))
        return self.failure

    def check(self) -> None:
        """Raise a :class:`RankFailure` if another rank failed."""
        if self.failure is not None:
            raise RankFailure(self.failure)

    def _fail(self, message: str, frozen: Sequence[str] = (), ends_by_itself: bool = False) -> None:
        """Report a failure to all ranks. The first one counts; later ones are its consequences."""
        own = json.dumps([message, frozen])
        first = self._store.compare_set("failure", "", own).decode()
        if first == own and not ends_by_itself:
            print(f"lightning_hiercomm: {message}", file=sys.stderr, flush=True)
        message, frozen = json.loads(first)
        self._learn(message, frozen, ends_by_itself)

    def _learn(self, message: str, frozen: Sequence[str] = (), ends_by_itself: bool = False) -> None:
        """Receive a failure: raise it at the next batch, or end this process if it does not end by itself."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = message
        self._failed.set()
        for who in frozen:
            heartbeat.end_frozen(who)
        if not ends_by_itself:
            last = f"{message.splitlines()[0]}. Ending {self.place}, which is waiting for it."
            threading.Thread(target=self._end_later, args=[last], daemon=True).start()

    def _end_later(self, message: str) -> None:
        if not self._is_closing.wait(_GRACE):
            print(f"lightning_hiercomm: {message}", file=sys.stderr, flush=True)
            os._exit(1)

    def request_stop(self, why: str = "stop") -> None:
        """Request that all ranks stop at the same batch, for any reason. Safe in a signal handler."""
        self._asked = self._asked or why
        if not self.is_connected:
            self.stops_for = self._asked

    def should_stop(self) -> bool:
        """Return whether this rank stops before this batch, together with all others if `stops_together`."""
        self.check()
        with self._lock:
            self._batch += 1
            if self._hold_at is None or self._batch < self._hold_at:
                return bool(self.stops_for) and not self.is_connected
        # a rank without an answer may stop here, but must not train on while others wait for it
        if self._stop_at is None and self._wait_until(lambda: self._store.add("held", 0) == self.size, 30.0):
            held = self._store.multi_get([f"hold/{rank}" for rank in range(self.size)])
            self._stop_at, self.stops_together = max(map(int, held)), True
        return self._stop_at is None or self._batch >= self._stop_at

    def _follow_stop(self, why: str) -> None:
        """Wait at the next batch for all ranks if one has requested a stop; all stop at the last of these batches."""
        if not why and self._asked:
            why = self._store.compare_set("stop", "", self._asked).decode()
        if why and self._hold_at is None:
            with self._lock:
                self.stops_for, self._hold_at = why, self._batch + 1
            self._store.set(f"hold/{self.rank}", str(self._hold_at))
            self._store.add("held", 1)

    def barrier(self, why: str = "asked for the averaged model") -> None:
        """Wait for all ranks, without a collective. Without a control plane it returns at once.

        gloo matches a collective that only some ranks call with the next one of the others: it mixes their values, or
        ends the process if the sizes differ. At this barrier such a rank waits. The run ends, with its name, if ranks
        come for different reasons, such as "ended an epoch", or after unequal optimizer steps.
        """
        if not self.is_connected:
            return
        self._barriers, (_, line) = self._barriers + 1, heartbeat.where_main_thread_waits()
        after = f" after {self._batch} batches of the run" if self._batch else ""
        why += f", {', '.join(map(str, self.steps()))} optimizer steps" if self.steps is not None else ""
        own = f"{self.place} {why}{after}{f' in {line}' if line else ''}"
        other_why, other = json.loads(self._store.compare_set(f"arrival/{self._barriers}", "", json.dumps([why, own])))
        arrived = f"arrived/{self._barriers}"
        if other_why != why:
            self._fail(f"{', and '.join(sorted([own, other]))}. {heartbeat.ALIKE}")
        elif self._store.add(arrived, 1) == self.size and self._barriers > 1:
            for name in ("arrival", "arrived"):
                self._store.delete_key(f"{name}/{self._barriers - 1}")
        if not self._wait_until(lambda: self._store.add(arrived, 0) == self.size, self._timeout or 1e9):
            self._fail(f"{own}, and has waited there for other ranks for timeout={self._timeout} s")
            self.check()

    def _wait_until(self, is_done: Callable[[], bool], timeout: float) -> bool:
        """Wait for a condition in the store; return False after ``timeout`` seconds."""
        pause, deadline = 0.002, time.monotonic() + timeout
        while not is_done():
            self.check()
            if time.monotonic() > deadline:
                return False
            self._failed.wait(pause)
            pause = min(1.5 * pause, max(0.1, self.size / 1000))
        return True
