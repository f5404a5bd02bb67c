"""Gradients in DDP: which ranks share them, and which parameters have none."""

from __future__ import annotations

from torch import nn

from lightning_hiercomm._lightning.ddp import unused_parameters, warning_of_unused_parameters
from lightning_hiercomm._lightning.tree import fabric
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.base import Gradients


def gradient_group(topology: Topology, gradients: Gradients) -> Communicator | None:
    """Return the ranks that average their gradients, or None if every rank keeps its own."""
    return {"node": topology.intra, "world": topology.world, "none": None}[gradients]


def warn_of_unused(module: nn.Module, strategy: type, loss: str = "training_step") -> None:
    """Warn of parameters without gradients, for which DDP would raise an error on nodes of several ranks."""
    if unused := unused_parameters(module):
        fabric.utilities.rank_zero_warn(warning_of_unused_parameters(unused, strategy, loss))
