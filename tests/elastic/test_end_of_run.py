"""Elastic nodes that are asked to leave, come when others have finished, or see data of other programs: on threads."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from elastic_cases import assert_equal, threads
from elastic_threads import ElasticRank, Threads, wait_until

from lightning_hiercomm.elastic import Elastic, rendezvous
from lightning_hiercomm.elastic.quorum import RunFinished, StaleReplica


@pytest.fixture
def short_hope(monkeypatch):
    """Nodes give up after 0.3 s."""
    monkeypatch.setattr(rendezvous, "_HOPE", 0.6)
    monkeypatch.setattr(rendezvous, "_POLL", 0.1)


def wait_longer_than_a_node_hopes() -> None:
    threading.Event().wait(0.5)


def train(own: ElasticRank, steps: int = 4):
    own.join()
    return own.train(steps)


class AskedToLeave(SystemExit):
    pass


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("waits_for", ["an answer", "more nodes"])
def test_a_waiting_node_that_is_asked_to_leave_leaves(ranks, waits_for):
    """Any of its ranks may be asked."""
    nodes = threads("periodic", Elastic(min_nodes=1 if waits_for == "an answer" else 2, dead_after=0.5))
    nodes.lights.min_nodes = 2 if waits_for == "an answer" else 1

    def work(own: ElasticRank):
        if own.local == ranks - 1:
            own.leaves_by = lambda: AskedToLeave() if own.membership.me.number else None
        with pytest.raises(AskedToLeave):
            own.join()
        return True

    nodes.start(0, work, ranks)
    assert nodes.end() == {("0", local): True for local in range(ranks)}


@pytest.mark.usefixtures("short_hope")
def test_node_does_not_wait_for_others_that_have_ended():
    """Its epoch was longer; it waited forever for another node to come."""
    nodes, has_ended = threads("periodic", Elastic(min_nodes=2, dead_after=0.5)), threading.Event()

    def work(own: ElasticRank):
        own.join()
        for _ in range(3):
            own.step()
        if own.node == "1":
            assert has_ended.wait(10.0)
            own.train(6)

    nodes.lights.min_nodes = 2
    nodes.start(0, work)
    nodes.start(1, work)
    nodes.started[0].join(60.0)
    nodes.wires.dead.add(nodes.address("0"))
    has_ended.set()
    with pytest.raises(RunFinished):
        nodes.end()


def stopped_until_another_ended(nodes: Threads, was_silent: bool):
    def work(own: ElasticRank):
        own.join()
        own.step()
        if own.node == "0":
            own.die()
        wait_until(lambda: not nodes.is_alive(0))
        nodes.lights.was_silent = was_silent
        return own.train(6).numel() > 0

    return nodes.play(work)


def test_node_that_was_stopped_until_others_ended_does_not_go_on_alone():
    """It would write its checkpoints over those of the run."""
    with pytest.raises(StaleReplica, match="the lighthouse at threads") as ended:
        stopped_until_another_ended(threads("periodic"), was_silent=True)
    assert ended.value.code == 75


def test_node_that_never_was_silent_goes_on_for_lost_ones():
    assert stopped_until_another_ended(threads("periodic"), was_silent=False) == {("1", 0): True}


def test_node_goes_on_alone_when_a_callback_has_ended_another():
    def work(own: ElasticRank):
        own.join()
        if own.node == "0":
            own.train(9)
        while own.scheme.state.steps < 3:
            own.step()
        return own.scheme.state.steps

    assert threads("periodic").play(work) == {("0", 0): 9, ("1", 0): 3}


@pytest.mark.usefixtures("short_hope")
def test_node_waits_for_one_that_trains_though_a_third_has_ended():
    """A callback may have ended training there, which is not the end of the others."""
    nodes = threads("periodic")

    def wait(own: ElasticRank) -> None:
        if own.node == "1":
            nodes.started[2].join(10.0)
            nodes.wires.dead.add(nodes.address("2"))
            wait_longer_than_a_node_hopes()

    def work(own: ElasticRank):
        own.join()
        if own.node != "2":
            return own.train(6, {3: lambda: wait(own)})
        for _ in range(3):
            own.step()
        return None

    results = nodes.play(work, (1, 1, 1))
    assert_equal(results["0", 0], results["1", 0])


@pytest.mark.usefixtures("short_hope")
@pytest.mark.parametrize("origin", [0, 8])
def test_node_restarted_in_the_first_period_of_a_later_fit_waits(origin):
    """The others train, and do not ask for long: it ended, because the earlier fit had finished."""
    nodes = threads("periodic")
    nodes.play(train)

    def again(own: ElasticRank):
        assert own.join()
        return own.train(6)

    def work(own: ElasticRank):
        own.membership.rendezvous.me = replace(own.membership.me, begins_at=origin)
        own.join()
        own.step()
        if own.node == "1":
            own.die()
        wait_until(lambda: not nodes.is_alive(1))
        nodes.let_come(1, again, restarts=1)
        wait_longer_than_a_node_hopes()
        return own.train(6)

    results = nodes.play(work)
    assert_equal(results["0", 0], results["1", 0])


@pytest.mark.parametrize(
    "data",
    [
        "replica_id",
        {"replica_id": "x", "node": 5},
        {"replica_id": "x"},
        {"replica_id": "x", "node": "x", "run": "run", "ranks": 1, "store": "x:1", "admits": 5},
    ],
    ids=str,
)
def test_data_of_other_programs_at_the_lighthouse_is_ignored(data):
    nodes = threads("periodic")
    ask = nodes.lights.ask

    def ask_among_strangers(*args):
        answer = ask(*args)
        return None if answer is None else [data, *answer]

    nodes.lights.ask = ask_among_strangers

    def work(own: ElasticRank):
        train(own)
        return own.membership.history.nodes

    assert nodes.play(work) == {("0", 0): 2, ("1", 0): 2}
