"""Nodes die at chosen moments of a synchronization, and the others go on as one: on threads, to the bit."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from elastic_cases import (
    ALL,
    LATE,
    SCHEMES,
    TRAINING,
    assert_equal,
    die_at,
    put,
    step_stay,
    threads,
)
from elastic_threads import ElasticRank, Failing
from harness import on_nodes

from lightning_hiercomm.elastic import Elastic

MOMENTS = ["before the quorum", "in the exchange", "before the vote", "after the vote"]


@pytest.mark.pairwise(groups=[("name",), ("moment", "sizes")])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("sizes", "lost"),
    [((1, 1, 1), "1"), ((2, 2, 2), "1"), ((1, 2, 1), "1"), ((1, 1, 1), "0"), ((2, 1, 1), "0")],
    ids=str,
)
@pytest.mark.parametrize(
    ("name", "sync"),
    [
        *((name, 2) for name in (*SCHEMES, "both", "noloco")),
        *((name, sync) for name in LATE for sync in (3, 4)),  # buckets are sent, and merged
    ],
)
def test_node_that_dies_leaves_the_others_equal(name, sync, sizes, lost, moment):
    """Node 0 has the vote in its store."""

    def work(own: ElasticRank):
        own.join()
        if own.node == lost:
            die_at(own, moment, sync)
        shared = []
        while own.scheme.state.steps < 14:
            own.step()
            own.scheme.state.settle()
            state = own.scheme.state_dict(shared=True)
            shared.append(repr({**state, "outer": None if "noloco" in name else state.get("outer")}))
        own.scheme.finish()
        return own.rank.values, own.membership.history.nodes, own.scheme.state.synchronizations, shared[8:]

    results = threads(name).play(work, sizes)
    assert {node for node, _ in results} == {"0", "1", "2"} - {lost}
    expected, _, syncs, shared = results["2", 0]
    for values, *others in results.values():
        assert_equal(values, expected)
        assert others == [2, syncs, shared if name in LATE else others[2]]


DUE = {"late": (8, 4), "streaming": (9, 6), "delta": (8, 4), "eq1": (8, 4), "late adam": (6, 4)}
"""The step after which buckets are due, and the number of the synchronization in which they are merged."""


@pytest.mark.pairwise(groups=[("name", "wire"), ("moment", "wire")])
@pytest.mark.parametrize(
    "moment", ["in flight", "as it leaves", "before the quorum", "before the vote", "after the vote", "a failure"]
)
@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("name", DUE)
def test_pending_buckets_are_dropped_and_repeated_when_they_are_due(name, wire, moment, monkeypatch):
    """As on two nodes that stay, which go on from what the two had before the buckets were sent."""
    scheme, (due, merged), at, was_sent = ALL[name], DUE[name], {}, threading.Event()
    before = due - scheme.staleness - 1

    def fail(own: ElasticRank) -> None:
        group = own.rank.topology.all_groups[1]

        def failing(start):
            monkeypatch.undo()
            handle = group._launch(start)
            handle._handle = Failing(handle._handle, was_sent)
            return handle

        monkeypatch.setattr(group, "_launch", failing)

    def work(own: ElasticRank):
        own.join()
        is_lost = own.node == "1"
        if is_lost and moment == "as it leaves":
            die_at(own, "in the exchange", merged - 1)
        elif is_lost and moment in MOMENTS:
            die_at(own, moment, merged)

        def note_state() -> None:
            at[own.node] = copy.deepcopy(own.state())
            if is_lost and moment == "a failure":
                fail(own)

        def note_sent() -> None:
            if is_lost:
                was_sent.set()
                if moment == "in flight":
                    own.die()

        return own.train(14, {before: note_state, due - 1: note_sent}), own.rank.trace

    # no node may be lost on a busy machine; a vote that does not come is waited for
    dead_after = 2.0 if moment != "before the vote" else 0.5 if wire is None else 1.5
    results = threads(name, Elastic(dead_after=dead_after), wire=wire).play(work, (1, 1, 1))
    nodes = ["0", "1", "2"] if moment == "a failure" else ["0", "2"]
    assert sorted(node for node, _ in results) == nodes
    if moment == "after the vote":
        assert_equal(results["0", 0][0], results["2", 0][0])
        return

    def stays(rank):
        node = nodes[rank.node]
        put(rank, at[node])
        after_step = rank.scheme.after_step
        while rank.scheme.state.steps < 14:
            if moment != "as it leaves" and rank.scheme.state.steps < due:
                rank.scheme.after_step = lambda last: None
            step_stay(rank, int(node))
            if moment != "as it leaves" and rank.scheme.state.steps == due:
                rank.scheme.exchanger.run(scheme.schedule.due(due, due, len(rank.scheme.exchanger.fragments)))
                rank.trace[-1] = rank.values.tolist()
            rank.scheme.after_step = after_step
        rank.scheme.finish()
        return rank.values, rank.trace

    expected = on_nodes(stays, scheme, [(index,) for index, _ in enumerate(nodes)], wire=wire, **TRAINING)
    for node, (values, trace) in zip(nodes, expected, strict=True):
        assert results[node, 0][1][before:] == trace
        assert_equal(results[node, 0][0], values)


@pytest.mark.parametrize("name", ["late", "delta"])
def test_exchange_lost_in_a_validation_is_repeated_when_it_is_due(name):
    """Node 1 dies while buckets are pending, and the others average for a validation before these are due."""
    due, _ = DUE[name]

    def validate(own: ElasticRank) -> None:
        if own.node == "1":
            own.die()
        undo = own.scheme.replica.undo_point()
        own.scheme.synchronize()
        undo()

    def work(own: ElasticRank):
        own.join()
        while own.scheme.state.steps < due:
            if own.scheme.state.steps == due - 1:
                validate(own)
            own.step()
        return own.rank.values

    results = threads(name).play(work, (1, 1, 1))
    assert_equal(results["0", 0], results["2", 0])


@pytest.mark.parametrize("lost", ["12", "01", "012"])
@pytest.mark.parametrize("name", [*SCHEMES, "both", "noloco", "streaming"])
def test_several_nodes_may_die_at_once(name, lost):
    def work(own: ElasticRank):
        own.join()
        if own.node in lost:
            die_at(own, "in the exchange")
        return own.train(10), own.membership.history.nodes

    results = threads(name).play(work, (1, 1, 1, 1))
    assert {node for node, _ in results} == {*"0123"} - {*lost}
    for values, nodes in results.values():
        assert nodes == 4 - len(lost)
        assert_equal(values, results["3", 0][0])


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_last_node_goes_on_alone(name, sizes):
    def work(own: ElasticRank):
        own.join()
        return own.die() if own.node == "1" else own.train(7)

    results = threads(name).play(work, sizes)
    assert {node for node, _ in results} == {"0"}
    for values in results.values():
        assert_equal(values, results["0", 0])


@pytest.mark.parametrize("name", ["periodic", "parts", "delta"])
def test_float_buffers_and_their_residuals_survive_a_change_of_nodes(name):
    def work(own: ElasticRank):
        own.join()
        if own.node == "1":
            die_at(own, "before the vote")
        return own.train(10)

    results = threads(name, wire="int8", buffer=torch.ones(3)).play(work, (1, 1, 1))
    assert_equal(results["0", 0], results["2", 0])
