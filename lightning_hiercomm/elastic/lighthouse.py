"""The lighthouse: who is alive, and who asks; torchft's, by its own low-level interface."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from http.client import HTTPException
from typing import Any, Protocol

from lightning_hiercomm.elastic.configuration import Elastic, check_address, check_torchft

log = logging.getLogger(__name__)

_NOTE = "hiercomm-note-"

JOIN_TIMEOUT = 24 * 3600.0
"""How long the lighthouse waits for a node that is alive to come to an agreement, in seconds: no period is longer."""


class Lighthouse(Protocol):
    """Tells all nodes that ask the same: who they are, once those are there that must be."""

    def ask(self, replica_id: str, says: Mapping[str, Any], patience: float) -> Sequence[Mapping[str, Any]] | None:
        """What everyone says who meets now.

        Args:
            replica_id: Who asks.
            says: What it says of itself; JSON.
            patience: Seconds after which None is returned: call it again, with the same.
        """

    def take_note(self, note: str) -> bool:
        """Remember this, of letters, digits and dashes, for all who come, as long as it runs; whether it does."""

    def notes(self) -> Collection[str] | None:
        """All that it was told to remember, and perhaps more; None if it does not say."""

    def when_back(self, look: Callable[[], bool | None]) -> None:
        """Who was not heard for so long that it counts as gone may hold up the others, who train on.

        Args:
            look: Called on a thread of its own when this node may be heard again. Whether the others have agreed
                without it, so that it is not to be heard any more; None if nobody says so.
        """

    def leave(self) -> None:
        """Be alive no longer."""


class TorchftLighthouse:
    """A client of a torchft lighthouse.

    It beats from a thread of this process: a node whose interpreter is stuck is not alive. Nothing listens here.

    All who ask are held until those have asked that are heard. So a node that stood still, is behind the others by that
    time, and is heard again would let them wait as long as it stood still: it is silent until it asks.

    Args:
        address: Its ``"host:port"``.
        dead_after: Seconds of silence after which it counts a node as gone.
    """

    def __init__(self, address: str, dead_after: float) -> None:
        check_torchft()
        self._address = f"http://{address}"
        self._name = address
        self._dead_after = dead_after
        self._left = threading.Event()
        self._timeout = max(1.0, dead_after / 2)
        self._beating: threading.Thread | None = None
        self._asker: threading.Thread | None = None
        self._last_beat = time.monotonic()
        self._asking: Future[Any] | None = None
        self._idle: Any = None
        self._has_said = False
        self._noted: set[str] = set()
        self._look: Callable[[], bool | None] = lambda: None
        self._is_silent = False

    def ask(self, replica_id: str, says: Mapping[str, Any], patience: float) -> Sequence[Mapping[str, Any]] | None:
        self._is_silent = False
        if self._beating is None:
            self._last_beat = time.monotonic()
            self._beating = threading.Thread(target=self._beat, args=(replica_id,), daemon=True, name="lighthouse-beat")
            self._beating.start()
        if self._asking is None:
            self._asking = self._ask_beside(replica_id, dict(says))
        wait([self._asking], patience)
        if not self._asking.done():
            if time.monotonic() - self._last_beat > max(2.0, self._dead_after):  # it is gone, and its answer with it
                self._say(f"the lighthouse at {self._name} does not answer: waiting for it")
                self._asking = None
            return None
        try:
            present: list[Mapping[str, Any]] = self._asking.result()
        except Exception as error:  # also a TimeoutError of its own, after a day
            self._asking = None
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            self._say(f"the lighthouse at {self._name} does not answer ({reason}): waiting for it")
            self._left.wait(min(patience, 0.2))
            return None
        self._asking, self._has_said = None, False
        return present

    def when_back(self, look: Callable[[], bool | None]) -> None:
        self._look = look

    # torchft's knows all who were ever alive: so a note is taken for one that was, once. Until it counts as gone, who
    # comes anew waits.

    def take_note(self, note: str) -> bool:
        self._noted.add(note)
        try:
            self._client().heartbeat(f"{_NOTE}{note}", timedelta(seconds=self._dead_after))
        except Exception:
            return False
        return True

    def notes(self) -> Collection[str] | None:
        try:
            return re.findall(rf"{_NOTE}([\w-]+)", self.page())
        except OSError:
            return None

    def page(self) -> str:
        """What it shows to people: who is there, and who was; raises an ``OSError`` if it does not."""
        try:
            with urllib.request.urlopen(f"{self._address}/status", timeout=self._dead_after) as page:
                shown: str = page.read().decode()
        except (HTTPException, UnicodeDecodeError) as error:  # it is another program's port
            raise OSError(f"what is there says {str(error).strip()!r}") from error
        return shown

    def leave(self) -> None:
        self._left.set()
        for thread in (self._beating, self._asker):
            if thread is not None:  # one that comes back from torchft while the interpreter ends aborts the process
                thread.join(2 * self._timeout)

    def _say(self, what: str) -> None:
        if not self._has_said:
            log.warning("%s", what)
        self._has_said = True

    def _client(self) -> Any:
        os.environ.setdefault("RUST_LOG", "warn")  # it tells of every call
        from torchft.coordination import LighthouseClient

        return LighthouseClient(self._address, timedelta(seconds=self._timeout))

    def _ask_beside(self, replica_id: str, says: dict[str, Any]) -> Future[Any]:
        """On a thread that holds nobody up: not the main one, which signals could not reach, nor the program's end."""
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._quorum(replica_id, says))
            except BaseException as error:
                answer.set_exception(error)

        self._asker = threading.Thread(target=ask, daemon=True, name="lighthouse-ask")
        self._asker.start()
        return answer

    def _quorum(self, replica_id: str, says: dict[str, Any]) -> list[Mapping[str, Any]]:
        client, self._idle = self._idle or self._client(), None
        quorum = client.quorum(replica_id, timedelta(seconds=JOIN_TIMEOUT), data=says)
        self._idle = client
        return [member.data for member in quorum.participants]

    def _beat(self, replica_id: str) -> None:
        client, was_away, was_missed, pause = None, False, False, min(0.5, self._dead_after / 8)
        while not self._left.is_set():
            was_missed = was_missed or time.monotonic() - self._last_beat > self._dead_after
            if was_missed:
                is_behind = self._look()
                if is_behind:
                    self._left.wait(pause)
                    continue
                was_missed = is_behind is None and was_away  # whom nobody answers is not back yet
            if not self._is_silent:
                try:
                    client = client or self._client()
                    client.heartbeat(replica_id, timedelta(seconds=self._dead_after))
                    self._last_beat = time.monotonic()
                    if was_away:  # perhaps it was started again, and has forgotten
                        was_away = not all(map(self.take_note, tuple(self._noted)))
                except Exception:
                    client, was_away = None, True
            slept = time.monotonic()
            self._left.wait(pause)
            stood_still = time.monotonic() - slept - pause > self._dead_after
            self._is_silent = self._is_silent or (stood_still and self._asking is None)


