"""A background thread keeps the order of its jobs, and a wait for a job raises its error."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from fake_streams import FakeEvent

from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.base import CommunicationError, completed_future
from lightning_hiercomm.comm.meter import Meter

CPU = torch.device("cpu")


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def background(meter: Meter) -> Iterator[Background]:
    background = Background(CPU, meter)
    yield background
    background.close()


def test_jobs_run_one_after_another_in_the_order_they_were_submitted(background):
    done: list[int] = []
    handles = [background.submit(lambda i=i: done.append(i)) for i in range(100)]
    handles[-1].wait()
    assert done == list(range(100))
    assert all(handle.is_done() for handle in handles)


def test_submitting_does_not_wait_for_the_job(background):
    may_end = threading.Event()
    handle = background.submit(may_end.wait)
    assert not handle.is_done()
    may_end.set()
    handle.wait()
    handle.wait()
    assert handle.is_done()


def test_an_error_reaches_every_waiter_and_the_background_goes_on(background):
    def fail() -> None:
        raise ValueError("lost")

    handle, after = background.submit(fail), background.submit(lambda: None)
    for _ in range(2):
        with pytest.raises(ValueError, match="lost"):
            handle.wait()
    with pytest.raises(ValueError, match="lost"):
        handle.future(torch.zeros(1)).wait()
    after.wait()


def test_a_future_completes_with_its_job_whenever_it_was_asked_for(background):
    may_end, value = threading.Event(), torch.zeros(1)

    def work() -> None:
        may_end.wait()
        value.fill_(3)

    handle = background.submit(work)
    early = handle.future(value)
    assert not early.done()
    may_end.set()
    assert early.wait().item() == 3
    assert handle.future(value).wait() is value


def test_only_waiting_for_a_job_is_exposed_not_the_job(background, meter):
    def work() -> None:
        with meter.waiting("inter", CPU):
            pass

    handle = background.submit(work)
    while not handle.is_done():
        pass
    assert meter.seconds == {}
    handle.wait()
    assert meter.seconds["inter"] > 0


def test_a_closed_background_ends_its_thread_and_can_be_used_again(meter):
    done: list[int] = []
    background, before = Background(CPU, meter), set(threading.enumerate())
    background.close()  # nothing was ever submitted
    for i in range(3):
        background.submit(lambda i=i: done.append(i))
    background.close()
    assert done == [0, 1, 2]
    assert set(threading.enumerate()) <= before
    background.submit(lambda: done.append(3)).wait()
    assert done == [0, 1, 2, 3]
    background.close()


def test_a_future_of_an_interrupted_job_has_not_succeeded(background):
    def interrupted() -> None:
        raise KeyboardInterrupt("Ctrl-C")

    before = background.submit(interrupted).future(torch.ones(1))
    after = background.submit(interrupted)
    with pytest.raises(KeyboardInterrupt):
        after.wait()
    for future in (before, after.future(torch.ones(1))):
        with pytest.raises(CommunicationError, match=r"KeyboardInterrupt.*Ctrl-C"):
            future.wait()


@pytest.mark.parametrize("defers", [False, True])
def test_a_future_on_a_gpu_completes_in_the_stream_of_its_job(meter, defers, fake_device, monkeypatch):
    completed: list[object] = []

    def noted(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:  # torch's records the streams of now
        completed.append(fake_device.current())
        return completed_future(value)

    monkeypatch.setattr("lightning_hiercomm.comm.background.completed_future", noted)
    with fake_device.watching():
        background, value = Background(CPU, meter, defers=defers), torch.zeros(1)
        background.uses(value)
        training = fake_device.current()
        job = background.submit(lambda: value.fill_(3))
        done = job.future(value)
        assert completed != [training]
        training.wait_stream(*completed)
        assert done.wait().item() == 3


def test_an_error_of_a_deferred_job_reaches_only_its_waiters(meter, fake_device):
    def fail() -> None:
        raise CommunicationError("lost")

    with fake_device.watching():
        background, value = Background(CPU, meter, defers=True), torch.zeros(1)
        failing, after = background.submit(fail), background.submit(lambda: value.fill_(3))
        after.wait()
        assert value.item() == 3
        for _ in range(2):
            with pytest.raises(CommunicationError, match="lost"):
                failing.wait()
        assert failing.is_done()


def test_interrupting_a_deferred_job_interrupts_later_waiters(meter, fake_device):
    def interrupted() -> None:
        raise KeyboardInterrupt

    with fake_device.watching():
        background = Background(CPU, meter, defers=True)
        background.submit(interrupted)
        with pytest.raises(KeyboardInterrupt):
            background.submit(lambda: None).wait()


def test_a_deferred_job_is_done_on_all_ranks_alike(meter, fake_device, monkeypatch):
    """What a device has done differs, and who launches the next moves by it does so in another order than others."""
    with fake_device.watching():
        background = Background(CPU, meter, defers=True)
        job, last = background.submit(lambda: None), background.submit(lambda: None)
        assert not job.is_done()
        last.wait()
        monkeypatch.setattr(FakeEvent, "query", lambda event: False)
        assert job.is_done()
