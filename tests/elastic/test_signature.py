"""A token that the nodes of a run share: what others say is not heard, and what they put in its place is not taken."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from elastic_threads import ElasticRank, Threads
from harness import on_ranks
from torch.distributed import HashStore

from lightning_hiercomm import PeriodicAveraging
from lightning_hiercomm.elastic.healing import Healing
from lightning_hiercomm.elastic.quorum import Member
from lightning_hiercomm.elastic.signature import Signer

SAID = {"node": "a", "shards": [1, 2], "is_lost": None}


def test_what_was_said_with_a_token_holds_for_those_who_know_it_and_for_nobody_else():
    knows, other, none = Signer("token"), Signer("another"), Signer()
    signed = knows.signed(SAID)
    assert knows.verifies(signed)
    assert Signer("token").verifies(signed)
    assert not other.verifies(signed)
    assert not none.verifies(signed)
    assert not knows.verifies(SAID)
    assert not knows.verifies({**signed, "shards": [1, 2, 3]})
    assert none.signed(SAID) == SAID
    assert none.verifies(SAID)


def test_only_those_who_know_the_token_find_what_is_kept():
    assert Signer().key("vote") == "vote"
    assert Signer("token").key("vote") not in ("vote", Signer("another").key("vote"))
    assert Signer("token").key("vote") != Signer("token").key("lane")


@pytest.mark.parametrize(
    "said",
    [
        "replica_id",
        {"replica_id": "x", "signature": "\ud800"},
        {"replica_id": "x", "signature": 5},
        {"replica_id": "x"},
        {"replica_id": "x", "node": "x", "run": "run", "ranks": 1, "store": "x:1", "shards": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("token", ["", "token"])
def test_what_no_node_says_ends_nobody(said, token):
    """Whoever reaches the lighthouse may say anything there."""
    threads = Threads(PeriodicAveraging(sync_every=2), tokens={"0": token, "1": token})
    threads.lights.min_nodes = 2
    ask = threads.lights.ask

    def ask_among_strangers(replica_id, says, patience):
        present = ask(replica_id, says, patience)
        has_begun = says["syncs"] >= 0  # which strangers may hold up
        return [said, *present] if present is not None and has_begun else present

    threads.lights.ask = ask_among_strangers

    def work(own: ElasticRank):
        own.join()
        for _ in range(3):
            own.step()
        own.scheme.finish()
        return own.membership.history.nodes

    for node in range(2):
        threads.start(node, work)
    assert threads.end() == {("0", 0): 2, ("1", 0): 2}


def test_a_node_with_another_token_is_not_heard_and_does_not_begin_beside_the_others():
    threads = Threads(PeriodicAveraging(sync_every=2), tokens={"0": "token", "1": "token", "2": "another"})
    threads.lights.min_nodes = 3

    def stranger(own: ElasticRank):
        waits = own.membership._ask(time.monotonic()).waits  # noqa: SLF001
        threads.results["2", 0] = waits
        own.die()

    def work(own: ElasticRank):
        own.join()
        for _ in range(5):
            own.step()
        own.scheme.finish()
        return own.membership.history.nodes

    for node, does in enumerate((work, work, stranger)):
        threads.start(node, does)
    results = threads.end()
    assert (results["0", 0], results["1", 0]) == (2, 2)
    assert "have another HIERCOMM_TOKEN, or none" in results["2", 0]


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_state_that_somebody_else_has_changed_is_not_taken(is_changed, caplog):
    caplog.set_level(logging.WARNING)
    store = HashStore()

    class Transport:
        def ask(self, address, work, patience=None):
            return work(store)

    source, recovering_node = (Member(name, name, "run", 1, "address") for name in "ab")

    def heal(topology):
        member = Healing(topology.intra, Transport(), store, 1.0, Signer("token"))
        member.expect(recovering_node)
        member.give(lambda: {"values": torch.arange(5.0)}, {})
        member._giving[0].join()  # noqa: SLF001
        if is_changed:
            key = Signer("token").key(f"heal/{recovering_node.replica_id}/{recovering_node.requests}") + "/0"
            data = bytearray(store.get(key))
            data[len(data) // 2] ^= 1
            store.set(key, bytes(data))
        joining_node = Healing(topology.intra, Transport(), HashStore(), 1.0, Signer("token"))
        return joining_node.fetch(source, recovering_node)

    (state,) = on_ranks(heal, ((0,),))
    if is_changed:
        assert state is None
        assert "bears no seal of HIERCOMM_TOKEN" in caplog.text
    else:
        assert state["values"].tolist() == [0, 1, 2, 3, 4]
