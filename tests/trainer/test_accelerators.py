"""Accelerators of unknown execution order are refused when a Trainer or a Fabric is made."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning import Fabric
from lightning.fabric import accelerators as of_fabric
from lightning.pytorch import accelerators as of_trainer

from lightning_hiercomm import HierarchicalFabricStrategy, HierarchicalModelParallelStrategy, HierarchicalStrategy


class InTrainer(of_trainer.CPUAccelerator):
    @staticmethod
    def get_parallel_devices(devices: object) -> list[torch.device]:
        return [torch.device("xpu", 0)]


class InFabric(of_fabric.CPUAccelerator):
    @staticmethod
    def get_parallel_devices(devices: object) -> list[torch.device]:
        return [torch.device("xpu", 0)]


@pytest.mark.parametrize("strategy", [HierarchicalStrategy, HierarchicalModelParallelStrategy])
def test_a_trainer_on_another_accelerator_is_refused_with_the_remedy(strategy):
    with pytest.raises(ValueError, match=r"'xpu' devices.*accelerator='gpu'.*accelerator='cpu'"):
        pl.Trainer(accelerator=InTrainer(), devices=1, strategy=strategy(), logger=False)


def test_fabric_runs_on_accelerators():
    with pytest.raises(ValueError, match=r"'xpu' devices.*accelerator='gpu'.*accelerator='cpu'"):
        Fabric(accelerator=InFabric(), devices=1, strategy=HierarchicalFabricStrategy())
