"""What the meter counts; that communicators count rightly is in test_communicator.py."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_hiercomm.comm.meter import Meter

CPU = torch.device("cpu")


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
