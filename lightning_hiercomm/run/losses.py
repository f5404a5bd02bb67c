"""The mean training loss of an epoch, which DASO's schedule follows, and the loss that ranks share in a closure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.comm.autocast import outside_autocast
from lightning_hiercomm.comm.dtensor import gathered
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.base import Gradients


class EpochLoss:
    """This rank's losses in the present epoch; nothing is stored unless a scheme follows the loss."""

    def __init__(self, is_followed: bool, topology: Topology, device: torch.device) -> None:
        self._is_followed = is_followed
        self._topology = topology
        self._device = device
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, output: Any) -> None:
        """Add the loss that a training step returned, if its output is a loss or a mapping with one."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if self._is_followed and isinstance(loss, Tensor):
            loss = gathered(loss.detach()).float().mean()
            self._sum = loss if self._sum is None else self._sum + loss
            self._count += 1

    def take_mean(self) -> Tensor | None:
        """Return the mean of the losses, if there are any, and begin again."""
        mean = None if self._sum is None else self._sum / self._count
        self._sum, self._count = None, 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return the sum and the number of this rank's losses; empty if there are none."""
        return {} if self._sum is None else {"sum": self._sum.clone(), "count": self._count}

    @outside_autocast()
    def common_state_dict(self) -> dict[str, Any]:
        """Return the mean of all ranks' :meth:`state_dict`, so that all resume with the same mean. Collective."""
        if not self._is_followed:
            return {}
        sums = torch.zeros(2, device=self._device)
        if self._sum is not None:
            sums[0], sums[1] = self._sum, self._count
        self._topology.world.all_reduce(sums.mul_(self._topology.rank_weight)).wait()
        count = round(sums[1].item())
        return {"sum": sums[0].clone(), "count": count} if count else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._sum, self._count = state["sum"].to(self._device), state["count"]


def common_loss(loss: Any, topology: Topology, gradients: Gradients) -> Any:
    """Return the mean of a loss over the ranks that average their gradients. Collective over these.

    Optimizers like LBFGS evaluate the loss until it no longer changes. These ranks must evaluate it equally often,
    because their backward passes communicate.
    """
    if not isinstance(loss, Tensor):
        return loss
    # in the loss's own dtype: a rounded loss would stop changing too early
    common = gathered(loss.detach()).clone().view(1)
    if gradients == "node":
        topology.intra.all_reduce(common, weight=topology.weight_in_node).wait()
    else:
        topology.world.all_reduce(common, weight=topology.rank_weight).wait()
    return common.view(())
