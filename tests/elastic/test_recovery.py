"""Elastic nodes that join and recover: on threads, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from elastic_cases import ALL, COPIED, PEERS, SCHEMES, TRAINING, assert_equal, put, threads, train_stay
from elastic_threads import ElasticRank, wait_until
from harness import on_nodes

from lightning_hiercomm.elastic import Elastic, rendezvous
from lightning_hiercomm.elastic.healing import Healing
from lightning_hiercomm.elastic.quorum import NodeRefused
from lightning_hiercomm.run.averaged_model import AveragedModel


def recover(own: ElasticRank):
    assert own.join()
    return own.train(15)


@pytest.mark.pairwise
@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("name", [*COPIED, *PEERS, "diloco"])
def test_node_that_joins_goes_on_as_one_that_began_with_its_source(name, wire):
    """As three nodes that stay, which go on from the two, and a copy of the first."""
    scheme, at = ALL[name], {}
    nodes = threads(name, Elastic(dead_after=5.0), wire=wire)  # a repeated synchronization has other bits
    period = getattr(scheme, "period", 1)  # in which all fragments are sent

    def joining(own: ElasticRank):
        assert own.join()
        at["joined"] = own.scheme.state.steps
        return own.train(12)

    def work(own: ElasticRank):
        own.join()
        while own.scheme.state.steps < 12:
            if own.scheme.state.steps == period - 1 and own.node == "0":
                nodes.let_come(2, joining)
            own.step()
            if own.scheme.state.steps == period:
                at[own.node] = copy.deepcopy(own.state())
        return own.train(12)

    results = nodes.play(work)
    assert at["joined"] == period

    def stays(rank):
        put(rank, at[str(rank.node % 2)])
        return train_stay(rank, rank.node, 12)[0]

    expected = on_nodes(stays, scheme, ((0,), (1,), (2,)), wire=wire, **TRAINING)
    for values in results.values():
        assert_equal(values, expected[0])


@pytest.mark.parametrize("name", [*COPIED, *PEERS])
def test_node_recovers_though_a_validation_follows_every_synchronization(name):
    """Where nodes are never equal a validation is a synchronization, and comes before any node can recover."""
    nodes, joined = threads(name), []

    def train(own: ElasticRank):
        give, averaged = own.membership.give_state, AveragedModel([own.scheme], own.rank.replicas, own.rank.topology)
        own.membership.give_state = lambda state: None
        while own.scheme.state.steps < 15:
            if own.scheme.state.steps == 4 and own.node == "0":
                nodes.let_come(1, joining)
            own.step()
            with averaged():
                pass
            give(own.state)
        return own.train(15)

    def joining(own: ElasticRank):
        assert own.join()
        joined.append(own.scheme.state.steps)
        return train(own)

    def work(own: ElasticRank):
        own.join()
        return train(own)

    nodes.start(0, work)
    results = nodes.end()
    assert joined[0] <= 8
    assert_equal(results["0", 0], results["1", 0])


def test_node_whose_source_dies_recovers_from_another():
    nodes = threads("diloco")

    def work(own: ElasticRank):
        own.join()
        if own.node == "1":
            return own.train(15, {4: lambda: wait_until(lambda: nodes.is_alive(2))})
        own.membership.give_state = lambda state: own.die() if own.membership.healing.is_expected else None
        return own.train(15, {4: lambda: nodes.let_come(2, recover)})

    results = nodes.play(work)
    assert set(results) == {("1", 0), ("2", 0)}
    assert_equal(results["2", 0], results["1", 0])


@pytest.mark.parametrize("who", ["0", "1"])
def test_joining_node_asks_again_when_the_members_cannot_connect(who):
    """It would wait for its state, and they, who need another quorum, for it."""
    nodes, failed = threads("diloco"), []
    nodes.wires.timeout, connect = 1.0, nodes.wires.connect_group

    def fails_once(quorum, index, name, meter):
        if quorum.joining and quorum.members[index].node == who and not failed:
            failed.append(True)
            raise RuntimeError("is not there in time")
        return connect(quorum, index, name, meter)

    nodes.wires.connect_group = fails_once

    def work(own: ElasticRank):
        own.join()

        def disconnect() -> None:
            own.rank.topology.disconnect()
            if own.node == "0":
                nodes.let_come(2, recover)

        return own.train(15, {4: disconnect})

    results = nodes.play(work)
    assert failed
    assert len(results) == 3
    for values in results.values():
        assert_equal(values, results["0", 0])


def test_joining_node_that_gets_no_state_ends_and_the_others_train(monkeypatch):
    nodes = threads("periodic")
    monkeypatch.setattr(rendezvous, "_GIVE_UP_AFTER", 3)
    monkeypatch.setattr(Healing, "_poll", lambda own, *args: torch.empty(0))

    def joining(own: ElasticRank):
        with pytest.raises(NodeRefused, match=r"with nodes 0, 1 has failed 3 times \(no state from node 0\)"):
            own.join()
        own.die()

    def work(own: ElasticRank):
        own.join()
        return own.train(15, {4: lambda: own.node == "0" and nodes.let_come(2, joining)})

    results = nodes.play(work)
    assert_equal(results["0", 0], results["1", 0])


def test_joining_node_that_has_to_ask_again_is_counted_once(monkeypatch):
    """On a busy machine a member may answer too late."""
    nodes, failed = threads("periodic"), []
    poll = Healing._poll  # noqa: SLF001

    def nothing_once(own, *args):
        if failed:
            return poll(own, *args)
        failed.append(own)
        return torch.empty(0)

    def joining(own: ElasticRank):
        monkeypatch.setattr(Healing, "_poll", nothing_once)
        recover(own)
        return own.membership.history

    def work(own: ElasticRank):
        own.join()
        own.train(15, {4: lambda: own.node == "0" and nodes.let_come(2, joining)})
        return own.membership.history

    histories = nodes.play(work)
    assert failed
    for history in histories.values():
        assert (history.heals, history.nodes) == (1, 3)


@pytest.mark.parametrize("name", [*SCHEMES, "both", "noloco"])
def test_node_that_joins_and_dies_repeatedly_does_not_delay_the_others(name):
    nodes, joined = threads(name), []

    def flapping(own: ElasticRank):
        assert own.join()
        joined.append(own.scheme.state.steps)
        own.step()
        own.die()

    def work(own: ElasticRank):
        own.join()
        comes = lambda: own.node == "0" and nodes.let_come(2, flapping)  # noqa: E731
        return own.train(24, dict.fromkeys((3, 9, 15), comes)), own.membership.history

    results = nodes.play(work)
    assert len(joined) == 3
    (zero, history), (one, _) = results["0", 0], results["1", 0]
    assert_equal(zero, one)
    assert history.heals == 3
    assert sum("node 2 has left" in event for event in history.events) == 3


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 1), (2, 2, 2), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_recovered_node_continues_the_history_and_ends_with_the_bits_of_the_others(name, sizes):
    nodes = threads(name)

    def joining(own: ElasticRank):
        values = recover(own)
        return own.membership.history, values

    def work(own: ElasticRank):
        own.join()
        dies, comes = own.node == "1", own.node == "0" and own.local == 0
        at = {5: lambda: dies and own.die(), 7: lambda: comes and nodes.let_come(3, joining, sizes[1])}
        values = own.train(15, at)
        return own.membership.history, values

    results = nodes.play(work, sizes)
    assert len(results) == sum(sizes)
    for history, values in results.values():
        assert_equal(values, results["0", 0][1])
        assert (history.heals, history.nodes) == (1, 3)
        events = [event.partition(" ")[2] for event in history.events]
        assert events == [
            "node 1 has left; 2 nodes continue, after sync 1",
            "node 3 joins; 2 nodes continue, after sync 2",
        ]
        assert "1 recovered; waited" in history.lines()[0]
