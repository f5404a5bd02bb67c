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
from lightning_hiercomm.control.bootstrap import LOST_STORE, Bootstrap, connect_again, names_of_ranks


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


def test_who_does_not_come_is_named_and_ends_the_wait(monkeypatch, caplog):
    monkeypatch.setattr(bootstrap, "_WARN_SECONDS", 0.3)
    with pytest.raises(TimeoutError, match=r"ranks 1, 3 of 4 did not answer within . s \(timeout=\)"):
        meet(0, 2, size=4, work=lambda _, joined: joined.gather(""), seconds=1.5)
    waits = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    seconds = r"\d s"  # rank 2, too, may not be there when it first looks
    assert any(re.fullmatch(f"ranks 1, 3 of 4 did not answer within {seconds}", said) for said in waits)


def test_a_store_that_is_lost_while_ranks_meet_is_the_end_of_its_host():
    host = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(Bootstrap("127.0.0.1", host[0].port, 1, 2).gather, "")
        time.sleep(0.2)
        host.clear()
        with pytest.raises(RuntimeError, match=LOST_STORE):
            meeting.result(timeout=10)


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


def test_a_new_connection_reads_what_another_has_written(agents_store):
    own = connect_again(PrefixStore("a", PrefixStore("b", agents_store)))
    agents_store.set("key", "value")
    assert own.get("key") == b"value"
    assert own is not agents_store
    assert connect_again(in_memory := HashStore()) is in_memory


@pytest.mark.parametrize(("ranks", "name"), [([3], "rank 3"), ([0, 1, 2, 8], "ranks 0-2, 8"), ([4, 2], "ranks 2, 4")])
def test_ranks_are_named_briefly(ranks, name):
    assert names_of_ranks(ranks) == name
