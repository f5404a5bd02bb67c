"""The control plane's hub: strangers, and members who misbehave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from subprocess import PIPE

import pytest

from lightning_hiercomm import hub

TOKEN = "secret"


class Served:
    """A hub of three ranks in a thread, and connections to it."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.port = listener.getsockname()[1]
        self.hub = hub.Hub(listener, size=3, token=TOKEN)
        parent, self.parent = os.pipe()
        self.thread = threading.Thread(target=self.hub.serve, args=(parent,))
        self.thread.start()
        self.connections: list[socket.socket] = [listener]

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10.0)
        self.connections.append(connection)
        return connection

    def member(self, rank: int) -> socket.socket:
        connection = self.connect()
        join(connection, rank)
        assert read(connection) == {"kind": "welcome"}
        return connection

    def close(self) -> None:
        os.close(self.parent)
        for connection in self.connections[1:]:
            connection.close()
        self.thread.join(5.0)
        assert not self.thread.is_alive()
        self.connections[0].close()


def read(connection: socket.socket) -> dict:
    """The next message."""
    line = b""
    while not line.endswith(b"\n"):
        seen = connection.recv(20_000, socket.MSG_PEEK)
        assert seen, "closed"
        line += connection.recv(len(seen.partition(b"\n")[0]) + 1)
    return json.loads(line)


