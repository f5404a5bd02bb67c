"""Many short runs at once: every rate and seed of a method as one batch of models, on one thread.

What a simulation plays with threads and the schemes' own code, a few hundred models at a time: a step of all of them is
a handful of batched matrix products. The methods are written down plainly here, on tensors of runs, nodes and
parameters; that they end where the schemes' own code ends is a test.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from benchmarks.papers.networks import (
    CHARACTERS,
    NORM_MOMENTUM,
    NORMALIZED,
    Network,
    character_scores,
    character_split,
    normalized_scores,
    perceptron_scores,
    scores,
)
from benchmarks.papers.perceptron import EXAMPLES, PERCEPTRON
from benchmarks.papers.wires import NodeMean, ParameterMean, StateMean, decoded
from benchmarks.simulate.simulation import schedule
from benchmarks.simulate.tasks import Examples, Task, shuffled
from benchmarks.zoo import TASKS
from lightning_hiercomm.comm.codec import AsIs, Codec
from lightning_hiercomm.schemes.plateau import Plateau, PlateauDetector
from lightning_hiercomm.schemes.reducers.graphs import DirectedExponential, Graph, RandomPermutation, Ring

MOMENTUM = 0.9
_BETAS, _EPSILON, _DECAY = (0.9, 0.999), 1e-8, 0.01  # torch's AdamW
_MUON, _NEWTON_SCHULZ = 0.95, (3.4445, -4.775, 2.0315)  # torch's Muon: its momentum, and its polynomial's coefficients
_HIDDEN, _KERNEL = (slice(150, 2025), slice(2050, 3925)), (25, 75)  # the CNN's second and third kernel, as matrices
_FRESH, _TUNING = 6000, 2000
_JUDGED_AT_ONCE = 2  # what lies between two layers then stays in a cache


def data(model: str = "cnn") -> tuple[Examples, Examples, Examples]:
    """What a network of :data:`NETWORKS` is trained on, tuned by and judged by."""
    return NETWORKS[model].split()


@cache
def _mnist1d() -> tuple[Examples, Examples, Examples]:
    """MNIST-1D's own 4,000 examples to train on; 2,000 fresh ones to choose learning rates by; 4,000 to judge by."""
    from mnist1d.data import get_dataset_args, make_dataset

    arguments = get_dataset_args()
    arguments.seed, arguments.num_samples, arguments.train_split = arguments.seed + 1, _FRESH, 1.0
    made = make_dataset(arguments)
    inputs, targets = torch.tensor(made["x"], dtype=torch.float32), torch.tensor(made["y"])
    train, _ = TASKS["mnist1d"].load()
    return train, (inputs[:_TUNING], targets[:_TUNING]), (inputs[_TUNING:], targets[_TUNING:])


NETWORKS = {
    "cnn": Network(TASKS["mnist1d"], _mnist1d, scores),
    "perceptron": Network(PERCEPTRON, _mnist1d, perceptron_scores),
    "batchnorm": Network(
        NORMALIZED,
        _mnist1d,
        lambda parameters, inputs: normalized_scores(parameters, inputs)[0],
        normalized_scores,
        torch.tensor([0.0, 1.0]).repeat_interleave(25).repeat(3),
    ),
    "characters": Network(CHARACTERS, character_split, character_scores),
}
"""By the name of an arena's model."""


