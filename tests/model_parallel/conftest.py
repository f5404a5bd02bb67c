"""Runs on four processes that several tests share: a launch takes seconds, a fit in it a fraction of one."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port

sys.path.append(str(Path(__file__).parents[1]))

Launch = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """``launch(main, ranks=4)``: what ``main(folder)`` returned on every rank of a world that a launcher started."""

    def run(main: Callable[[Path], Any], ranks: int = 4, folder: Path | None = None) -> list[Any]:
        folder = folder or tmp_path_factory.mktemp("launch")
        before = dict(os.environ)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(find_free_network_port()))
        try:
            torch.multiprocessing.start_processes(_main, args=(main, folder), nprocs=ranks, start_method="fork")
        finally:
            os.environ.clear()
            os.environ.update(before)
        return [torch.load(folder / f"returned-{rank}.pt", weights_only=False) for rank in range(ranks)]

    return run


def _main(rank: int, main: Callable[[Path], Any], folder: Path) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    warnings.filterwarnings("ignore")
    torch.save(main(folder), folder / f"returned-{rank}.pt")


def trainer(strategy: Any, devices: int = 4, **arguments: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": devices,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **arguments})


def whole_state(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    """The module's parameters and buffers, whole."""
    whole = {}
    for name, tensor in module.state_dict().items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        whole[name] = full.detach().clone()
    return whole
