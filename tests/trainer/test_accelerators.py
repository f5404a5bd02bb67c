"""Accelerators of unknown execution order are refused when a Trainer or a Fabric is made."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning import Fabric
from lightning.fabric import accelerators as of_fabric
from lightning.pytorch import accelerators as of_trainer

from lightning_hiercomm import HierarchicalFabricStrategy, HierarchicalModelParallelStrategy, HierarchicalStrategy


def with_xpus(cpu: type) -> Any:
    devices = staticmethod(lambda devices: [torch.device("xpu", 0)])
    return type("Xpus", (cpu,), {"get_parallel_devices": devices})()


@pytest.mark.parametrize(
    ("kind", "cpu", "strategy"),
    [
        (pl.Trainer, of_trainer.CPUAccelerator, HierarchicalStrategy),
        (pl.Trainer, of_trainer.CPUAccelerator, HierarchicalModelParallelStrategy),
        (Fabric, of_fabric.CPUAccelerator, HierarchicalFabricStrategy),
    ],
)
def test_another_accelerator_is_refused_with_the_remedy(kind, cpu, strategy):
    with pytest.raises(ValueError, match=r"'xpu' devices.*accelerator='gpu'.*accelerator='cpu'"):
        kind(accelerator=with_xpus(cpu), devices=1, strategy=strategy())