@dataclass(frozen=True)
class Arena:
    """What all methods of a comparison have in common.

    Attributes:
        name: What files and tables call it.
        nodes: Of one rank each.
        batch: Examples that a node takes per step.
        epochs: Of all nodes together.
        optimizer: Momentum SGD, AdamW with torch's defaults, or Muon of the CNN's hidden kernels and AdamW of the rest.
        model: A name of :data:`NETWORKS`: MNIST-1D's own CNN, a perceptron on the same data, the CNN with BatchNorm, or
            a character model.
    """

    name: str
    nodes: int
    batch: int
    epochs: int
    optimizer: Literal["sgd", "adamw", "muon"] = "sgd"
    model: Literal["cnn", "perceptron", "batchnorm", "characters"] = "cnn"

    @property
    def network(self) -> Network:
        """The model, many at once."""
        return NETWORKS[self.model]

    @property
    def task(self) -> Task:
        """Which makes initial values."""
        return self.network.task

    @property
    def scores(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Of many models."""
        return self.network.scores

    @cached_property
    def steps_per_epoch(self) -> int:
        """All nodes see as many examples as there are."""
        examples = len(data(self.model)[0][1]) if self.model == "characters" else EXAMPLES  # MNIST-1D is slow to make
        return examples // (self.nodes * self.batch)

    @property
    def steps(self) -> int:
        """Of a whole run."""
        return self.steps_per_epoch * self.epochs


def orthogonalised(matrices: Tensor) -> Tensor:
    """What torch's Muon makes of each matrix, in float32: nearly the orthogonal one next to it."""
    a, b, c = _NEWTON_SCHULZ
    matrices = matrices / matrices.flatten(-2).norm(dim=-1).clamp(min=1e-7)[..., None, None]
    for _ in range(5):
        gram = matrices @ matrices.mT
        matrices = a * matrices + (b * gram + c * gram @ gram) @ matrices
    return matrices


@dataclass
class State:
    """All runs at one moment.

    Attributes:
        arena: Where.
        weights: Runs x replicas x parameters.
        velocity: SGD's momentum, or the mean of AdamW's gradients; the same shape.
        rate: Of this step, by run; runs x 1 x 1.
        step: Steps taken before this one.
        extra: What a method remembers.
    """

    arena: Arena
    weights: Tensor
    velocity: Tensor
    rate: Tensor
    step: int = 0
    extra: dict[str, Tensor] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """Number of this one, from 0."""
        return self.step // self.arena.steps_per_epoch

    @property
    def index(self) -> int:
        """Of the step in its epoch, from 0."""
        return self.step % self.arena.steps_per_epoch

    @property
    def is_last(self) -> bool:
        """Of its epoch."""
        return self.index + 1 == self.arena.steps_per_epoch

    def descend(self, gradients: Tensor) -> None:
        """A step of every replica's optimizer."""
        if self.arena.optimizer == "sgd":
            self.velocity.mul_(MOMENTUM).add_(gradients)
            self.weights.sub_(self.rate * self.velocity)
            return
        hidden = _HIDDEN if self.arena.optimizer == "muon" else ()
        kernels = [self.weights[..., part].clone() for part in hidden]
        self._descend_by_adamw(gradients)
        for part, kernel in zip(hidden, kernels, strict=True):
            own = gradients[..., part]
            momentum = self.extra.setdefault(f"momentum from {part.start}", torch.zeros_like(kernel))
            momentum.lerp_(own, 1 - _MUON)
            way = orthogonalised(own.lerp(momentum, _MUON).unflatten(-1, _KERNEL)).flatten(-2)
            size = 0.2 * math.sqrt(max(_KERNEL))  # as large as AdamW's
            self.weights[..., part] = kernel * (1 - self.rate * _DECAY) - self.rate * size * way

    def _descend_by_adamw(self, gradients: Tensor) -> None:
        first, second = _BETAS
        squares = self.extra.setdefault("squares", torch.zeros_like(self.weights))
        self.velocity.lerp_(gradients, 1 - first)
        squares.mul_(second).addcmul_(gradients, gradients, value=1 - second)
        size = (squares / (1 - second ** (self.step + 1))).sqrt_().add_(_EPSILON)
        self.weights.mul_(1 - self.rate * _DECAY)
        self.weights.sub_(self.rate / (1 - first ** (self.step + 1)) * self.velocity / size)


class Method(ABC):
    """One way to train.

    Attributes:
        averages_gradients: One replica stands for all nodes.
        needs_node_gradients: With one replica, whether it still takes the gradients of every node.
    """

    averages_gradients = False
    needs_node_gradients = False

    def begin(self, state: State) -> None:
        """Before the first step."""

    @abstractmethod
    def step(self, state: State, gradients: Tensor) -> None:
        """From gradients at the weights to the next weights."""

    def end_epoch(self, state: State, losses: Tensor) -> None:
        """After the last step of an epoch; the mean training loss of each run."""

    def averaged(self, state: State) -> Tensor:
        """What is judged: runs x parameters."""
        return state.weights.mean(1)

    def shares(self, arena: Arena) -> Tensor:
        """What each of a replica's examples counts in its loss."""
        count = arena.batch * (arena.nodes if self.averages_gradients else 1)
        return torch.full((count,), 1 / count)


class Synchronous(Method):
    """All-reduce, of gradients whose examples may count unequally.

    Args:
        batches: Of each node, if they are not the arena's.
        weights: Of the nodes' mean gradients; by default in proportion to their examples.
    """

    averages_gradients = True

    def __init__(self, batches: Sequence[int] | None = None, weights: Sequence[float] | None = None) -> None:
        self._batches, self._weights = batches, weights

    def step(self, state: State, gradients: Tensor) -> None:
        state.descend(gradients)

    def shares(self, arena: Arena) -> Tensor:
        if self._batches is None or self._weights is None:
            return super().shares(arena)
        of_nodes = [torch.full((size,), w / size) for size, w in zip(self._batches, self._weights, strict=True)]
        return torch.cat(of_nodes)


class Compressed(Method):
    """All-reduce of encoded gradients, with error feedback where the codec's payloads do not add.

    Args:
        codec: Encodes the gradients.
    """

    averages_gradients = needs_node_gradients = True

    def __init__(self, codec: Codec) -> None:
        self._mean = NodeMean(codec)

    def step(self, state: State, gradients: Tensor) -> None:
        state.descend(self._mean(gradients))


class Averages(Method):
    """The mean of parameters every so many steps, and at the end of an epoch; None: only there.

    Args:
        every: Steps between two means, counted in the epoch.
        codec: Encodes the differences from the last mean.
        synchronous: The share of the run in which nodes take the mean gradient instead, at every step.
        with_state: Whether means are also taken of what the optimizer remembers.
    """

    def __init__(
        self, every: int | None, codec: Codec | None = None, synchronous: float = 0.0, with_state: bool = False
    ) -> None:
        self._every, self._codec = every, codec or AsIs()
        self._synchronous, self._with_state = synchronous, with_state

    def begin(self, state: State) -> None:
        self._mean = ParameterMean(self._codec, state.weights)
        self._gradients = NodeMean(self._codec)
        self._of_state = [StateMean(self._codec, of_squares) for of_squares in (False, True)]

    def step(self, state: State, gradients: Tensor) -> None:
        until = synchronous_steps(state.arena, self._synchronous)
        if state.step < until:
            state.descend(self._gradients(gradients).expand_as(gradients))
            if state.step + 1 == until:
                self._mean = ParameterMean(self._codec, state.weights)
            return
        state.descend(gradients)
        if state.is_last or (self._every is not None and (state.index + 1) % self._every == 0):
            state.weights.copy_(self._mean(state.weights).expand_as(state.weights))
            if self._with_state:
                tensors = [state.velocity, *(state.extra[name] for name in ("squares",) if name in state.extra)]
                for mean, tensor in zip(self._of_state, tensors, strict=False):
                    tensor.copy_(mean(tensor).expand_as(tensor))


class Stale(Method):
    """DASO with nodes of one rank.

    Args:
        every: B.
        staleness: S, at least 1.
        warm_up: Epochs, or a fraction of one.
        cool_down: Epochs, or a fraction of one.
        merge: Eq. 1, or all local progress kept.
        adapts: B and S follow the loss.
        patience: Epochs that may fail to improve it by 5 % before they do.
        codec: Encodes the differences from the last mean; B and S must then stay as they are.
    """

    def __init__(
        self,
        every: int,
        staleness: int,
        warm_up: float,
        cool_down: float,
        merge: Literal["eq1", "delta"] = "eq1",
        adapts: bool = True,
        patience: int = 0,
        codec: Codec | None = None,
    ) -> None:
        if adapts and codec is not None:
            raise ValueError("runs whose B and S follow their loss do not send at the same steps: give adapts=False")
        self._codec = codec or AsIs()
        self._first, self._merge, self._adapts, self._patience = (every, staleness), merge, adapts, patience
        self._warm_up, self._cool_down = warm_up, cool_down

    def begin(self, state: State) -> None:
        runs = len(state.weights)
        self._cycles = [self._first] * runs
        self._plateaus = [PlateauDetector(Plateau(self._patience)) for _ in range(runs)]
        self._due = torch.full((runs,), -1)
        self._mean = ParameterMean(self._codec, state.weights)
        state.extra["sent"] = torch.zeros_like(state.weights)
        state.extra["mean"] = torch.zeros_like(state.weights[:, :1])

    def _is_blocking(self, state: State) -> bool:
        per_epoch = state.arena.steps_per_epoch
        begins, ends = int(self._warm_up * per_epoch), state.arena.steps - int(self._cool_down * per_epoch)
        return not begins <= state.step < ends

    def step(self, state: State, gradients: Tensor) -> None:
        state.descend(gradients)
        if self._is_blocking(state) or state.is_last:
            state.weights.copy_(self._mean(state.weights).expand_as(state.weights))
            self._due.fill_(-1)
            return
        weights, sent, means = state.weights, state.extra["sent"], state.extra["mean"]
        arrived = self._due == state.step
        if arrived.any():
            mean = means[arrived]
            if self._merge == "delta":
                weights[arrived] += mean - sent[arrived]
            else:
                local = torch.tensor([2.0 * s for (_, s), due in zip(self._cycles, arrived, strict=True) if due])
                local, nodes = local[:, None, None], state.arena.nodes
                weights[arrived] = (local * weights[arrived] + nodes * mean) / (local + nodes)
        leaves = torch.tensor([state.index % every == 0 for every, _ in self._cycles])
        if leaves.any():
            sent[leaves] = weights[leaves]
            means[leaves] = self._mean(weights) if leaves.all() else weights[leaves].mean(1, keepdim=True)
            self._due[leaves] = state.step + torch.tensor([s for _, s in self._cycles])[leaves]

    def end_epoch(self, state: State, losses: Tensor) -> None:
        if self._is_blocking(state) or not self._adapts:
            return
        for run, loss in enumerate(losses.tolist()):
            if self._plateaus[run].reached(loss):
                every, staleness = self._cycles[run]
                halved = max(1, every // 2), max(1, staleness // 2)
                self._cycles[run] = self._first if (every, staleness) == (1, 1) else halved


class Gossips(Method):
    """Every node mixes each fragment of its parameters in equal shares with what equally many others send.

    Args:
        graph: Makes the graph.
        fragments: Number of equal parts.
        codec: Encodes the share that a node sends, and subtracts from its own value.
    """

    def __init__(self, graph: Callable[[], Graph], fragments: int, codec: Codec | None = None) -> None:
        self._graph, self._fragments, self._codec = graph, fragments, codec or AsIs()

    def begin(self, state: State) -> None:
        self._drawn = self._graph()
        count = state.weights.shape[-1]
        self._sizes = [
            count * (i + 1) // self._fragments - count * i // self._fragments for i in range(self._fragments)
        ]

    def step(self, state: State, gradients: Tensor) -> None:
        state.descend(gradients)
        nodes = state.arena.nodes
        for fragment, part in enumerate(state.weights.split(self._sizes, 2)):
            sources: list[list[int]] = [[] for _ in range(nodes)]
            for source, targets in enumerate(self._drawn.send_to(nodes, state.step, fragment)):
                for target in targets:
                    sources[target].append(source)
            arrived_from = [list(each) for each in zip(*sources, strict=True)]
            if self._codec.narrows(part.dtype):
                sent = decoded(part / (1 + len(arrived_from)), self._codec)
                part.add_(sum(sent[:, each] - sent for each in arrived_from))
                continue
            part.copy_(sum((part[:, each] for each in arrived_from), part) / (1 + len(arrived_from)))


class Delayed(Method):
    """SSD-SGD with GLU at its paper's weights, of one-rank nodes and a server.

    Args:
        delay: k.
        warm_up: The share of all steps that is synchronous, to the next multiple of k.
    """

    _ALPHA, _BETA, _LOCAL = 2.0, 0.5, 4.0

    def __init__(self, delay: int, warm_up: float) -> None:
        self._delay, self._warm_up = delay, warm_up

    def begin(self, state: State) -> None:
        self.warmup_steps = warm_up_steps(state.arena, self._delay, self._warm_up)
        state.velocity = state.velocity[:, :1].clone()
        state.extra["server"] = state.weights[:, :1].clone()
        state.extra["pulled"] = state.extra["server"].clone()

    def step(self, state: State, gradients: Tensor) -> None:
        delayed, extra = state.step - self.warmup_steps, state.extra
        arrived = extra.pop("arrived", None)
        if delayed >= 0:
            weights = state.weights if arrived is None else arrived.expand_as(state.weights)
            synchronous = (extra["pulled"] - weights) * ((1 - MOMENTUM) / self._delay) / state.rate
            moved = self._ALPHA * gradients + self._BETA * synchronous
            state.weights = weights - self._LOCAL * state.rate * moved
            if arrived is not None:
                extra["pulled"] = arrived
        state.velocity.mul_(MOMENTUM).add_(gradients.mean(1, keepdim=True))
        extra["server"] = extra["server"] - state.rate * state.velocity
        if delayed < 0:
            state.weights = extra["server"].expand_as(state.weights).clone()
            extra["pulled"] = extra["server"]
        elif delayed % self._delay == self._delay - 1:
            extra["arrived"] = extra["server"]

    def averaged(self, state: State) -> Tensor:
        return state.extra["server"][:, 0]


class Outer(Method):
    """DiLoCo: an outer Nesterov SGD takes the way that nodes went for a gradient; rate 1 and no momentum: plain means.

    Args:
        every: H, counted over the run.
        rate: Of the outer optimizer.
        momentum: The same.
        staleness: Steps between the sending and the merging of a synchronization.
        keep_local: Weight of what a node has become by itself, when it arrives.
        codec: Encodes how far nodes went.
    """

    def __init__(
        self,
        every: int,
        rate: float,
        momentum: float,
        staleness: int = 0,
        keep_local: float = 0.0,
        codec: Codec | None = None,
    ) -> None:
        self._every, self._rate, self._momentum = every, rate, momentum
        self._staleness, self._keep_local, self._codec = staleness, keep_local, codec or AsIs()

    def begin(self, state: State) -> None:
        self._mean = NodeMean(self._codec)
        state.extra["reference"] = state.weights[:, :1].clone()
        state.extra["way"] = torch.zeros_like(state.extra["reference"])

    def step(self, state: State, gradients: Tensor) -> None:
        state.descend(gradients)
        done = state.step + 1
        if (done + self._staleness) % self._every == 0:
            state.extra["moved"] = self._mean(state.weights - state.extra["reference"])
        if done % self._every == 0:
            reference, way = state.extra["reference"], state.extra["way"]
            difference = -state.extra["moved"]
            way.mul_(self._momentum).add_(difference)
            reference.sub_(self._rate * (difference + self._momentum * way))
            state.weights.lerp_(reference.expand_as(state.weights), 1.0 - self._keep_local)


def synchronous_steps(arena: Arena, share: float) -> int:
    """Return the steps of the first phase of :class:`Averages`."""
    return round(share * arena.steps)


def warm_up_steps(arena: Arena, delay: int, share: float) -> int:
    """Return the share of the run, rounded up to a multiple of the delay."""
    return -(-round(share * arena.steps_per_epoch * arena.epochs) // delay) * delay


def crossover() -> Gossips:
    """Crossover-SGD, flat."""
    return Gossips(RandomPermutation, 8)


def push() -> Gossips:
    """SGP; every node sends and receives once per step, so its push-sum weights stay 1."""
    return Gossips(DirectedExponential, 1)


def ring() -> Gossips:
    """DP-SGD's graph."""
    return Gossips(Ring, 1)


def train(
    arena: Arena,
    method: Method,
    runs: Sequence[tuple[float, int]],
    looks: Collection[int] = (),
    look: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Return the averaged parameters at the end, runs x parameters; then running statistics if the network has them.

    Args:
        arena: Of all runs.
        method: Of all runs.
        runs: Learning rate and seed of each.
        looks: Numbers of steps after which ``look`` gets the averaged parameters at that step.
        look: Evaluates them.
    """
    (inputs, targets), _, _ = data(arena.model)
    network = arena.network
    seeds = sorted({seed for _, seed in runs})
    of_seed = torch.tensor([seeds.index(seed) for _, seed in runs])
    initial = torch.stack([parameters_to_vector(arena.task.model(seed).parameters()).detach() for seed in seeds])
    replicas = 1 if method.averages_gradients else arena.nodes
    # BatchNorm takes each node's own statistics
    parts = arena.nodes if method.needs_node_gradients or network.train_scores is not None else replicas
    weights = initial[of_seed][:, None].repeat(1, replicas, 1)
    statistics = None if network.statistics is None else network.statistics.repeat(len(runs), 1)
    highest = torch.tensor([rate for rate, _ in runs])[:, None, None]
    state = State(arena, weights, torch.zeros_like(weights), highest)
    method.begin(state)
    steps = arena.steps
    shares = method.shares(arena) if parts == replicas else torch.full((arena.batch,), 1 / arena.batch)
    losses = torch.zeros(len(runs))
    whole = arena.nodes * arena.batch

    def averaged() -> Tensor:
        parameters = method.averaged(state)
        return parameters if statistics is None else torch.cat([parameters, statistics], 1)

    for step in range(steps):
        state.step, state.rate = step, highest * schedule(step, steps)
        orders = [shuffled_once(len(targets), seed, state.epoch) for seed in seeds]
        chosen = torch.stack([order[state.index * whole :][:whole] for order in orders])[of_seed]
        chosen = chosen.unflatten(1, (parts, -1)).flatten(0, 1)
        leaves = state.weights.detach().expand(-1, parts, -1).requires_grad_()
        if network.train_scores is None:
            found = network.scores(leaves.flatten(0, 1), inputs[chosen])
        else:
            found, of_batch = network.train_scores(leaves.flatten(0, 1), inputs[chosen])
            assert statistics is not None
            statistics.lerp_(of_batch.unflatten(0, (len(runs), parts)).mean(1), NORM_MOMENTUM)  # the nodes' mean
        each = functional.cross_entropy(found.flatten(0, 1), targets[chosen].flatten(), reduction="none")
        loss = each.view(len(chosen), -1) @ shares
        (gradients,) = torch.autograd.grad(loss.sum(), leaves)
        with torch.no_grad():
            losses += loss.detach().view(len(runs), parts).mean(1) / arena.steps_per_epoch
            if parts > replicas and not method.needs_node_gradients:
                gradients = gradients.mean(1, keepdim=True)
            method.step(state, gradients)
            if state.is_last:
                method.end_epoch(state, losses)
                losses = torch.zeros(len(runs))
            if look is not None and step + 1 in looks:
                look(averaged())
    return averaged()


shuffled_once = cache(shuffled.__wrapped__)


@torch.no_grad()
def accuracies(arena: Arena, parameters: Tensor, examples: Examples) -> list[float | None]:
    """Of each of the arena's models, in percent; None if it diverged."""
    inputs, targets = examples
    found: list[float | None] = []
    for part in parameters.split(_JUDGED_AT_ONCE):
        right = (arena.scores(part, inputs.expand(len(part), -1, -1)).argmax(2) == targets).float().mean(1)
        finite = part.isfinite().all(1)
        found += [100 * float(share) if ok else None for share, ok in zip(right, finite, strict=True)]
    return found
