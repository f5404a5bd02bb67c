"""Ranks that are threads, and schemes that train on them: what tests of nodes and schemes have in common."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from devices import place
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_hiercomm.comm.base import Connect
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.schemes import Context, RunningScheme, Scheme
from lightning_hiercomm.schemes.base import Gradients
from lightning_hiercomm.schemes.gradient_path import GradientPath, gradient_path
from lightning_hiercomm.schemes.samples import SampleWeights

T = TypeVar("T")
Nodes = Sequence[Sequence[int]]
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

TWO_BY_TWO: Nodes = ((0, 1), (2, 3))
TARGETS = (0.0, 2.0, 4.0, 10.0)
"""Of the four ranks of the oracle problem; the two nodes' means are 1 and 7, that of all is 4."""
_TRACED = 10_000
"""Elements; to make numbers of more takes longer than the step."""
SGD_AT_HALF: MakeOptimizer = partial(torch.optim.SGD, lr=0.5)


def on_ranks(
    work: Callable[[Topology], T],
    nodes: Nodes = TWO_BY_TWO,
    weights: Sequence[float] | None = None,
    *,
    timeout: float = 20.0,
    connect: Callable[[Connect], Connect] = lambda connect: connect,
    waits_on_host: bool = False,
) -> list[T]:
    """What ``work(topology)`` returns on every rank; raises if it raised on any.

    A wait for a peer of more than ``timeout`` seconds is an error; ``connect`` changes the world's own way to connect.
    """

    def body(rank: int, world: ThreadWorld) -> T:
        meter = Meter()
        with place.rank():
            return work(Topology(nodes, rank, connect(world.connect(rank, meter)), meter, weights, waits_on_host))

    return on_cpu(ThreadWorld(sum(map(len, nodes)), timeout).run(body))


def on_cpu(results: T) -> T:
    """The same, with the tensors that are anywhere in it on the CPU."""
    moved: T = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, results)
    return moved


@dataclass
class Rank:
    """One rank in training: all of its parameters minimise 0.5 |x - target|^2, or follow gradients of the test's own.

    Attributes:
        target: Of all parameters, flat.
        trace: All values after every step, but of large models, whose bytes are counted.
        looks: All averaged values, whenever :meth:`averaged` was called.
    """

    topology: Topology
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    wire: Wire
    scheme: RunningScheme[Scheme]
    paths: Mapping[Gradients, GradientPath]
    replicas: Replicas
    target: Tensor
    trace: list[list[float]] = field(default_factory=list)
    looks: list[list[float]] = field(default_factory=list)

    @property
    def gradients(self) -> GradientPath:
        return self.paths[self.scheme.gradients]

    @property
    def rank(self) -> int:
        return self.topology.rank

    @property
    def node(self) -> int:
        return self.topology.node

    @property
    def meter(self) -> Meter:
        return self.topology.meter

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [*self.module._parameters.values()]  # a ParameterDict's; parameters() walks through all modules

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that are not frozen."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    @property
    def values(self) -> Tensor:
        """A flat copy of all parameters."""
        return _flat(self.parameters)

    def train(
        self, gradient: Callable[[Tensor], Tensor] | float | None = None, last: bool = False, skip: bool = False
    ) -> Tensor:
        """One step.

        Args:
            gradient: This rank's own, given the values of all trained parameters, or a number for every element.
                Default: towards the target.
            last: Whether it is the last one of the epoch.
            skip: Whether the optimizer is left out, as a gradient scaler does.

        Returns:
            The values that the forward pass saw.
        """
        seen: list[Tensor] = []

        def run() -> None:
            trained = self.trained
            values = _flat(trained)
            seen.append(values)
            if gradient is None:
                flat = values - self.target
            elif callable(gradient):
                flat = gradient(values).clone()
            else:
                flat = torch.full_like(values, gradient)
            flat = flat.to(place.device)
            self.gradients.reduce(flat).wait()
            for parameter, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
                parameter.grad = part.view_as(parameter).to(parameter.dtype, copy=True)
            if not skip:
                self.optimizer.step()

        self.scheme.step(run, last=last)
        if len(seen[0]) <= _TRACED:
            self.trace.append(self.values.tolist())
        return seen[0]

    def train_on(self, samples: float) -> None:
        """One step on a batch of so many samples; on none, the node idles."""
        assert self.scheme.samples is not None
        if samples:
            self.scheme.samples.count(samples)
            self.train()
        else:
            self.scheme.step(lambda: None)
            self.trace.append(self.values.tolist())

    def averaged(self) -> Tensor:
        """Return the averaged values; the rank keeps its own."""
        snapshot = self.scheme.replica.snapshot()
        self.scheme.synchronize()
        values = self.values
        self.looks.append(values.tolist())
        self.scheme.replica.restore(snapshot)
        return values

    def replica(self) -> Replica:
        return self.replicas.of(self.optimizer)

    def state(self) -> dict[str, Any]:
        """What a sidecar of a checkpoint holds, through a file."""
        self.scheme.state.settle()
        return reloaded(
            {
                "values": [parameter.detach().clone() for parameter in self.parameters],
                "optimizer": self.optimizer.state_dict(),
                "scheme": self.scheme.state_dict(),
                "gradients": self.gradients.state_dict(),
            }
        )

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        for parameter, values in zip(self.parameters, state["values"], strict=True):
            parameter.copy_(values)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheme.load_state_dict(state["scheme"])
        self.gradients.load_state_dict(state["gradients"])


