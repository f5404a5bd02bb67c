"""A fit of every scheme over nccl, each rank a node with a GPU of its own: ``torchrun ... over_nccl.py FOLDER``."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from jobs.on_a_device import QUIET, SCHEMES, Net

from lightning_hiercomm import HierarchicalStrategy


def fits() -> dict[str, torch.Tensor]:
    """The weights that every scheme ended with, flat, by its name."""
    warnings.filterwarnings("ignore")
    found = {}
    for name, scheme in SCHEMES.items():
        module = Net()
        own = {"devices": int(os.environ["WORLD_SIZE"]), "strategy": HierarchicalStrategy(scheme, ranks_per_node=1)}
        pl.Trainer(**{**QUIET, "accelerator": "gpu", "max_epochs": 1, **own}).fit(module)
        found[name] = torch.nn.utils.parameters_to_vector(module.parameters()).detach().cpu()
    return found


if __name__ == "__main__":
    torch.save(fits(), Path(sys.argv[1]) / f"{os.environ['RANK']}.pt")
