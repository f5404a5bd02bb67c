"""Reports and receives failures of ranks, and lets all ranks stop at the same batch, by keys in torch's store."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing.util
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torch.distributed import Store

from lightning_hiercomm.control import process
from lightning_hiercomm.control.bootstrap import is_agents_store, lost_store, store_host
from lightning_hiercomm.control.reports import Arrival, Failure, Purpose, Status, in_line, standstill
from lightning_hiercomm.control.waiting import MainThread, describe_caller

_STUCK_GRACE = 1.5  # seconds; ranks that wait for each other do not end by themselves
_FIRST_POLL = 0.002  # seconds
_UNKNOWN = ("", "0", "")  # the identity of a process on another machine
_SHARED = ("failure", "rounds", "arrival", "standstill", "left", "broken")


class RankFailure(RuntimeError):
    """Another rank died or raised."""


def seconds_between_beats(size: int, hang_timeout: float | None) -> float:
    """Return the interval between heartbeats of each rank, which grows with the number of ranks beyond 1,000."""
    return min(max(1.0, size / 1000), 300.0 if hang_timeout is None else hang_timeout / 10)


class ControlPlane:
    """A rank's part in the control plane: what its training thread reports, receives and waits for.

    A :class:`Watch` sends heartbeats and looks for failures in threads of its own. The training thread uses the store
    at barriers, common stops and failures only. Neither reads a key that may be missing: the store would wait for it.

    ==================================================== ===============================================================
    key                                                  value
    ==================================================== ===============================================================
    ``status/<rank>``                                    what a rank does, and where it waits
    ``failure``                                          the first failure of any rank, which ends the run
    ``broken``                                           whether a collective broke: then a silent rank has died
    ``rounds``; ``hold/<round>/<rank>``, ``at/<round>``  common stops; the next batch of each rank, and their maximum
    ``arrival/<n>``, ``arrived/<n>``                     barrier n: why the first rank waits; the number of ranks there
    ``arrival``, ``left``                                the last barrier, and a rank that left, for ranks that miss it
    ``standstill``                                       changes when all ranks shall write their stacks
    ``aware``                                            the number of ranks that left or have read the failure
    ==================================================== ===============================================================

    After a failure of another rank, this one raises at its next batch, or is ended ``grace`` seconds later.

    Args:
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
        self._lock = threading.Lock()  # guards what both threads write
        self._failed, self.is_closing = threading.Event(), threading.Event()
        self._main_thread = main_thread or MainThread()
        self._watch: Watch | None = None  # while this rank is connected

        # what this rank does
        self.doing = "starting"
        self._progress = self._batch = self._barriers = 0
        self._progressed_at = time.monotonic()
        self._arrival: Arrival | None = None  # at the barrier where this rank waits

        # other ranks
        self.processes: dict[int, Sequence[str]] = {}  # the identities of ranks on this machine
        self.failure: str | None = None
        self.collective_broke = False
        self.left = ""  # a rank that has left

        # common stops: this rank waits at batch `_hold_at` until `_stop_at` is known
        self.stop_requested = self.requeue_requested = False
        self._asked = {"requeue": 0, "stop": 0}
        self._round = 0
        self._hold_at: int | None = None
        self._stop_at: int | None = None

    def start(self, store: Store, gather: Callable[..., list[Any]]) -> None:
        """Start the watch. Collective.

        Args:
            store: A new part of a store, over a connection of this object's own.
            gather: Returns at least the values of ranks with the same ``among``.
        """
        self.store = store
        for key in _SHARED if self.rank == 0 else ():
            store.compare_set(key, "", "")  # `set` returns before the store has the key
        watch = Watch(self)
        own = process.identity()
        if self.hang_timeout is not None and not faulthandler.is_enabled():
            faulthandler.enable(2)  # for `process.end_frozen`
        self.processes = {rank: who for rank, who in gather([self.rank, own], among=own[0]) if who[0] == own[0]}
        watch.start()
        self._watch = watch

    def close(self) -> None:
        """Leave; this does not count as a failure."""
        self.is_closing.set()
        if self._watch is not None:
            self._watch.join()
            self._watch = None

    # ---- progress and failures -----------------------------------------------------------------------------------

    def note_progress(self, doing: str) -> None:
        """Store what this rank does now; every call counts as progress."""
        self.doing, self._progressed_at = doing, time.monotonic()
        self._progress += 1

    def status(self, stuck: float) -> Status:
        """Return what this rank does; it has been stuck in the kernel for so many seconds."""
        arrival = self._arrival
        return Status(
            **asdict(self._main_thread.position()),
            rank=self.rank,
            place=self.place,
            doing=self.doing,
            progress=self._progress,
            idle=time.monotonic() - self._progressed_at,
            batches=self._batch,
            stuck=stuck,
            arrival=None if arrival is None else arrival.purpose,
        )

    def report_failure(self, error: BaseException) -> str:
        """Report to all ranks that this one raised, and return the message."""
        failed = f"failed: {type(error).__name__}: {error}"
        message = f"{self.place} {'was interrupted' if isinstance(error, KeyboardInterrupt) else failed}"
        if self._watch is not None:
            with contextlib.suppress(RuntimeError):  # the watch also finds that the store is lost
                self.fail(Failure(message[:2000], raised_by=self.rank))
        return message

    def wait_for_failure(self, timeout: float, collective_broke: bool = False) -> str | None:
        """Wait up to ``timeout`` seconds for a failure, and return the first one of any rank."""
        if self._watch is not None:
            self.collective_broke = collective_broke
            self._failed.wait(timeout)
        return self.failure

    def check(self) -> None:
        """Raise a :class:`RankFailure` if another rank failed."""
        if self.failure is not None:
            raise RankFailure(self.failure)

    def fail(self, failure: Failure) -> None:
        """Report a failure to all ranks. The first one counts; later ones are its consequences."""
        own = json.dumps(asdict(failure))
        first = self.store.compare_set("failure", "", own).decode()
        if first == own and failure.raised_by is None:
            print(f"lightning_hiercomm: {failure.message}", file=sys.stderr, flush=True)
        self.learn(Failure(**json.loads(first)))

    def learn(self, failure: Failure) -> None:
        """Receive the failure: raise it at the next batch, or end this process if it does not end by itself."""
        message = failure.message
        with self._lock:
            if self.failure is not None:
                return
            self.failure = message
        self._failed.set()
        # if this process ends by itself, before multiprocessing waits for its children
        multiprocessing.util.Finalize(None, process.end_children, exitpriority=100)
        if failure.is_frozen:
            process.dump_stacks(f"{message}. What {self.place} does:")
        for rank in {*failure.silent} & {*self.processes} - {self.rank}:
            ending = threading.Timer(self.grace / 2, process.end_frozen, [self.processes[rank]])
            ending.daemon = False  # the watch's are by default: this process may end by itself before that
            ending.start()
        if failure.raised_by != self.rank:
            grace = min(self.grace, _STUCK_GRACE) if failure.is_stuck else self.grace
            why = "" if failure.is_stuck or message.startswith(self.place) else ", which is waiting for it"
            first_line = message.partition("\n")[0]
            last = f"{first_line}. Ending {self.place}{why}."
            threading.Thread(target=process.end_after, args=(grace, last, self.is_closing), daemon=True).start()

    def lose_store(self) -> None:
        """Receive that the store does not answer any more, because its host has died."""
        if not self.left and not self.is_closing.is_set():
            self.learn(Failure(lost_store()))

    # ---- common stops --------------------------------------------------------------------------------------------
    # One rank appends a round to the list in the store. Each rank then waits at its next batch and writes that batch's
    # number. The last one writes the largest number, at which all ranks stop. After a requeue they continue.

    def request_stop(self) -> None:
        """Request that all ranks stop at the same batch. Safe in a signal handler."""
        self.stop_requested = True
        self._asked["stop"] = 1

    def request_requeue(self) -> None:
        """Request that all ranks save at the same batch and are queued again. Safe in a signal handler."""
        self._asked["requeue"] += 1

    def go_on(self) -> None:
        """Continue training after all ranks have saved to be queued again."""
        with self._lock:
            self._hold_at = self._stop_at = None
            self.requeue_requested = False
            self._round += 1

    @property
    def stops_together(self) -> bool:
        """Whether all ranks stop at the batch at which :meth:`should_stop` returns True."""
        return self._stop_at is not None

    def should_stop(self) -> bool:
        """Return whether this rank stops before this batch, together with all others if :attr:`stops_together`.

        If :attr:`requeue_requested`, the rank only saves here and then calls :meth:`go_on`.

        Raises:
            RankFailure: If another rank failed.
        """
        self.check()
        with self._lock:
            self._batch += 1
            if self._hold_at is None or self._batch < self._hold_at:
                return False
        # a rank without an answer may stop here, but must not train on while others wait for it in a save
        key, timeout = f"at/{self._round}", None if self.requeue_requested else 30.0
        with self._lost_store_raises():
            if self._stop_at is None and self._wait_until(lambda: self.store.check([key]), timeout):
                self._stop_at = int(self.store.get(key))
        return self._stop_at is None or self._batch >= self._stop_at

    def follow_rounds(self, listed: str) -> None:
        """Wait at the next batch if the list has a new round; append the rounds that this rank requests."""
        for kind, asked in self._asked.items():
            if listed.split().count(kind) < asked:  # otherwise another rank has requested it already
                listed = self.store.compare_set("rounds", listed, f"{listed} {kind}".strip()).decode()
        rounds, number = listed.split(), self._round
        if self._hold_at is not None or number >= len(rounds):
            return
        with self._lock:
            self.requeue_requested = rounds[number] == "requeue"
            self.stop_requested = self.stop_requested or rounds[number] == "stop"
            self._hold_at = self._batch + 1
        self.store.set(f"hold/{number}/{self.rank}", str(self._hold_at))
        if self.store.add(f"held/{number}", 1) == self.size:
            held = self.store.multi_get([f"hold/{number}/{rank}" for rank in range(self.size)])
            self.store.set(f"at/{number}", str(max(map(int, held))))

    # ---- barriers ------------------------------------------------------------------------------------------------

    def barrier(self, purpose: Purpose = "average", what: str = "", steps: Sequence[int] = ()) -> None:
        """Wait for all ranks, without a collective. Without a control plane it returns at once.

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
        if self._watch is None:
            return
        self.check()
        line, is_saving = describe_caller()
        if is_saving and purpose == "average":
            purpose = "save"
        with self._lock:
            self._barriers = number = self._barriers + 1
        self._arrival = own = Arrival(number, self.rank, self.place, purpose, what, line, self._batch, [*steps])
        with self._lost_store_raises():
            self._arrive(own)
            if not self._wait_until(lambda: self.store.add(f"arrived/{number}", 0) == self.size, self._timeout):
                waited = f"{self.place} has waited{in_line(line)} for other ranks for timeout={self._timeout} s"
                self.fail(Failure(waited))
                self.check()
        self._arrival = None

    def _arrive(self, own: Arrival) -> None:
        number, text = own.number, json.dumps(asdict(own))
        first = Arrival(**json.loads(self.store.compare_set(f"arrival/{number}", "", text)))
        if first.rank == self.rank:
            self.store.set("arrival", text)
        if (difference := first.difference(own)) is not None:
            self.fail(Failure(difference))
        elif self.store.add(f"arrived/{number}", 1) == self.size and number > 1:
            for name in ("arrival", "arrived"):
                self.store.delete_key(f"{name}/{number - 1}")

    def follow_barriers(self, arrival: str) -> None:
        """End the run if this rank trains on, and another one waits at a barrier before."""
        if arrival:
            first = Arrival(**json.loads(arrival))
            with self._lock:
                has_passed = first.number > self._barriers and self._batch > first.batches
            if has_passed:
                passed = f"{self.place} trains on with batch {self._batch} of the run"
                self.fail(Failure(first.without_others(passed)))

    def _wait_until(self, is_done: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for a condition in the store; return False after ``timeout`` seconds."""
        pause, began = _FIRST_POLL, time.monotonic()
        while True:
            self.check()
            left = self.left  # before the check: a rank that passed this barrier may leave
            if is_done():
                return True
            if left and self._arrival is not None:
                self.fail(Failure(self._arrival.without_others(f"{left} has ended its run")))
            if timeout is not None and time.monotonic() - began > timeout:
                return False
            self._failed.wait(pause)
            pause = min(1.5 * pause, max(0.1, self.size / 1000))

    @contextlib.contextmanager
    def _lost_store_raises(self) -> Iterator[None]:
        try:
            yield
        except RankFailure:
            raise
        except RuntimeError as error:  # of torch's store
            self.lose_store()
            self.check()
            line = "" if self._arrival is None else self._arrival.line
            waiting = f"{self.place} waits{in_line(line)} for it"
            raise RankFailure(f"{store_host()} has ended its run, and {waiting}") from error


