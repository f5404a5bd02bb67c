"""A token of the run: requests and states of programs that do not know it are ignored."""

from __future__ import annotations

import logging

import pytest
import torch
from elastic_threads import ElasticRank, Threads
from harness import on_ranks
from torch.distributed import HashStore

from lightning_hiercomm import PeriodicAveraging
from lightning_hiercomm.elastic import Elastic
from lightning_hiercomm.elastic.healing import Healing
from lightning_hiercomm.elastic.quorum import Request
from lightning_hiercomm.elastic.signature import Signer
from lightning_hiercomm.elastic.surroundings import Surroundings

MESSAGE = {"node": "a", "stores": ["b", "c"], "admits": None}


def test_signature_is_valid_for_the_same_token_only():
    knows, other, none = Signer("token"), Signer("another"), Signer()
    signed = knows.signed(MESSAGE)
    assert knows.verifies(signed)
    assert Signer("token").verifies(signed)
    assert not other.verifies(signed)
    assert not none.verifies(signed)
    assert not knows.verifies(MESSAGE)
    assert not knows.verifies({**signed, "stores": ["b"]})
    assert none.signed(MESSAGE) == MESSAGE
    assert none.verifies(MESSAGE)


def test_keys_of_stores_need_the_token():
    assert Signer().key("vote") == "vote"
    assert Signer("token").key("vote") not in ("vote", Signer("another").key("vote"))
    assert Signer("token").key("vote") != Signer("token").key("group")


def takes_part(own: ElasticRank) -> int:
    """Train, and return the number of nodes."""
    own.join()
    own.train(5)
    return own.membership.history.nodes


@pytest.mark.parametrize(
    "said",
    [
        "replica_id",
        {"replica_id": "x", "signature": "\ud800"},
        {"replica_id": "x", "signature": 5},
        {"replica_id": "x"},
        {"replica_id": "x", "node": "x", "run": "run", "ranks": 1, "store": "x:1", "admits": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("token", ["", "token"])
def test_data_of_other_programs_is_ignored(said, token):
    """Any program that reaches the lighthouse may send data there."""
    threads = Threads(PeriodicAveraging(sync_every=2), tokens={"0": token, "1": token})
    threads.lights.min_nodes = 2
    ask = threads.lights.ask

    def ask_among_strangers(replica_id, says, patience):
        present = ask(replica_id, says, patience)
        has_begun = says["progress"][0]  # which strangers may hold up
        return [said, *present] if present is not None and has_begun else present

    threads.lights.ask = ask_among_strangers

    for node in range(2):
        threads.start(node, takes_part)
    assert threads.end() == {("0", 0): 2, ("1", 0): 2}


def test_node_with_another_token_does_not_begin_a_run_of_its_own():
    threads = Threads(PeriodicAveraging(sync_every=2), tokens={"0": "token", "1": "token", "2": "another"})
    threads.lights.min_nodes = 3

    def stranger(own: ElasticRank):
        waits = own.membership.rendezvous._answer(own).waits  # noqa: SLF001
        threads.results["2", 0] = waits
        own.die()

    for node, does in enumerate((takes_part, takes_part, stranger)):
        threads.start(node, does)
    results = threads.end()
    assert (results["0", 0], results["1", 0]) == (2, 2)
    assert "have another HIERCOMM_TOKEN, or none" in results["2", 0]


@pytest.mark.parametrize("is_changed", [False, True])
def test_changed_state_is_rejected(is_changed, caplog):
    caplog.set_level(logging.WARNING)
    store = HashStore()

    class Transport:
        def ask(self, address, work, patience=None):
            return work(store)

    def around(topology, own_store):
        return Surroundings(Elastic(dead_after=1.0), topology, None, Transport(), own_store, Signer("token"))

    source, recovering_node = (Request(name, name, "run", 1, "address") for name in "ab")

    def heal(topology):
        member = Healing(around(topology, store))
        member.commit([recovering_node])
        member.send(lambda: {"values": torch.arange(5.0)}, {})
        member._threads[0].join()  # noqa: SLF001
        if is_changed:
            key = Signer("token").key(f"heal/{recovering_node.replica_id}/{recovering_node.number}") + "/0"
            data = bytearray(store.get(key))
            data[len(data) // 2] ^= 1
            store.set(key, bytes(data))
        joining_node = Healing(around(topology, HashStore()))
        return joining_node.fetch(source, recovering_node)

    (state,) = on_ranks(heal, ((0,),))
    if is_changed:
        assert state is None
        assert "failed HMAC verification" in caplog.text
    else:
        assert state["values"].tolist() == [0, 1, 2, 3, 4]
