"""The calls of comm/streams.py are what CUDA's own are: each once, with torch.cuda in the place of a GPU."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from lightning_hiercomm.comm import streams

GPU = torch.device("cuda", 0)


class Event:
    def __init__(self, enable_timing: bool) -> None:
        self.enable_timing, self.recorded_in = enable_timing, None

    def record(self, stream: str) -> None:
        self.recorded_in = stream


class OnGpu:
    """A tensor, as far as streams look at it."""

    device = GPU

    def __init__(self) -> None:
        self.kept_for: list[str] = []

    def record_stream(self, stream: str) -> None:
        self.kept_for.append(stream)


@pytest.fixture
def said(monkeypatch):
    said: list[object] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a new stream of {device}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", said.append)

    @contextmanager
    def stream(which):
        said.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "stream", stream)
    return said


def test_streams_and_events_are_those_of_the_device(said):
    assert streams.has(GPU)
    assert not streams.has(torch.device("cpu"))
    assert streams.new(GPU) == "a new stream of cuda:0"
    event = streams.mark(GPU, timing=True)
    assert (event.enable_timing, event.recorded_in) == (True, "the stream of cuda:0")
    with streams.within("another"):
        pass
    streams.synchronize(GPU)
    streams.synchronize(torch.device("cpu"))
    assert said == ["another", GPU]


def test_tensors_of_a_gpu_are_kept_for_the_stream_that_uses_them(said):
    tensor = OnGpu()
    streams.keep_for("another", tensor, torch.ones(1))
    streams.keep_here(tensor, torch.ones(1))
    assert tensor.kept_for == ["another", "the stream of cuda:0"]


def test_copies_to_the_host_use_pinned_memory(monkeypatch):
    asked = []

    def empty_like(tensor, **arguments):
        asked.append(arguments)
        return torch.zeros(tensor.shape)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    copy = streams.to_host(torch.arange(3.0))
    assert copy.tolist() == [0.0, 1.0, 2.0]
    assert asked == [{"device": "cpu", "pin_memory": True}]