class Watch:
    """The threads of a rank that send its heartbeats, and find and receive failures of other ranks.

    At each heartbeat, one thread writes ``status/<rank>``, and reads the shared keys and the status of the rank after
    this one. The other thread ends this rank if the store does not answer.

    - **Deaths.** Ranks check the processes of their own machine. A rank alone on its machine is dead if it is silent
      after a collective broke.
    - **Hangs.** A rank is frozen if it sends nothing for ``hang_timeout`` seconds, or if its main thread is stuck in
      the kernel for as long. A rank without progress for as long reads the status of all ranks.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane, self._store = plane, plane.store
        self._interval = seconds_between_beats(plane.size, plane.hang_timeout)
        self._threads = [
            threading.Thread(target=target, name="hiercomm-control", daemon=True)
            for target in (self._run, self._watch_store)
        ]
        self._stuck = process.StuckDetector()
        self._is_broken = False  # then heartbeats are more frequent
        # seconds are those that this process has waited: it may have been stopped, perhaps together with all others
        self._unanswered = 0.0  # since the last answer of the store
        self._next = (plane.rank + 1) % plane.size  # the rank that this one watches
        self._seen, self._silent = "", 0.0  # its last status, and the seconds since then
        self._progress, self._idle = 0, 0.0  # of this rank, and the seconds since then
        self._standstill = ""
        self._look_at = 0.0
        self._write_status()  # before ranks gather, because others read it without a check

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until the threads have ended, because the plane is closing."""
        for thread in self._threads:
            thread.join(timeout=max(2.0, 2 * self._interval) + self._plane.grace / 2)

    def _run(self) -> None:
        plane, before = self._plane, time.monotonic()
        try:
            while plane.failure is None:
                self._beat()
                if plane.is_closing.wait(self._interval / (4 if self._is_broken else 1)):
                    break
                now = time.monotonic()
                waited, before = min(now - before, 2 * self._interval), now
                self._silent += waited
                self._idle += waited
            self._leave()
        except RuntimeError:  # of torch's store
            plane.lose_store()

    def _beat(self) -> None:
        """Write this rank's status, and read what concerns all ranks: two requests to the store."""
        plane, status = self._plane, self._write_status()
        shared = self._store.multi_get([*_SHARED, f"status/{self._next}"])
        failure, rounds, arrival, requested, plane.left, broken, watched = (value.decode() for value in shared)
        self._unanswered = 0.0
        if failure:
            plane.learn(Failure(**json.loads(failure)))
            return
        if requested != self._standstill:
            self._standstill = requested
            process.dump_stacks(f"what {plane.place} does, which is {plane.doing}:")
        if plane.collective_broke and not broken:
            self._store.set("broken", "1")
        self._is_broken = plane.collective_broke or bool(broken)
        plane.follow_rounds(rounds)
        plane.follow_barriers(arrival)
        self._check_machine()
        self._check_next(watched)
        self._check_all(status)  # each does no harm after a failure: the first one counts

    def _write_status(self) -> Status:
        what, stuck = self._stuck.check()
        status, hang_timeout = self._plane.status(stuck), self._plane.hang_timeout
        self._store.set(f"status/{status.rank}", json.dumps(asdict(status)))
        if hang_timeout is not None and stuck > hang_timeout:
            self._fail_frozen(status, f"{what} has been stopped or stuck", silent=[])
        return status

    def _check_machine(self) -> None:
        """End the run if the process of the next rank on this machine has ended without leaving."""
        processes = self._plane.processes
        ranks = sorted(processes, key=lambda rank: (rank <= self._plane.rank, rank))
        if ranks and process.is_gone(processes[ranks[0]]):
            status = self._status_of(ranks[0])  # without an answer, `_watch_store` needs the process
            del processes[ranks[0]]
            if not status.has_left:
                self._plane.fail(Failure(f"{status.place} died"))

    def _check_next(self, watched: str) -> None:
        """End the run if the next rank that has not left is silent."""
        hang_timeout = self._plane.hang_timeout
        if watched != self._seen:
            self._seen, self._silent = watched, 0.0
        status = Status(**json.loads(watched))
        if status.has_left or status.rank == self._plane.rank:
            self._next, self._silent = (self._next + 1) % self._plane.size, 0.0
        elif self._is_broken and self._silent > 3 * self._interval:
            self._plane.fail(Failure(f"{status.place} died"))
        elif hang_timeout is not None and self._silent > hang_timeout:
            self._fail_frozen(status, "it sent nothing", silent=[status.rank])

    def _check_all(self, own: Status) -> None:
        """Look at all ranks if this one has made no progress for ``hang_timeout`` seconds."""
        size, hang_timeout, now = self._plane.size, self._plane.hang_timeout, time.monotonic()
        if own.progress != self._progress:
            self._progress, self._idle = own.progress, 0.0
        if hang_timeout is None or self._idle < hang_timeout or now < self._look_at:
            return
        self._look_at = now + max(hang_timeout / 10, size / 100)
        found = self._store.multi_get([f"status/{rank}" for rank in range(size)])  # all ranks may look at once
        statuses = [Status(**json.loads(each)) for each in found]
        table, is_deadlock = standstill(statuses, hang_timeout, 2 * self._interval)
        if is_deadlock:
            self._plane.fail(Failure(table, is_stuck=True))
            return
        progress = sum(status.progress for status in statuses)
        if table and self._standstill.partition("/")[0] != f"{progress}":  # it is reported once
            request = f"{progress}/{own.rank}"
            if self._store.compare_set("standstill", self._standstill, request).decode() == request:
                print(f"lightning_hiercomm: {table}", file=sys.stderr, flush=True)

    def _status_of(self, rank: int) -> Status:
        return Status(**json.loads(self._store.get(f"status/{rank}")))

    def _fail_frozen(self, status: Status, how: str, silent: Sequence[int]) -> None:
        how = f"{how} for {self._plane.hang_timeout:g} s, and before it was {status.doing}"
        self._plane.fail(Failure(f"{status.place} is frozen: {how}", silent=silent, is_frozen=True))

    def _leave(self) -> None:
        plane = self._plane
        if plane.failure is None:
            status = Status(rank=plane.rank, place=plane.place, has_left=True)
            self._store.set(f"status/{plane.rank}", json.dumps(asdict(status)))
            self._store.set("left", plane.place)
        deadline = time.monotonic() + max(2.0, 2 * self._interval)
        aware = self._store.add("aware", 1)
        while plane.rank == 0 and not is_agents_store() and aware < plane.size and time.monotonic() < deadline:
            time.sleep(0.02)  # other ranks would take the end of this process, which has the store, for a death
            aware = self._store.add("aware", 0)

    def _watch_store(self) -> None:
        """End this rank if the store does not answer: a call has no timeout if the store's process is stopped."""
        plane, hang_timeout, on_rank_0 = self._plane, self._plane.hang_timeout, not is_agents_store()
        while not plane.is_closing.wait(1.0) and plane.failure is None and self._threads[0].is_alive():
            self._unanswered += 1.0
            silence = self._unanswered - self._interval
            # its forked workers may keep its connections open
            if silence > 1.0 and on_rank_0 and process.is_gone(plane.processes.get(0, _UNKNOWN)):
                plane.learn(Failure(lost_store()))
            elif hang_timeout is not None and silence > hang_timeout:
                message = f"{store_host()} is frozen: torch's store there has not answered for {hang_timeout:g} s"
                plane.learn(Failure(message, silent=[0] if on_rank_0 else [], is_frozen=True))
