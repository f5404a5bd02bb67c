"""Ranks meet, as threads; and those that do not come are named."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
from ports import free_port
from torch.distributed import HashStore, PrefixStore, TCPStore

from lightning_hiercomm.control import bootstrap
from lightning_hiercomm.control.bootstrap import Bootstrap


@pytest.fixture(autouse=True)
def one_process_per_rank(monkeypatch):
    """Threads share the counter of a process's generations."""
    monkeypatch.setattr(bootstrap, "_generations", iter(lambda: 0, 1))


def meet(*ranks, size, work, host="127.0.0.1", seconds=20.0, port=None):
    port = port or free_port()

    def come(rank):
        joined = Bootstrap(host, port, rank, size, timedelta(seconds=seconds))
        return joined, work(rank, joined)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return [said for _, said in [*threads.map(come, ranks)]]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_broadcast_and_gather_reach_all_ranks(host):
    def work(rank, joined):
        return joined.broadcast({"from": rank}), joined.gather(f"I am {rank}"), joined.gather(None)

    expected = ({"from": 0}, ["I am 0", "I am 1", "I am 2"], [])
    assert meet(0, 1, 2, size=3, work=work, host=host) == [expected] * 3


def test_ranks_of_a_group_get_its_messages_and_broadcasts_only():
    def work(rank, joined):
        by_host = joined.gather(rank if rank != 3 else None, among=f"host {rank % 2}")
        return by_host, joined.gather(rank, among=f"host {rank % 2}", aloud=rank in (2, 3)), joined.gather(rank)

    even, odd = ([0, 2, 4], [0, 2, 3, 4], [0, 1, 2, 3, 4]), ([1], [1, 2, 3], [0, 1, 2, 3, 4])
    assert meet(*range(5), size=5, work=work) == [even, odd, even, odd, even]


def test_who_does_not_come_is_named_and_ends_the_wait(monkeypatch, caplog):
    monkeypatch.setattr(bootstrap, "_WARN_SECONDS", 0.3)
    with pytest.raises(TimeoutError, match=r"ranks 1, 3 of 4 did not come within the . s of timeout="):
        meet(0, 2, size=4, work=lambda _, joined: joined.gather(""), seconds=1.5)
    waits = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    seconds = r"\d s"  # rank 2, too, may not be there when it first looks
    assert any(re.fullmatch(f"rank 0 has waited {seconds} for ranks 1, 3 of 4", said) for said in waits)


def test_ranks_that_wait_for_a_missing_rank_get_an_alarm():
    def alarm():
        raise KeyError("news")

    with pytest.raises(KeyError, match="news"):
        meet(0, size=2, work=lambda _, joined: joined.gather("", alarm))


def test_who_does_not_come_is_named_on_all_ranks():
    def work(rank, joined):
        with pytest.raises(TimeoutError, match=r"rank 1 of 4 did not come within the . s of timeout="):
            joined.gather("")

    meet(0, 2, 3, size=4, work=work, seconds=1.0)


class CountingStore:
    """Counts the keys that are named, by rank and by what for; not those that are asked for too early."""

    def __init__(self, prefix, store):
        self.prefix, self.about = prefix, store if isinstance(store, tuple) else store.about
        self.rank, self.shared, self.named = self.about

    def _count(self, what, keys):
        self.named[self.rank, what] += len(keys)
        return [f"{self.prefix}/{key}" for key in keys]

    def set(self, key, value):
        self.shared.set(*self._count("set", [key]), value)

    def get(self, key):
        return self.shared.get(*self._count("get", [key]))

    def multi_get(self, keys):
        return [self.shared.get(key) for key in self._count("get", keys)]

    def check(self, keys):
        assert len(keys) == 1  # however often a rank has to ask
        is_there = self.shared.check([f"{self.prefix}/{key}" for key in keys])
        self.named[self.rank, "check"] += is_there
        return is_there


@pytest.mark.parametrize("size", [4, 8, 16])
def test_the_store_has_as_much_to_do_as_there_are_ranks(size, monkeypatch):
    shared, named, ranks = HashStore(), Counter(), iter(range(size))
    monkeypatch.setattr(bootstrap, "TCPStore", lambda *_, **__: (next(ranks), shared, named))
    monkeypatch.setattr(bootstrap, "PrefixStore", CountingStore)
    everyone = [Bootstrap("host", 1, rank, size, timedelta(seconds=20)) for rank in range(size)]

    def work(rank):
        joined = everyone[rank]
        assert joined.broadcast("hello") == "hello"
        assert joined.gather(f"I am {rank}") == [f"I am {other}" for other in range(size)]

    with ThreadPoolExecutor(size) as threads:
        [*threads.map(work, range(size))]
    assert [named[rank, "set"] for rank in range(size)] == [3, *[1] * (size - 1)]  # an answer is set once
    assert [named[rank, "get"] for rank in range(size)] == [1 + size, *[2] * (size - 1)]
    assert [named[rank, "check"] for rank in range(size)] == [1 + size, *[2] * (size - 1)]


@pytest.fixture
def agents_store(monkeypatch):
    """Torchrun's agent keeps a store while it starts ranks again and again."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


def test_restarted_ranks_ignore_messages_of_earlier_attempts(agents_store):
    def work(attempt, rank, joined):
        if rank == 0:
            time.sleep(0.1)  # others come first, and find what is left of the attempt before
        said = joined.broadcast(f"attempt {attempt}"), joined.gather([attempt, rank])
        return said, joined.store

    for attempt, size in enumerate((3, 2, 4)):
        said = meet(*range(size), size=size, work=partial(work, attempt), port=agents_store.port)
        assert [words for words, _ in said] == [(f"attempt {attempt}", [[attempt, r] for r in range(size)])] * size
        stores = [store for _, store in said]
        assert not stores[0].check(["address"])
        stores[-1].set("address", "of a rank that dies soon")
        assert [store.get("address") for store in stores] == [b"of a rank that dies soon"] * size


def test_rank_that_dies_while_asking_for_the_attempt_blocks_no_other(agents_store):
    PrefixStore("hiercomm", agents_store).add("asking", 1)
    said = meet(0, 1, size=2, work=lambda _, m: (m.broadcast("hello"), m.gather("")), port=agents_store.port)
    assert [word for word, _ in said] == ["hello"] * 2
