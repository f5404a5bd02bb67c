"""A rank's end of the control plane: it reports and receives failures, and lets all ranks stop at the same batch."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from lightning_hiercomm.control import hub, process
from lightning_hiercomm.control.connection import HubLink, Invitation
from lightning_hiercomm.control.waiting import MainThread, describe_caller

log = logging.getLogger(__name__)

_STUCK_GRACE = 1.5  # seconds; ranks that wait for each other do not end by themselves
_CANNOT_ASK = "it cannot reach the other ranks, because the control plane is lost"
_planes: weakref.WeakSet[ControlPlane] = weakref.WeakSet()


class RankFailure(RuntimeError):
    """Another rank died or raised."""


class ControlPlane:
    """Connects this rank to the hub on rank 0's machine by TCP; a thread sends and receives messages.

    - **Failures.** A rank that waits in a collective for a dead peer waits for the backend's timeout, by default half
      an hour. The hub sees at once that the connection of a dead process is closed, and reports it to all ranks. They
      raise at their next batch; a rank in a collective is ended after ``grace`` seconds.
    - **Hangs.** A rank is frozen if it sends nothing for ``hang_timeout`` seconds, or if its main thread is stuck in
      the kernel for as long. Then all ranks dump their stacks, and the run ends. It also ends if all ranks wait for
      each other in different places. If no rank makes progress but one is busy, all dump their stacks and continue.
    - **Common stops.** After a SIGTERM on some ranks all stop at the same batch, without a collective per step. Before
      a SLURM time limit all save at the same batch and continue.
    - **A lost hub.** The hub is a separate process with a listening socket of rank 0. Rank 0 is alive as long as that
      socket accepts connections; then the ranks continue without a control plane.

    Args:
        rank: This rank.
        size: Number of ranks.
        place: The name of this rank in messages, such as ``"rank 3 (node 1)"``.
        grace: Seconds from receiving a failure until this process is ended, unless it ended by itself.
        hang_timeout: Seconds without a message after which a rank counts as frozen; None: never.
        main_thread: Watches the main thread of this process. Default: by its Python stack alone.
        timeout: The longest wait of :meth:`barrier`, in seconds. Default: no limit.

    Attributes:
        processes: The identities of the processes of ranks on this machine, to kill a frozen one. They do not come from
            the hub, which could name any process.
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
        self.rank = rank
        self.size = size
        self.place = place
        self.grace = grace
        self.hang_timeout = hang_timeout
        self._timeout = timeout
        self.processes: dict[int, Sequence[str]] = {}
        self._changed = threading.Condition()  # guards what the thread and the main thread share

        # this rank's activity, which it reports
        self.doing = "starting"
        self._progress = 0
        self._batch = 0
        self._main_thread = main_thread or MainThread()

        # other ranks
        self.failure: str | None = None
        self._rank_0_has_left = False
        self._is_lost = False  # the hub
        self._barriers = 0  # at which this rank has arrived
        self._released = 0  # that all ranks have passed

        # the common stop: this rank waits at batch `_hold_at` until `_stop_at` is known
        self.stop_requested = False
        self.requeue_requested = False
        self._hold_at: int | None = None
        self._stop_at: int | None = None
        self._stops_next = False  # after the requeue
        self._asked_to_requeue = 0
        self._requeues = 0

        # connections
        self.link = HubLink(rank, size, place, hang_timeout)
        self._channel: hub.Channel | None = None
        self._outbox: queue.SimpleQueue[hub.Message] = queue.SimpleQueue()
        self._waker: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._ending: threading.Thread | None = None
        _planes.add(self)

    # ---- joining -------------------------------------------------------------------------------------------------

    def start(self, host: str, port: int, broadcast: Callable[[Any], Any], gather: Callable[..., list[Any]]) -> bool:
        """Start the control plane on all ranks, or on none with a warning on rank 0. Collective.

        Without it, ranks wait for each other before every batch. So all ranks must have it, or none.

        Args:
            host: An address of rank 0 that every rank can reach.
            port: The port on which rank 0 listens; 0 for any free port.
            broadcast: Returns rank 0's value on all ranks.
            gather: Returns at least the values of ranks with the same ``among``, and those that are sent ``aloud``. It
                may call ``alarm`` while it waits.

        Returns:
            Whether it started.
        """
        address, trouble = None, None
        try:
            if self.rank == 0:
                address = asdict(self.link.invite(host, port))
        except OSError as error:
            trouble = f"{self.place} cannot listen on port {port}: {error}"
        address = broadcast(address)
        if address is not None:
            invitation = Invitation(**address)
            try:
                self.join(invitation)
            except OSError as error:
                trouble = f"{self.place} cannot reach {invitation}: {error}"
        try:
            own = process.identity()
            gathered = gather([self.rank, own, trouble], self.check, among=own[0], aloud=trouble is not None)
        except BaseException as error:
            self.report_failure(error)
            self.close()
            raise
        self.processes = {rank: identity for rank, identity, _ in gathered if identity[0] == own[0]}
        troubles = [trouble for _, _, trouble in gathered if trouble is not None]
        if not troubles:
            return True
        self.close()
        if self.rank == 0:
            more = f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""
            log.warning(
                "No control plane: %s%s. Training continues without it: all ranks wait for each other before every"
                " batch, and when one dies the others wait for the process group's timeout. Make that port of rank 0's"
                " node reachable for every rank, or choose another one with"
                " HierarchicalStrategy(health=Health(control_port=...)).",
                troubles[0],
                more,
            )
        return False

    def join(self, invitation: Invitation) -> None:
        """Connect to the hub, or raise an ``OSError`` if it cannot be reached."""
        self._waker = socket.socketpair()
        self._waker[1].setblocking(False)
        joined = self.link.join(invitation)
        self._thread = threading.Thread(
            target=self._take_part, args=(*joined, invitation), name="hiercomm-control", daemon=True
        )
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        """Whether :meth:`join` succeeded and :meth:`close` was not called."""
        return self._thread is not None

    @property
    def stops_together(self) -> bool:
        """Whether all ranks stop at the batch at which :meth:`should_stop` returns True."""
        return self._stop_at is not None

    # ---- reports -------------------------------------------------------------------------------------------------

    def note_progress(self, doing: str) -> None:
        """Store what this rank does now; every call counts as progress."""
        self.doing = doing
        self._progress += 1

    def report_failure(self, error: BaseException) -> None:
        """Report to all ranks that this one raised."""
        if self.failure is None and self.is_connected:
            message = self.description(error)
            self._post({"kind": "failed", "message": message[:2000]})

    def description(self, error: BaseException) -> str:
        if isinstance(error, KeyboardInterrupt):
            return f"{self.place} was interrupted"
        return f"{self.place} failed: {type(error).__name__}: {error}"

    def wait_for_failure(self, timeout: float) -> str | None:
        """Wait up to ``timeout`` seconds for a failure, and return the first one of any rank."""
        if self.is_connected:
            with self._changed:
                self._changed.wait_for(lambda: self.failure is not None, timeout)
        return self.failure

    def check(self) -> None:
        """Raise a :class:`RankFailure` if another rank failed."""
        if self.failure is not None:
            raise RankFailure(self.failure)

    # ---- common stops --------------------------------------------------------------------------------------------
    # One rank sends a request, which the hub proposes to all. Each rank then waits at its next batch and sends that
    # batch's number. The hub answers with the largest number, at which all ranks stop. Round 0 is a stop for good;
    # rounds 1, 2, ... are requeues, after which ranks continue.

    def request_stop(self) -> None:
        """Request that all ranks stop at the same batch. Safe in a signal handler."""
        self.stop_requested = True
        self._post({"kind": "request", "round": 0})

    def request_requeue(self) -> None:
        """Request that all ranks save at the same batch and are queued again. Safe in a signal handler."""
        with self._changed:  # a reentrant lock
            if self._is_lost:
                log.warning("%s saves nothing, and the job is not queued again: %s", self.place, _CANNOT_ASK)
            self._asked_to_requeue += 1
            if self._asked_to_requeue > self._requeues:  # otherwise another rank has requested it already
                self._post({"kind": "request", "round": self._requeues + 1})

    def go_on(self) -> None:
        """Continue training after all ranks have saved to be queued again."""
        with self._changed:
            if self._stop_at is None:
                log.warning("%s saves nothing, and the job is not queued again: %s", self.place, _CANNOT_ASK)
            self._hold_at = self._stop_at = None
            self.requeue_requested = False
            if self._stops_next:
                self._hold(0)

    def should_stop(self) -> bool:
        """Return whether this rank stops before this batch, together with all others if :attr:`stops_together`.

        If :attr:`requeue_requested`, the rank only saves here and then calls :meth:`go_on`.

        Raises:
            RankFailure: If another rank failed.
        """
        self.check()
        with self._changed:
            self._batch += 1
            if self._hold_at is None or self._batch < self._hold_at:
                return self._is_lost and self.stop_requested
            # wait a round trip for the common batch. A rank without an answer may stop here, but must not train on
            # while others wait for it in a save
            self._changed.wait_for(
                lambda: self._stop_at is not None or self.failure is not None or self._is_lost,
                timeout=None if self.requeue_requested else 30.0,
            )
            self.check()
            return self._stop_at is None or self._batch >= self._stop_at

    # ---- barriers ------------------------------------------------------------------------------------------------

    def barrier(self, purpose: hub.Purpose = "average", what: str = "", steps: Sequence[int] = ()) -> None:
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
        if not self.is_connected:
            return
        line, is_saving = describe_caller()
        if is_saving and purpose == "average":
            purpose = "save"
        with self._changed:
            self._barriers += 1
            number = self._barriers
            arrival = {"number": number, "batches": self._batch, "purpose": purpose, "what": what, "line": line}
            self._post({"kind": "arrive", **arrival, "steps": [*steps]})
            is_over = self._changed.wait_for(
                lambda: self._released >= number or self.failure is not None or self._is_lost or self._rank_0_has_left,
                timeout=self._timeout,
            )
            self.check()
            where = hub.in_line(line)
            if not is_over:
                raise RankFailure(f"{self.place} has waited{where} for other ranks for timeout={self._timeout:g} s")
            if self._released < number and self._rank_0_has_left:
                raise RankFailure(f"rank 0 has ended its run, and {self.place} waits{where} for it")

    def close(self) -> None:
        """Disconnect; this does not count as a failure."""
        if self._thread is not None:
            self._closing.set()
            self._post({"kind": "bye"})
            self._thread.join(timeout=2.0)
            self._thread = None
            if self.hang_timeout is not None:
                process.survive_urgent_data()
        if self._ending is not None:
            self._ending.join(timeout=self.grace)
        if self._waker is not None:
            for end in self._waker:
                end.close()
            self._waker = None
        self.link.close()

    def _post(self, message: hub.Message) -> None:
        self._outbox.put(message)
        if self._waker is not None:
            with contextlib.suppress(OSError):  # the thread will wake up anyway
                self._waker[1].send(b".")

    def forget(self) -> None:
        """Close connections that a forked child has inherited, because they would hide the death of this rank."""
        self.link.forget()
        for connection in (self._channel, *(self._waker or ())):
            if connection is not None:
                connection.close()

    # ---- the listening thread ------------------------------------------------------------------------------------

    def _take_part(self, channel: hub.Channel, messages: list[hub.Message], invitation: Invitation) -> None:
        self._channel = channel
        try:
            self._exchange(channel, messages)
        except (OSError, ValueError):
            if not self._closing.is_set() and self.failure is None:
                self._lose_hub(invitation)
        finally:
            channel.close()

    def _exchange(self, channel: hub.Channel, messages: list[hub.Message]) -> None:
        """Exchange messages until this rank or the hub leaves."""
        stuck = process.StuckDetector()
        next_beat = 0.0 if self.hang_timeout is not None else math.inf
        assert self._waker is not None
        woken, _ = self._waker
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while True:
                for message in messages:
                    if message["kind"] == "closed":
                        with self._changed:
                            self._rank_0_has_left = True
                            self._changed.notify_all()
                        return
                    self.receive(message)
                while not self._outbox.empty():
                    message = self._outbox.get()
                    channel.send(message)
                    if message["kind"] == "bye":
                        return
                if self.hang_timeout is not None and time.monotonic() >= next_beat:
                    beat: dict[str, Any] = {"doing": self.doing, "progress": self._progress, "batches": self._batch}
                    beat["stuck"] = stuck.check()
                    wait = self._main_thread.wait()
                    beat["wait"] = asdict(wait) if wait is not None and wait.seconds >= 1.0 else None
                    beat["line"] = self._main_thread.line() if wait is None else ""
                    channel.send({"kind": "beat", **beat})
                    next_beat = time.monotonic() + hub.seconds_between_beats(self.size, self.hang_timeout)
                pause = max(0.0, next_beat - time.monotonic()) if next_beat < math.inf else None
                ready = [key.fileobj for key, _ in selector.select(pause)]
                if woken in ready:
                    woken.recv(4096)
                messages = channel.receive() if channel in ready else []

    def _lose_hub(self, invitation: Invitation) -> None:
        """Raise at the next batch if rank 0 died with the hub; otherwise continue without the control plane."""
        try:
            self.link.connect(invitation, timeout=2.0).close()
        except OSError:  # rank 0's socket accepts connections as long as rank 0 is alive
            self._learn_failure("rank 0 died, and the control plane's hub with it")
            return
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()
        log.warning(
            "%s lost the control plane's hub and continues without it: failures of other ranks are not reported, and"
            " after a SIGTERM it stops alone",
            self.place,
        )

    def receive(self, message: hub.Message) -> None:
        if message["kind"] == "failed":
            if message.get("frozen"):
                process.dump_stacks(f"{message['message']}. What {self.place} does:")
                self._end_frozen([rank for rank in message.get("silent", ()) if rank != self.rank])
            self._learn_failure(message["message"], is_stuck=bool(message.get("stuck")))
        elif message["kind"] == "dump":
            process.dump_stacks(f"what {self.place} does, which is {self.doing}:")
        elif message["kind"] == "release":
            with self._changed:
                self._released = max(self._released, message["number"])
                self._changed.notify_all()
        elif message["kind"] == "propose":
            with self._changed:
                round_ = message["round"]
                if self._hold_at is None and (round_ > self._requeues or not round_):
                    self._hold(round_)
                elif not round_ and self.requeue_requested:
                    self._stops_next = True
        elif message["kind"] == "stop_at":
            with self._changed:
                is_for_this = message["round"] == (self._requeues if self.requeue_requested else 0)
                if self._hold_at is not None and is_for_this:
                    self._stop_at = message["at"]
                    self._changed.notify_all()

    def _hold(self, round_: int) -> None:
        """Wait at the next batch for the number of the common batch."""
        if round_:
            self.requeue_requested, self._requeues = True, round_
        else:
            self.stop_requested, self._stops_next = True, False
        self._hold_at = self._batch + 1
        self._post({"kind": "hold", "at": self._hold_at, "round": round_})

    def _learn_failure(self, message: str, is_stuck: bool = False) -> None:
        with self._changed:
            if self.failure is not None:
                return
            self.failure = message
            self._changed.notify_all()
        process.end_children_at_exit()
        if not message.startswith((f"{self.place} failed", f"{self.place} was interrupted")):
            grace = min(self.grace, _STUCK_GRACE) if is_stuck else self.grace
            why = "" if is_stuck or message.startswith(self.place) else ", which is waiting for it"
            first_line = message.partition("\n")[0]
            last = f"{first_line}. Ending {self.place}{why}."
            end = threading.Thread(
                target=process.end_after, args=(grace, last, self._closing), name="hiercomm-grace", daemon=True
            )
            end.start()

    def _end_frozen(self, ranks: Sequence[int]) -> None:
        """Kill frozen ranks of this machine after they had time to dump their stacks."""

        def end() -> None:
            time.sleep(self.grace / 2)
            for rank in ranks:
                if rank in self.processes:
                    process.end_process(self.processes[rank])

        self._ending = threading.Thread(target=end, name="hiercomm-ending", daemon=True)
        self._ending.start()


def _forget_in_child() -> None:
    for plane in [*_planes]:
        plane.forget()


os.register_at_fork(after_in_child=_forget_in_child)
