"""A synchronization of elastic nodes happens on all members or on none: on threads, to the bit."""

from __future__ import annotations

import threading

import pytest
from elastic_cases import ALL, SCHEMES, TRAINING, assert_equal, die_at, threads, undisturbed
from elastic_threads import ElasticRank, Failing, Threads, play, wait_until

from lightning_hiercomm import PeriodicAveraging
from lightning_hiercomm.comm.base import finished
from lightning_hiercomm.elastic.groups import InterNodeGroup
from lightning_hiercomm.elastic.quorum import NodeRefused, StaleReplica


@pytest.mark.pairwise(groups=[("name",), ("sizes", "wire")])
@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_undisturbed_nodes_have_the_bits_of_nodes_that_stay(name, sizes, wire):
    def work(own: ElasticRank):
        own.join()
        return own.train(10), own.rank.trace

    results = play(ALL[name], work, sizes, wire=wire, **TRAINING)
    expected = undisturbed(ALL[name], sizes, 10, wire)
    assert len(results) == len(expected)
    for (_, (values, trace)), (stays, trace_that_stays) in zip(sorted(results.items()), expected, strict=True):
        assert trace == trace_that_stays
        assert_equal(values, stays)


@pytest.mark.pairwise
@pytest.mark.parametrize("wire", [None, "int8", "int4"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_failed_exchange_is_rolled_back_to_the_bit_and_repeated(name, sizes, at, wire, monkeypatch):
    launch, seen, attempts = InterNodeGroup._launch, [], []

    def failing(own, start):
        handle = launch(own, start)
        if threading.current_thread().name == "fails" and own.is_open:
            seen.append(handle)
            if len(seen) == at + 1:
                handle._handle = Failing(handle._handle)
        return handle

    monkeypatch.setattr(InterNodeGroup, "_launch", failing)

    def work(own: ElasticRank):
        own.join()
        attempt = own.transaction._attempt
        own.transaction._attempt = lambda do: (attempts.append(own.node), attempt(do))[1]
        is_failing = own.node == "1" and own.local == 0
        values = own.train(10, {5: lambda: is_failing and setattr(threading.current_thread(), "name", "fails")})
        return values, own.scheme.state.synchronizations

    results = play(ALL[name], work, sizes, wire=wire, **TRAINING)
    expected, *_ = undisturbed(ALL[name], sizes, 10, wire, reconnects_at=5)[0]
    assert len(seen) > at, "no exchange has failed"
    syncs = 3 + 1  # the last at the end of the run
    assert len(attempts) == (syncs + 1) * sum(sizes), "all repeat one of them"
    for values, synchronizations in results.values():
        assert_equal(values, expected)
        assert synchronizations == syncs - 1, "neither the failed one nor the last is counted"


# ---- the vote ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
def test_vote_on_a_failed_exchange_is_not_waited_for(name):
    """The lost node may be the one with the vote, and would be waited for a second time."""
    nodes, timeouts = threads(name), []
    ask = nodes.wires.ask

    def noting(address, query, timeout=None):
        if address in nodes.wires.dead:
            timeouts.append(timeout)
        return ask(address, query, timeout)

    nodes.wires.ask = noting

    def work(own: ElasticRank):
        own.join()
        if own.node == "0":
            die_at(own, "in the exchange")
        return own.train(15)

    results = nodes.play(work, (1, 1, 1))
    assert_equal(results["1", 0], results["2", 0])
    assert timeouts == [0.1, 0.1]


def test_store_does_not_grow_with_every_synchronization():
    """Where nodes synchronize at every step, it filled gigabytes in a week."""

    def work(own: ElasticRank):
        own.join()
        keys = []
        for _ in range(6):
            own.step()
            keys.append(own.membership.around.store.num_keys())
        own.scheme.finish()
        return own.node, keys

    for node, keys in play(PeriodicAveraging(sync_every=1), work, (1, 1, 1), **TRAINING).values():
        assert len({*keys[:-1]}) == 1, (node, keys)  # others may have finished by the last


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_node_that_finds_out_that_it_is_stale_ends_without_asking(sizes):
    """The lighthouse would answer only at the others' next synchronization."""
    nodes, checks = threads("diloco"), {}
    is_lost, has_ended = threading.Event(), threading.Event()

    def work(own: ElasticRank):
        own.join()
        check = own.membership.rendezvous._others_have_gone_on
        if own.node != "2":

            def note_check() -> None:
                checks[own.node] = check()
                assert has_ended.wait(10.0)

            return own.train(15, {5: lambda: is_lost.wait(10.0), 7: note_check})

        def lose() -> None:
            checks["before"] = check()
            nodes.lights.lose("2")
            is_lost.set()
            wait_until(lambda: {"0", "1"} <= {*checks})
            checks["after"] = check()
            with pytest.raises(StaleReplica):
                own.membership.rendezvous.end_if_behind()
            nodes.lights.ask = None

        with pytest.raises(StaleReplica):
            own.train(15, {4: lose} if own.local == 0 else None)
        if own.local == 0:
            del nodes.lights.ask
            has_ended.set()
        return None

    results = nodes.play(work, sizes)
    assert checks == {"before": False, "0": False, "1": False, "after": True}
    assert_equal(results["0", 0], results["1", 0])


@pytest.mark.parametrize("name", SCHEMES)
def test_node_that_alone_reads_the_vote_in_its_store_is_stale(name):
    """It was stopped, the others could not read the vote, and have synchronized without it as often as it has."""
    nodes = threads(name)
    has_voted, others_went_on = threading.Event(), threading.Event()

    def stop(own: ElasticRank) -> None:
        votes = own.membership.votes
        decide = votes.decide

        def stopped(quorum, replica_id, succeeded):
            nodes.wires.dead.add(nodes.address(own.node))  # it does not answer
            is_kept = succeeded or decide(quorum, replica_id, succeeded)
            nodes.lights.lose(own.node)
            has_voted.set()
            assert others_went_on.wait(10.0)
            nodes.wires.dead.clear()
            votes.decide = decide
            return is_kept

        votes.decide = stopped

    def wait_for_vote(own: ElasticRank) -> None:
        votes = own.membership.votes
        decide = votes.decide
        votes.decide = lambda *args: has_voted.wait(10.0) and decide(*args)

    def go_on(own: ElasticRank) -> None:
        if own.node == "1":
            assert own.membership.history.nodes == 2
            others_went_on.set()
            wait_until(lambda: nodes.is_alive(0))

    def work(own: ElasticRank):
        own.join()
        if own.node == "0":
            with pytest.raises(StaleReplica):
                own.train(9, {5: lambda: stop(own)})
            return None
        return own.train(9, {5: lambda: wait_for_vote(own), 6: lambda: go_on(own)})

    results = nodes.play(work, (1, 1, 1))
    assert_equal(results["1", 0], results["2", 0])


# ---- failures that repeat ----------------------------------------------------------------------------------------


def failing_in_threads_named(name: str, launch, seen: list[object]):
    """A `_launch` whose collectives fail in threads of this name."""

    def failing(own, start):
        handle = launch(own, start)
        if threading.current_thread().name == name and own.is_open and handle is not finished:
            seen.append(own.rank)
            handle._handle = Failing(handle._handle)
        return handle

    return failing


def test_synchronization_that_fails_repeatedly_is_reported(monkeypatch, caplog):
    def warnings() -> list[str]:
        return [record.message for record in caplog.records if record.levelname == "WARNING"]

    launch = InterNodeGroup._launch
    failing = failing_in_threads_named("fails", launch, [])
    monkeypatch.setattr(InterNodeGroup, "_launch", lambda own, start: (launch if warnings() else failing)(own, start))

    def work(own: ElasticRank):
        own.join()
        if own.node == "0":
            threading.current_thread().name = "fails"
        return own.train(1)

    results = play(PeriodicAveraging(sync_every=1), work, **TRAINING)
    assert_equal(results["0", 0], results["1", 0])
    of_first, of_second = sorted(warnings())
    assert of_first == "node 0: a synchronization has failed 10 times (asked to fail), and is repeated"
    assert of_second.startswith("node 1: a synchronization has failed 10 times")


@pytest.mark.parametrize("fails", ["the first connection", "a later connection", "the exchange"])
def test_nodes_that_always_fail_together_part_and_the_first_goes_on(fails, monkeypatch):
    """They reach the lighthouse and each other's stores, but a firewall closes other ports."""
    nodes, failures = Threads(PeriodicAveraging(sync_every=2), training=TRAINING), []
    connect = nodes.wires.connect_group

    def connecting(quorum, index, name, meter):
        is_failing = fails == ("the first connection" if quorum.begins else "a later connection")
        if len(quorum.members) == 2 and is_failing:
            failures.append(index)
            raise RuntimeError("no port is open")
        return connect(quorum, index, name, meter)

    nodes.wires.connect_group = connecting
    monkeypatch.setattr(InterNodeGroup, "_launch", failing_in_threads_named("fails", InterNodeGroup._launch, failures))

    def work(own: ElasticRank):
        own.join()
        if fails == "a later connection":
            own.rank.topology.disconnect()
        if fails == "the exchange":
            threading.current_thread().name = "fails"
        return own.train(4), own.membership.history.nodes

    nodes.lights.min_nodes = 2
    nodes.let_come(0, work)
    nodes.start(1, work)
    with pytest.raises(NodeRefused, match=r"its synchronization with nodes 0 has failed 30 times \(.*HIERCOMM_ADDRESS"):
        nodes.end()
    assert [count for _, count in nodes.results.values()] == [1]
    assert len(failures) >= 60