def own_address(towards: str) -> str:
    """The address of this machine from which it reaches another: what others can reach it by, unlike its name.

    Args:
        towards: A ``"host:port"``.
    """
    host, port = towards.rsplit(":", 1)
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def serve(bind: str | None, min_nodes: int, dead_after: float, port: int = 29510) -> int:
    """Run a lighthouse until it is told to end; for the command line.

    Args:
        bind: ``"host:port"``, where it listens. Default: this machine's own address, and ``port``.
        min_nodes: Without so many, nobody meets.
        dead_after: Seconds of silence after which a node counts as gone.
        port: Where ``bind`` does not say.

    Raises:
        ValueError: For numbers or an address that make no sense, or at which nobody can listen.
    """
    Elastic(min_nodes=min_nodes, dead_after=dead_after)  # refuses what no node could have, either
    check_torchft()
    if bind is None:
        try:
            bind = f"{own_address('192.0.2.1:9')}:{port}"  # an address that exists nowhere, reached as any other is
        except OSError:
            bind = f"127.0.0.1:{port}"
    check_address(bind, "--bind")
    os.environ.setdefault("RUST_LOG", "warn")
    from torchft.coordination import LighthouseServer

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        server = LighthouseServer(
            bind=bind,
            min_replicas=min_nodes,
            join_timeout_ms=int(1000 * JOIN_TIMEOUT),
            quorum_tick_ms=50,
            heartbeat_timeout_ms=int(1000 * dead_after),
        )
    except RuntimeError as error:  # of torchft: the port is taken, or the address is another machine's
        raise ValueError(
            f"a lighthouse cannot listen at --bind={bind!r} ({error}): give a free port, and an address of this machine"
        ) from error
    print(f"the lighthouse listens; on every node: HIERCOMM_LIGHTHOUSE={bind}", flush=True)
    ended.wait()
    with contextlib.suppress(Exception):
        server.shutdown()
    return 0
