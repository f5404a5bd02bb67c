"""Nodes die at chosen moments of a synchronization, and the others go on as one: on threads, to the bit."""

from __future__ import annotations

import pytest
import torch
from elastic_cases import SCHEMES, assert_equal, die_at, threads
from elastic_threads import ElasticRank

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
    [*((name, 2) for name in (*SCHEMES, "both", "noloco")), *(("daso", sync) for sync in (3, 4))],  # in its two phases
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
            state = own.scheme.state_dict(shared=True)
            shared.append(repr({**state, "outer": None if name == "noloco" else state.get("outer")}))
        own.scheme.finish()
        return own.rank.values, own.membership.history.nodes, own.scheme.state.synchronizations, shared[8:]

    results = threads(name).play(work, sizes)
    assert {node for node, _ in results} == {"0", "1", "2"} - {lost}
    expected, _, syncs, shared = results["2", 0]
    for values, *others in results.values():
        assert_equal(values, expected)
        assert others == [2, syncs, shared]


@pytest.mark.parametrize("lost", ["12", "01", "012"])
@pytest.mark.parametrize("name", [*SCHEMES, "both", "noloco"])
def test_several_nodes_may_die_at_once(name, lost):
    """The last one goes on alone, also with two ranks."""

    def work(own: ElasticRank):
        own.join()
        if own.node in lost:
            die_at(own, "in the exchange")
        return own.train(10), own.membership.history.nodes

    results = threads(name).play(work, (1, 1, 1, 2))
    assert {node for node, _ in results} == {*"0123"} - {*lost}
    for values, nodes in results.values():
        assert nodes == 4 - len(lost)
        assert_equal(values, results["3", 0][0])


@pytest.mark.parametrize("name", ["periodic", "parts"])
def test_float_buffers_and_their_residuals_survive_a_change_of_nodes(name):
    def work(own: ElasticRank):
        own.join()
        if own.node == "1":
            die_at(own, "before the vote")
        return own.train(10)

    results = threads(name, wire="int8", buffer=torch.ones(3)).play(work, (1, 1, 1))
    assert_equal(results["0", 0], results["2", 0])
