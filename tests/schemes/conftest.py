"""What the tests of schemes train on: ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import pytest
import torch
from pretended_streams import PretendedDevice


@pytest.fixture
def run_oracle() -> Callable[..., list[harness.Trace]]:
    """Rank r minimises 0.5 (x - a_r)^2 under a scheme."""
    return harness.run_oracle


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedDevice]:
    """Ranks compute on devices that work in streams; in the end nothing must have been used out of order."""
    with PretendedDevice().installed() as device:
        monkeypatch.setattr(harness.place, "rank", device.watching)
        yield device
    assert device.trouble == []


@pytest.fixture
def on_nodes() -> Callable[..., list[Any]]:
    """Trains tensors of ones by SGD with learning rate 0.1 under a scheme, with gradients that the test chooses."""
    return partial(harness.on_nodes, start=1.0, inner=partial(torch.optim.SGD, lr=0.1))
