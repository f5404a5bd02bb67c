"""A control plane beside the collectives: who failed, and when to stop together."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from lightning_hiercomm import hub

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 30.0


class RankFailure(RuntimeError):
    """Another rank died or raised."""


@dataclass(frozen=True)
class Invitation:
    """Where rank 0 listens; sent to every rank once, over the collectives."""

    host: str
    port: int
    token: str


class ControlPlane:
    """A TCP star around rank 0 that carries a few bytes when something happens, and nothing otherwise.

    Collectives cannot report a failure: whoever waits for a dead peer waits for the backend's timeout, half an hour by
    default, and schemes that agree rarely would not even ask. Here the kernel closes a dead process's connection at
    once, and every other rank learns its number. The same star lets all ranks stop at one common batch after a SIGTERM
    that only some received, without a collective per step.

    A rank that learns of a failure raises at its next batch. If it is stuck in a collective it is ended after
    ``grace`` seconds.

    Args:
        rank: This rank.
        size: Number of ranks.
        place: How to name this rank to people, such as ``"rank 3 (node 1)"``.
        grace: Seconds from learning of a failure until this process is ended, unless it ended by itself.
    """

    def __init__(self, rank: int, size: int, place: str, grace: float = 4.0) -> None:
        self.rank = rank
        self.size = size
        self.place = place
        self.grace = grace
        self.failure: str | None = None
        self.stop_requested = False
        self._failed = threading.Event()
        self._changed = threading.Condition()
        self._batch = 0
        self._hold_at: int | None = None
        self._stop_at: int | None = None
        self._outbox: queue.SimpleQueue[hub.Message] = queue.SimpleQueue()
        self._hub: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def invite(self, host: str) -> Invitation:
        """Start the middle of the star (rank 0 only)."""
        # in a session of its own: what a launcher or a terminal sends to rank 0 and its children is not for it
        command = [sys.executable, "-I", "-S", hub.__file__, str(self.size)]
        self._hub = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._hub.stdin is not None
        assert self._hub.stdout is not None
        token = secrets.token_hex(16)
        self._hub.stdin.write(f"{token}\n")
        self._hub.stdin.flush()
        return Invitation(host, int(self._hub.stdout.readline()), token)

    def join(self, invitation: Invitation) -> bool:
        """Connect to rank 0; False (and a warning) if it cannot be reached."""
        host = "127.0.0.1" if self.rank == 0 else invitation.host
        try:
            connection = socket.create_connection((host, invitation.port), timeout=_CONNECT_SECONDS)
        except OSError as error:
            log.warning("%s cannot reach the control plane at %s: %s", self.place, host, error)
            return False
        # a machine that loses power closes nothing: probe it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.settimeout(None)
        hub.send(connection, {"kind": "hello", "token": invitation.token, "rank": self.rank, "place": self.place})
        self._thread = threading.Thread(target=self._listen, args=(connection,), name="hiercomm-control", daemon=True)
        self._thread.start()
        return True

    @property
    def is_connected(self) -> bool:
        """Whether :meth:`join` succeeded and :meth:`close` was not called."""
        return self._thread is not None

    def report_failure(self, error: BaseException) -> None:
        """Tell all ranks that this one raised."""
        if self.failure is None and self.is_connected:
            self._outbox.put({"kind": "failed", "message": f"{self.place} failed: {type(error).__name__}: {error}"})

    def wait_for_failure(self, timeout: float) -> str | None:
        """The first failure anywhere, waiting for the news for up to ``timeout`` seconds."""
        if self.is_connected:
            self._failed.wait(timeout)
        return self.failure

    def request_stop(self) -> None:
        """Ask all ranks to stop at one common batch. Safe in a signal handler."""
        self.stop_requested = True
        self._outbox.put({"kind": "stop"})

    def should_stop(self) -> bool:
        """Call before every batch: whether all ranks stop here.

        Raises:
            RankFailure: If another rank failed.
        """
        if self.failure is not None:
            raise RankFailure(self.failure)
        with self._changed:
            self._batch += 1
            if self._hold_at is None or self._batch < self._hold_at:
                return False
            # a rank asked to stop: wait, a round trip long, until it is known where
            self._changed.wait_for(lambda: self._stop_at is not None or self.failure is not None, timeout=30.0)
            if self.failure is not None:
                raise RankFailure(self.failure)
            return self._stop_at is None or self._batch >= self._stop_at

    def close(self) -> None:
        """Leave; the others do not take it for a failure."""
        if self._thread is not None:
            self._outbox.put({"kind": "bye"})
            self._closing.set()
            self._thread.join(timeout=2.0)
            self._thread = None
        if self._hub is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._hub.communicate(timeout=2.0)  # it ends when rank 0 has left
            self._hub = None

    # ---- the listening thread ------------------------------------------------------------------------------------

    def _listen(self, connection: socket.socket) -> None:
        lines = hub.Lines()
        with connection, selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            while True:
                try:
                    while not self._outbox.empty():
                        message = self._outbox.get()
                        hub.send(connection, message)
                        if message["kind"] == "bye":
                            return
                    if not selector.select(timeout=0.05):
                        continue
                    data = connection.recv(65536)
                except OSError:
                    data = b""
                if not data:
                    if not self._closing.is_set():
                        self._learn_failure("the control plane's hub, on rank 0's node, died")
                    return
                for message in lines.feed(data):
                    if message["kind"] == "closed":
                        return
                    self._receive(message)

    def _receive(self, message: hub.Message) -> None:
        if message["kind"] == "failed":
            self._learn_failure(message["message"])
        elif message["kind"] == "propose":
            with self._changed:
                if self._hold_at is None:
                    self.stop_requested = True
                    self._hold_at = self._batch + 1
                    self._outbox.put({"kind": "hold", "at": self._hold_at})
        elif message["kind"] == "stop_at":
            with self._changed:
                self._stop_at = message["at"]
                self._changed.notify_all()

    def _learn_failure(self, message: str) -> None:
        with self._changed:
            if self.failure is not None:
                return
            self.failure = message
            self._changed.notify_all()
        self._failed.set()
        if not message.startswith(f"{self.place} failed"):
            threading.Thread(target=self._end_if_stuck, args=(message,), name="hiercomm-grace", daemon=True).start()

    def _end_if_stuck(self, message: str) -> None:
        if not self._closing.wait(self.grace):
            print(f"lightning_hiercomm: {message}. Ending {self.place}, which is waiting for it.", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)


def start_control_plane(
    rank: int, size: int, place: str, host: str, share: Callable[[Invitation | None], Invitation | None]
) -> ControlPlane:
    """Start the star; collective.

    Args:
        rank: This rank.
        size: Number of ranks.
        place: How to name this rank to people.
        host: An address of rank 0 that every rank can reach.
        share: Broadcasts rank 0's invitation.
    """
    plane = ControlPlane(rank, size, place)
    invitation = share(plane.invite(host) if rank == 0 else None)
    if invitation is not None:
        plane.join(invitation)
    return plane
