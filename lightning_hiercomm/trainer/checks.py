"""Checks before processes start, and before training begins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lightning_hiercomm._lightning.launcher import check_ranks_of_node
from lightning_hiercomm._lightning.trainer import validates_by_the_clock
from lightning_hiercomm._lightning.tree import fabric, pl
from lightning_hiercomm.comm import streams
from lightning_hiercomm.nodes.connect import check_backend, check_equal_work
from lightning_hiercomm.nodes.topology import Topology, nodes_by_count
from lightning_hiercomm.schemes import Scheme
from lightning_hiercomm.trainer.epoch_clock import length_of_run, steps_of_epoch


def check_launch(
    devices: Sequence[torch.device] | None,
    backend: str | None,
    ranks_per_node: int | Sequence[int] | None,
    world_size: int,
    environment: fabric.plugins.ClusterEnvironment | None = None,
) -> None:
    """Check devices, backend and ranks before processes start."""
    for device in devices or ():
        streams.check_known(device)
    check_backend(backend, devices or ())
    if environment is not None and environment.creates_processes_externally:
        check_ranks_of_node(environment)
    if ranks_per_node is not None:
        nodes_by_count(ranks_per_node, world_size)


def check_training(trainer: pl.Trainer, scheme: Scheme, topology: Topology) -> None:
    """Check that ranks have equal work, and warn if the run is too short for its scheme. Collective."""
    check_equal_work(topology, trainer.num_training_batches)
    if validates_by_the_clock(trainer) and topology.world_size > 1:
        raise ValueError(
            "Trainer(val_check_interval=...) is a time, which every rank measures by its own clock, so ranks would"
            " validate after different batches: give a number of batches, or a fraction of the epoch"
        )
    _, steps = length_of_run(trainer)
    length = math.inf if steps is None else steps
    for warning in scheme.check_run(topology.num_nodes, steps_of_epoch(trainer), length):
        pl.utilities.rank_zero_warn(warning)
