"""The oracle problem of the scheme tests: rank r minimises 0.5 (x - a_r)^2, on ranks that are threads."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.replica import Replica
from lightning_hiercomm.schemes import Scheme
from lightning_hiercomm.schemes.gradients import GradientPath, gradient_path
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


@dataclass
class Rank:
    """One rank of :func:`on_nodes`, which trains tensors with gradients that the test chooses."""

    rank: int
    topology: Topology
    meter: Meter
    module: torch.nn.ParameterDict
    optimizer: torch.optim.Optimizer
    wire: Wire
    scheme: Scheme
    gradients: GradientPath
    bucket_bytes: int

    @property
    def node(self) -> int:
        """The node it lives on."""
        return self.topology.node

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that are not frozen."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    @property
    def values(self) -> torch.Tensor:
        """A flat copy of all parameters."""
        return torch.cat([parameter.detach().flatten().clone() for parameter in self.module.parameters()])

    def train(self, gradient: Callable[[torch.Tensor], torch.Tensor], last: bool = False) -> None:
        """One step with ``gradient(values)``, over all trained parameters, as this rank's own gradient."""

        def run() -> None:
            flat = gradient(torch.cat([parameter.detach().flatten() for parameter in self.trained])).clone()
            self.gradients.reduce(flat).wait()
            offset = 0
            for parameter in self.trained:
                parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter).clone()
                offset += parameter.numel()
            self.optimizer.step()

        self.scheme.step(run, last=last)

    def agreed(self) -> torch.Tensor:
        """The agreed values; the rank's own are put back."""
        snapshot = self.scheme.replica.snapshot()
        self.scheme.agree()
        values = self.values
        self.scheme.replica.restore(snapshot)
        return values

    def replica(self) -> Replica:
        """What is trained now."""
        return Replica(self.trained, bucket_bytes=self.bucket_bytes, named=self.module.named_parameters())

    def state(self) -> dict[str, Any]:
        """What a companion of a checkpoint holds, through a file."""
        self.scheme.settle()
        state = {
            "values": [parameter.detach().clone() for parameter in self.module.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "scheme": self.scheme.state_dict(),
            "gradients": self.gradients.state_dict(),
        }
        return reloaded(state)

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`."""
        for parameter, values in zip(self.module.parameters(), state["values"], strict=True):
            parameter.copy_(values)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheme.load_state_dict(state["scheme"])
        self.gradients.load_state_dict(state["gradients"])


def reloaded(state: dict[str, Any]) -> dict[str, Any]:
    """What a file gives back of a state: tensors and primitives only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def on_nodes(
    work: Callable[[Rank], Any],
    scheme: Scheme,
    nodes: Sequence[Sequence[int]] = ((0,), (1,)),
    *,
    shapes: Mapping[str, int] | None = None,
    start: float = 1.0,
    inner: Callable[..., torch.optim.Optimizer] | None = None,
    wire: str | None = None,
    weights: Sequence[float] | None = None,
    bucket_bytes: int = 4 * 2**20,
    dtype: torch.dtype = torch.float32,
    frozen: Sequence[str] = (),
) -> list[Any]:
    """Call ``work`` with a :class:`Rank` on every rank of the nodes; all parameters begin at ``start``."""

    def body(rank: int, world: ThreadWorld) -> Any:
        meter = Meter()
        topology = Topology(nodes, rank, world.connect(rank, meter), meter, weights)
        sizes = shapes or {"x": 1}
        module = torch.nn.ParameterDict({name: torch.full((size,), start, dtype=dtype) for name, size in sizes.items()})
        for name in frozen:
            module[name].requires_grad_(False)
        optimizer = (inner or partial(torch.optim.SGD, lr=0.1))(list(module.parameters()))
        own, payload = copy.deepcopy(scheme), Wire.named(wire)
        path = gradient_path(own.gradients, topology, torch.device("cpu"), payload, piece_bytes=bucket_bytes)
        built = Rank(rank, topology, meter, module, optimizer, payload, own, path, bucket_bytes)
        own.attach(built.replica(), topology, optimizer, payload)
        own.begin_run(None, None)
        own.begin_epoch(0, {})
        try:
            return work(built)
        finally:
            own.close()
            path.close()

    return ThreadWorld(sum(map(len, nodes))).run(body)


@pytest.fixture(name="on_nodes")
def on_nodes_fixture() -> Callable[..., list[Any]]:
    """Trains tensors under a scheme, with gradients that the test chooses, on ranks that are threads."""
    return on_nodes
