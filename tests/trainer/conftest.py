"""Loops on Fabric, on two nodes of two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_hiercomm import HierarchicalFabricStrategy


def launch(scheme: Any, work: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Run ``work(fabric, strategy)`` on two nodes of two ranks."""
    strategy = HierarchicalFabricStrategy(scheme, ranks_per_node=2, **settings)
    return Fabric(accelerator="cpu", devices=4, strategy=strategy).launch(work, strategy, *arguments)


def on_this_rank(scheme: Any, work: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Run ``work`` where a launcher has started the ranks, which go on: nothing of it may stay."""

    def work_and_end(fabric: Fabric, strategy: HierarchicalFabricStrategy, *arguments: Any) -> Any:
        returned = work(fabric, strategy, *arguments)
        for run in strategy.runs:
            run.close(timeout=20.0)
        strategy.topology.close()
        return returned

    return launch(scheme, work_and_end, *arguments, **settings)


@pytest.fixture
def launched(borrow: Any) -> Callable[..., list[Any]]:
    """``launched(scheme, work, ...)``: what ``work`` returns on each of four ranks that stay for the next one."""

    def run(scheme: Any, work: Callable[..., Any], *arguments: Any, **settings: Any) -> list[Any]:
        return borrow(lambda _: on_this_rank(scheme, work, *arguments, **settings))

    return run


def linear(*sizes: int, weight: float = 0.0, bias: bool = True) -> nn.Linear:
    """A layer in float64, whose weights are all equal, and whose biases are zero."""
    layer = nn.Linear(*sizes, bias=bias).double()
    nn.init.constant_(layer.weight, weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def by_sgd(fabric: Fabric, module: nn.Module, lr: float = 0.1) -> Any:
    """Set up a module and its SGD."""
    return fabric.setup(module, torch.optim.SGD(module.parameters(), lr=lr))


def step(fabric: Fabric, loss: Tensor, *optimizers: Any) -> None:
    fabric.backward(loss)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def is_equal_on_all_ranks(fabric: Fabric, tensor: Tensor) -> bool:
    everyone = fabric.all_gather(tensor.detach())
    return bool((everyone == everyone[0]).all())
