"""Packages that people train with, unchanged and in their own ways, under every scheme and under DDP.

Every night a job installs them. Where none is there nothing is collected; tests of those that are missing are skipped.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hiercomm import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, StepsDelay

collect_ignore = [] if any(map(find_spec, ("darts", "litgpt"))) else ["test_packages.py"]

SCHEMES: dict[str, Callable[[], Any]] = {
    "all_reduce": AllReduce,
    "periodic": lambda: PeriodicAveraging(sync_every=4),
    "daso": lambda: DASO(sync_every=2, warmup=0, cooldown=0),
    # most packages train by Adam, which the default local rule refuses
    "steps_delay": lambda: StepsDelay(delay=2, warmup_steps=4, local_update="sgd", local_lr_scale=1.0),
    "gossip": lambda: Gossip(fragments=2),
    # outer momentum of 0.9 overshoots in runs of so few periods
    "diloco": lambda: DiLoCo(sync_every=4, outer_optimizer=partial(torch.optim.SGD, lr=0.7)),
}
"""By the name of a test: short periods, for short runs."""


@pytest.fixture(params=["ddp", *SCHEMES])
def how(request: pytest.FixtureRequest) -> str:
    """``"ddp"``, or the name of a scheme."""
    return request.param


@pytest.fixture
def apart(tmp_path: Path) -> Callable[..., Any]:
    """``apart(main, *arguments)``: what ``main(folder, *arguments)`` returns in a process of its own.

    A package may leave threads behind, and a process that has some cannot fork ranks.
    """

    def run(main: Callable[..., Any], *arguments: Any) -> Any:
        process = multiprocessing.get_context("spawn").Process(target=_main, args=(main, tmp_path, arguments))
        process.start()
        process.join(timeout=240)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"{main.__name__} takes longer than 240 s")
        assert process.exitcode == 0, "it ended with an error, which stands above"
        return torch.load(tmp_path / "returned.pt", weights_only=False)

    return run


def _main(main: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.chdir(folder)
    torch.save(main(folder, *arguments), folder / "returned.pt")