def is_closed(connection: socket.socket) -> bool:
    """Whether the hub ends the connection, which may take as long as its timeout."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1000):
            pass
    return True


def join(connection: socket.socket, number: int, token: str = TOKEN, **other: object) -> None:
    """Answer the challenge, with ``other`` values than those of a rank."""
    shown = hub.proof(token, read(connection)["nonce"], number)
    hello = {"kind": "hello", "rank": number, "place": f"rank {number}", "proof": shown, **other}
    hub.Channel(connection).send(hello)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\xff\xfe\n",
        b"null\n",
        b"[1, 2]\n",
        b'{"kind": 5}\n',
        b'{"kind": "failed", "message": "rank 0 died"}\n',
        b'{"kind": "hello"}\n',
        b'{"kind": "hello", "rank": [0], "place": {}, "proof": null}\n',
        b'{"kind": "hello", "rank": true, "place": "rank 0", "proof": ""}\n',
        "{'kind': 'hello', 'rank': 0, 'place': 'rank 0', 'proof': 'ä'}\n".replace("'", '"').encode(),
        b"[" * 4000 + b"\n",
        b"9" * 4500 + b"\n",
        b"x" * 5000,
        b"\n" * 5000,
    ],
)
def test_a_stranger_ends_only_itself(served, said):
    members = [served.member(rank) for rank in (0, 1)]
    stranger = served.connect()
    stranger.sendall(said)
    assert is_closed(stranger)
    hub.Channel(members[0]).send({"kind": "failed", "message": "the first news"})
    assert [read(member)["message"] for member in members] == ["the first news"] * 2


def test_who_connects_and_says_nothing_is_sent_away(served, monkeypatch):
    monkeypatch.setattr(hub, "STRANGER_SECONDS", 0.2)
    assert is_closed(served.connect())


def test_who_connects_and_leaves_changes_nothing(served):
    for _ in range(20):
        served.connect().close()
    served.member(0)


def test_a_crowd_of_strangers_keeps_no_rank_out(served):
    early = served.connect()
    crowd = [served.connect() for _ in range(200)]
    assert is_closed(early)
    assert is_closed(crowd[0])
    served.member(1)
    assert len(served.hub._strangers) <= hub.MAX_STRANGERS


def test_the_token_is_not_said(served):
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as rank, listener.accept()[0] as seen:
        hub.Channel(seen).send({"kind": "challenge", "nonce": "once"})
        join(rank, 1)
        assert TOKEN.encode() not in seen.recv(1000)


def test_an_answer_counts_once(served):
    first, second = served.connect(), served.connect()
    said = {"kind": "hello", "rank": 1, "place": "rank 1", "proof": hub.proof(TOKEN, read(first)["nonce"], 1)}
    hub.Channel(second).send(said)  # what somebody overheard
    assert is_closed(second)
    hub.Channel(first).send(said)
    assert read(first) == {"kind": "welcome"}


@pytest.mark.parametrize(
    "wrong",
    [{"token": "guess"}, {"proof": ""}, {"proof": 5}, {"rank": 2}, {"rank": "1"}, {"place": None}, {"kind": "failed"}],
    ids=str,
)
def test_who_does_not_know_the_token_is_sent_away(served, wrong):
    stranger = served.connect()
    join(stranger, 1, **wrong)
    assert is_closed(stranger)


def test_a_rank_joins_once(served):
    served.member(1)
    second = served.connect()
    join(second, 1)
    assert is_closed(second)


def test_a_rank_that_joins_late_hears_what_happened(served):
    first = served.member(0)
    served.member(1).close()
    news = {"kind": "failed", "message": "rank 1 died while rank 2 had not come yet"}
    assert read(first) == news
    hub.Channel(first).send({"kind": "stop"})
    assert read(first) == {"kind": "propose"}
    late = served.member(2)
    assert read(late) == news
    assert read(late) == {"kind": "propose"}


@pytest.mark.parametrize(
    "said", [b"x" * 20_000, b"nonsense\n", b'{"kind": "hold"}\n'], ids=["endless", "line", "short"]
)
def test_a_member_that_talks_nonsense_is_a_death(served, said):
    members = [served.member(rank) for rank in (0, 1, 2)]
    members[1].sendall(said)
    assert read(members[0]) == {"kind": "failed", "message": "rank 1 died"}


def test_a_member_that_reads_nothing_stops_nobody(served):
    deaf, *others = [served.member(rank) for rank in (0, 1, 2)]
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    said, heard = {"kind": "failed", "message": "x" * 10_000}, []
    for _ in range(1000):
        hub.Channel(others[0]).send(said)
        heard += [read(other)["message"] for other in others]
        if heard[-1] != said["message"]:
            break
    assert heard[-1] == "rank 0 died"


def test_without_file_descriptors_strangers_leave_first(tmp_path):
    """1100 idle connections are more than a process may usually have; here it may have 30."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=200)
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30)); exec(open({hub.__file__!r}).read())"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, pass_fds=[listener.fileno()])
    assert process.stdin is not None
    process.stdin.write(json.dumps({"listener": listener.fileno(), "size": 1, "token": TOKEN}).encode() + b"\n")
    process.stdin.flush()
    with listener, contextlib.ExitStack() as connections:
        for _ in range(100):
            connections.enter_context(socket.create_connection(listener.getsockname(), timeout=10.0))
        rank = connections.enter_context(socket.create_connection(listener.getsockname(), timeout=10.0))
        join(rank, 0)
        assert read(rank) == {"kind": "welcome"}
        hub.Channel(rank).send({"kind": "bye"})
        process.stdin.close()
        assert process.wait(10.0) == 0


def test_it_outlives_rank_zero_and_names_only_the_first_to_die(capfd):
    listener = socket.create_server(("127.0.0.1", 0))
    process = subprocess.Popen([sys.executable, hub.__file__], stdin=PIPE, pass_fds=[listener.fileno()])
    assert process.stdin is not None
    process.stdin.write(json.dumps({"listener": listener.fileno(), "size": 3, "token": TOKEN}).encode() + b"\n")
    process.stdin.flush()
    ranks = [socket.create_connection(listener.getsockname(), timeout=5.0) for _ in range(3)]
    for rank, connection in enumerate(ranks):
        join(connection, rank)
        assert read(connection) == {"kind": "welcome"}
    process.send_signal(signal.SIGTERM)  # a scheduler sends it to everybody; the ranks end in their own time
    process.stdin.close()
    ranks[0].close()
    assert read(ranks[2]) == {"kind": "failed", "message": "rank 0 died"}
    ranks[1].close()
    assert read(ranks[2]) == {"kind": "failed", "message": "rank 1 died"}
    assert process.poll() is None
    ranks[2].close()
    assert process.wait(5.0) == 0
    listener.close()
    assert capfd.readouterr().err == "lightning_hiercomm: rank 0 died\n"
