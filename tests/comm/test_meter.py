"""What the meter counts; that communicators count rightly is in test_communicator.py."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_hiercomm.comm.meter import Meter

CPU = torch.device("cpu")


def test_bytes_and_messages_add_up_by_level():
    meter = Meter()
    meter.count("inter", 10)
    meter.count("inter", 2.5)
    meter.count("intra", 1)
    snapshot = meter.snapshot()
    assert (snapshot["inter_bytes"], snapshot["inter_messages"]) == (12.5, 2)
    assert (snapshot["intra_bytes"], snapshot["intra_messages"]) == (1, 1)
    assert (snapshot["world_bytes"], snapshot["world_messages"]) == (0, 0)


def test_exposed_seconds_are_those_between_the_marks_of_all_levels():
    meter = Meter()
    meter.add_wait("inter", 1.0, 1.5)
    meter.add_wait("intra", 2.0, 2.25)
    meter.add_wait("inter", 3.0, 4.0)
    assert meter.seconds == {"inter": 1.5, "intra": 0.25}
    snapshot = meter.snapshot()
    assert snapshot["exposed_seconds"] == 1.75
    assert [snapshot[f"{level}_exposed_seconds"] for level in ("intra", "inter", "world")] == [0.25, 1.5, 0.0]


def test_a_wait_that_raises_is_counted():
    meter = Meter()
    with pytest.raises(ValueError, match="broken"), meter.waiting("inter", CPU):
        raise ValueError("broken")
    assert meter.seconds["inter"] > 0


def test_waits_of_autograd_threads_count_and_overlapped_ones_do_not():
    meter = Meter()

    def wait() -> None:
        with meter.waiting("inter", CPU):
            pass

    with meter.overlapped():
        wait()
        assert meter.seconds == {}
        thread = threading.Thread(target=wait)  # on a GPU, of a backward pass with hooks
        thread.start()
        thread.join()
        hooks = meter.seconds["inter"]
        assert hooks > 0
    wait()
    assert meter.seconds["inter"] > hooks


def test_two_threads_lose_no_count():
    meter = Meter()

    def count() -> None:
        for _ in range(20_000):
            meter.count("inter", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (meter.bytes["inter"], meter.messages["inter"]) == (80_000, 80_000)
