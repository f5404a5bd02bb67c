"""Ranks meet, as threads; and those that do not come are named."""

from __future__ import annotations

import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
from ports import free_port
from torch.distributed import HashStore, PrefixStore, TCPStore

from lightning_hiercomm.control import bootstrap
from lightning_hiercomm.control.bootstrap import Bootstrap, connect_again, names_of_ranks


def meet(*ranks, size, work, host="127.0.0.1", seconds=20.0, port=None):
    port = port or free_port()

    def come(rank):
        joined = Bootstrap(host, port, rank, size, timedelta(seconds=seconds))
        return joined, work(rank, joined)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return [said for _, said in [*threads.map(come, ranks)]]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_values_reach_all_ranks(host):
    def work(rank, joined):
        return joined.gather(f"I am {rank}"), joined.gather(None)

    expected = (["I am 0", "I am 1", "I am 2"], [None, None, None])
    assert meet(0, 1, 2, size=3, work=work, host=host) == [expected] * 3


def test_ranks_of_a_group_get_its_values_only():
    def work(rank, joined):
        return joined.gather(rank, among=f"host {rank % 2}"), joined.gather(rank)

    even, odd = ([0, 2, 4], [0, 1, 2, 3, 4]), ([1, 3], [0, 1, 2, 3, 4])
    assert meet(*range(5), size=5, work=work) == [even, odd, even, odd, even]


def test_who_does_not_come_is_named_and_ends_the_wait(monkeypatch, caplog):
    monkeypatch.setattr(bootstrap, "_WARN_SECONDS", 0.3)
    with pytest.raises(TimeoutError, match=r"ranks 1, 3 of 4 did not come within the . s of timeout="):
        meet(0, 2, size=4, work=lambda _, joined: joined.gather(""), seconds=1.5)
    waits = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    seconds = r"\d s"  # rank 2, too, may not be there when it first looks
    assert any(re.fullmatch(f"rank 0 has waited {seconds} for ranks 1, 3 of 4", said) for said in waits)


def test_who_does_not_come_is_named_on_all_ranks():
    def work(rank, joined):
        with pytest.raises(TimeoutError, match=r"rank 1 of 4 did not come within the . s of timeout="):
            joined.gather("")

    meet(0, 2, 3, size=4, work=work, seconds=1.0)


@pytest.mark.parametrize(
    ("agents", "named"),
    [
        ("False", "^rank 0 died, and torch's store with it$"),
        ("True", "^torchrun's agent on n0 died, and torch's store with it. See there which rank failed first$"),
    ],
)
def test_a_store_that_is_lost_while_ranks_meet_is_the_end_of_its_host(monkeypatch, agents, named):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agents)
    monkeypatch.setenv("MASTER_ADDR", "n0")
    host = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    joined = Bootstrap("127.0.0.1", host[0].port, 1, 2)
    with ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(joined.gather, "here")
        time.sleep(0.1)
        host.clear()
        with pytest.raises(RuntimeError, match=named):
            gathering.result(timeout=10)


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
        return joined.gather([attempt, rank]), joined.store("process group")

    for attempt, size in enumerate((3, 2, 4)):
        said = meet(*range(size), size=size, work=partial(work, attempt), port=agents_store.port)
        assert [values for values, _ in said] == [[[attempt, r] for r in range(size)]] * size
        stores = [store for _, store in said]
        assert not stores[0].check(["address"])
        stores[-1].set("address", "of a rank that dies soon")
        assert [store.get("address") for store in stores] == [b"of a rank that dies soon"] * size


def test_a_connection_of_its_own_reads_what_another_has_written(agents_store):
    own = connect_again(PrefixStore("a", PrefixStore("b", agents_store)))
    agents_store.set("key", "value")
    assert own.get("key") == b"value"
    assert own is not agents_store


def test_a_store_without_connections_is_used_as_it_is():
    store = HashStore()
    assert connect_again(PrefixStore("a", store)) is not None
    store.set("key", "value")
    assert connect_again(PrefixStore("a", store)).get("key") == b"value"


@pytest.mark.parametrize(("ranks", "name"), [([3], "rank 3"), ([0, 1, 2, 8], "ranks 0-2, 8"), ([4, 2], "ranks 2, 4")])
def test_ranks_are_named_briefly(ranks, name):
    assert names_of_ranks(ranks) == name
