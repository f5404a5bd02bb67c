"""torchft's lighthouse on this machine, in this process."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from lightning_hiercomm.elastic.lighthouse import TorchftLighthouse, lighthouse, own_address

pytest.importorskip("torchft", reason="needs the extra `elastic`")


@pytest.fixture
def address():
    with lighthouse("127.0.0.1:0", dead_after=0.5) as address:
        yield address


def all_meet(**nodes: TorchftLighthouse) -> None:
    """Let nodes ask until they are a quorum, without any other one."""
    is_done: dict[str, bool] = {}

    def ask(name: str, node: TorchftLighthouse) -> None:
        deadline = time.monotonic() + 30
        while not is_done.get(name) and time.monotonic() < deadline:
            answer = node.ask(name, {"name": name}, 0.2)
            if answer is not None:
                is_done[name] = {each["name"] for each in answer if "name" in each} == nodes.keys()

    threads = [threading.Thread(target=ask, args=node) for node in nodes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_done == dict.fromkeys(nodes, True)


def test_node_that_leaves_is_waited_for_no_longer_than_dead_after(address):
    a, b, c = (TorchftLighthouse(address, 0.5) for _ in "abc")
    all_meet(a=a, b=b, c=c)
    c.leave()
    all_meet(a=a, b=b)
    a.leave()
    b.leave()


class Played:
    """A client of a lighthouse, and the time, in which what happens is written down beforehand.

    Args:
        waits: How long each pause between two beats takes, instead of the fifth of a second that it should take.
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


def test_node_that_was_suspended_is_silent_until_it_asks(monkeypatch):
    """Others would wait for it, at their synchronization, as long as it stood still."""
    played = Played([0.2, 0.2, 1.0, 3.0, 0.2, 0.2, 0.2, 0.2])

    def asks_later():
        if played.now > 4.9:
            played.lighthouse._is_silent = False  # as `ask` does

    played.each_turn = asks_later
    assert played.play(monkeypatch) == [0.0, 0.2, 0.4, 1.4, 5.0]


def test_node_that_asks_sends_heartbeats_again(monkeypatch):
    a = TorchftLighthouse("127.0.0.1:9", 0.5)
    a._is_silent = True
    a.ask("a", {"replica_id": "a"}, 0.1)
    assert not a._is_silent
    a.leave()


def test_node_that_was_suspended_while_it_asked_sends_heartbeats(monkeypatch):
    played = Played([0.2, 3.0, 0.2])
    played.lighthouse._answer = object()
    assert played.play(monkeypatch) == [0.0, 0.2, 3.2]
    assert played.lighthouse.was_silent


@pytest.mark.parametrize(
    ("found", "beats"), [(True, [0.0, 0.2]), (False, [0.0, 0.2, 5.8, 6.0]), (None, [0.0, 0.2, 5.8, 6.0])], ids=str
)
def test_node_that_was_cut_off_checks_whether_it_is_stale_first(found, beats, monkeypatch):
    """It may be that the lighthouse was away, and that all were."""
    played = Played([0.2] * 7, is_cut=lambda now: 0.3 < now < 5.0)
    looks = []

    def look():
        looks.append(round(played.now, 1))
        return found if played.now > 5.0 else None

    played.lighthouse.when_back(look)
    assert played.play(monkeypatch) == beats
    assert played.lighthouse.was_silent
    assert looks == [2.2, 4.0, 5.8, *([] if found is False else [6.0])], "and not before it was missed"


def test_absent_lighthouse_is_waited_for(caplog):
    a = TorchftLighthouse("127.0.0.1:9", 0.5)
    assert [a.ask("a", {"replica_id": "a"}, 1.5) for _ in range(2)] == [None, None]
    a.leave()
    assert caplog.text.count("the lighthouse at 127.0.0.1:9 does not answer") == 1


@pytest.mark.parametrize("message", ["", "deadline exceeded"])
def test_request_that_has_failed_is_repeated(message):
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


def test_no_thread_is_left_in_torchft_after_a_node_has_left():
    """While the interpreter ends that would abort the process, whatever its exit code was to be."""
    a = TorchftLighthouse("127.0.0.1:9", 0.5)
    assert a.ask("a", {"replica_id": "a"}, 0.1) is None
    a.leave()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("lighthouse")]


def test_own_address_is_that_of_the_way_to_the_others():
    assert own_address("127.0.0.1:29510") == "127.0.0.1"
    assert own_address("[::1]:29510") == "::1"


def test_node_that_was_stopped_in_the_middle_of_a_heartbeat_was_silent(monkeypatch):
    played = Played([0.2, 0.2])

    def heartbeat(name, timeout):
        played.now += 3.0 if played.now == 0.2 else 0.0

    played.heartbeat = heartbeat
    played.play(monkeypatch)
    assert played.lighthouse.was_silent


def test_node_with_regular_heartbeats_was_not_silent(monkeypatch):
    played = Played([0.2, 0.2, 1.0, 0.2])
    played.play(monkeypatch)
    assert not played.lighthouse.was_silent