def reloaded(state: dict[str, Any]) -> dict[str, Any]:
    """What a file gives back of a state: tensors and primitives only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    given: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return given


def needs_a_background_thread() -> None:
    """Skip where there is none: a device's jobs are enqueued by the host, which threads' communicator lets wait."""
    if place.device.type != "cpu":
        pytest.skip("ranks that are threads have no wire, and let the host wait where a device would")


def needs_a_backward_pass_for_each_rank() -> None:
    """Skip where backward passes wait for each other: autograd has one thread for a device, of all ranks."""
    if place.device.type != "cpu":
        pytest.skip("of ranks that are threads, one would hold autograd's thread of a GPU until the others come")


def _flat(parameters: Sequence[Tensor]) -> Tensor:
    return flattened([parameter.detach() for parameter in parameters]).cpu()


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all in one; of none, nothing."""
    return torch.cat([tensor.flatten() for tensor in tensors]) if tensors else torch.zeros(0)


def with_policy(scheme: Scheme, **chosen: Any) -> Scheme:
    """A scheme that :func:`attached` builds as a user has ``chosen``: settings of a ``Context``."""
    own = object.__new__(type(scheme))
    vars(own).update(vars(scheme), settings_of_test=chosen)
    return own


@contextmanager
def attached(
    topology: Topology,
    scheme: Scheme,
    *,
    shapes: Mapping[str, int | Sequence[int]] | Sequence[Sequence[int]] = ((1,),),
    start: float = 0.0,
    targets: Sequence[float] | None = TARGETS,
    inner: MakeOptimizer | None = None,
    wire: Wire | str | None = None,
    bucket_bytes: int = 4 * 2**20,
    dtype: torch.dtype | Mapping[str, torch.dtype] = torch.float32,
    frozen: Sequence[str] = (),
    buffer: Tensor | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    begins_epoch: bool = True,
    unequal_data: bool = False,
) -> Iterator[Rank]:
    """What ``scheme`` makes for parameters, ready to train; it is closed in the end.

    Args:
        topology: The rank's.
        scheme: What every rank trains by.
        shapes: Of the parameters, by their names (those of one without a name are numbers). Default: one scalar.
        start: The value of all parameters.
        targets: Of all ranks; every element's. None: random ones, different for every element.
        inner: Makes the user's optimizer. Default: SGD with learning rate 0.5.
        wire: What parameters look like between nodes.
        bucket_bytes: Upper bound of a bucket.
        dtype: Of the parameters; of each by its name, where they differ.
        frozen: Names of parameters that are not trained.
        buffer: A buffer of the module.
        epochs: How long the run will be.
        steps: The same, in steps.
        begins_epoch: Whether the first epoch has begun.
        unequal_data: Whether nodes are weighted by their samples; otherwise ranks keep their weights.
    """
    named = shapes.items() if isinstance(shapes, Mapping) else ((str(i), shape) for i, shape in enumerate(shapes))
    dtypes = dtype if isinstance(dtype, Mapping) else defaultdict(lambda: dtype)
    module = torch.nn.ParameterDict(
        {name: torch.zeros(shape, dtype=dtypes[name]).fill_(start) for name, shape in named}
    )
    module.register_buffer("buffer", None if buffer is None else buffer.clone())
    module.to(place.device)
    for name in frozen:
        module[name].requires_grad_(False)
    optimizer = (inner or SGD_AT_HALF)(list(module.parameters()))
    wire = wire if isinstance(wire, Wire) else Wire(wire)
    if targets is None:
        generator = torch.Generator().manual_seed(topology.rank)
        target = _flat([torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in module.parameters()])
    else:
        target = torch.full_like(_flat(list(module.parameters())), targets[topology.rank % len(targets)])
    phases = dict.fromkeys((scheme.first_gradients or scheme.gradients, scheme.gradients))
    paths = {over: gradient_path(over, topology, place.device, wire, bucket_bytes) for over in phases}
    replicas = Replicas(module, [optimizer], bucket_bytes)
    settings = vars(scheme).get("settings_of_test", {})
    samples = SampleWeights() if unequal_data else None
    with ExitStack() as closing:
        for path in paths.values():
            closing.callback(path.close, timeout=1.0)
        own = scheme.build(Context(replicas.of(optimizer), topology, optimizer, wire, samples, **settings))
        closing.callback(own.close, timeout=1.0)
        own.begin_run(epochs, steps)
        if begins_epoch:
            own.begin_epoch(0)
        yield Rank(topology, module, optimizer, wire, own, paths, replicas, target)


