"""What this package needs of torchft: a server, and two calls. Another lighthouse that passes this can replace it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torchft", reason="needs the extra `elastic`")

from torchft.coordination import LighthouseClient, LighthouseServer

DEAD_AFTER = 0.5
LONG = timedelta(seconds=30)


@contextlib.contextmanager
def serving(bind: str = "127.0.0.1:0") -> Iterator[tuple[Any, str]]:
    server = LighthouseServer(
        bind=bind,
        min_replicas=2,
        join_timeout_ms=24 * 3600 * 1000,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=int(1000 * DEAD_AFTER),
    )
    try:
        yield server, f"127.0.0.1:{server.address().rpartition(':')[2]}"
    finally:
        with contextlib.suppress(Exception):
            server.shutdown()


@pytest.fixture
def address() -> Iterator[str]:
    with serving() as (_, address):
        yield address


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def client(address: str) -> Any:
    return LighthouseClient(f"http://{address}", timedelta(seconds=5))


@contextlib.contextmanager
def heartbeats(address: str, *names: str) -> Iterator[None]:
    """Send the heartbeats of nodes, which a node also needs while it asks."""
    ended = threading.Event()

    def beat() -> None:
        heart = client(address)
        while not ended.wait(0.1):
            for name in names:
                heart.heartbeat(name)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(20)


def ask(address: str, name: str, data: Any, timeout: timedelta = LONG) -> list[Any]:
    """Return the data of the participants of the next quorum."""
    return [member.data for member in client(address).quorum(name, timeout, data=data).participants]


def test_all_participants_get_the_json_data_of_all(address, threads):
    sent = [{"number": 1, "list": [1, 2], "flag": True, "text": "ä", "none": None, "nested": {"x": -1}}, {"number": 2}]
    asked = [threads.submit(ask, address, name, data) for name, data in zip("ab", sent, strict=True)]
    answers = [future.result(40) for future in asked]
    assert answers[0] == answers[1]
    assert sorted(answers[0], key=lambda data: data["number"]) == sent


def test_a_quorum_waits_for_a_node_that_sends_heartbeats_but_does_not_ask(address, threads):
    with heartbeats(address, "a", "b", "c"):
        time.sleep(0.3)  # until the lighthouse knows c
        asked = [threads.submit(ask, address, name, {"name": name}) for name in "ab"]
        time.sleep(3 * DEAD_AFTER)
        assert not any(future.done() for future in asked)
        asked.append(threads.submit(ask, address, "c", {"name": "c"}))
        assert [{data["name"] for data in future.result(40)} for future in asked] == [{"a", "b", "c"}] * 3


def test_a_silent_node_is_left_out(address, threads):
    client(address).heartbeat("c")
    with heartbeats(address, "a", "b"):
        asked = [threads.submit(ask, address, name, {"name": name}) for name in "ab"]
        assert [{data["name"] for data in future.result(40)} for future in asked] == [{"a", "b"}] * 2


def test_every_request_begins_another_quorum(address, threads):
    for number in range(3):
        asked: list[Future[Any]] = [threads.submit(ask, address, name, {"number": number}) for name in "ab"]
        assert [future.result(40) for future in asked] == [[{"number": number}] * 2] * 2


def test_a_request_without_a_quorum_ends_at_its_timeout(address):
    with pytest.raises(Exception, match=r"(?i)timeout|timed out|deadline|cancel"):
        ask(address, "a", {}, timedelta(seconds=0.5))


def test_a_lighthouse_that_is_gone_is_an_error_within_the_timeout():
    began = time.monotonic()
    with pytest.raises(Exception, match=r".+"):
        LighthouseClient("http://127.0.0.1:9", timedelta(seconds=1)).heartbeat("a", timedelta(seconds=1))
    assert time.monotonic() - began < 20


def test_a_taken_port_is_a_runtime_error():
    with serving() as (_, address), pytest.raises(RuntimeError), serving(address):
        pass
