"""Connects batches of unequal size to a Trainer."""

from __future__ import annotations

import torch

from lightning_hiercomm._lightning.trainer import (
    leave_train_dataloaders_alone,
    mark_means_of_a_step,
    restart_train_dataloaders,
    takes_dataloader_iter,
)
from lightning_hiercomm._lightning.tree import pl
from lightning_hiercomm.batches.running import RunningBatches
from lightning_hiercomm.nodes.topology import Topology

_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
"""Layers that refuse a single sample: always, or if it has a single value in a channel."""


def attach_batches(batches: RunningBatches, trainer: pl.Trainer, topology: Topology, device: torch.device) -> None:
    """Let ``batches`` divide the train dataloaders of a trainer, before their length is used. Collective."""
    has_batch_norm = any(isinstance(layer, _BATCH_NORMS) for layer in trainer.lightning_module.modules())
    batches.bind(topology, topology.meter, device, least=2 if has_batch_norm else 1)
    leave_train_dataloaders_alone(trainer)
    mark_means_of_a_step(trainer)


def begin_batches(batches: RunningBatches, trainer: pl.Trainer) -> None:
    """Begin training, and set the epoch of the samplers."""
    module = trainer.lightning_module
    # other programs choose themselves which batches an optimizer step sums, or when one is loaded
    batches.begin(module.print, module.automatic_optimization and not takes_dataloader_iter(module))
    if batches.go_to(trainer.current_epoch):
        with pl.utilities.seed.isolate_rng():
            restart_train_dataloaders(trainer)
