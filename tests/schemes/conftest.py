"""What the tests of schemes train on: ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import pytest
import torch


@pytest.fixture
def run_oracle() -> Callable[..., list[harness.Trace]]:
    """Rank r minimises 0.5 (x - a_r)^2 under a scheme."""
    return harness.run_oracle


@pytest.fixture
def on_nodes() -> Callable[..., list[Any]]:
    """Trains tensors of ones by SGD with learning rate 0.1 under a scheme, with gradients that the test chooses."""
    return partial(harness.on_nodes, start=1.0, inner=partial(torch.optim.SGD, lr=0.1))
