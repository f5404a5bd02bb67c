"""Connects batches of unequal size to a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_hiercomm._lightning.trainer import (
    leave_train_dataloaders_alone,
    mark_means_of_a_step,
    restart_train_dataloaders,
    takes_dataloader_iter,
)
from lightning_hiercomm._lightning.tree import pl
from lightning_hiercomm.batches import HeterogeneousBatches
from lightning_hiercomm.batches.running import RunningBatches
from lightning_hiercomm.nodes.topology import Topology

_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
"""Layers that refuse a single sample: always, or if it has a single value in a channel."""


def attach_batches(
    config: HeterogeneousBatches,
    trainer: pl.Trainer,
    topology: Topology,
    device: torch.device,
    state: Mapping[str, Any] | None,
) -> RunningBatches:
    """Return batches that divide the train dataloaders of a trainer, before their length is used. Collective.

    For ``state`` see :class:`RunningBatches`.
    """
    module = trainer.lightning_module
    least = 2 if any(isinstance(layer, _BATCH_NORMS) for layer in module.modules()) else 1
    # other programs choose themselves which batches an optimizer step sums, or when one is loaded
    may_change_in_epoch = module.automatic_optimization and not takes_dataloader_iter(module)
    batches = RunningBatches(config, topology, device, least, state, may_change_in_epoch, module.print)
    leave_train_dataloaders_alone(trainer)
    mark_means_of_a_step(trainer)
    return batches


def begin_batches(batches: RunningBatches, trainer: pl.Trainer) -> None:
    """Begin training, and set the epoch of the samplers."""
    batches.announce()
    if batches.go_to(trainer.current_epoch):
        with pl.utilities.seed.isolate_rng():
            restart_train_dataloaders(trainer)
