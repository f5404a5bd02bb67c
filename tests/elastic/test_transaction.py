"""An agreement of nodes that come and go happens whole or not at all: on threads, to the bit."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from elastic_threads import ElasticRank, Failing, Threads, play
from harness import on_nodes

from lightning_hiercomm import DASO, DiLoCo, Gossip, PeriodicAveraging
from lightning_hiercomm.comm.base import finished
from lightning_hiercomm.comm.threads import on_one_processor
from lightning_hiercomm.elastic import Elastic, rendezvous
from lightning_hiercomm.elastic.groups import InterNodeGroup
from lightning_hiercomm.elastic.healing import Healing
from lightning_hiercomm.elastic.quorum import NodeRefused, RunFinished, StaleReplica
from lightning_hiercomm.run.averaged_model import AveragedModel
from lightning_hiercomm.schemes import OuterOptimizer, ParameterSync, RandomPermutation, Ring, Scheme
from lightning_hiercomm.schemes.components.merges import Replace

SHAPES = {"a": (7, 3), "b": (5,), "c": (40,)}
TRAINING = {"shapes": SHAPES, "targets": (0.0, 0.0, 0.0, 0.0), "bucket_bytes": 64}
SCHEMES = {"periodic": PeriodicAveraging(sync_every=3), "diloco": DiLoCo(sync_every=3)}
COPIED = {
    "fragments": DiLoCo(sync_every=4, fragments=2),
    "local": DiLoCo(sync_every=3, keep_local=0.5),
    "both": DiLoCo(sync_every=4, fragments=2, keep_local=0.25, outer_optimizer=partial(torch.optim.Adam, lr=0.1)),
    "parts": ParameterSync(schedule=4, fragments=2),
    "kept": ParameterSync(schedule=3, merge=Replace(0.5)),
}
"""Whose nodes are never equal."""
PEERS = {
    "peers": ParameterSync(schedule=2, reducer=RandomPermutation()),
    "noloco": ParameterSync(schedule=3, reducer=RandomPermutation(), merge=OuterOptimizer()),
    "ring": ParameterSync(schedule=2, reducer=Ring()),
}
"""The same, each agreeing with those that a graph names: of the nodes that are there."""
GOSSIP = {
    "gossip": Gossip(segments=3),
    "push-sum": Gossip(segments=2, fair=None),
    "one way": Gossip("directed_exponential", segments=1),
    "no push-sum": Gossip(segments=2, fair=None, push_sum=False),
}
"""Nodes that mix at every step."""
LATE = {
    "late": DiLoCo(sync_every=4, staleness=2, keep_local=0.0),
    "streaming": DiLoCo(sync_every=6, fragments=2, staleness=2, keep_local=0.5),
    "late adam": DiLoCo(sync_every=3, staleness=1, keep_local=0.0, outer_optimizer=partial(torch.optim.Adam, lr=0.1)),
    "delta": ParameterSync(schedule=4, staleness=2, merge="delta"),
    "eq1": ParameterSync(schedule=4, staleness=3, merge="eq1"),
    "late peers": ParameterSync(schedule=4, staleness=2, reducer=RandomPermutation()),
    "late noloco": ParameterSync(schedule=4, staleness=2, reducer=RandomPermutation(), merge=OuterOptimizer()),
    "daso": DASO(sync_every=3, warmup_steps=2, reducer="sharded", adapt=False),
}
"""Which train on while something is in flight."""
ALL = {**SCHEMES, **COPIED, **PEERS, **GOSSIP, **LATE}
SIZES = [(1, 1), (2, 2), (1, 1, 1), (2, 1), (3, 2, 1)]


@pytest.fixture(autouse=True)
def nodes_share_a_processor():
    """As ranks that are threads do: see `ThreadWorld`. Nodes start at different moments."""
    with on_one_processor():
        yield


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def train(steps: int):
    def work(own: ElasticRank):
        own.join()
        for _ in range(steps):
            own.step()
        own.scheme.finish()
        return own.rank.values, own.rank.trace

    return work


def undisturbed(scheme: Scheme, sizes, steps: int, wire=None, connects_at: int | None = None):
    """The same run on nodes that stay, all of which begin as the first node does.

    After ``connects_at`` steps they forget what encoding has kept back, as those do that connect anew.
    """
    ends, at = [], 0
    for size in sizes:
        ends.append(range(at, at + size))
        at += size

    def work(rank):
        local = rank.topology.local_rank
        for step in range(steps):
            for kept_back in rank.scheme.exchanger.reducer._feedback if step == connects_at else ():
                kept_back.clear()
            generator = torch.Generator().manual_seed(1000 * rank.scheme.state.steps + 10 * rank.topology.node + local)

            def drawn(values, generator=generator):
                return torch.randn(values.shape, generator=generator) + 0.1 * values

            rank.train(drawn)
        rank.scheme.finish()
        return rank.values, rank.trace

    return on_nodes(work, scheme, ends, start=1.0, inner=adam, wire=wire, **TRAINING)


@pytest.mark.pairwise
@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_nodes_that_may_leave_but_do_not_end_with_the_bits_of_nodes_that_stay(name, sizes, wire):
    ends_as_nodes_that_stay(SCHEMES[name], sizes, wire)


@pytest.mark.pairwise
@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", [*COPIED, *PEERS, *GOSSIP])
def test_so_do_nodes_that_are_never_equal(name, sizes, wire):
    ends_as_nodes_that_stay(ALL[name], sizes, wire)


@pytest.mark.pairwise
@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", LATE)
def test_so_do_nodes_that_train_on_while_something_is_in_flight(name, sizes, wire):
    ends_as_nodes_that_stay(ALL[name], sizes, wire, steps=14)


def ends_as_nodes_that_stay(scheme: Scheme, sizes, wire, steps: int = 10) -> None:
    """At every step."""
    results = play(scheme, train(steps), sizes, inner=adam, wire=wire, **TRAINING)
    expected = undisturbed(scheme, sizes, steps, wire)
    assert len(results) == len(expected)
    for (_, (values, trace)), (stays, trace_that_stays) in zip(sorted(results.items()), expected, strict=True):
        assert trace == trace_that_stays
        torch.testing.assert_close(values, stays, rtol=0, atol=0)


@pytest.mark.pairwise
@pytest.mark.parametrize("wire", [None, "int8", "int4"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_agreement_whose_exchange_breaks_is_taken_back_to_the_bit_and_made_once_more(
    name, sizes, at, wire, monkeypatch
):
    launch, broken = InterNodeGroup._launch, []

    def breaking(own, start):
        move = launch(own, start)
        if threading.current_thread().name == "breaks" and own.is_open:
            breaking.seen += 1
            if breaking.seen == at + 1:
                broken.append(True)
                move._handle = Failing(move._handle)
        return move

    breaking.seen = 0
    monkeypatch.setattr(InterNodeGroup, "_launch", breaking)
    tries = []

    def work(own: ElasticRank):
        own.join()
        attempt = own.transaction._attempt
        own.transaction._attempt = lambda do: (tries.append(own.node), attempt(do))[1]
        for step in range(10):
            if own.node == "1" and own.local == 0 and step == 5:
                threading.current_thread().name = "breaks"
            own.step()
        own.scheme.finish()
        return own.rank.values

    results = play(SCHEMES[name], work, sizes, inner=adam, wire=wire, **TRAINING)
    expected, *_ = undisturbed(SCHEMES[name], sizes, 10, wire, connects_at=5)[0]
    assert broken == [True], "no exchange was broken"
    agreements = 3 + 1  # the last at the end of the run
    assert len(tries) == (agreements + 1) * sum(sizes), "one was made twice, by all"
    for values in results.values():
        torch.testing.assert_close(values, expected, rtol=0, atol=0)


@pytest.mark.pairwise
@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_taken_back_is_all_that_an_agreement_changes(name, sizes, wire):
    """Parameters, last agreed values, outer momentum, what encoding kept back, and all that is counted."""

    def state(own: ElasticRank):
        scheme = own.scheme
        return {
            "values": own.rank.values,
            "scheme": {k: v for k, v in scheme.state_dict().items() if k != "outer"},
            "outer": scheme.shared_state().get("outer"),
            "nonfinite": scheme.guard.nonfinite,
        }

    def work(own: ElasticRank):
        own.join()
        for _ in range(4):
            own.step()
        undo = own.scheme.undo_point()
        before = state(own)
        own.transaction(lambda: own.scheme.exchanger.run(own.scheme.exchanger.all_fragments))
        between = state(own)
        undo()
        return before, between, state(own)

    for before, between, after in play(SCHEMES[name], work, sizes, inner=adam, wire=wire, **TRAINING).values():
        same = lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0)  # noqa: E731
        same(before["values"], after["values"])
        assert repr(before) == repr(after)
        assert not torch.equal(before["values"], between["values"])
        assert repr(before) != repr(between)


def survivors(name, sizes, who, work):
    """What ``work`` returned on the ranks of three nodes of which one, ``who``, dies in it."""
    threads = Threads(ALL[name], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = len(sizes)
    for node, ranks in enumerate(sizes):
        threads.start(node, work, ranks)
    results = threads.end()
    assert {node for node, _ in results} == {"0", "1", "2"} - {who}
    return results


@pytest.mark.pairwise
@pytest.mark.parametrize("moment", ["before the quorum", "in the exchange", "before the vote", "after the vote"])
@pytest.mark.parametrize(
    ("sizes", "who"),
    [((1, 1, 1), "1"), ((2, 2, 2), "1"), ((1, 2, 1), "1"), ((1, 1, 1), "0"), ((2, 1, 1), "0")],
    ids=str,
)
@pytest.mark.parametrize("name", [*SCHEMES, "both", "noloco", "push-sum"])
def test_a_node_that_dies_at_any_moment_leaves_the_others_equal(name, sizes, who, moment):
    """Node 0 keeps the vote."""

    def work(own: ElasticRank):
        own.join()
        if own.node == who:
            die_at(own, moment)
        for _ in range(10):
            own.step()
        own.scheme.finish()
        return own.rank.values, own.membership.history.nodes, own.scheme.state.synchronizations

    results = survivors(name, sizes, who, work)
    for values, nodes, _ in results.values():
        torch.testing.assert_close(values, results["2", 0][0], rtol=0, atol=0)
        assert nodes == 2
    assert len({agreements for _, _, agreements in results.values()}) == 1


@pytest.mark.pairwise
@pytest.mark.parametrize("moment", ["before the quorum", "in the exchange", "before the vote", "after the vote"])
@pytest.mark.parametrize("agreement", [3, 4], ids=["leaving", "merging"])
@pytest.mark.parametrize(
    ("sizes", "who"), [((1, 1, 1), "1"), ((2, 2, 2), "1"), ((2, 1, 1), "0"), ((1, 1, 1), "0")], ids=str
)
@pytest.mark.parametrize("name", LATE)
def test_so_does_one_that_dies_while_something_leaves_or_is_merged(name, sizes, who, agreement, moment):
    """What nodes have in common beside their parameters is equal, too."""

    def work(own: ElasticRank):
        own.join()
        if own.node == who:
            die_at(own, moment, agreement)
        common = []
        for _ in range(14):
            own.step()
            own.scheme.settle()
            schedule = own.scheme.shared_state()
            common.append(repr({**schedule, "outer": None if name == "late noloco" else schedule.get("outer")}))
        own.scheme.finish()
        return own.rank.values, own.membership.history.nodes, common

    results = survivors(name, sizes, who, work)
    for values, nodes, common in results.values():
        torch.testing.assert_close(values, results["2", 0][0], rtol=0, atol=0)
        assert nodes == 2
        assert common[8:] == results["2", 0][2][8:]


LANDINGS = {"late": (8, 4), "streaming": (9, 6), "delta": (8, 4), "eq1": (8, 4), "late adam": (6, 4)}
"""The step after which something is due, and the number of the agreement in which it is merged."""


@pytest.mark.long("the node that died is missed after five seconds: on a busy machine one that lives is not")
@pytest.mark.pairwise
@pytest.mark.parametrize(
    "moment",
    ["in flight", "as it leaves", "before the quorum", "before the vote", "after the vote", "a move fails"],
)
@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("name", LANDINGS)
def test_what_was_in_flight_when_a_node_died_is_taken_back_and_others_agree_when_it_is_due(
    name, wire, moment, monkeypatch
):
    """As two nodes that stay would: they take up what the two had before it left."""
    scheme, (due, landing), at, has_left = ALL[name], LANDINGS[name], {}, threading.Event()
    before = due - scheme.staleness - 1

    def work(own: ElasticRank):
        own.join()
        if own.node == "1":
            if moment == "as it leaves":
                die_at(own, "in the exchange", landing - 1)
            elif moment not in ("in flight", "a move fails"):
                die_at(own, moment, landing)
        while own.scheme.state.steps < 14:
            if own.scheme.state.steps == before:
                at[own.node] = copy.deepcopy(own.state())
                if own.node == "1" and moment == "a move fails":
                    lane = own.rank.topology.all_groups[1]
                    monkeypatch.setattr(lane, "_launch", lambda start, lane=lane: broken(lane, start))
            if own.scheme.state.steps == due - 1 and own.node == "1":
                has_left.set()
                if moment == "in flight":
                    own.die()
            own.step()
        own.scheme.finish()
        return own.rank.values, own.rank.trace

    def broken(lane, start):
        monkeypatch.undo()
        move = lane._launch(start)
        move._handle = Failing(move._handle, has_left)
        return move

    # nobody is to be lost who only has too little of the processor; a vote that does not come is waited for
    elastic = Elastic(dead_after=5.0 if moment != "before the vote" else 0.5 if wire is None else 2.5)
    threads = Threads(scheme, elastic, {"inner": adam, "wire": wire, **TRAINING})
    threads.lights.min_nodes = 3
    for node in range(3):
        threads.start(node, work)
    results = threads.end()
    names = ["0", "1", "2"] if moment == "a move fails" else ["0", "2"]
    assert sorted(node for node, _ in results) == names
    if moment == "after the vote":
        torch.testing.assert_close(results["0", 0][0], results["2", 0][0], rtol=0, atol=0)
        return

    def stays(rank):
        name = names[rank.node]
        put(rank, at[name])
        after_step = rank.scheme.after_step
        while rank.scheme.state.steps < 14:
            if moment != "as it leaves" and rank.scheme.state.steps < due:
                rank.scheme.after_step = lambda last: None
            generator = torch.Generator().manual_seed(1000 * rank.scheme.state.steps + 10 * int(name))
            rank.train(lambda values, g=generator: torch.randn(values.shape, generator=g) + 0.1 * values)
            if moment != "as it leaves" and rank.scheme.state.steps == due:
                rank.scheme.exchanger.run(scheme.schedule.due(due, due, len(rank.scheme.exchanger.fragments)))
                rank.trace[-1] = rank.values.tolist()
            rank.scheme.after_step = after_step
        rank.scheme.finish()
        return rank.values, rank.trace

    expected = on_nodes(stays, scheme, [(node,) for node, _ in enumerate(names)], inner=adam, wire=wire, **TRAINING)
    for node, (values, trace) in zip(names, expected, strict=True):
        assert results[node, 0][1][before:] == trace
        torch.testing.assert_close(results[node, 0][0], values, rtol=0, atol=0)


def put(rank, state) -> None:
    """Let a rank that stays go on from an elastic one's state."""
    state = copy.deepcopy(state)
    with torch.no_grad():
        for parameter, values in zip(rank.parameters, state["values"], strict=True):
            parameter.copy_(values)
    rank.optimizer.load_state_dict(state["optimizer"])
    rank.scheme.follow(rank.replica())
    rank.scheme.load_state_dict(state["schedule"])
    if "last_agreed" in state["schedule"]:
        tensors = rank.scheme.reference._tensors(rank.scheme.replica)
        rank.scheme.reference.set_values(dict(zip(map(id, tensors), state["schedule"]["last_agreed"], strict=True)))


