"""Gradients in DDP: which ranks share them, and how long training waits for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from lightning_hiercomm._lightning.ddp import unused_parameters, warning_of_unused_parameters
from lightning_hiercomm._lightning.tree import fabric
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.meter import Mark
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.base import Gradients
from lightning_hiercomm.schemes.gradients import GradientPath


def gradient_group(topology: Topology, gradients: Gradients) -> Communicator | None:
    """Return the ranks that average their gradients, or None if every rank keeps its own."""
    return {"node": topology.intra, "world": topology.world, "none": None}[gradients]


class GradientReduction:
    """Reduces DDP's buckets of gradients, and measures how long a backward pass waits for the last one."""

    def __init__(self) -> None:
        self._last: tuple[str, Mark] | None = None

    def __reduce__(self) -> tuple[type[GradientReduction], tuple[()]]:
        return GradientReduction, ()

    def start(self, gradients: GradientPath, topology: Topology, bucket: Any) -> Future[Tensor]:
        """Start to average a bucket; DDP's communication hook."""
        future = gradients.reduce_bucket(bucket)
        if bucket.is_last():
            self._last = gradients.level, topology.meter.mark(bucket.buffer().device)
        return future

    def end_backward(self, topology: Topology, device: torch.device) -> None:
        """Record the wait since the last bucket's hook, if this backward pass averaged gradients."""
        if self._last is None:
            return
        (level, start), self._last = self._last, None
        topology.meter.add_wait(level, start, topology.meter.mark(device))


def warn_of_unused(module: nn.Module, strategy: type, loss: str = "training_step") -> None:
    """Warn of parameters without gradients, for which DDP would raise an error on nodes of several ranks."""
    if unused := unused_parameters(module):
        fabric.utilities.rank_zero_warn(warning_of_unused_parameters(unused, strategy, loss))
