"""Ranks meet, as threads; and those that do not come are named."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from lightning_hiercomm import rendezvous
from lightning_hiercomm.rendezvous import Rendezvous


@pytest.fixture(autouse=True)
def one_process_per_rank(monkeypatch):
    """Threads share what counts the meetings of a process."""
    monkeypatch.setattr(rendezvous, "_generations", iter(lambda: 0, 1))


def meet(*ranks, size, work, host="127.0.0.1", seconds=20.0):
    """What ``work`` gives each of these ranks."""
    port = find_free_network_port()

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
