"""The control plane's hub: strangers, and members who misbehave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from subprocess import PIPE
from types import SimpleNamespace

import pytest

from lightning_hiercomm.control import hub

TOKEN = "secret"


class Served:
    """A hub of three ranks in a thread, and connections to it."""

    def __init__(self, size: int = 3, **settings: object) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.port = listener.getsockname()[1]
        self.hub = hub.Hub(listener, size=size, token=TOKEN, **settings)
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
def serve() -> Iterator[Callable[..., Served]]:
    running: list[Served] = []

    def start(**settings: object) -> Served:
        running.append(Served(**settings))
        return running[-1]

    yield start
    for served in running:
        served.close()


@pytest.fixture
def served(serve) -> Served:
    return serve()


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


def test_silent_connections_are_closed(served, monkeypatch):
    monkeypatch.setattr(hub, "STRANGER_SECONDS", 0.2)
    assert is_closed(served.connect())


def test_a_crowd_of_strangers_keeps_no_rank_out(served):
    early = served.connect()
    crowd = [served.connect() for _ in range(200)]
    assert is_closed(early)
    assert is_closed(crowd[0])
    served.member(1)
    assert len(served.hub.strangers) <= hub.MAX_STRANGERS + 3


def test_the_token_is_never_sent(served):
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as rank, listener.accept()[0] as seen:
        hub.Channel(seen).send({"kind": "challenge", "nonce": "once"})
        join(rank, 1)
        assert TOKEN.encode() not in seen.recv(1000)


def test_an_answer_counts_once(served):
    first, second = served.connect(), served.connect()
    said = {"kind": "hello", "rank": 1, "place": "rank 1", "proof": hub.proof(TOKEN, read(first)["nonce"], 1)}
    hub.Channel(second).send(said)  # a copied message
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


def test_a_rank_that_connects_late_receives_earlier_events(served):
    first = served.member(0)
    served.member(1).close()
    news = {"kind": "failed", "message": "rank 1 died while rank 2 had not come yet"}
    assert read(first) == news
    hub.Channel(first).send({"kind": "request", "round": 0})
    assert read(first) == {"kind": "propose", "round": 0}
    late = served.member(2)
    assert read(late) == news
    assert read(late) == {"kind": "propose", "round": 0}


@pytest.mark.parametrize(
    "said", [b"x" * 20_000, b"nonsense\n", b'{"kind": "hold"}\n'], ids=["endless", "line", "short"]
)
def test_a_member_that_talks_nonsense_is_a_death(served, said):
    members = [served.member(rank) for rank in (0, 1, 2)]
    members[1].sendall(said)
    assert read(members[0]) == {"kind": "failed", "message": "rank 1 died"}


def test_a_member_that_reads_nothing_does_not_block_the_others():
    hubs_end, deaf = socket.socketpair()
    hubs_end.setblocking(False)
    with hubs_end, deaf, pytest.raises(BlockingIOError):
        hub.Channel(hubs_end).send({"kind": "dump", "message": "x" * 10_000_000})


def test_only_the_first_failure_is_reported(served):
    members = [served.member(rank) for rank in (0, 1, 2)]
    for message in ("the first", "the second"):
        hub.Channel(members[1]).send({"kind": "failed", "message": message})
    members[1].close()
    hub.Channel(members[0]).send({"kind": "request", "round": 0})
    assert read(members[2]) == {"kind": "failed", "message": "the first"}
    assert read(members[2]) == {"kind": "propose", "round": 0}


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


def test_hub_outlives_rank_zero_and_names_the_first_to_die(capfd):
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
    assert process.poll() is None
    ranks[2].close()
    assert process.wait(5.0) == 0
    listener.close()
    assert capfd.readouterr().err == "lightning_hiercomm: rank 0 died\n"


# ---- who is silent, and who does not move ----------------------------------------------------------------------------


class Recorder:
    """A connection that records what the hub sends."""

    def __init__(self) -> None:
        self.news: list[dict] = []
        self.has_urgent_data = False

    def send(self, message: dict) -> None:
        self.news.append(message)

    def send_urgently(self) -> None:
        self.has_urgent_data = True

    def close(self) -> None:
        pass


class Clocked:
    """A hub without connections, whose clock is the test's; ranks report again and again."""

    def __init__(self, monkeypatch, ranks: int = 3, **settings) -> None:
        self.now = 1000.0
        monkeypatch.setattr(hub, "time", SimpleNamespace(monotonic=lambda: self.now))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.hub = hub.Hub(listener, **{"size": ranks, "token": TOKEN, **settings})
        self.channels = [Recorder() for _ in range(ranks)]
        self.hub.members = {each: hub.RankStatus(r, f"rank {r}", self.now) for r, each in enumerate(self.channels)}
        self.hub._joined = dict(enumerate(self.channels))  # noqa: SLF001
        self.hub._selector = SimpleNamespace(unregister=lambda channel: None)  # noqa: SLF001
        self.hub.missing -= {*range(ranks)}

    @property
    def news(self) -> list[list[dict]]:
        return [channel.news for channel in self.channels]

    def pause(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            self.hub._check_all(self.now)  # noqa: SLF001

    def send(self, rank: int, message: dict) -> None:
        self.hub.members[self.channels[rank]].reported_at = self.now
        self.hub.handle(self.channels[rank], message)

    def say(self, rank: int, **what: object) -> None:
        report = {"doing": "", "progress": 0, "stuck": ("", 0.0), "batches": 0, **what}
        self.send(rank, {"kind": "beat", "wait": None, "line": "", **report})

    def beat(self, seconds: float, *alive: int, progress: bool = True, stuck: tuple[str, float] = ("", 0.0)) -> None:
        """Report from some ranks for some time; the last of them is ``stuck``."""
        for moment in range(round(seconds / 0.05)):
            for rank in alive:
                said = {"doing": f"training batch {moment}", "progress": moment + 1 if progress else 1}
                self.say(rank, **said, stuck=stuck if rank == alive[-1] else ("", 0.0))
            self.pause(0.05)

    def failure(self) -> str:
        """Check all ranks once, and return the failure that they receive."""
        self.pause(0.05)
        (failure,) = [news for news in self.channels[0].news if news["kind"] == "failed"]
        return failure["message"]


@pytest.fixture
def clocked(monkeypatch) -> Callable[..., Clocked]:
    """``clocked(ranks, **settings)`` makes a hub with connected ranks."""
    return lambda *arguments, **settings: Clocked(monkeypatch, *arguments, **settings)


def test_a_silent_rank_is_frozen_and_named_with_its_last_step(clocked, capfd):
    ranks = clocked(hang_timeout=0.5)
    ranks.beat(0.2, 0, 1, 2)
    ranks.beat(1.0, 0, 1)
    message = "rank 2 is frozen: it sent nothing for 0.5 s, and before it was training batch 3"
    assert ranks.news == [[{"kind": "failed", "message": message, "frozen": True, "silent": [2]}]] * 3
    assert capfd.readouterr().err == f"lightning_hiercomm: {message}\n"
    assert [channel.has_urgent_data for channel in ranks.channels] == [False, False, True]


def test_urgent_data_arrives_out_of_band():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as rank:
        connection, _ = listener.accept()
        with connection:
            hub.Channel(connection).send_urgently()
            assert select.select([], [], [rank], 10.0)[2]
            assert rank.recv(1, socket.MSG_OOB) == b"!"


def test_a_rank_whose_worker_is_stuck_is_frozen(clocked):
    ranks = clocked(hang_timeout=0.5)
    ranks.beat(0.2, 0, 1, 2, stuck=("its worker 7", 0.4))
    assert ranks.news == [[]] * 3
    ranks.beat(0.2, 0, 1, 2, stuck=("its worker 7", 0.6))
    assert "rank 2 is frozen: its worker 7 has been stopped or stuck for 0.5 s" in ranks.news[0][0]["message"]


def test_silent_ranks_are_nobodys_business_without_a_limit(clocked):
    ranks = clocked(hang_timeout=None)
    ranks.beat(0.2, 0, 1, 2)
    ranks.beat(1.0, 0)
    assert ranks.news == [[]] * 3


def test_if_all_ranks_are_silent_the_job_has_been_stopped_and_may_go_on(clocked):
    ranks = clocked(hang_timeout=0.5)
    ranks.beat(0.2, 0, 1, 2)
    ranks.beat(1.0)
    ranks.beat(0.3, 0)  # its machine was continued first
    ranks.beat(0.5, 0, 1, 2)
    assert ranks.news == [[]] * 3


def test_a_rank_that_stays_silent_when_the_others_go_on_is_frozen(clocked):
    ranks = clocked(hang_timeout=0.5)
    ranks.beat(0.2, 0, 1, 2)
    ranks.beat(1.0)
    ranks.beat(1.0, 0, 1)
    assert [[news["silent"] for news in heard] for heard in ranks.news] == [[[2]]] * 3


def test_a_hub_that_was_stopped_itself_does_not_take_that_for_silence(clocked):
    ranks = clocked(hang_timeout=0.5)
    ranks.beat(0.2, 0, 1, 2)
    ranks.now += 1000  # it was stopped for so long
    ranks.beat(0.3, 0)  # and the others need a moment
    ranks.beat(0.3, 0, 1, 2)
    assert ranks.news == [[]] * 3


def test_ranks_that_live_but_do_not_get_on_dump_their_stacks_once(clocked, capfd):
    ranks = clocked(hang_timeout=0.5)
    ranks.beat(0.2, 0, 1, 2)
    ranks.beat(1.5, 0, 1, 2, progress=False)
    assert ranks.news == [[{"kind": "dump"}]] * 3
    where = "; ".join(f"rank {rank}, training batch, is busy" for rank in range(3))
    said = re.sub(r"batch \d+", "batch", capfd.readouterr().err)
    head = "lightning_hiercomm: no rank made progress for 0.5 s (hang_timeout), and the run goes on: "
    assert said == f"{head}{where}\n"


def test_a_standstill_before_the_first_batch_is_reported_where_ranks_wait(clocked, capfd):
    ranks = clocked(2, hang_timeout=0.5)
    for _ in range(10):
        ranks.say(0, doing="starting")
        ranks.say(1, doing="starting")
        ranks.pause(0.2)
    assert capfd.readouterr().err == ""  # both may load data
    for _ in range(4):
        ranks.say(0, doing="starting", wait=BACKWARD)
        ranks.say(1, doing="starting")
        ranks.pause(0.2)
    assert "rank 1, starting, is busy" in capfd.readouterr().err


def test_the_report_of_a_standstill_names_who_is_busy_and_who_waits(clocked, capfd):
    ranks = clocked(hang_timeout=0.5)
    ranks.beat(0.2, 0, 1, 2)
    for _ in range(10):
        for rank, more in enumerate([{"wait": BACKWARD}, {"line": "train.py:5 (log)"}, {}]):
            ranks.say(rank, doing="training batch 3", progress=1, **more)
        ranks.pause(0.2)
    assert capfd.readouterr().err.partition("goes on: ")[2] == (
        "rank 0, training batch 3, waits in backward in train.py:9 (main); rank 1, training batch 3, is busy in"
        " train.py:5 (log); rank 2, training batch 3, is busy\n"
    )


BACKWARD = {"seconds": 60.0, "call": "backward", "place": "a", "line": "train.py:9 (main)", "collectives": 3}
SAVING = {
    "seconds": 60.5,
    "call": "trainer.save_checkpoint",
    "place": "b",
    "line": "",
    "collectives": 3,
}
GATHER = {**SAVING, "call": "torch.distributed.all_gather"}


def test_ranks_that_wait_in_different_places_end_the_run_with_a_table(clocked, capfd):
    ranks = clocked(2, hang_timeout=60.0)
    ranks.say(0, wait=SAVING, doing="saving a checkpoint of epoch 0")
    ranks.say(1, wait=BACKWARD, doing="training batch 4 of epoch 0", batches=5)
    message = ranks.failure()
    assert message.splitlines() == [
        "no rank made progress for 60 s (hang_timeout): the ranks wait for each other in different places",
        "rank   | waits in                | during                         | line of the program",
        "---------------------------------------------------------------------------------------",
        "rank 0 | trainer.save_checkpoint | saving a checkpoint of epoch 0 | -",
        "rank 1 | backward                | training batch 4 of epoch 0    | train.py:9 (main)",
        "Likely cause: rank 0 called trainer.save_checkpoint and the others did not. Call trainer.save_checkpoint on"
        " all ranks; only rank 0 writes the file",
    ]
    assert capfd.readouterr().err == f"lightning_hiercomm: {message}\n"
    assert ranks.news[0][-1]["stuck"]


def test_the_likely_cause_of_other_waits_is_a_collective_on_some_ranks(clocked):
    ranks = clocked(2, hang_timeout=60.0)
    ranks.say(0, wait=GATHER)
    ranks.say(1, wait=BACKWARD)
    assert "Likely cause: a collective (barrier, all_gather, " in ranks.failure()


def test_the_likely_cause_of_a_teardown_on_some_ranks_is_their_stop(clocked):
    ranks = clocked(2, hang_timeout=60.0)
    ranks.say(0, wait={**GATHER, "call": "teardown (lightning_hiercomm)"})
    ranks.say(1, wait=BACKWARD)
    assert "Likely cause: training ended on some ranks only" in ranks.failure()


def test_ranks_that_wait_in_one_place_with_unequal_collectives_end_the_run(clocked):
    ranks = clocked(2, hang_timeout=60.0)
    ranks.say(0, wait=BACKWARD)
    ranks.say(1, wait={**BACKWARD, "collectives": 4})
    assert "Likely cause: rank 1 called more collectives (barrier, all_gather," in ranks.failure()


def test_ranks_that_wait_at_different_batches_end_the_run(clocked):
    ranks = clocked(2, hang_timeout=60.0)
    ranks.say(0, wait=BACKWARD, batches=7)
    ranks.say(1, wait=BACKWARD, batches=8)
    message = ranks.failure()
    assert "the ranks wait for each other in different places" in message
    assert "Likely cause: The ranks took unequal numbers of optimizer steps" in message


def test_ranks_that_wait_for_one_that_has_left_end_the_run(clocked):
    ranks = clocked(3, hang_timeout=60.0)
    ranks.send(2, {"kind": "bye"})
    for rank in (0, 1):
        ranks.say(rank, wait=BACKWARD)
    message = ranks.failure()
    assert "rank 2 | has ended its run |" in message
    assert "Likely cause: training ended on some ranks only" in message


@pytest.mark.parametrize(
    "waits",
    [
        (BACKWARD, BACKWARD),
        (SAVING, None),
        (SAVING, {**BACKWARD, "seconds": 59.0}),
    ],
    ids=["in one place", "one computes", "one has not waited for long"],
)
def test_other_long_waits_do_not_end_the_run(clocked, waits):
    ranks = clocked(2, hang_timeout=60.0)
    for _ in range(20):
        for rank, wait in enumerate(waits):
            ranks.say(rank, wait=wait)
        ranks.pause(0.1)
    assert ranks.news == [[], []]


ARRIVAL = {"kind": "arrive", "number": 1, "batches": 4, "line": "train.py:3 (on_fit)", "purpose": "average", "what": ""}
ARRIVAL["steps"] = []
STOP_ALIKE = (
    "A loop that stops early, by a KL divergence for instance, must stop on all ranks alike:"
    " trainer.strategy.reduce_boolean_decision(kl > limit, all=False)"
)


@pytest.mark.parametrize("call", ["backward", "optimizer_step (lightning_hiercomm)"])
def test_the_likely_cause_of_a_step_that_others_do_not_take_is_an_unequal_number(clocked, call):
    ranks = clocked(3, hang_timeout=60.0)
    ranks.say(0, wait={**BACKWARD, "call": call}, batches=4)
    for rank in (1, 2):
        ranks.send(rank, {**ARRIVAL, "purpose": "epoch"})
        ranks.say(rank, wait={**BACKWARD, "call": "on_train_batch_end (lightning_hiercomm)", "place": "b"}, batches=4)
    assert ranks.failure().splitlines()[-1] == (
        "Likely cause: ranks 1-2 ended a batch, and rank 0 did not. The ranks took unequal numbers of optimizer steps."
        " All ranks must take equally many steps: give them equally many batches, or set limit_train_batches, and in"
        f" manual optimization call optimizer.step() equally often. {STOP_ALIKE}"
    )


def test_a_collective_of_the_user_does_not_count_as_an_unequal_number_of_steps(clocked):
    ranks = clocked(2, hang_timeout=60.0)
    ranks.say(0, wait=GATHER, batches=4)
    ranks.send(1, {**ARRIVAL, "purpose": "epoch"})
    ranks.say(1, wait={**BACKWARD, "call": "on_train_batch_end (lightning_hiercomm)"}, batches=4)
    assert "Likely cause: a collective (barrier, all_gather, " in ranks.failure()


def test_unequal_steps_at_a_barrier_end_the_run_with_the_ranks(clocked):
    ranks = clocked(2, hang_timeout=60.0)
    for rank, steps in enumerate(([4, 2], [4, 3])):
        ranks.send(rank, {**ARRIVAL, "steps": steps})
    assert ranks.failure() == (
        "rank 0 has taken 4, 2 steps of its optimizers and rank 1 4, 3 steps of its optimizers. All ranks must take"
        " equally many steps: give them equally many batches, or set limit_train_batches, and in manual optimization"
        f" call optimizer.step() equally often. {STOP_ALIKE}"
    )


def test_a_barrier_of_many_ranks_takes_time_in_proportion_to_them():
    """Each rank that comes to it must not cost a pass over all ranks, nor each rank that waits in a look around."""
    reads = 0

    class Status(hub.RankStatus):
        @property
        def barriers(self) -> int:
            nonlocal reads
            reads += 1
            return self._barriers

        @barriers.setter
        def barriers(self, number: int) -> None:
            self._barriers = number

    size = 500
    with socket.create_server(("127.0.0.1", 0)) as listener:
        center = hub.Hub(listener, size=size, token=TOKEN)
        center.missing, center._send_to_all = set(), lambda message: None  # noqa: SLF001
        center.members = {object(): Status(rank, f"rank {rank}", 0.0) for rank in range(size)}
        last, *channels = center.members
        for channel in channels:
            center.handle(channel, ARRIVAL)
        center._check_for_broken_barrier()  # noqa: SLF001
        assert center.released == 0
        center.handle(last, ARRIVAL)
    assert center.released == 1
    assert reads < 10 * size


def test_a_rank_that_saves_while_another_validates_ends_the_run(clocked):
    ranks = clocked(2, hang_timeout=60.0)
    ranks.send(0, {**ARRIVAL, "purpose": "save"})
    ranks.send(1, ARRIVAL)
    assert ranks.failure() == (
        "rank 0 called trainer.save_checkpoint, and rank 1 asked for the averaged model in train.py:3 (on_fit). Call"
        " trainer.save_checkpoint on all ranks; only rank 0 writes the file"
    )


def test_values_logged_on_some_ranks_only_end_the_run(clocked):
    ranks = clocked(3, hang_timeout=60.0)
    ranks.send(0, {**ARRIVAL, "purpose": "save", "line": ""})
    for rank in (1, 2):
        ranks.send(rank, {**ARRIVAL, "purpose": "reduce", "what": " (sum of float32)"})
    assert ranks.failure() == (
        "ranks 1-2 reduced a value (sum of float32) in train.py:3 (on_fit), and rank 0 called trainer.save_checkpoint."
        " Call self.log(..., sync_dist=True) and strategy.reduce on all ranks alike"
    )


def test_ranks_that_reduce_different_values_end_the_run(clocked):
    ranks = clocked(2, hang_timeout=60.0)
    for rank, what in enumerate([" (sum of float32)", " (sum of int64)"]):
        ranks.send(rank, {**ARRIVAL, "purpose": "reduce", "what": what})
    assert "rank 0 reduced a value (sum of float32), and rank 1 reduced a value (sum of int64) in train.py:3" in (
        ranks.failure()
    )


def test_a_rank_that_trains_on_past_a_barrier_ends_the_run(clocked):
    ranks = clocked(2, hang_timeout=60.0)
    ranks.send(0, {**ARRIVAL, "purpose": "save"})
    ranks.say(1, batches=4)
    ranks.say(1, batches=5)
    assert ranks.failure() == (
        "rank 0 called trainer.save_checkpoint after 4 batches of the run in train.py:3 (on_fit), and rank 1 trains on"
        " with batch 5 of the run. Call trainer.save_checkpoint on all ranks; only rank 0 writes the file"
    )


def test_a_rank_that_leaves_before_a_barrier_ends_the_run(clocked):
    ranks = clocked(2)
    ranks.send(0, ARRIVAL)
    ranks.send(1, {"kind": "bye"})
    assert "rank 0 asked for the averaged model after 4 batches of the run" in ranks.failure()


@pytest.mark.parametrize(
    ("purpose", "done", "remedy"),
    [("end", "ended training", "If trainer.should_stop was set on some ranks only"), ("epoch", "ended an epoch", "")],
)
def test_rank_that_trains_after_another_finished_ends_the_run(clocked, purpose, done, remedy):
    ranks = clocked(2, hang_timeout=60.0)
    ranks.send(1, {**ARRIVAL, "purpose": purpose, "batches": 8, "line": ""})
    ranks.say(0, batches=8)
    ranks.say(0, batches=9)
    message = ranks.failure()
    said = f"rank 1 {done} after 8 batches of the run, and rank 0 trains on with batch 9 of the run."
    assert message.startswith(f"{said} All ranks must take equally many steps")
    assert remedy in message


def test_ranks_that_have_not_begun_may_take_their_time(clocked):
    ranks = clocked(hang_timeout=0.5)
    for _ in range(21):
        for rank in range(3):
            ranks.say(rank, doing="preparing data")
        ranks.pause(0.05)
    ranks.beat(0.05, 0, 1, 2)
    assert ranks.news == [[]] * 3


# ---- many ranks ------------------------------------------------------------------------------------------------------


def test_hub_admits_simultaneous_ranks_and_answers_each(serve, monkeypatch):
    size = 300
    sent: list[str] = []
    tell = hub.Hub._send  # noqa: SLF001
    monkeypatch.setattr(
        hub.Hub, "_send", lambda self, channel, said: (sent.append(said["kind"]), tell(self, channel, said))
    )
    served = serve(size=size)
    crowd = [served.connect() for _ in range(size)]
    for rank, connection in enumerate(crowd):
        join(connection, rank)
    assert [read(connection) for connection in crowd] == [{"kind": "welcome"}] * size
    for connection in crowd[1:]:
        hub.Channel(connection).send({"kind": "bye"})
        assert is_closed(connection)
    assert len(sent) == 2 * size


def test_the_hub_checks_ranks_regularly_under_load(serve, monkeypatch):
    looks: list[float] = []
    monkeypatch.setattr(hub.Hub, "_check_all", lambda self, now: looks.append(now))
    served = serve(hang_timeout=1000.0)
    member = served.member(0)
    for number in range(300):
        hub.Channel(member).send(
            {"kind": "beat", "doing": "", "progress": number, "stuck": ("", 0.0), "batches": 0}
            | {"wait": None, "line": ""}
        )
        if number % 20 == 0:
            time.sleep(0.002)
    hub.Channel(member).send({"kind": "request", "round": 0})
    assert read(member) == {"kind": "propose", "round": 0}
    assert len(looks) <= 1 + (looks[-1] - looks[0]) / 0.5  # a look goes over all ranks


@pytest.mark.parametrize("hang_timeout", [5.0, 300.0, 3600.0])
def test_messages_of_all_ranks_fit_the_limit_of_the_hub(hang_timeout):
    assert hub.seconds_between_beats(4, hang_timeout) == min(1.0, hang_timeout / 10)
    for size in (100, 4096, 100_000):
        pause = hub.seconds_between_beats(size, hang_timeout)
        assert pause == hang_timeout / 10 or size / pause <= hub.BEATS_PER_SECOND


def test_hub_ends_soon_after_a_failure(serve, monkeypatch):
    monkeypatch.setattr(hub, "AFTERMATH_SECONDS", 0.2)
    served = serve(hang_timeout=1.0)
    first = served.member(0)
    hub.Channel(first).send({"kind": "failed", "message": "all is lost"})
    served.thread.join(5.0)
    assert not served.thread.is_alive()
    assert [read(first)["kind"], read(first)["kind"]] == ["failed", "closed"]


@pytest.mark.parametrize(("ranks", "name"), [([3], "rank 3"), ([0, 1, 2, 8], "ranks 0-2, 8"), ([4, 2], "ranks 2, 4")])
def test_ranks_are_named_briefly(ranks, name):
    assert hub.names_of_ranks(ranks) == name
