"""Ranks meet, as threads; and those that do not come are named."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from torch.distributed import PrefixStore, TCPStore

from lightning_hiercomm.control import rendezvous
from lightning_hiercomm.control.rendezvous import Rendezvous


@pytest.fixture(autouse=True)
def one_process_per_rank(monkeypatch):
    """Threads share what counts the meetings of a process."""
    monkeypatch.setattr(rendezvous, "_generations", iter(lambda: 0, 1))


def meet(*ranks, size, work, host="127.0.0.1", seconds=20.0, port=None):
    """What ``work`` gives each of these ranks."""
    port = port or find_free_network_port()

    def come(rank):
        meeting = Rendezvous(host, port, rank, size, timedelta(seconds=seconds))
        return meeting, work(rank, meeting)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return [said for _, said in [*threads.map(come, ranks)]]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_everybody_hears_rank_zero_and_then_all(host):
    def work(rank, meeting):
        return meeting.broadcast({"from": rank}), meeting.gather(f"I am {rank}"), meeting.gather(None)

    expected = ({"from": 0}, ["I am 0", "I am 1", "I am 2"], [None] * 3)
    assert meet(0, 1, 2, size=3, work=work, host=host) == [expected] * 3


def test_who_does_not_come_is_named_and_ends_the_wait(monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "_WARN_SECONDS", 0.3)
    with pytest.raises(TimeoutError, match=r"ranks 1, 3 of 4 did not come within the . s of timeout="):
        meet(0, 2, size=4, work=lambda _, meeting: meeting.gather(""), seconds=1.5)
    waits = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "rank 0 has waited 0 s for ranks 1, 3 of 4" in waits


def test_who_waits_for_the_missing_hears_an_alarm():
    def alarm():
        raise KeyError("news")

    with pytest.raises(KeyError, match="news"):
        meet(0, size=2, work=lambda _, meeting: meeting.gather("", alarm))


@pytest.fixture
def agents_store(monkeypatch):
    """Torchrun's agent keeps a store while it starts ranks again and again."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


def test_ranks_that_are_started_again_hear_nothing_of_earlier_attempts(agents_store):
    def work(attempt, rank, meeting):
        if rank == 0:
            time.sleep(0.1)  # others come first, and find what is left of the attempt before
        said = meeting.broadcast(f"attempt {attempt}"), meeting.gather([attempt, rank])
        return said, meeting.fresh_store

    for attempt, size in enumerate((3, 2, 4)):
        said = meet(*range(size), size=size, work=partial(work, attempt), port=agents_store.port)
        assert [words for words, _ in said] == [(f"attempt {attempt}", [[attempt, r] for r in range(size)])] * size
        stores = [store for _, store in said]
        assert not stores[0].check(["address"])
        stores[-1].set("address", "of somebody who dies soon")
        assert [store.get("address") for store in stores] == [b"of somebody who dies soon"] * size


def test_who_dies_as_it_asks_for_the_attempts_name_keeps_nobody_else_waiting(agents_store):
    PrefixStore("hiercomm", agents_store).add("asking", 1)
    said = meet(0, 1, size=2, work=lambda _, m: (m.broadcast("hello"), m.gather("")), port=agents_store.port)
    assert [word for word, _ in said] == ["hello"] * 2
