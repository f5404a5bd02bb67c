"""The lighthouse (torchft): sends every node the requests of all that are alive."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

from lightning_hiercomm.elastic.configuration import Elastic, check_address, check_torchft

log = logging.getLogger(__name__)

_PORT = 29510
JOIN_TIMEOUT = 24 * 3600.0
"""How long the lighthouse waits for a node that is alive to ask, in seconds: no period may be longer."""


class TorchftLighthouse:
    """A client of a torchft lighthouse, which forms a quorum when all nodes that send heartbeats have asked.

    A thread sends the heartbeats. After a suspension of more than ``dead_after`` seconds it sends none until the node
    asks, because the other nodes would wait for it.
    """

    def __init__(self, address: str, dead_after: float) -> None:
        check_torchft()
        self.address = address
        self._dead_after = dead_after
        self._left = threading.Event()
        self._timeout = max(1.0, dead_after / 2)
        self._threads: dict[str, threading.Thread] = {}
        self._last_beat = time.monotonic()
        self._answer: Future[Any] | None = None
        self._idle: Any = None
        self._has_warned = False
        self._is_behind: Callable[[], bool | None] = lambda: None
        self._is_silent = False
        self.was_silent = False
        """Whether heartbeats stopped for so long that others may have continued; reset by the caller."""

    def ask(self, replica_id: str, data: Mapping[str, Any], timeout: float) -> Sequence[Any] | None:
        """Return the JSON data of all participants of the next quorum; None after the timeout: ask again."""
        self._is_silent = False
        if "beat" not in self._threads:
            self._last_beat = time.monotonic()
            self._start("beat", lambda: self._beat(replica_id))
        if self._answer is None:
            # in a thread, so that it delays neither signal handlers nor the program's end
            answer: Future[Any] = Future()
            self._answer = answer
            self._start("ask", lambda: self._request(answer, replica_id, dict(data)))
        wait([self._answer], timeout)
        self._note_silence()
        if not self._answer.done():
            if time.monotonic() - self._last_beat > max(2.0, self._dead_after):  # the request is lost as well
                self._warn("does not answer")
                self._answer = None
            return None
        answered, self._answer = self._answer, None
        error = answered.exception()
        if error is not None:  # perhaps a TimeoutError after JOIN_TIMEOUT
            self._warn(f"does not answer ({next(iter(str(error).splitlines()), type(error).__name__)})")
            self._left.wait(min(timeout, 0.2))
            return None
        self._has_warned = False
        participants: list[Any] = answered.result()
        return participants

    def when_back(self, is_behind: Callable[[], bool | None]) -> None:
        """After a silence, send no heartbeats if ``is_behind()``; it returns None if no other node answers."""
        self._is_behind = is_behind

    def leave(self) -> None:
        """Stop sending heartbeats."""
        self._left.set()
        for thread in self._threads.values():  # a thread that returns from torchft at interpreter exit aborts it
            thread.join(2 * self._timeout)

    def _start(self, name: str, target: Callable[[], None]) -> None:
        self._threads[name] = threading.Thread(target=target, daemon=True, name=f"lighthouse-{name}")
        self._threads[name].start()

    def _note_silence(self) -> bool:
        is_missed = time.monotonic() - self._last_beat > self._dead_after
        self.was_silent = self.was_silent or is_missed
        return is_missed

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            log.warning("the lighthouse at %s %s: waiting for it", self.address, problem)
        self._has_warned = True

    def _client(self) -> Any:
        os.environ.setdefault("RUST_LOG", "warn")  # torchft logs every call
        from torchft.coordination import LighthouseClient

        return LighthouseClient(f"http://{self.address}", timedelta(seconds=self._timeout))

    def _request(self, answer: Future[Any], replica_id: str, data: dict[str, Any]) -> None:
        try:
            client, self._idle = self._idle or self._client(), None
            quorum = client.quorum(replica_id, timedelta(seconds=JOIN_TIMEOUT), data=data)
            self._idle = client
            answer.set_result([member.data for member in quorum.participants])
        except BaseException as error:
            answer.set_exception(error)

    def _beat(self, replica_id: str) -> None:
        client, is_cut_off, was_missed, pause = None, False, False, min(0.5, self._dead_after / 8)
        while not self._left.is_set():
            was_missed = self._note_silence() or was_missed
            if was_missed:
                is_behind = self._is_behind()
                if is_behind:
                    self._left.wait(pause)
                    continue
                was_missed = is_behind is None and is_cut_off  # no other node answers: this one is not back yet
            if not self._is_silent:
                try:
                    client = client or self._client()
                    client.heartbeat(replica_id, timedelta(seconds=self._dead_after))
                    self._note_silence()
                    self._last_beat = time.monotonic()
                    is_cut_off = False
                except Exception:
                    client, is_cut_off = None, True
            began = time.monotonic()
            self._left.wait(pause)
            was_suspended = time.monotonic() - began - pause > self._dead_after
            self._is_silent = self._is_silent or (was_suspended and self._answer is None)


def own_address(towards: str) -> str:
    """Return this machine's address on the route to ``"host:port"``."""
    host, port = towards.rsplit(":", 1)
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of a datagram socket: sends nothing
        return str(probe.getsockname()[0])


def serve(bind: str | None, dead_after: float) -> int:
    """Run a lighthouse until SIGINT or SIGTERM; for the command line.

    Args:
        bind: ``"host:port"`` to listen at. Default: this machine's own address, and port 29510.
        dead_after: Seconds of silence after which a node counts as lost.
    """
    Elastic(dead_after=dead_after)  # checks it
    check_torchft()
    if bind is None:
        try:
            bind = f"{own_address('192.0.2.1:9')}:{_PORT}"  # an address for documentation, which no machine has
        except OSError:
            bind = f"127.0.0.1:{_PORT}"
    check_address(bind, "--bind")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        with lighthouse(bind, dead_after):
            print(f"the lighthouse listens; on every node: HIERCOMM_LIGHTHOUSE={bind}", flush=True)
            ended.wait()
    except RuntimeError as error:  # torchft's: the port is taken, or the address is another machine's
        raise ValueError(
            f"a lighthouse cannot listen at --bind={bind!r} ({error}): give a free port, and an address of this machine"
        ) from error
    return 0


@contextlib.contextmanager
def lighthouse(bind: str, dead_after: float) -> Iterator[str]:
    """Run a lighthouse in this process, and yield its ``"host:port"``."""
    os.environ.setdefault("RUST_LOG", "warn")
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=bind,
        min_replicas=1,  # nodes wait for min_nodes themselves
        join_timeout_ms=int(1000 * JOIN_TIMEOUT),
        quorum_tick_ms=50,
        heartbeat_timeout_ms=int(1000 * dead_after),
    )
    host = bind.rpartition(":")[0]
    local = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    try:
        yield f"{local}:{server.address().rpartition(':')[2]}"
    finally:
        with contextlib.suppress(Exception):
            server.shutdown()
