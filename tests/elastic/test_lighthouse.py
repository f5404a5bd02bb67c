"""The lighthouse of torchft, as nodes ask it: on this machine, in this process."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from lightning_hiercomm.elastic.lighthouse import TorchftLighthouse, own_address

pytest.importorskip("torchft", reason="needs the extra `elastic`")
from torchft.coordination import LighthouseServer


@pytest.fixture
def address():
    settings = {"join_timeout_ms": 60_000, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 500}
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, **settings)
    yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def all_meet(**nodes: TorchftLighthouse) -> None:
    """Let nodes ask until all of them, and nobody else, have heard of each other."""
    heard: dict[str, bool] = {}

    def ask(replica_id: str, lighthouse: TorchftLighthouse) -> None:
        deadline = time.monotonic() + 30
        while not heard.get(replica_id) and time.monotonic() < deadline:
            present = lighthouse.ask(replica_id, {"replica_id": replica_id, "number": 1}, 0.2)
            if present is not None:
                assert all(each["number"] == 1 for each in present)
                heard[replica_id] = {each["replica_id"] for each in present} == nodes.keys()

    threads = [threading.Thread(target=ask, args=node) for node in nodes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == dict.fromkeys(nodes, True)


def test_all_who_ask_learn_the_same_and_one_alone_waits(address):
    a, b = (TorchftLighthouse(address, 0.5) for _ in "ab")
    assert a.ask("a", {"replica_id": "a", "number": 1}, 0.2) is None
    all_meet(a=a, b=b)
    a.leave()
    b.leave()


def test_one_that_leaves_is_missed_no_longer_than_its_silence(address):
    a, b, c = (TorchftLighthouse(address, 0.5) for _ in "abc")
    all_meet(a=a, b=b, c=c)
    c.leave()
    all_meet(a=a, b=b)
    a.leave()
    b.leave()


def test_what_it_was_told_it_tells_all_who_come_when_the_teller_is_gone(address):
    a, b = (TorchftLighthouse(address, 0.5) for _ in "ab")
    assert b.notes() == []
    assert a.take_note("trained-1f-2e")
    a.leave()
    assert b.notes() == ["trained-1f-2e"]
    assert TorchftLighthouse("127.0.0.1:9", 0.5).notes() is None


def test_a_lighthouse_that_was_started_again_is_told_once_more(monkeypatch):
    heard: list[str] = []
    is_there = threading.Event()

    class Client:
        def heartbeat(self, name, timeout):
            if not is_there.is_set():
                raise RuntimeError("is not there")
            heard.append(name)

        def quorum(self, *args, **kwargs):
            raise RuntimeError("is not there")

    a = TorchftLighthouse("127.0.0.1:9", 0.5)
    monkeypatch.setattr(a, "_client", Client)
    assert not a.take_note("trained-1f-2e")
    a.ask("a", {"replica_id": "a"}, 0.1)
    assert not heard
    is_there.set()
    deadline = time.monotonic() + 30
    while "hiercomm-note-trained-1f-2e" not in heard and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {*heard} == {"a", "hiercomm-note-trained-1f-2e"}
    a.leave()


class Played:
    """A client of a lighthouse, and the time, in which what happens is written down beforehand.

    Args:
        waits: How long each pause between two beats takes, in place of the fifth of a second that it is to take.
        is_cut: At these moments nothing arrives.
    """

    def __init__(self, waits, is_cut=lambda now: False):
        self.now, self.beats, self.waits, self.is_cut = 0.0, [], [*waits], is_cut
        self.lighthouse = TorchftLighthouse("127.0.0.1:9", 1.6)
        self.lighthouse._client = lambda: self
        self.lighthouse._left = self
        self.lighthouse._last_beat = 0.0
        self.each_turn = lambda: None

    def monotonic(self):
        return self.now

    def is_set(self):
        return not self.waits

    def wait(self, seconds):
        assert seconds == pytest.approx(0.2)
        self.now += self.waits.pop(0)
        self.each_turn()

    def heartbeat(self, name, timeout):
        if self.is_cut(self.now):
            self.now += timeout.total_seconds()
            raise RuntimeError("nothing arrives")
        self.beats.append(round(self.now, 1))

    def play(self, monkeypatch):
        monkeypatch.setattr("lightning_hiercomm.elastic.lighthouse.time", self)
        self.lighthouse._beat("a")
        return self.beats


def test_who_stood_still_for_so_long_that_it_counts_as_gone_is_silent_until_it_asks(monkeypatch):
    """Others would wait for it, at their agreement, as long as it stood still."""
    played = Played([0.2, 0.2, 1.0, 3.0, 0.2, 0.2, 0.2, 0.2])

    def asks_later():
        if played.now > 4.9:
            played.lighthouse._is_silent = False  # as `ask` does

    played.each_turn = asks_later
    assert played.play(monkeypatch) == [0.0, 0.2, 0.4, 1.4, 5.0]


def test_who_asks_breaks_its_silence(monkeypatch):
    a = TorchftLighthouse("127.0.0.1:9", 0.5)
    a._is_silent = True
    a.ask("a", {"replica_id": "a"}, 0.1)
    assert not a._is_silent
    a.leave()


def test_who_stood_still_while_it_asked_is_not_behind_and_is_heard(monkeypatch):
    played = Played([0.2, 3.0, 0.2])
    played.lighthouse._asking = object()
    assert played.play(monkeypatch) == [0.0, 0.2, 3.2]


@pytest.mark.parametrize(
    ("found", "beats"), [(True, [0.0, 0.2]), (False, [0.0, 0.2, 5.8, 6.0]), (None, [0.0, 0.2, 5.8, 6.0])], ids=str
)
def test_who_was_cut_off_looks_whether_others_agreed_without_it_before_it_is_heard_again(found, beats, monkeypatch):
    """It may be that the lighthouse was away, and that all were."""
    played = Played([0.2] * 7, is_cut=lambda now: 0.3 < now < 5.0)
    looks = []

    def look():
        looks.append(round(played.now, 1))
        return found if played.now > 5.0 else None

    played.lighthouse.when_back(look)
    assert played.play(monkeypatch) == beats
    assert looks == [2.2, 4.0, 5.8, *([] if found is False else [6.0])], "and not before it was missed"


def test_a_lighthouse_that_is_not_there_is_waited_for(caplog):
    a = TorchftLighthouse("127.0.0.1:9", 0.5)
    assert [a.ask("a", {"replica_id": "a"}, 1.5) for _ in range(2)] == [None, None]
    a.leave()
    assert caplog.text.count("the lighthouse at 127.0.0.1:9 does not answer") == 1


@pytest.mark.parametrize("message", ["", "deadline exceeded"])
def test_a_question_that_has_ended_without_an_answer_is_asked_again(message):
    """Torchft's ends after a day with a TimeoutError; for ever after it was taken for one that is still open."""

    class Client:
        def heartbeat(self, name, timeout):
            pass

        def quorum(self, *args, **kwargs):
            asked.append(args)
            if len(asked) == 1:
                raise TimeoutError(message)
            return SimpleNamespace(participants=[SimpleNamespace(data={"replica_id": "a"})])

    asked = []
    a = TorchftLighthouse("127.0.0.1:9", 0.5)
    a._client = Client
    assert [a.ask("a", {"replica_id": "a"}, 5.0) for _ in range(2)] == [None, [{"replica_id": "a"}]]
    a.leave()


def test_nothing_comes_back_from_torchft_after_a_node_has_left():
    """While the interpreter ends that would abort the process, whatever its exit code was to be."""
    a = TorchftLighthouse("127.0.0.1:9", 0.5)
    assert a.ask("a", {"replica_id": "a"}, 0.1) is None
    a.leave()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("lighthouse")]


def test_the_address_that_others_reach_is_that_of_the_way_to_them():
    assert own_address("127.0.0.1:29510") == "127.0.0.1"
    assert own_address("[::1]:29510") == "::1"
