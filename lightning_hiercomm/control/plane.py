"""Reports and receives failures of ranks, and lets all ranks stop at the same batch, by keys in torch's store."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from torch.distributed import Store

from lightning_hiercomm.control import process
from lightning_hiercomm.control.bootstrap import is_agents_store
from lightning_hiercomm.control.keys import Keys
from lightning_hiercomm.control.reports import Arrival, Failure, Purpose, Status, in_line, standstill
from lightning_hiercomm.control.waiting import MainThread, describe_caller

_FIRST_POLL = 0.002  # seconds
Found = TypeVar("Found")


class RankFailure(RuntimeError):
    """Another rank died or raised."""


def seconds_between_beats(size: int, hang_timeout: float | None) -> float:
    """Return the interval between heartbeats of each rank, which grows with the number of ranks beyond 1,000."""
    return min(max(1.0, size / 1000), 300.0 if hang_timeout is None else hang_timeout / 10)


class ControlPlane:
    """A rank's part in the control plane: what its training thread reports, asks and waits for.

    A :class:`Watch` sends heartbeats and receives failures in threads of its own. The training thread uses the store at
    barriers, common stops and failures only. After a failure it raises at its next batch, or the process is ended.

    Args:
        store: A new part of a store, over a connection of this object's own.
        rank: This rank.
        size: Number of ranks.
        place: The name of this rank in messages, such as ``"rank 3 (node 1)"``.
        grace: Seconds from receiving a failure until this process is ended, unless it ended by itself.
        hang_timeout: Seconds without a heartbeat after which a rank counts as frozen; None: never.
        main_thread: Watches the main thread of this process. Default: by its Python stack alone.
        timeout: The longest wait of :meth:`barrier`, in seconds. Default: no limit.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        place: str,
        grace: float = 4.0,
        hang_timeout: float | None = None,
        main_thread: MainThread | None = None,
        timeout: float | None = None,
    ) -> None:
        self.rank, self.size, self.place, self.grace = rank, size, place, grace
        self.hang_timeout, self._timeout = hang_timeout, timeout
        self.process, self._main_thread = process.identity(), main_thread or MainThread()
        self._lock = threading.Lock()  # guards what both threads write

        self.doing, self.progressed_at, self._has_begun = "starting", time.monotonic(), False
        self.batches = self.barriers = 0  # begun; reached
        self._arrival: Arrival | None = None  # at the barrier where this rank waits

        self.failure: str | None = None
        self._has_failed, self.is_closing = threading.Event(), threading.Event()

        # the common stop: this rank waits at batch `_hold_at` until `_stop_at` is known
        self.stop_requested = self.requeue_requested = False
        self._asked = ""
        self._hold_at: int | None = None
        self._stop_at: int | None = None

        if hang_timeout is not None and not faulthandler.is_enabled():
            faulthandler.enable(2)  # for `process.end_frozen`
        self._keys = Keys(store, size)
        self._watch = Watch(self, self._keys)
        self._watch.start()

    def close(self) -> None:
        """Leave; this does not count as a failure."""
        self.is_closing.set()
        self._watch.join()

    # ---- progress and failures -----------------------------------------------------------------------------------

    def note_progress(self, doing: str) -> None:
        """Store what this rank does now; every call counts as progress."""
        self.doing, self.progressed_at, self._has_begun = doing, time.monotonic(), True

    def status(self) -> Status:
        """Return what this rank does."""
        arrival = self._arrival
        return Status(
            **asdict(self._main_thread.position()),
            rank=self.rank,
            place=self.place,
            process=self.process,
            doing=self.doing,
            has_begun=self._has_begun,
            idle=time.monotonic() - self.progressed_at,
            batches=self.batches,
            arrival=None if arrival is None else arrival.purpose,
        )

    def report_failure(self, error: BaseException) -> str:
        """Report to all ranks that this one raised, and return the message."""
        failed = f"failed: {type(error).__name__}: {error}"
        message = f"{self.place} {'was interrupted' if isinstance(error, KeyboardInterrupt) else failed}"[:2000]
        with contextlib.suppress(RuntimeError):  # the watch also finds that the store is lost
            self.fail(message, is_own=True)
        return message

    def wait_for_failure(self, timeout: float) -> str | None:
        """Wait up to ``timeout`` seconds for the failure that has broken a collective, and return it."""
        with contextlib.suppress(RuntimeError):
            self._keys.mark_broken()
        self._has_failed.wait(timeout)
        return self.failure

    def check(self) -> None:
        """Raise a :class:`RankFailure` if another rank failed."""
        if self.failure is not None:
            raise RankFailure(self.failure)

    def fail(self, message: str, is_own: bool = False, frozen: Sequence[str] | None = None) -> None:
        """Report a failure to all ranks. The first one counts; later ones are its consequences."""
        own = Failure(message, self.rank, is_own, frozen)
        first = self._keys.write_failure(own)
        if first == own and not is_own and self.failure is None:
            _print(message)
        self.learn(first)

    def learn(self, failure: Failure) -> None:
        """Receive the failure: raise it at the next batch, or end this process if it does not end by itself."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure.message
        self._has_failed.set()
        if failure.by != self.rank or not failure.is_own:
            threading.Thread(target=self._end, args=[failure], daemon=True).start()

    def _end(self, failure: Failure) -> None:
        frozen = failure.frozen
        if frozen is not None and frozen[0] == self.process[0] and frozen != self.process:
            process.end_frozen(frozen)
        if not self.is_closing.wait(self.grace):
            first_line = failure.message.partition("\n")[0]
            _print(f"{first_line}. Ending {self.place}.")
            process.end_this()

    # ---- the common stop -----------------------------------------------------------------------------------------
    # One rank requests it. Each rank then waits at its next batch and writes that batch's number. The last one writes
    # the largest number, at which all ranks stop.

    def request_stop(self) -> None:
        """Request that all ranks stop at the same batch. Safe in a signal handler."""
        self.stop_requested, self._asked = True, "stop"

    def request_requeue(self) -> None:
        """Request that all ranks stop at the same batch, and are queued again. Safe in a signal handler."""
        self._asked = self._asked or "requeue"

    @property
    def stops_together(self) -> bool:
        """Whether all ranks stop at the batch at which :meth:`should_stop` returns True."""
        return self._stop_at is not None

    def should_stop(self) -> bool:
        """Return whether this rank stops before this batch, together with all others if :attr:`stops_together`.

        Raises:
            RankFailure: If another rank failed.
        """
        self.check()
        with self._lock:
            self.batches += 1
            if self._hold_at is None or self.batches < self._hold_at:
                return False
        if self._stop_at is None:
            self._stop_at = self._wait_for(self._keys.stop_at, None if self.requeue_requested else 30.0)
        return self._stop_at is None or self.batches >= self._stop_at

    def follow_stop(self, kind: str) -> None:
        """Wait at the next batch if a stop of some ``kind`` was requested; request that which this rank wants."""
        if not kind and self._asked:
            kind = self._keys.request_stop(self._asked)
        if not kind or self._hold_at is not None:
            return
        with self._lock:
            self.requeue_requested = kind == "requeue"
            self.stop_requested = self.stop_requested or kind == "stop"
            self._hold_at = self.batches + 1
        self._keys.hold(self.rank, self._hold_at)

    # ---- barriers ------------------------------------------------------------------------------------------------

    def barrier(self, purpose: Purpose = "average", what: str = "", steps: Sequence[int] = ()) -> None:
        """Wait for all ranks, without a collective.

        gloo matches a collective that only some ranks call with the next one of the others: it mixes their values, or
        ends the process if the sizes differ. At this barrier such a rank waits, and the run ends with its name.

        Args:
            purpose: Why the ranks wait. The run ends if it differs between ranks.
            what: Details, for the message of that error. The run also ends if they differ between ranks.
            steps: How often each optimizer has stepped; must be the same on all ranks.

        Raises:
            RankFailure: If another rank failed, continued without this barrier, has taken another number of steps, or
                does not arrive within the timeout.
        """
        self.check()
        line, is_saving = describe_caller()
        if is_saving and purpose == "average":
            purpose = "save"
        with self._lock:
            self.barriers = number = self.barriers + 1
        own = Arrival(number, self.rank, self.place, purpose, what, line, self.batches, [*steps])
        self._arrival = own
        if (difference := self._keys.arrive(own).difference(own)) is not None:
            self.fail(difference)
        else:
            self._keys.count_arrival(number)
        if self._wait_for(lambda: self._keys.has_passed(number), self._timeout) is None:
            raise RankFailure(f"{self.place} has waited{in_line(line)} for other ranks for timeout={self._timeout} s")
        self._arrival = None

    def _wait_for(self, find: Callable[[], Found | None], timeout: float | None) -> Found | None:
        """Call ``find`` until it returns a value; return None after ``timeout`` seconds."""
        pause, began = _FIRST_POLL, time.monotonic()
        while True:
            self.check()
            left = self._watch.left  # before the call: a rank that passed this barrier may leave
            if (found := find()) is not None:
                return found
            if left and self._arrival is not None:
                self.fail(self._arrival.without_others(f"{left} has ended its run"))
            if timeout is not None and time.monotonic() - began > timeout:
                return None
            self._has_failed.wait(pause)
            pause = min(1.5 * pause, max(0.1, self.size / 1000))


@dataclass
class Neighbor:
    """The nearest rank in one direction, 1 or -1, that has not left."""

    rank: int
    direction: int
    status: Status | None = None
    silent: int = 0  # heartbeats of this rank since its last one; a process that is stopped itself counts none


class Watch:
    """The threads of a rank that send its heartbeats, and find and receive failures of other ranks.

    Each rank watches both neighbors, of which one is on the same machine if any rank is.

    - **Deaths.** A rank has died if its process on this machine is gone, or if it is silent after a collective broke.
    - **Hangs.** A rank is frozen if it sends nothing for ``hang_timeout`` seconds. If no rank makes progress for as
      long, the lowest rank that is there reads where all ranks wait.
    - **The store.** If it is lost or does not answer, the process that hosts it has died or is frozen.

    Args:
        plane: This rank.
        keys: Its part of the store.
    """

    def __init__(self, plane: ControlPlane, keys: Keys) -> None:
        self.left = ""  # a rank that has left
        self._plane, self._keys = plane, keys
        self._interval = seconds_between_beats(plane.size, plane.hang_timeout)
        self._neighbors = [Neighbor((plane.rank + side) % plane.size, side) for side in (1, -1)]
        self._unanswered = 0  # seconds for which the store has not answered
        self._reported_at: float | None = None  # the last progress before the standstill that was reported
        self._threads = [
            threading.Thread(target=target, name="hiercomm-control", daemon=True)
            for target in (self._run, self._watch_store)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until the threads have ended, because the plane is closing."""
        for thread in self._threads:
            thread.join(timeout=max(2.0, 2 * self._interval) + self._plane.grace / 2)

    def _run(self) -> None:
        try:
            while self._plane.failure is None:
                self._beat()
                if self._plane.is_closing.wait(self._interval):
                    break
            self._leave()
        except RuntimeError:  # of torch's store
            if not self.left and not self._plane.is_closing.is_set():
                self._plane.learn(Failure(f"{_store_host()} died, and torch's store with it", self._plane.rank))

    def _beat(self) -> None:
        """Write this rank's status, and read what concerns it: two requests to the store."""
        plane, status = self._plane, self._plane.status()
        self._keys.write_status(status)
        shared = self._keys.read(*(neighbor.rank for neighbor in self._neighbors))
        self._unanswered, self.left = 0, shared.left
        if shared.failure is not None:
            plane.learn(shared.failure)
            return
        plane.follow_stop(shared.stop)
        first = shared.barrier
        # in this order: this rank may pass that barrier now, and begin a batch
        if first is not None and plane.batches > first.batches and first.number > plane.barriers:
            plane.fail(first.without_others(f"{plane.place} trains on with batch {plane.batches} of the run"))
        for neighbor, now in zip(self._neighbors, shared.statuses, strict=True):
            neighbor.silent = neighbor.silent + 1 if now == neighbor.status else 0
            neighbor.status = now
            self._check(neighbor, shared.a_collective_broke)
        self._check_progress(status)  # each check does no harm after a failure: the first one counts

    def _check(self, neighbor: Neighbor, a_collective_broke: bool) -> None:
        """End the run if a neighbor has died or is frozen."""
        plane, rank = self._plane, neighbor.rank
        status = neighbor.status or Status(rank=rank, place=f"rank {rank}")
        if status.has_left or rank == plane.rank:
            neighbor.rank, neighbor.status, neighbor.silent = (rank + neighbor.direction) % plane.size, None, 0
        elif self._is_gone(status) or (a_collective_broke and neighbor.silent >= 3):
            plane.fail(f"{status.place} died")
        elif plane.hang_timeout is not None and neighbor.silent * self._interval > plane.hang_timeout:
            how = f"it sent nothing for {plane.hang_timeout:g} s, and before it was {status.doing}"
            plane.fail(f"{status.place} is frozen: {how}", frozen=status.process)

    def _is_gone(self, status: Status) -> bool:
        """Return whether a process of this machine has ended without leaving."""
        if status.process[0] != self._plane.process[0] or not process.is_gone(status.process):
            return False
        (now,) = self._keys.read(status.rank).statuses
        return now is not None and not now.has_left

    def _check_progress(self, own: Status) -> None:
        """Report who waits where if no rank makes progress; end the run if the ranks wait for each other."""
        plane, is_lowest = self._plane, self._neighbors[1].rank >= own.rank
        if plane.hang_timeout is None or own.idle < plane.hang_timeout or not is_lowest:
            return
        statuses = self._keys.read(*range(plane.size)).statuses
        table, is_deadlock = standstill([status for status in statuses if status is not None], plane.hang_timeout)
        if is_deadlock:
            plane.fail(table)
        elif table and self._reported_at != plane.progressed_at:  # it is reported once
            self._reported_at = plane.progressed_at
            _print(table)

    def _leave(self) -> None:
        plane, keys = self._plane, self._keys
        if plane.failure is None:
            keys.write_status(Status(rank=plane.rank, place=plane.place, has_left=True))
            keys.leave(plane.place)
        deadline, aware = time.monotonic() + max(2.0, 2 * self._interval), keys.count_aware(1)
        while plane.rank == 0 and not is_agents_store() and aware < plane.size and time.monotonic() < deadline:
            time.sleep(0.02)  # other ranks would take the end of this process, which has the store, for a death
            aware = keys.count_aware(0)

    def _watch_store(self) -> None:
        """End this rank if the store does not answer: a call has no timeout if the store's process is stopped."""
        plane, hang_timeout = self._plane, self._plane.hang_timeout
        while hang_timeout is not None and not plane.is_closing.wait(1.0) and self._threads[0].is_alive():
            self._unanswered += 1
            if self._unanswered > hang_timeout + self._interval:
                on_rank_0 = [] if is_agents_store() else [each.status for each in self._neighbors if each.rank == 0]
                frozen = [status.process for status in on_rank_0 if status is not None]
                message = f"{_store_host()} is frozen: torch's store there has not answered for {hang_timeout:g} s"
                plane.learn(Failure(message, plane.rank, frozen=frozen[0] if frozen else None))
                return


def _store_host() -> str:
    return "torchrun's agent" if is_agents_store() else "rank 0"


def _print(message: str) -> None:
    print(f"lightning_hiercomm: {message}", file=sys.stderr, flush=True)