def on_nodes(
    work: Callable[[Rank], T],
    scheme: Scheme,
    nodes: Nodes = ((0,), (1,)),
    *,
    weights: Sequence[float] | None = None,
    timeout: float = 20.0,
    **training: Any,
) -> list[T]:
    """What ``work`` returns for every rank of the nodes, in training as :func:`attached` says."""

    def body(topology: Topology) -> T:
        with attached(topology, scheme, **training) as rank:
            return work(rank)

    return on_ranks(body, nodes, weights, timeout=timeout)


def run_to_end(work: Callable[[Rank], T], scheme: Scheme, nodes: Nodes = ((0,), (1,)), **training: Any) -> list[T]:
    """As :func:`on_nodes`, but the run ends when ``work`` has returned: the replica holds the averaged values."""

    def body(rank: Rank) -> T:
        result = work(rank)
        rank.scheme.finish()
        return result

    return on_nodes(body, scheme, nodes, epochs=1, **training)


@dataclass
class Trace:
    after_step: list[float] = field(default_factory=list)
    after_epoch: list[float] = field(default_factory=list)
    finished: float = 0.0
    meter: dict[str, float] = field(default_factory=dict)
    scheme: RunningScheme[Scheme] | None = None


def run_oracle(
    scheme: Callable[[], Scheme],
    *,
    nodes: Nodes = TWO_BY_TWO,
    weights: Sequence[float] | None = None,
    epochs: int = 1,
    steps_per_epoch: int = 8,
    learning_rate: float = 0.5,
    momentum: float = 0.0,
    losses: Sequence[float] | None = None,
    **training: Any,
) -> list[Trace]:
    """Train one scalar from 0 with SGD; one trace per rank. ``losses`` are the epoch losses that the scheme gets."""

    def work(rank: Rank) -> Trace:
        scheme, trace = rank.scheme, Trace(scheme=rank.scheme)
        for epoch in range(epochs):
            if epoch:
                scheme.begin_epoch(epoch)
            for i in range(steps_per_epoch):
                rank.train(last=i == steps_per_epoch - 1)
                trace.after_step.append(rank.values.item())
            scheme.end_epoch(torch.tensor(losses[epoch]) if losses else None)
            trace.after_epoch.append(rank.values.item())
        scheme.finish()
        trace.finished = rank.values.item()
        trace.meter = rank.meter.snapshot()
        return trace

    inner = partial(torch.optim.SGD, lr=learning_rate, momentum=momentum)
    return on_nodes(work, scheme(), nodes, weights=weights, inner=inner, epochs=epochs, **training)


def steps(number: int, look: bool = False) -> Callable[[Rank], Rank]:
    """Work that takes ``number`` steps and returns its rank."""

    def work(rank: Rank) -> Rank:
        for _ in range(number):
            rank.train()
            if look:
                rank.averaged()
        return rank

    return work
