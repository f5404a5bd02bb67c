"""What the runs of sharded nodes share, which several tests look at: a launch takes seconds, a fit in it a fraction."""

from __future__ import annotations

import importlib
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import MPIEnvironment
from packaging.version import Version
from problems import one_trainer

if Version(torch.__version__) < Version("2.9"):
    collect_ignore_glob = ["test_*.py"]  # refused by name


@pytest.fixture(scope="session", autouse=True)
def imports_of_the_first_step() -> None:
    """What every rank would import, and ask MPI whether that started it, for itself."""
    importlib.import_module("torch.distributed._tensor")
    MPIEnvironment.detect()


def trainer(strategy: Any, devices: int = 4, **arguments: Any) -> pl.Trainer:
    return one_trainer(None, strategy=strategy, devices=devices, **arguments)


def whole_state(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    """The module's parameters and buffers, whole."""
    whole = {}
    for name, tensor in module.state_dict().items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        whole[name] = full.detach().clone()
    return whole
