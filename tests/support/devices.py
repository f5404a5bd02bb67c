"""Where the ranks of a test compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch


@dataclass
class Place:
    """Where the ranks of a test compute; the fixtures ``device`` and ``fake_device`` change it.

    Tests see values of the CPU all the same: what they give to a rank is moved there, and what they get from it, here.

    Attributes:
        device: Of their tensors.
        rank: Around all that a rank does.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: Callable[[], AbstractContextManager[object]] = nullcontext


place = Place()


@contextmanager
def _on_a_stream(device: torch.device) -> Iterator[None]:
    """Run on a stream of its own, and synchronize it at the end for readers on other streams."""
    stream = torch.cuda.Stream(device)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


@contextmanager
def on_a_gpu() -> Iterator[torch.device]:
    """Let ranks compute on the GPU, each on a stream of its own."""
    before = place.device, place.rank
    place.device = device = torch.device("cuda", torch.cuda.current_device())
    place.rank = partial(_on_a_stream, device)
    try:
        yield device
    finally:
        place.device, place.rank = before
