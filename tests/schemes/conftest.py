"""The oracle problem of the scheme tests: rank r minimises 0.5 (x - a_r)^2, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.replica import Replica
from lightning_hiercomm.schemes import Scheme
from lightning_hiercomm.schemes.gradients import gradient_path
from lightning_hiercomm.topology import Topology


@dataclass
class Trace:
    """What one rank saw."""

    after_step: list[float] = field(default_factory=list)
    after_epoch: list[float] = field(default_factory=list)
    finished: float = 0.0
    meter: dict[str, float] = field(default_factory=dict)
    scheme: Scheme | None = None


def run_oracle(
    scheme: Callable[[], Scheme],
    *,
    nodes: Sequence[Sequence[int]] = ((0, 1), (2, 3)),
    targets: Sequence[float] = (0.0, 2.0, 4.0, 10.0),
    weights: Sequence[float] | None = None,
    epochs: int = 1,
    steps_per_epoch: int = 8,
    learning_rate: float = 0.5,
    momentum: float = 0.0,
    dtype: torch.dtype = torch.float32,
    wire: Wire | None = None,
    losses: Sequence[float] | None = None,
) -> list[Trace]:
    """Train one scalar from 0 with SGD; one trace per rank. ``losses`` are the epoch losses the scheme is told."""

    def work(rank: int, world: ThreadWorld) -> Trace:
        meter, trace = Meter(), Trace()
        topology = Topology(nodes, rank, world.connect(rank, meter), meter, weights)
        x = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        optimizer = torch.optim.SGD([x], lr=learning_rate, momentum=momentum)
        trace.scheme = bound = scheme()
        bound.attach(Replica([x]), topology, optimizer, wire)
        gradients = gradient_path(bound.gradients, topology, x.device, bound.wire, piece_bytes=2**22)
        bound.begin_run(epochs, None)

        def user_step() -> None:
            gradient = x.detach() - targets[rank]
            gradients.reduce(gradient).wait()
            x.grad = gradient
            optimizer.step()

        for epoch in range(epochs):
            bound.begin_epoch(epoch, {})
            for i in range(steps_per_epoch):
                bound.step(user_step, last=i == steps_per_epoch - 1)
                trace.after_step.append(x.item())
            bound.end_epoch(torch.tensor(losses[epoch]) if losses else None)
            trace.after_epoch.append(x.item())
        bound.finish()
        gradients.close()
        trace.finished = x.item()
        trace.meter = meter.snapshot()
        return trace

    return ThreadWorld(sum(map(len, nodes))).run(work)


@pytest.fixture(name="run_oracle")
def run_oracle_fixture() -> Callable[..., list[Trace]]:
    """The oracle runner."""
    return run_oracle