def put_weights(rank, of_nodes) -> None:
    """Give push-sum weights to all nodes, by segment."""
    rank.scheme.state.weights = [list(of_segment) for of_segment in zip(*of_nodes, strict=True)]


@pytest.mark.parametrize("moment", ["before the quorum", "in the exchange", "before the vote"])
@pytest.mark.parametrize("name", GOSSIP)
def test_what_a_node_holds_of_the_sums_of_push_sum_is_lost_with_it(name, moment):
    """The others go on with their own values and weights, as two nodes that stay would."""
    at = {}

    def work(own: ElasticRank):
        own.join()
        if own.node == "1":
            die_at(own, moment, agreement=6)
        while own.scheme.state.steps < 12:
            if own.scheme.state.steps == 5:
                at[own.node] = copy.deepcopy(own.state()) | {"weights": own.scheme._own_weights}
            own.step()
        own.scheme.finish()
        return own.rank.values, own.rank.trace

    threads = Threads(ALL[name], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 3
    for node in range(3):
        threads.start(node, work)
    results = threads.end()

    def stays(rank):
        put(rank, at["02"[rank.node]])
        put_weights(rank, [at["0"]["weights"], at["2"]["weights"]])
        while rank.scheme.state.steps < 12:
            generator = torch.Generator().manual_seed(1000 * rank.scheme.state.steps + 20 * rank.node)
            rank.train(lambda values, g=generator: torch.randn(values.shape, generator=g) + 0.1 * values)
        rank.scheme.finish()
        return rank.values, rank.trace

    expected = on_nodes(stays, ALL[name], ((0,), (1,)), inner=adam, **TRAINING)
    for node, (values, trace) in zip("02", expected, strict=True):
        assert results[node, 0][1][5:] == trace
        torch.testing.assert_close(results[node, 0][0], values, rtol=0, atol=0)


def die_at(own: ElasticRank, moment: str, agreement: int = 2) -> None:
    """Let a node die in its agreement with that number."""
    membership = own.membership

    def wrapped(function, before: bool):
        def call(*args, **kwargs):
            if before and membership.me.syncs + 1 == agreement:
                own.die()
            result = function(*args, **kwargs)
            if not before and membership.me.syncs + 1 >= agreement:
                own.die()
            return result

        return call

    if moment == "before the quorum":
        membership.form_quorum = wrapped(membership.form_quorum, before=True)
    elif moment == "in the exchange":
        for lane in own.rank.topology.all_groups if own.local == 0 else ():
            lane._launch = wrapped(lane._launch, before=False)
    elif moment == "before the vote":
        membership.vote = wrapped(membership.vote, before=True)
    else:
        membership.commit = wrapped(membership.commit, before=False)


@pytest.mark.parametrize("name", SCHEMES)
def test_nobody_waits_for_the_vote_on_an_exchange_that_failed(name, monkeypatch):
    """The node that is gone may be the one that keeps it: it would be waited for a second time."""
    threads = Threads(SCHEMES[name], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 3
    ask, waits = threads.wires.ask, []

    def asks(address, work, patience=None):
        if address in threads.wires.dead:
            waits.append(patience)
        return ask(address, work, patience)

    threads.wires.ask = asks

    def work(own: ElasticRank):
        own.join()
        if own.node == "0":
            die_at(own, "in the exchange")
        return train_to_the_end(own)

    for node in range(3):
        threads.start(node, work)
    results = threads.end()
    torch.testing.assert_close(results["1", 0], results["2", 0], rtol=0, atol=0)
    assert waits == [0.1, 0.1]


def test_what_a_node_keeps_for_others_does_not_grow_with_every_agreement():
    """Of votes; where nodes agree at every step, it filled gigabytes in a week."""

    def work(own: ElasticRank):
        own.join()
        kept = []
        for _ in range(6):
            own.step()
            kept.append(own.membership.votes._store.num_keys())
        own.scheme.finish()
        return own.node, kept

    for node, kept in play(PeriodicAveraging(sync_every=1), work, (1, 1, 1), inner=adam, **TRAINING).values():
        assert len({*kept}) == 1, (node, kept)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_who_learns_that_the_others_agreed_without_it_ends_and_asks_nobody(sizes):
    """It would be let in by the lighthouse only when they come to their next agreement, and is of no use until then."""
    threads = Threads(SCHEMES["diloco"], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 3
    is_lost, has_ended, looks = threading.Event(), threading.Event(), {}

    def work(own: ElasticRank):
        own.join()
        look = own.membership.rendezvous._others_have_gone_on
        while own.scheme.state.steps < 15:
            if own.node != "2":
                if own.scheme.state.steps == 5:
                    assert is_lost.wait(10.0)
                if own.scheme.state.steps == 7:
                    looks[own.node] = look()
                    assert has_ended.wait(10.0)
            elif own.scheme.state.steps == 4 and own.local == 0:
                looks["before"] = look()
                threads.lights.lose("2")
                is_lost.set()
                wait_until(lambda: {"0", "1"} <= {*looks})
                looks["after"] = look()
                with pytest.raises(StaleReplica):
                    own.membership.rendezvous.end_if_behind()
                threads.lights.ask = None
            try:
                own.step()
            except StaleReplica:
                if own.local == 0:
                    del threads.lights.ask
                    has_ended.set()
                return "left behind"
        own.scheme.finish()
        return own.rank.values

    for node, ranks in enumerate(sizes):
        threads.start(node, work, ranks)
    results = threads.end()
    assert looks == {"before": False, "0": False, "1": False, "after": True}
    assert {results.pop(("2", local)) for local in range(sizes[2])} == {"left behind"}
    torch.testing.assert_close(results["0", 0], results["1", 0], rtol=0, atol=0)


@pytest.mark.parametrize("name", SCHEMES)
def test_who_has_the_vote_for_itself_because_it_stopped_is_left_behind_when_it_goes_on(name):
    """It holds as many agreements as the others, who could not read the vote, and have agreed without it meanwhile."""
    threads = Threads(SCHEMES[name], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 3
    has_voted, all_went_on = threading.Event(), threading.Event()

    def stops(own: ElasticRank) -> None:
        vote = own.membership.vote

        def stopped(quorum, well):
            threads.wires.dead.add(threads.address(own.node))  # it does not answer
            voted = well or vote(quorum, well)
            threads.lights.lose(own.node)
            has_voted.set()
            assert all_went_on.wait(10.0)
            threads.wires.dead.clear()
            own.membership.vote = vote
            return voted

        own.membership.vote = stopped

    def work(own: ElasticRank):
        own.join()
        for step in range(9):
            if step == 5 and own.node == "0":
                stops(own)
            if step == 5 and own.node != "0":
                vote = own.membership.vote

                def votes(quorum, well, vote=vote):
                    assert has_voted.wait(10.0)
                    return vote(quorum, well)

                own.membership.vote = votes
            if step == 6 and own.node == "1":
                assert own.membership.history.nodes == 2
                all_went_on.set()
                wait_until(lambda: "0" in threads.lights._alive.values())
            try:
                own.step()
            except StaleReplica:
                return "left behind"
        own.scheme.finish()
        return own.rank.values

    for node in range(3):
        threads.start(node, work)
    results = threads.end()
    assert results.pop(("0", 0)) == "left behind"
    torch.testing.assert_close(results["1", 0], results["2", 0], rtol=0, atol=0)


def train_to_the_end(own: ElasticRank, steps: int = 15) -> torch.Tensor:
    """What a node ends with that nothing befalls any more."""
    while own.scheme.state.steps < steps:
        own.step()
    own.scheme.finish()
    return own.rank.values


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 1)], ids=str)
def test_batches_that_nobody_has_learned_from_are_counted_and_a_healed_node_knows_it_too(sizes):
    threads = Threads(SCHEMES["periodic"], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 3

    def joining_node(own: ElasticRank):
        assert own.join()
        train_to_the_end(own)
        return own.membership.history

    def work(own: ElasticRank):
        own.join()
        while own.scheme.state.steps < 15:
            if own.scheme.state.steps == 5 and own.node == "1":
                own.die()
            if own.scheme.state.steps == 7 and own.node == "0":
                let_come(threads, 3, joining_node, sizes[1])
            own.step()
        own.scheme.finish()
        return own.membership.history

    for node, ranks in enumerate(sizes):
        threads.start(node, work, ranks)
    histories = threads.end()
    for history in histories.values():
        assert history.lost_batches == sizes[1] * (3 + 3), "from step 3, its last agreement, to 9, its heir's first"
        assert (history.heals, history.nodes) == (1, 3)
        events = [event.partition(" ")[2] for event in history.events]
        assert events == ["node 1 has left; 2 go on, after sync 1", "node 3 joins; 2 go on, after sync 2"]
        assert "1 recovered; waited" in history.lines()[0]


@pytest.mark.parametrize("name", ["periodic", "parts", "delta"])
def test_float_buffers_and_what_encoding_needs_of_them_outlive_a_change_of_nodes(name):
    threads = Threads(ALL[name], training={"inner": adam, "wire": "int8", "buffer": torch.ones(3), **TRAINING})
    threads.lights.min_nodes = 3

    def work(own: ElasticRank):
        own.join()
        if own.node == "1":
            die_at(own, "before the vote")
        return train_to_the_end(own, 10)

    for node in range(3):
        threads.start(node, work)
    results = threads.end()
    torch.testing.assert_close(results["0", 0], results["2", 0], rtol=0, atol=0)


@pytest.mark.parametrize("dying", ["12", "01", "012"])
@pytest.mark.parametrize("name", [*SCHEMES, "both", "noloco", "push-sum", "streaming"])
def test_several_nodes_may_die_at_once_down_to_the_last(name, dying):
    def work(own: ElasticRank):
        own.join()
        if own.node in dying:
            die_at(own, "in the exchange")
        for _ in range(10):
            own.step()
        own.scheme.finish()
        return own.rank.values, own.membership.history.nodes

    threads = Threads(ALL[name], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 4
    for node in range(4):
        threads.start(node, work)
    results = threads.end()
    assert {node for node, _ in results} == {*"0123"} - {*dying}
    for values, nodes in results.values():
        assert nodes == 4 - len(dying)
        torch.testing.assert_close(values, results["3", 0][0], rtol=0, atol=0)


@pytest.mark.parametrize("name", [*SCHEMES, "both", "noloco", "push-sum", "late", "delta"])
def test_a_node_that_comes_and_goes_again_and_again_does_not_hold_up_the_others(name):
    threads = Threads(ALL[name], training={"inner": adam, **TRAINING})
    replica_ids = []

    def flaps(own: ElasticRank):
        assert own.join()
        replica_ids.append(own.scheme.state.steps)
        own.step()
        own.die()

    def work(own: ElasticRank):
        own.join()
        while own.scheme.state.steps < 24:
            if own.node == "0" and own.scheme.state.steps in (3, 9, 15):
                let_come(threads, 2, flaps)
            own.step()
        own.scheme.finish()
        return own.rank.values, own.membership.history

    threads.lights.min_nodes = 2
    threads.start(0, work)
    threads.start(1, work)
    results = threads.end()
    assert len(replica_ids) == 3
    (zero, history), (one, _) = results["0", 0], results["1", 0]
    torch.testing.assert_close(zero, one, rtol=0, atol=0)
    assert history.heals == 3
    assert sum("node 2 has left" in event for event in history.events) == 3


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_the_last_node_goes_on_alone_and_ends_where_one_node_would(name, sizes):
    def work(own: ElasticRank):
        own.join()
        if own.node == "1":
            own.die()
        for _ in range(7):
            own.step()
        own.scheme.finish()
        return own.rank.values

    threads = Threads(SCHEMES[name], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 2
    for node, ranks in enumerate(sizes):
        threads.start(node, work, ranks)
    results = threads.end()
    assert {node for node, _ in results} == {"0"}
    values = list(results.values())
    for each in values:
        torch.testing.assert_close(each, values[0], rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_newcomer_is_healed_between_two_steps_and_ends_with_the_others_bits(name, sizes):
    threads = Threads(SCHEMES[name], training={"inner": adam, **TRAINING})

    def joining_node(own: ElasticRank):
        was_healed, began = own.join(), own.scheme.state.steps
        return train_to_the_end(own), was_healed, began, own.membership.own_shards()

    def work(own: ElasticRank):
        own.join()
        while own.scheme.state.steps < 15:
            if own.scheme.state.steps == 4 and own.local == 0:
                threads.start(1, joining_node, sizes[1])
                wait_until(lambda: any(name == "1" for name in threads.lights._alive.values()))
            own.step()
        own.scheme.finish()
        return own.rank.values, False, 0, own.membership.own_shards()

    threads.start(0, work, sizes[0])
    results = threads.end()
    assert len(results) == sum(sizes)
    for (node, _), (values, was_healed, began, _) in results.items():
        torch.testing.assert_close(values, results["0", 0][0], rtol=0, atol=0)
        assert (was_healed, began) == ((True, 6) if node == "1" else (False, 0))


@pytest.mark.pairwise
@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("name", [*COPIED, *PEERS, *GOSSIP, "diloco", *LATE])
def test_a_node_that_joins_goes_on_as_one_that_stays_and_began_with_what_its_source_had(name, wire):
    """The same three nodes that stay, put where the two, and the copy of the first, were."""
    scheme = ALL[name]
    training = {"inner": adam, "wire": wire, **TRAINING}
    threads = Threads(scheme, Elastic(dead_after=5.0), training)  # or a busy machine's nodes agree twice: other bits
    threads.lights.min_nodes = 2
    period, at = 5 if name == "daso" else scheme.profile.cycle, {}  # of parts, all have been sent by then

    def joining_node(own: ElasticRank):
        assert own.join()
        at["joined"] = own.scheme.state.steps
        return train_to_the_end(own, 12)

    def work(own: ElasticRank):
        own.join()
        while own.scheme.state.steps < 12:
            if own.scheme.state.steps == period - 1 and own.node == "0":
                let_come(threads, 2, joining_node)
            own.step()
            if own.scheme.state.steps == period:
                at[own.node] = copy.deepcopy(own.state()) | {"weights": getattr(own.scheme, "_own_weights", [])}
        own.scheme.finish()
        return own.rank.values

    threads.start(0, work)
    threads.start(1, work)
    results = threads.end()
    assert at["joined"] == period

    def stays(rank):
        put(rank, at[str(rank.node % 2)])
        if isinstance(rank.scheme, Gossip):  # who comes has the weight 1
            put_weights(rank, [at["0"]["weights"], at["1"]["weights"], [1.0] * len(at["0"]["weights"])])
        while rank.scheme.state.steps < 12:
            generator = torch.Generator().manual_seed(1000 * rank.scheme.state.steps + 10 * rank.node)
            rank.train(lambda values, g=generator: torch.randn(values.shape, generator=g) + 0.1 * values)
        rank.scheme.finish()
        return rank.values

    expected = on_nodes(stays, scheme, ((0,), (1,), (2,)), inner=adam, wire=wire, **TRAINING)
    for values in results.values():
        torch.testing.assert_close(values, expected[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["diloco", "local"])
def test_a_newcomer_that_could_not_be_healed_before_the_next_agreement_is_healed_after_it(name):
    """A validation may begin with an agreement of its own, right after one that has admitted a newcomer."""
    threads = Threads(ALL[name], training={"inner": adam, **TRAINING})
    joined = []

    def joining_node(own: ElasticRank):
        assert own.join()
        joined.append(own.scheme.state.steps)
        return train_to_the_end(own)

    def work(own: ElasticRank):
        own.join()
        give = own.membership.give_state
        while own.scheme.state.steps < 15:
            if own.scheme.state.steps == 4:
                let_come(threads, 1, joining_node)
                own.membership.give_state = lambda state: None
            if own.scheme.state.steps == 8:
                own.membership.give_state = give
            own.step()
        own.scheme.finish()
        return own.rank.values

    threads.start(0, work)
    results = threads.end()
    assert joined == [9]
    torch.testing.assert_close(results["0", 0], results["1", 0], rtol=0, atol=0)


@pytest.mark.parametrize("name", [*COPIED, *PEERS, *GOSSIP, *LATE])
def test_a_newcomer_is_healed_though_a_validation_follows_every_agreement(name):
    """Where nodes are never equal that is an agreement itself, and comes before anybody can be healed."""
    threads = Threads(ALL[name], training={"inner": adam, **TRAINING})
    joined = []

    def train(own: ElasticRank, steps: int = 15):
        give, agreed = own.membership.give_state, AveragedModel([own.scheme], own.rank.replicas, own.rank.topology)
        while own.scheme.state.steps < steps:
            if own.scheme.state.steps == 4 and own.node == "0":
                let_come(threads, 1, joining_node)
            own.membership.give_state = lambda state: None
            own.step()
            with agreed():
                pass
            give(own.state)
        own.scheme.finish()
        return own.rank.values

    def joining_node(own: ElasticRank):
        assert own.join()
        joined.append(own.scheme.state.steps)
        return train(own)

    def work(own: ElasticRank):
        own.join()
        return train(own)

    threads.start(0, work)
    results = threads.end()
    assert joined
    assert joined[0] <= 8
    torch.testing.assert_close(results["0", 0], results["1", 0], rtol=0, atol=0)


def let_come(threads: Threads, node: int, work, ranks: int = 1, restarts: int = 0) -> None:
    """Start a node, and wait until the lighthouse has heard of it."""
    threads.start(node, work, ranks, restarts)
    wait_until(lambda: str(node) in threads.lights._alive.values())


def wait_until(condition, timeout: float = 60.0) -> None:
    done = threading.Event()
    for _ in range(int(timeout / 0.005)):
        if condition():
            return
        done.wait(0.005)
    raise AssertionError("it did not come about")


def test_a_newcomer_whose_source_dies_before_it_has_given_its_state_is_healed_by_another():
    threads = Threads(SCHEMES["diloco"], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 2

    def joining_node(own: ElasticRank):
        assert own.join()
        return train_to_the_end(own)

    def work(own: ElasticRank):
        own.join()
        while own.scheme.state.steps < 15:
            if own.scheme.state.steps == 4 and own.node == "0":
                let_come(threads, 2, joining_node)
            if own.node == "0" and own.membership.healing.is_expected:
                own.die()
            if own.scheme.state.steps == 4 and own.node == "1":
                wait_until(lambda: "2" in threads.lights._alive.values())
            if own.node == "0":
                own.membership.give_state = lambda state: own.die() if own.membership.healing.is_expected else None
            own.step()
        own.scheme.finish()
        return own.rank.values

    threads.start(0, work)
    threads.start(1, work)
    results = threads.end()
    assert set(results) == {("1", 0), ("2", 0)}
    torch.testing.assert_close(results["2", 0], results["1", 0], rtol=0, atol=0)


@pytest.mark.parametrize("tells", [True, False], ids=["it says so", "it has not heard of it"])
@pytest.mark.parametrize("who", ["0", "1"])
def test_a_newcomer_asks_again_when_the_nodes_that_let_it_in_cannot_connect(who, tells):
    """It waited for its state, and they, who had to meet once more, for it: for ever."""
    threads = Threads(SCHEMES["diloco"], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes, threads.wires.timeout = 2, 1.0
    lane, failed = threads.wires.connect_group, []

    def fails_once(quorum, index, name, meter):
        if quorum.joining and quorum.members[index].node == who and not failed:
            failed.append(True)
            raise RuntimeError("is not there in time")
        return lane(quorum, index, name, meter)

    threads.wires.connect_group = fails_once

    def joining_node(own: ElasticRank):
        assert own.join()
        return train_to_the_end(own)

    def work(own: ElasticRank):
        own.join()
        while own.scheme.state.steps < 15:
            if own.scheme.state.steps == 4:
                own.membership.rendezvous.me = replace(own.membership.me, group="")  # so that they connect anew
                if not tells:
                    own.membership.healing.reject = lambda recovering: None
                if own.node == "0":
                    let_come(threads, 2, joining_node)
            own.step()
        own.scheme.finish()
        return own.rank.values

    threads.start(0, work)
    threads.start(1, work)
    results = threads.end()
    assert failed
    assert len(results) == 3
    for values in results.values():
        torch.testing.assert_close(values, results["0", 0], rtol=0, atol=0)


@pytest.mark.parametrize("cannot", ["reach a member", "read its state"])
def test_a_newcomer_that_has_to_ask_again_is_counted_once(cannot, monkeypatch):
    """Where machines are busy, somebody answers too late now and then; three heals were counted for two."""
    threads = Threads(SCHEMES["periodic"], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 2
    ask_all, look, failed = threads.wires.ask_all, Healing._poll, []

    def one_is_silent_once(addresses, query):
        if failed:
            return ask_all(addresses, query)
        failed.extend(addresses)
        return {}

    def silent_once(own, *args):
        if failed:
            return look(own, *args)
        failed.append(own)
        return None, 0

    def joining_node(own: ElasticRank):
        if cannot == "reach a member":
            threads.wires.ask_all = one_is_silent_once
        else:
            monkeypatch.setattr(Healing, "_poll", silent_once)
        assert own.join()
        train_to_the_end(own)
        return own.membership.history

    def work(own: ElasticRank):
        own.join()
        while own.scheme.state.steps < 15:
            if own.scheme.state.steps == 4 and own.node == "0":
                let_come(threads, 2, joining_node)
            own.step()
        own.scheme.finish()
        return own.membership.history

    threads.start(0, work)
    threads.start(1, work)
    histories = threads.end()
    assert failed
    for history in histories.values():
        assert (history.heals, history.nodes) == (1, 3)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("waits_for", ["an answer", "more nodes"])
def test_a_node_that_is_told_to_leave_while_it_waits_for_others_leaves(ranks, waits_for):
    """Any rank may be the one that is told. Nobody would kill it but with SIGKILL."""
    threads = Threads(SCHEMES["periodic"], training={"inner": adam, **TRAINING})
    if waits_for == "an answer":
        threads.lights.min_nodes = 2
    else:
        threads.elastic = Elastic(min_nodes=2, dead_after=0.5)

    def work(own: ElasticRank):
        if own.local == ranks - 1:
            own.membership.rendezvous._around.leaves_by = lambda: Told() if own.membership.me.number else None
        with pytest.raises(Told):
            own.join()
        return True

    threads.start(0, work, ranks)
    assert threads.end() == {("0", local): True for local in range(ranks)}


class Told(SystemExit):
    pass


def test_an_exchange_that_fails_again_and_again_says_why(monkeypatch, caplog):
    """Of unequal sizes, say; it was made once more for ever, and nobody knew."""
    launch = InterNodeGroup._launch

    def said():
        return [r.message for r in caplog.records if r.levelname == "WARNING"]

    def failing(own, start):
        move = launch(own, start)
        is_due = own.is_open and threading.current_thread().name == "fails" and not said()
        if is_due and move is not finished:
            move._handle = Failing(move._handle)
        return move

    monkeypatch.setattr(InterNodeGroup, "_launch", failing)

    def work(own: ElasticRank):
        own.join()
        if own.node == "0":
            threading.current_thread().name = "fails"
        own.step()
        own.scheme.finish()
        return own.rank.values

    results = play(PeriodicAveraging(sync_every=1), work, inner=adam, **TRAINING)
    torch.testing.assert_close(results["0", 0], results["1", 0], rtol=0, atol=0)
    of_first, of_second = sorted(said())
    assert of_first == "node 0: a synchronization has failed 10 times (told to fail), and is repeated"
    assert of_second.startswith("node 1: a synchronization has failed 10 times")


@pytest.mark.parametrize("fails", ["the first connection", "a later connection", "the exchange"])
def test_nodes_whose_agreement_fails_for_ever_part_and_the_first_goes_on(fails, monkeypatch):
    """They reach the lighthouse, and each other's stores; behind a firewall, say, that lets but one port through."""
    threads = Threads(PeriodicAveraging(sync_every=2), training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 2
    lane, tries = threads.wires.connect_group, []

    def fails_between_two(quorum, index, name, meter):
        is_first = quorum.begins
        if len(quorum.members) == 2 and fails == ("the first connection" if is_first else "a later connection"):
            tries.append(index)
            raise RuntimeError("no port is open")
        return lane(quorum, index, name, meter)

    def failing(own, start):
        move = launch(own, start)
        if threading.current_thread().name == "fails" and own.is_open and move is not finished:
            tries.append(own.rank)
            move._handle = Failing(move._handle)
        return move

    threads.wires.connect_group = fails_between_two
    launch = InterNodeGroup._launch
    monkeypatch.setattr(InterNodeGroup, "_launch", failing)

    def work(own: ElasticRank):
        own.join()
        if fails == "a later connection":
            own.membership.rendezvous.me = replace(own.membership.me, group="")
        if fails == "the exchange":
            threading.current_thread().name = "fails"
        return train_to_the_end(own, 4), own.membership.history.nodes

    threads.start(0, work)
    wait_until(lambda: threads.lights._alive)
    threads.start(1, work)
    with pytest.raises(NodeRefused, match=r"its synchronization with nodes 0 has failed 30 times \(.*HIERCOMM_ADDRESS"):
        threads.end()
    (_, nodes), *others = threads.results.values()
    assert not others
    assert nodes == 1
    assert len(tries) >= 60


def test_nodes_that_do_not_reach_each_other_for_a_while_meet_as_soon_as_they_do(caplog):
    """With `min_nodes=2` each waited for the other, and nobody looked again."""
    threads = Threads(SCHEMES["diloco"], Elastic(min_nodes=2, dead_after=0.5), {"inner": adam, **TRAINING})
    threads.lights.min_nodes = 2
    lane, ask_all, cut = threads.wires.connect_group, threads.wires.ask_all, threading.Event()

    def lane_between(quorum, index, name, meter):
        if cut.is_set():
            raise RuntimeError("is not there in time")
        return lane(quorum, index, name, meter)

    def silent(addresses, query):
        if cut.is_set() and sum(" waits: " in record.message for record in caplog.records) >= 2:
            cut.clear()
        return {} if cut.is_set() else ask_all(addresses, query)

    threads.wires.connect_group, threads.wires.ask_all = lane_between, silent

    def work(own: ElasticRank):
        own.join()
        own.step()
        cut.set()
        own.membership.rendezvous.me = replace(own.membership.me, group="")
        return train_to_the_end(own, 6), own.membership.history.nodes

    with caplog.at_level("INFO", logger="lightning_hiercomm"):
        for node in range(2):
            threads.start(node, work)
        results = threads.end()
    torch.testing.assert_close(results["0", 0][0], results["1", 0][0], rtol=0, atol=0)
    assert [nodes for _, nodes in results.values()] == [2, 2]
    waits = [record.message.partition(" waits: ")[2] for record in caplog.records if " waits: " in record.message]
    assert sorted(waits)[:2] == ["1 of at least 2 nodes are there", "it and node 0 do not reach each other"]


def test_a_run_begins_without_a_node_that_the_others_do_not_reach_and_that_one_comes_when_they_do(caplog):
    """All failed 30 times, then the last ended, then the second: the one that nobody reached went on."""
    threads = Threads(SCHEMES["periodic"], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 3
    lane, ask_all, is_cut = threads.wires.connect_group, threads.wires.ask_all, threading.Event()
    is_cut.set()

    def lane_between(quorum, index, name, meter):
        if is_cut.is_set() and len(quorum.members) > 1 and "0" in [member.node for member in quorum.members]:
            raise RuntimeError("is not there in time")
        return lane(quorum, index, name, meter)

    def silent(addresses, query):
        return ask_all([each for each in addresses if not is_cut.is_set() or each != threads.address("0")], query)

    threads.wires.connect_group, threads.wires.ask_all = lane_between, silent

    def work(own: ElasticRank):
        was_healed = own.join()
        is_cut.clear()
        if own.node == "1":
            wait_until(lambda: "0" in threads.lights._alive.values())
        return train_to_the_end(own), was_healed, own.membership.history.nodes

    with caplog.at_level("INFO", logger="lightning_hiercomm"):
        for node in range(3):
            threads.start(node, work)
        results = threads.end()
    assert "node 0 waits: it and node 1, 2 do not reach each other" in caplog.messages
    for (node, _), (values, was_healed, nodes) in results.items():
        torch.testing.assert_close(values, results["1", 0][0], rtol=0, atol=0)
        assert (was_healed, nodes) == (node == "0", 3)


@pytest.mark.parametrize("min_nodes", [1, 2])
def test_a_node_that_is_started_again_when_the_run_is_over_ends_and_says_so(min_nodes, caplog):
    """Also where the lighthouse waits for more nodes than one."""
    threads = Threads(SCHEMES["periodic"], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 2
    for node in range(2):
        threads.start(node, train(4))
    assert len(threads.end()) == 2
    threads.lights.memory = replace(threads.lights.memory, min_nodes=min_nodes)
    threads.start(1, train(4), restarts=1)
    with pytest.raises(RunFinished) as ended:
        threads.end()
    assert ended.value.code == 69
    assert [message for message in caplog.messages if " ends: " in message] == [f"node 1 ends: {ended.value}"]


def test_a_node_that_goes_on_when_the_others_have_ended_does_not_wait_for_them(monkeypatch):
    """Its epoch was longer; it waited forever for another node to come."""
    monkeypatch.setattr(rendezvous, "_HOPE", 0.6)
    threads = Threads(SCHEMES["periodic"], Elastic(min_nodes=2, dead_after=0.5), {"inner": adam, **TRAINING})
    threads.lights.min_nodes = 2
    has_ended = threading.Event()

    def work(own: ElasticRank):
        own.join()
        for _ in range(3):
            own.step()
        if own.node == "1":
            assert has_ended.wait(10.0)
            for _ in range(3):
                own.step()

    for node in range(2):
        threads.start(node, work)
    threads._threads[0].join(60.0)
    threads.wires.dead.add(threads.address("0"))
    has_ended.set()
    with pytest.raises(RunFinished):
        threads.end()


@pytest.mark.parametrize("standing_still", [("1",), ("1", "2")], ids=str)
def test_nodes_that_stood_still_while_the_others_went_on_to_the_end_do_not_come_to_another(standing_still):
    """Where any number of nodes may train they went on by themselves, from where they had stood."""
    threads = Threads(SCHEMES["periodic"], training={"inner": adam, **TRAINING})
    nodes = ("0", *standing_still)
    threads.lights.min_nodes = len(nodes)
    stand = threading.Barrier(len(nodes), lambda: [threads.lights.lose(node) for node in standing_still])
    is_over = threading.Event()

    def work(own: ElasticRank):
        own.join()
        for _ in range(3):
            own.step()
        stand.wait(10.0)
        if own.node != "0":
            assert is_over.wait(10.0)
        for _ in range(6):
            own.step()
        own.scheme.finish()

    for node in nodes:
        threads.start(node, work)
    threads._threads[0].join(60.0)
    is_over.set()
    for thread in threads._threads:
        thread.join(10.0)
    assert {node: type(error) for (node, _), error in threads.errors.items()} == dict.fromkeys(
        standing_still, RunFinished
    )


def test_a_node_goes_on_alone_when_another_one_has_ended_where_both_had_come_to():
    """A callback may end training on one node."""
    threads = Threads(SCHEMES["periodic"], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 2

    def work(own: ElasticRank):
        own.join()
        for _ in range(3 if own.node == "1" else 9):
            own.step()
        if own.node == "0":
            own.scheme.finish()
        return own.scheme.state.steps

    for node in range(2):
        threads.start(node, work)
    assert threads.end() == {("0", 0): 9, ("1", 0): 3}


def test_a_node_waits_for_one_that_trains_though_a_third_one_has_ended(monkeypatch):
    """A callback may have ended training there, which is not the end of the others."""
    monkeypatch.setattr(rendezvous, "_POLL", 0.1)
    monkeypatch.setattr(rendezvous, "_HOPE", 0.6)
    threads = Threads(SCHEMES["periodic"], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 3

    def work(own: ElasticRank):
        own.join()
        for _ in range(3):
            own.step()
        if own.node == "2":
            return None
        if own.node == "1":
            threads._threads[2].join(10.0)
            threads.wires.dead.add(threads.address("2"))
            threading.Event().wait(0.5)  # longer than a node hopes
        for _ in range(3):
            own.step()
        return own.rank.values

    for node in range(3):
        threads.start(node, work)
    results = threads.end()
    torch.testing.assert_close(results["0", 0], results["1", 0], rtol=0, atol=0)


@pytest.mark.parametrize("origin", [0, 8])
def test_a_node_that_is_started_again_in_the_first_period_of_a_later_fit_waits_for_the_others(origin, monkeypatch):
    """They train, and ask nobody for long: it ended, because it knew of the earlier fit's end alone."""
    monkeypatch.setattr(rendezvous, "_POLL", 0.1)
    monkeypatch.setattr(rendezvous, "_HOPE", 0.4)
    threads = Threads(SCHEMES["periodic"], training={"inner": adam, **TRAINING})
    threads.lights.min_nodes = 2
    for node in range(2):
        threads.start(node, train(4))
    threads.end()

    def again(own: ElasticRank):
        assert own.join()
        return train_to_the_end(own, 6)

    def work(own: ElasticRank):
        own.membership.rendezvous.me = replace(own.membership.me, checkpoint_step=origin)
        own.join()
        own.step()
        if own.node == "1":
            own.die()
        wait_until(lambda: "1" not in threads.lights._alive.values())
        let_come(threads, 1, again, restarts=1)
        threading.Event().wait(0.5)  # longer than a node hopes
        return train_to_the_end(own, 6)

    threads.lights.min_nodes = 2
    for node in range(2):
        threads.start(node, work)
    results = threads.end()
    torch.testing.assert_close(results["0", 0], results["1", 0], rtol=0, atol=0)


def test_a_newcomer_hopes_for_nodes_from_when_they_are_gone_and_not_from_when_it_came(monkeypatch):
    """It has waited for their agreement for long, and they are only slow."""
    monkeypatch.setattr(rendezvous, "_HOPE", 0.6)
    threads = Threads(SCHEMES["periodic"], training={"inner": adam, **TRAINING})
    asks = threading.Event()

    def joining_node(own: ElasticRank):
        assert own.join()
        return train_to_the_end(own, 9)

    def work(own: ElasticRank):
        own.join()
        while own.scheme.state.steps < 9:
            if own.scheme.state.steps == 4:
                let_come(threads, 1, joining_node)
                asks.wait(0.4)
                threads.lights.lose("0")
                asks.wait(0.1)
            own.step()
        own.scheme.finish()
        return own.rank.values

    threads.start(0, work)
    results = threads.end()
    torch.testing.assert_close(results["0", 0], results["1", 0], rtol=0, atol=0)


@pytest.mark.parametrize("is_program_of_two", [False, True])
def test_a_node_that_comes_for_the_first_time_when_the_run_is_over_says_that_it_begins_another(
    is_program_of_two, caplog, monkeypatch
):
    """A program may fit twice: that is nothing to be told of."""
    monkeypatch.setattr(rendezvous, "_ended_here", set())
    threads = Threads(SCHEMES["periodic"], training={"inner": adam, **TRAINING})
    threads.start(0, train(4))
    threads.end()
    if not is_program_of_two:
        rendezvous._ended_here.clear()
    threads.start(1, train(4))
    assert len(threads.end()) == 2
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    if is_program_of_two:
        assert not warnings
    else:
        (warning,) = warnings
        assert warning.startswith("node 1 begins at step 0, although a run of this name has finished")
