"""A training run without a Trainer, on two nodes of one rank that are threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from harness import on_ranks, place
from torch import nn

from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import Scheme

T = TypeVar("T")
SGD_AT_ONE = partial(torch.optim.SGD, lr=1.0)
TWO_NODES: Sequence[Sequence[int]] = ((0,), (1,))


def scalar() -> nn.Module:
    """One weight, zero."""
    return weights(1)[0]


def weights(count: int = 2) -> nn.ModuleList:
    """Layers of one weight, zero."""
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(count))
    for layer in layers:
        nn.init.zeros_(layer.weight)
    return layers


def with_buffers(module: nn.Module, **buffers: torch.Tensor | None) -> nn.Module:
    for name, value in buffers.items():
        module.register_buffer(name, None if value is None else value.clone())
    return module


@contextmanager
def begun(run: TrainingRun, epochs: int = 1, steps: int | None = None) -> Iterator[TrainingRun]:
    """The run in its first epoch."""
    try:
        run.begin(epochs=epochs, steps=steps)
        run.begin_epoch(0)
        yield run
    finally:
        run.close(timeout=5.0)


def on_two_nodes(
    scheme: Scheme,
    work: Callable[[TrainingRun], T],
    module: Callable[[], nn.Module] = weights,
    *,
    inner: Callable[..., torch.optim.Optimizer] = SGD_AT_ONE,
    wire: str | None = None,
    epochs: int = 1,
    **of_replicas: Any,
) -> list[T]:
    """Return ``work(run)`` of both nodes, with a run that has begun.

    Of a ``ModuleList``, each layer has an optimizer; ``of_replicas`` are further arguments of ``Replicas``.
    """

    def body(topology: Topology) -> T:
        own = module().to(place.device)
        layers = own if isinstance(own, nn.ModuleList) else [own]
        optimizers = [inner([p for p in layer.parameters() if p.requires_grad]) for layer in layers]
        replicas = Replicas(own, optimizers, **of_replicas)
        run = TrainingRun(scheme, replicas, topology, Wire(wire))
        with begun(run, epochs):
            return work(run)

    return on_ranks(body, TWO_NODES)


def step(run: TrainingRun, gradient: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like, which: int = 0) -> None:
    """A step of one optimizer, with gradients made for everything it trains."""
    optimizer = run.optimizers[which]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = gradient(parameter)
    run.step(optimizer, lambda: optimizer.step())  # schemes may replace it


def add(run: TrainingRun, which: int, amount: float) -> None:
    """A step of one optimizer that adds ``amount`` to everything it trains."""
    step(run, lambda parameter: torch.full_like(parameter, -amount), which)
