"""Random combinations of schemes and settings: ``python -m tools.combinations``, in a checkout.

``--random 5000 --seed 1`` draws combinations, each from its own number; ``--only 1234`` repeats one of them. Ranks are
threads, so a combination takes milliseconds. Its parameters are compared with a calculation in float64, in one process
without buckets and wires, which shares no code with the schemes. If numbers must differ from it (encoded payloads),
the ranks of a node must still be equal at all times, and all ranks at the end. Reading the averaged model and resuming
from a file must change no bit.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests", "tests/support", "tools")]

import torch
from devices import on_a_gpu
from harness import Rank, attached, flattened, on_ranks, reloaded, with_policy
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes import (
    SCHEMES,
    DirectedExponential,
    Epochs,
    Every,
    Full,
    Graph,
    OuterOptimizer,
    ParameterSync,
    Plateau,
    RandomPermutation,
    Replace,
    Ring,
    Scheme,
    Staggered,
)

Vectors = dict[int, Tensor]
Gradient = Callable[[int, int, Sequence[str], Tensor], Tensor]

_NODES: dict[str, tuple[tuple[int, ...], ...]] = {
    "1+1": ((0,), (1,)),
    "2x2": ((0, 1), (2, 3)),
    "3+1": ((0, 1, 2), (3,)),
    "2+3": ((0, 1), (2, 3, 4)),
    "1+1+1": ((0,), (1,), (2,)),
    "4 of 1": ((0,), (1,), (2,), (3,)),
    "1+2+1": ((0,), (1, 2), (3,)),
    "1 of 2": ((0, 1),),
    "1 of 1": ((0,),),
}
_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.03, momentum=0.9),
    "nesterov and decay": partial(SGD, lr=0.03, momentum=0.8, nesterov=True, weight_decay=0.1),
    # a large eps: a small gradient's sign decides nothing, which rounding may turn
    "adam": partial(Adam, lr=0.05, eps=0.1),
    "adamw": partial(AdamW, lr=0.05, eps=0.1, weight_decay=0.1),
}
_OUTER: dict[str, Callable[..., Optimizer]] = {
    "nesterov": partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
    "sgd": partial(SGD, lr=1.0),
    "momentum": partial(SGD, lr=0.5, momentum=0.5),
    "adam": partial(Adam, lr=0.1, eps=0.1),
}
_GRAPHS: dict[str, Callable[[], Graph]] = {
    "ring": Ring,
    "full": Full,
    "exponential": DirectedExponential,
    "permutation": RandomPermutation,
    "cyclic": partial(RandomPermutation, "cyclic"),
    "roulette": partial(RandomPermutation, "roulette"),
    "unfair": partial(RandomPermutation, "independent"),
}
_RANDOM_GRAPHS = ("permutation", "cyclic", "roulette", "unfair")
_DTYPES = {"mixed": ("float32", "float64", "float64"), "mixed and narrow": ("float32", "float64", "bfloat16")}
"""Of the parameters, where they are not all of one."""
_SHAPES = {"a": (3,), "b": (2, 2), "c": (4,)}
_SAID_EVERY = 250
_HANGS = 20.0  # seconds; a run takes milliseconds, but not on a busy machine
HALVES = (("a", "b"), ("c",))


@dataclass(frozen=True)
class Combination:
    """One run; the defaults are the simplest values."""

    scheme: str = "all_reduce"  # the kind of scheme
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the scheme; objects are given by a name
    nodes: str = "1+1"  # of how many ranks
    weights: tuple[float, ...] | None = None  # of the ranks
    reweight: int | None = None  # before which step the ranks get their weights in reversed order
    wire: str | None = None  # payload type between nodes
    raw: bool = False  # whether parameters themselves are encoded
    bucket_bytes: int = 2**20  # upper bound of a bucket
    dtype: str = "float64"  # of the parameters
    optimizer: str = "sgd"  # the user's
    two: bool = False  # whether two optimizers have a half of the parameters each
    buffer: str | None = None  # float buffers: none, ``"statistics"`` or ``"mask"``, which holds -inf
    state: bool = False  # whether the optimizer's state is averaged
    unfreeze: int | None = None  # before which step a parameter that was frozen is trained
    freeze: int | None = None  # before which step one is frozen
    again: int | None = None  # before which step that one is trained again
    clamp: float | None = None  # the bound that a program writes to the weights between steps
    looks: tuple[int, ...] = ()  # after which steps a callback reads the averaged model
    resume: int | None = None  # after which step the run goes on from a file
    skip: tuple[int, int] | None = None  # step and node whose gradient scaler skips the optimizer
    losses: tuple[float, ...] = ()  # of the epochs, on rank 0; empty if the scheme gets none
    epochs: int = 2  # how many
    steps: int = 7  # of every epoch
    knows_last: bool = True  # whether the last step of an epoch is known as such
    warmup: int | float = 0  # ``warmup_steps`` of periodic averaging and DiLoCo: steps, or a share of the run
    grows: bool = False  # whether the learning rate grows from step to step

    def __str__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(said)})"

    @property
    def ranks(self) -> list[int]:
        return [rank for node in _NODES[self.nodes] for rank in node]

    @property
    def total(self) -> int:
        return self.epochs * self.steps

    @property
    def synchronous_steps(self) -> int:
        """How many steps average gradients over all ranks before the schedule begins."""
        return round(self.warmup * self.total) if isinstance(self.warmup, float) else self.warmup

    def argument(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def make(self) -> Scheme:
        arguments = dict(self.arguments)
        if "outer_optimizer" in arguments:
            arguments["outer_optimizer"] = _OUTER[arguments["outer_optimizer"]]
        for name in {"graph", "reducer"} & arguments.keys():
            arguments[name] = _GRAPHS[arguments[name]]() if arguments[name] in _GRAPHS else arguments[name]
        if self.scheme == "parameter_sync":
            kind, period = arguments["schedule"]
            arguments["schedule"] = Staggered(period) if kind == "staggered" else Every(period, kind)
            keep = arguments.pop("keep_local", 0.0)
            if arguments["merge"] in _OUTER:
                arguments["merge"] = OuterOptimizer(_OUTER[arguments["merge"]], keep)
            elif keep:
                arguments["merge"] = Replace(keep)
        if self.warmup:
            arguments["warmup_steps"] = self.warmup
        scheme = {**SCHEMES, "parameter_sync": ParameterSync}[self.scheme](**arguments)
        return with_policy(scheme, average_optimizer_state=self.state)

    def weights_at(self, step: int) -> list[float]:
        weights = list(self.weights or [1.0] * len(self.ranks))
        if self.reweight is not None and step >= self.reweight:
            weights.reverse()
        return [weight / sum(weights) for weight in weights]

    def dtype_of(self, name: str) -> torch.dtype:
        dtypes = dict(zip(_SHAPES, _DTYPES[self.dtype], strict=True)) if self.dtype in _DTYPES else {}
        return getattr(torch, dtypes.get(name, self.dtype))

    def loss(self, rank: int, epoch: int) -> float | None:
        """Return a rank's loss of an epoch."""
        return self.losses[epoch] * (1 + 0.1 * rank) if self.losses else None

    def rate_at(self, step: int) -> float:
        """Return the factor of the learning rate in a step."""
        return 0.5 * (1 + step) if self.grows else 1.0

    def knows_last_at(self, step: int) -> bool:
        """Whether this step is known to be its epoch's last one, if it is."""
        return self.knows_last

    def clipped(self, gradient: Tensor) -> Tensor:
        """Return the gradient that a rank's optimizer gets."""
        return gradient

    def written(self, values: Tensor) -> Tensor:
        """Return the parameters after a program has written to them."""
        return values

    def frozen_at(self, step: int) -> list[str]:
        """Names of the parameters that are not trained in a step."""
        unfrozen = self.unfreeze is None or step >= self.unfreeze
        frozen = self.freeze is not None and self.freeze <= step < (self.total if self.again is None else self.again)
        return [*([] if unfrozen else ["b"]), *(["a"] if frozen else [])]


# ---- drawing ---------------------------------------------------------------------------------------------------------


def drawn(number: int) -> Combination:
    """The combination of a number, always the same."""
    draw = random.Random(number)
    chance = lambda probability: draw.random() < probability  # noqa: E731
    name = draw.choice([*_NODES, "2x2", "3+1", "1+1+1"])
    nodes = _NODES[name]
    epochs, steps = draw.randint(1, 3), draw.randint(3, 8)
    total = epochs * steps
    kind = draw.choice(
        ["all_reduce", "periodic", "daso", "steps_delay", "gossip", "diloco", "parameter_sync", "parameter_sync"]
    )
    arguments = _arguments(kind, draw, len(nodes))
    ranks = sum(map(len, nodes))
    wire = draw.choice([None, None, None, "float32", "bfloat16", "float16", "int8", "int4"])
    combination = Combination(
        kind,
        arguments,
        name,
        weights=tuple(float(draw.randint(1, 4)) for _ in range(ranks)) if chance(0.4) else None,
        wire=wire,
        raw=wire in ("bfloat16", "float16", "float32") and chance(0.3),
        bucket_bytes=draw.choice([8, 16, 40, 2**20, 2**20]),
        dtype=draw.choice(["float64", "float64", "float64", "float32", "bfloat16", *_DTYPES]),
        optimizer=draw.choice([*_OPTIMIZERS]),
        two=chance(0.2),
        buffer=draw.choice([None, None, "statistics", "mask"]),
        looks=tuple(sorted(draw.sample(range(total), min(2, total)))) if chance(0.4) else (),
        resume=draw.randrange(total) if chance(0.3) else None,
        epochs=epochs,
        steps=steps,
        knows_last=chance(0.8),
    )
    more: dict[str, Any] = {}
    if combination.argument("plateau") is not None:
        more = {"losses": tuple(draw.choice([1.0, 0.99, 0.9, 0.5]) for _ in range(6)), "epochs": 6}
        more["steps"] = min(steps, 5)
        total = 6 * more["steps"]
    if combination.weights is not None and chance(0.4):
        more["reweight"] = draw.randrange(total)
    if kind == "periodic" or (kind == "daso" and combination.argument("staleness") == 0):
        more["state"] = chance(0.3)
    if chance(0.2):
        more["unfreeze"] = draw.randrange(1, total)
    if chance(0.15):
        more["freeze"] = freeze = draw.randrange(1, total)
        more["again"] = draw.randrange(freeze + 1, total) if freeze + 1 < total and chance(0.5) else None
    if chance(0.15):
        if kind == "steps_delay":  # which takes them over in its warm-up
            arguments["warmup_steps"] = arguments["delay"] * total
        more["clamp"] = 0.4
    if kind != "all_reduce" and chance(0.2):
        more["skip"] = draw.randrange(total), draw.randrange(len(nodes))
    if kind in ("periodic", "diloco") and chance(0.4):
        more["warmup"] = draw.choice([draw.randint(1, total), draw.choice([0.25, 0.5, 0.9])])
    waits = arguments.get("fragments") == 1 and arguments.get("staleness") == 0 and not arguments.get("keep_local")
    if kind == "diloco" and waits and chance(0.3):
        more["state"] = True
    combination = replace(combination, **more)
    return combination if goes_together(combination) else drawn(number + 1_000_003)


_NAMED_PARTS = (["a"], ["c"], ["c", "a"], ["b", "c"])


def _arguments(kind: str, draw: random.Random, nodes: int) -> dict[str, Any]:
    if kind == "periodic":
        period = draw.choice([1, 2, 3, 4, None])
        return {
            "sync_every": period,
            "at_epoch_end": period is None or draw.random() < 0.6,
            "order": draw.choice(["after_step", "after_step", "before_step"]),
        }
    if kind == "daso":
        period = draw.randint(1, 4)
        adapts = draw.random() < 0.3
        arguments = {
            "sync_every": period,
            "staleness": draw.randint(0, period),
            "warmup": Epochs(draw.choice([0, 0, 1])),
            "cooldown": Epochs(draw.choice([0, 0, 1])),
            "merge": draw.choice(["eq1", "delta"]),
            "reducer": draw.choice(["leader", "sharded"]),
        }
        plateau = Plateau(threshold=draw.choice([0.0, 0.05]), patience=draw.randint(0, 1))
        arguments["plateau"] = plateau if adapts else None
        arguments["compressed_phases"] = draw.choice(["all", "all", "blocking"])
        return arguments
    if kind == "steps_delay":
        delay = draw.randint(1, 4)
        return {
            "delay": delay,
            "warmup_steps": delay * draw.randint(0, 2),
            "local_update": draw.choice(["glu", "glu", "sgd", "dc_asgd"]),
        }
    if kind == "gossip":
        return {
            "graph": draw.choice([*_GRAPHS]),
            "fragments": draw.choice([1, 2, 3, 4, 5, *_NAMED_PARTS]),
            "overlap": draw.random() < 0.4,
            "push_sum": draw.random() < 0.8,
        }
    if kind == "diloco":
        fragments = draw.choice([1, 2, 3, *_NAMED_PARTS])
        parts = fragments if isinstance(fragments, int) else 3
        period = draw.randint(parts, 6)
        return {
            "sync_every": period,
            "outer_optimizer": draw.choice([*_OUTER]),
            "fragments": fragments,
            "staleness": draw.randint(0, -(-period // parts) - 1),
            "keep_local": draw.choice([None, 0.0, 0.5]),
        }
    if kind == "parameter_sync":
        fragments = draw.choice([1, 2, 3, *_NAMED_PARTS])
        name, period = draw.choice(["run", "epoch", "staggered"]), draw.randint(1, 5)
        schedule = Staggered(period) if name == "staggered" else Every(period, name)
        merge = draw.choice(["replace", "eq1", "delta", *_OUTER])
        reducer = draw.choice(["sharded", "sharded", "leader", *_GRAPHS])
        return {
            "schedule": (name, period),
            "fragments": fragments,
            "reducer": "sharded" if (merge in _OUTER and reducer == "leader") or reducer == "unfair" else reducer,
            "merge": merge,
            "keep_local": draw.choice([0.0, 0.5]) if merge in ("replace", *_OUTER) else 0.0,
            "staleness": draw.randint(0, schedule.longest_staleness(fragments if isinstance(fragments, int) else 3)),
        }
    return {}


def goes_together(c: Combination) -> bool:
    """Return whether no documented rule forbids a combination."""
    parts = c.argument("fragments", 1)
    is_cut_late = isinstance(parts, int) and parts > 1 and c.dtype in _DTYPES and c.argument("staleness")
    is_server = c.scheme == "steps_delay"
    return not (
        (is_server and c.argument("local_update") == "glu" and c.optimizer.startswith("adam"))  # refused: GLU needs SGD
        or (is_server and c.wire in ("int8", "int4"))  # refused: a server gets gradients
        or is_cut_late  # may be refused: parts are of one type, so there may be more, and each is due earlier
        # refused: one half has no such parameters
        or (c.two and parts in _NAMED_PARTS)
        or (c.skip is not None and c.skip[0] < c.synchronous_steps)  # then all nodes skip
        or (c.dtype in _DTYPES and parts == 1 and _is_late_for_types(c))  # refused: one exchange is in flight at a time
    )


def _is_late_for_types(c: Combination) -> bool:
    """Whether parts of one type each, of which there are more then, are due before they can be merged."""
    if c.argument("fragments") is None or not c.argument("staleness"):
        return False
    period = c.argument("sync_every") or c.argument("schedule")[1]
    is_staggered = c.scheme == "diloco" or c.argument("schedule")[0] == "staggered"
    return is_staggered and c.argument("staleness") > Staggered(period).longest_staleness(len({*_DTYPES[c.dtype]}))


# ---- running ---------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    """The record of one half of a rank's parameters."""

    trace: list[Tensor] = field(default_factory=list)  # all values after every step
    looks: dict[int, Tensor] = field(default_factory=dict)  # averaged values
    end: Tensor | None = None  # all values at the end
    buffer: Tensor | None = None  # the buffer at the end

    @property
    def last(self) -> list[Tensor]:
        """What it ends with."""
        return [tensor for tensor in (self.end, self.buffer) if tensor is not None]


def halves_of(c: Combination) -> list[dict[str, tuple[int, ...]]]:
    if not c.two:
        return [_SHAPES]
    return [{name: _SHAPES[name] for name in half} for half in HALVES]


def _target(rank: int, name: str, step: int) -> Tensor:
    """Where a rank's loss of a step is least."""
    numel = math.prod(_SHAPES[name])
    index = torch.arange(numel, dtype=torch.float64) + 10 * [*_SHAPES].index(name)
    return torch.sin(1.3 * index + 2.1 * rank) + 0.3 * torch.cos(index + 0.7 * step * (rank + 1))


def run(c: Combination, looks: bool = True, resumes: bool = True) -> list[list[Record]]:
    """Train it on threads; what every rank saw, by half."""
    scheme = c.make()
    states: dict[int, Any] = {}

    def body(first: int, end: int, topology: Topology) -> list[Record]:
        records = [Record() for _ in halves_of(c)]
        with ExitStack() as stack:
            if c.reweight is not None and first >= c.reweight:
                topology.set_weights(c.weights_at(first))
            halves = [stack.enter_context(_attached(c, scheme, topology, shapes, first)) for shapes in halves_of(c)]
            if first:
                for half, state in zip(halves, states[topology.rank], strict=True):
                    half.load(state)
                    if "buffer" in state:
                        half.module.get_buffer("buffer").copy_(state["buffer"])
            for step in range(first, end):
                _one_step(c, step, topology, halves, records, looks)
            if end < c.total:
                states[topology.rank] = [_state(half) for half in halves]
            else:
                for half, seen in zip(halves, records, strict=True):
                    half.scheme.finish()
                    seen.end = half.values
                    seen.buffer = half.module.get_buffer("buffer").cpu() if c.buffer else None
        return records

    nodes, weights = _NODES[c.nodes], c.weights
    cut = c.total if c.resume is None or not resumes else c.resume + 1
    before = on_ranks(partial(body, 0, cut), nodes, weights, timeout=_HANGS)
    if cut == c.total:
        return before
    after = on_ranks(partial(body, cut, c.total), nodes, weights, timeout=_HANGS)
    return [
        [Record(b.trace + a.trace, {**b.looks, **a.looks}, a.end, a.buffer) for b, a in zip(old, new, strict=True)]
        for old, new in zip(before, after, strict=True)
    ]


def _attached(c: Combination, scheme: Scheme, topology: Topology, shapes: Any, first: int) -> Any:
    return attached(
        topology,
        scheme,
        shapes=shapes,
        start=0.5,
        inner=_OPTIMIZERS[c.optimizer],
        wire=Wire(c.wire, c.raw),
        bucket_bytes=c.bucket_bytes,
        dtype={name: c.dtype_of(name) for name in shapes},
        frozen=[name for name in c.frozen_at(max(0, first - 1)) if name in shapes],
        buffer={None: None, "statistics": torch.ones(3), "mask": torch.full((3, 3), -math.inf).triu(1)}[c.buffer],
        epochs=c.epochs,
        steps=c.total,
    )


def _state(half: Rank) -> dict[str, Any]:
    state = half.state()
    if half.module.get_buffer("buffer") is not None:
        state["buffer"] = half.module.get_buffer("buffer").clone()
    return reloaded(state)


def _one_step(
    c: Combination, step: int, topology: Topology, halves: list[Rank], records: list[Record], looks: bool
) -> None:
    epoch, in_epoch = divmod(step, c.steps)
    if in_epoch == 0 and epoch:
        for half in halves:
            half.scheme.begin_epoch(epoch)
    for group in (group for half in halves for group in half.optimizer.param_groups):
        group["lr"] = _OPTIMIZERS[c.optimizer].keywords["lr"] * c.rate_at(step)  # type: ignore[attr-defined]
    if step and c.clamp is not None:
        for half in halves:
            with torch.no_grad():
                for parameter in half.trained:  # as some programs write, and as others do
                    (parameter.data if step % 2 else parameter).clamp_(-c.clamp, c.clamp)
    if step == c.reweight:
        topology.set_weights(c.weights_at(step))
    for half, seen in zip(halves, records, strict=True):
        if step and c.frozen_at(step) != c.frozen_at(step - 1):
            _unfreeze(half, c.frozen_at(step))
        names = [name for name, p in half.module.named_parameters() if p.requires_grad]
        target = flattened([_target(topology.rank, name, step) for name in names])

        def gradient(x: Tensor, target: Tensor = target, half: Rank = half) -> Tensor:
            flat = x - target.to(x.dtype)
            if c.buffer == "statistics":
                half.module.get_buffer("buffer").mul_(0.9).add_(0.1 * topology.node)  # DDP gives a node one value
            return flat

        last = c.knows_last and in_epoch == c.steps - 1
        half.train(gradient, last=last, skip=(step, topology.node) == c.skip)
        if in_epoch == c.steps - 1:
            loss = c.loss(topology.rank, epoch)
            half.scheme.end_epoch(None if loss is None else torch.tensor(loss, dtype=torch.float64))
        seen.trace.append(half.values.double())
        if looks and step in c.looks:
            seen.looks[step] = half.averaged().double()


def _unfreeze(half: Rank, frozen: Sequence[str]) -> None:
    changed = False
    for name, parameter in half.module.named_parameters():
        changed |= parameter.requires_grad == (name in frozen)
        parameter.requires_grad_(name not in frozen)
        if name in frozen:
            parameter.grad = None
    if changed:
        half.scheme.synchronize()
        half.scheme.follow(half.replica())


# ---- the independent calculation in float64 --------------------------------------------------------------------------


class Reference:
    """One half of a run, in one process: every rank's parameters are float64 tensors of its own.

    Args:
        c: What is run.
        shapes: Of the half's parameters.
        gradient: Of a rank in a step, given the names and the values of what is trained, flat. Default: towards the
            rank's targets.

    Attributes:
        trace: All values after every step, by rank.
        looks: Averaged values.
        end: All values when the run is over.
        stop_after: The number of steps of a run that ends early.
    """

    def __init__(self, c: Combination, shapes: dict[str, tuple[int, ...]], gradient: Gradient | None = None) -> None:
        self.c, self.shapes = c, shapes
        self.gradient = gradient or self._towards_targets
        self.nodes = _NODES[c.nodes]
        self.node_of = {rank: number for number, node in enumerate(self.nodes) for rank in node}
        self.parameters = {
            rank: {name: torch.full(shape, 0.5, dtype=torch.float64) for name, shape in shapes.items()}
            for rank in c.ranks
        }
        self.optimizers = {rank: _OPTIMIZERS[c.optimizer](list(self.parameters[rank].values())) for rank in c.ranks}
        self.trace: list[Vectors] = []
        self.looks: dict[int, Tensor] = {}
        self.stop_after: int | None = None
        self.step = 0
        self.encoded_state: list[tuple[int, str]] = []  # of the last average, by place among what was trained
        self.roots: dict[str, Tensor] = {}  # of the last averaged second moments
        self.names = [name for name in shapes if name not in c.frozen_at(0)]

    # -- values --

    @property
    def x(self) -> Vectors:
        return {r: flattened([p[n] for n in self.names]) for r, p in self.parameters.items()}

    def put(self, rank: int, flat: Tensor) -> None:
        for name, part in zip(self.names, flat.split(self.sizes), strict=True):
            self.parameters[rank][name].copy_(part.view(self.shapes[name]))

    @property
    def weights(self) -> list[float]:
        return self.c.weights_at(self.step)

    def mean(self, values: Vectors) -> Tensor:
        return sum((self.weights[r] * v for r, v in values.items()), torch.zeros(()))  # type: ignore[return-value]

    def node_mean(self, values: Vectors, node: int) -> Tensor:
        ranks = self.nodes[node]
        total = sum(self.weights[r] for r in ranks)
        return sum((self.weights[r] / total * values[r] for r in ranks), torch.zeros(()))  # type: ignore[return-value]

    def pieces(self, into: int | Sequence[str]) -> list[Tensor]:
        """So many equal parts, or by name, and what is left; the indexes of their elements."""
        numel = self.x[0].numel()
        if isinstance(into, int):
            return list(torch.arange(numel).split(-(-numel // into)))
        of_names = dict(zip(self.names, torch.arange(numel).split(self.sizes), strict=True))
        rest = [of_names[name] for name in self.names if name not in into]
        named = [of_names[name] for name in into if name in of_names]
        return [*named, torch.cat(rest)] if rest else named

    @property
    def sizes(self) -> list[int]:
        """Elements of every parameter that is trained."""
        return [math.prod(self.shapes[name]) for name in self.names]

    # -- the run --

    @torch.no_grad()
    def run(self) -> Reference:
        c = self.c
        self.begin()
        for step in range(c.total if self.stop_after is None else self.stop_after):
            self.step = step
            if step and c.clamp is not None:
                self.write_outside(lambda x: x.clamp(-c.clamp, c.clamp))
            names = [name for name in self.shapes if name not in c.frozen_at(step)]
            if names != self.names:
                averaged = self.averaged()
                for rank in c.ranks:
                    self.put(rank, averaged)
                    for name in set(self.names) - set(names):
                        self.parameters[rank][name].grad = None
                self.names = names
                self.begin()
            epoch, in_epoch = divmod(step, c.steps)
            last = in_epoch == c.steps - 1 or step == c.total - 1
            self.knows_last = c.knows_last_at(step)
            for optimizer in self.all_optimizers():
                for group in optimizer.param_groups:
                    group["lr"] = group.setdefault("first", group["lr"]) * c.rate_at(step)
            self.one_step(step + 1, in_epoch + 1, epoch, last)
            for rank, values in self.x.items():
                self.put(rank, c.written(values))
            self.trace.append({r: torch.cat([p.flatten() for p in ps.values()]) for r, ps in self.parameters.items()})
            if step in c.looks:
                kept = self.x
                averaged = self.averaged()
                for rank in c.ranks:
                    self.put(rank, averaged)
                self.looks[step] = torch.cat([p.flatten().clone() for p in self.parameters[0].values()])
                for rank, values in kept.items():
                    self.put(rank, values)
        averaged = self.averaged()
        for rank in c.ranks:
            self.put(rank, averaged)
        self.end = torch.cat([p.flatten() for p in self.parameters[0].values()])
        return self

    def gradients(self) -> Vectors:
        """Every rank's: its node's mean, or that of all."""
        own = {rank: self.gradient(rank, self.step, self.names, values) for rank, values in self.x.items()}
        if self.c.scheme == "all_reduce" or self.step < self.c.synchronous_steps:
            own = dict.fromkeys(own, self.mean(own))
        else:
            own = {r: self.node_mean(own, self.node_of[r]) for r in own}
        return {rank: self.c.clipped(gradient) for rank, gradient in own.items()}

    @staticmethod
    def _towards_targets(rank: int, step: int, names: Sequence[str], x: Tensor) -> Tensor:
        return x - flattened([_target(rank, name, step) for name in names])

    def all_optimizers(self) -> list[Optimizer]:
        """Those that have the user's learning rate."""
        return list(self.optimizers.values())

    def optimize(self, rank: int, gradient: Tensor) -> None:
        """One step of a rank's own optimizer."""
        for name, part in zip(self.names, gradient.split(self.sizes), strict=True):
            self.parameters[rank][name].grad = part.view(self.shapes[name]).clone()
        if not self.skips(rank):
            self.optimizers[rank].step()

    def skips(self, rank: int) -> bool:
        """Whether a rank's scaler leaves out the step."""
        return self.c.skip == (self.step, self.node_of[rank])

    def average_state(self) -> None:
        """Replace what the optimizers remember by its mean; an encoded second moment by the square of a mean root."""
        held: list[tuple[str, str]] = []
        for name in (name for name in self.shapes if name in self.names):
            states = [o.state.get(self.parameters[r][name], {}) for r, o in self.optimizers.items()]
            for key, value in states[0].items():
                has_mean = all(key in state for state in states)  # a scaler may have skipped all steps of one
                if has_mean and isinstance(value, Tensor) and value.shape == self.shapes[name]:
                    held.append((name, key))
        encoded = [(self.names.index(name), key) for name, key in held if self.encodes(name)]
        for name, key in held:
            values = {r: o.state[self.parameters[r][name]][key] for r, o in self.optimizers.items()}
            if key == "exp_avg_sq" and self.encodes(name) and encoded == self.encoded_state:
                root = self.mean({r: value.sqrt() for r, value in values.items()})
                mean = torch.maximum(root, self.roots[name] / 2).square()
            else:
                mean = self.mean(values)
            if key == "exp_avg_sq":
                self.roots[name] = mean.sqrt()
            for value in values.values():
                value.copy_(mean)
        self.encoded_state = encoded

    def encodes(self, name: str) -> bool:
        """Whether messages between nodes hold a parameter in fewer bytes."""
        bits = {None: 64, "float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}[self.c.wire]
        return len(self.nodes) > 1 and bits < 8 * self.c.dtype_of(name).itemsize

    # -- for methods --

    def write_outside(self, of: Callable[[Tensor], Tensor]) -> None:
        """A program writes to the weights between two steps."""
        for rank, values in self.x.items():
            self.put(rank, of(values))

    def begin(self) -> None:
        """All ranks are equal."""

    def averaged(self) -> Tensor:
        """The averaged values of what is trained."""
        return self.mean(self.x)

    def one_step(self, step: int, in_epoch: int, epoch: int, last: bool) -> None:
        """The next one; both numbers count from 1."""
        for rank, gradient in self.gradients().items():
            self.optimize(rank, gradient)


class Averaging(Reference):
    """ParameterSync in all its compositions, periodic averaging, DASO and DiLoCo."""

    def begin(self) -> None:
        c, args = self.c, self.c.arguments
        self.reducer = args.get("reducer", "sharded")
        self.merge = args.get("merge", "replace")
        self.staleness = args.get("staleness", 0)
        self.keep = args.get("keep_local")
        if self.keep is None:
            self.keep = 0.5 if c.scheme == "diloco" and self.staleness else 0.0
        self.fragments = args.get("fragments", 1)
        if c.scheme == "diloco":
            self.merge, self.schedule = args["outer_optimizer"], ("staggered", args["sync_every"])
        elif c.scheme == "parameter_sync":
            self.schedule = args["schedule"]
        else:
            self.schedule = ("epoch", args["sync_every"])
        self.is_alone = len(self.nodes) == 1
        self.parts = self.pieces(self.fragments)
        self.count = len(self.parts)
        if self.fragments == 1 and self.reducer in _RANDOM_GRAPHS and c.dtype not in _DTYPES:  # drawn for each bucket
            self.parts = list(self.parts[0].split(max(1, c.bucket_bytes // getattr(torch, c.dtype).itemsize)))
        self.flying: list[tuple[int, list[int], Vectors, dict[int, Vectors], int]] = []
        if not hasattr(self, "period"):
            self.parts_sent = 0
            self.period, self.best, self.bad = self.schedule[1], math.inf, 0
            self.outer: dict[int, dict[str, Tensor]] = {}  # what outer optimizers know, of all elements
        elif c.scheme == "daso":
            self.staleness = self.stale_now
        self.stale_now = self.staleness
        self.references: dict[int, list[Tensor]] = {}
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        places = dict(zip(self.shapes, torch.arange(sum(sizes)).split(sizes), strict=True))
        self.places = flattened([places[name] for name in self.names]).long()
        if self.merge in _OUTER:
            for node in range(len(self.nodes) if self.reducer in _GRAPHS else 1):
                x = self.x[self.nodes[node][0]]
                self.references[node] = [x[part].clone() for part in self.parts]
                for of_all in self.outer.setdefault(node, {}).values():  # what is not trained is forgotten
                    kept = of_all[self.places].clone()
                    of_all.zero_()[self.places] = kept

    def outer_step(self, node: int, part: int, gradient: Tensor) -> None:
        """Move a node's last averaged values, each element for itself."""
        places, reference = self.places[self.parts[part]], self.references[node][part]
        held = self.outer[node]

        def new(name: str, of: Callable[[Tensor], Tensor]) -> Tensor:
            of_all = held.setdefault(name, torch.zeros(sum(map(math.prod, self.shapes.values()))).double())
            of_all[places] = of(of_all[places])
            return of_all[places]

        if self.merge == "adam":
            t = new("steps", lambda steps: steps + 1)
            first = new("first", lambda moment: 0.9 * moment + 0.1 * gradient) / (1 - 0.9**t)
            second = new("second", lambda moment: 0.999 * moment + 0.001 * gradient**2) / (1 - 0.999**t)
            reference -= 0.1 * first / (second.sqrt() + 0.1)
            return
        rate, momentum = {"nesterov": (0.7, 0.9), "sgd": (1.0, 0.0), "momentum": (0.5, 0.5)}[self.merge]
        buffer = new("buffer", lambda buffer: momentum * buffer + gradient)
        direction = gradient + momentum * buffer if self.merge == "nesterov" else buffer
        reference -= rate * direction

    def due(self, step: int, in_epoch: int) -> list[int]:
        """Return the parts that nodes synchronize after a step."""
        kind, period = self.schedule
        if period is None:
            return []
        step -= min(self.c.synchronous_steps, self.c.total)
        parts = len(self.parts)
        if kind == "staggered" and self.fragments != 1:
            return [p for p in range(parts) if step % period == (p + 1) * period // parts % period]
        return list(range(parts)) if (in_epoch if kind == "epoch" else step) % period == 0 else []

    def means(self, values: Vectors, part: int) -> Vectors:
        """For every node: with whom it takes the mean of a part."""
        cut = {r: v[self.parts[part]] for r, v in values.items()}
        if self.reducer not in _GRAPHS:
            mean = self.mean(cut)
            return {node: mean.clone() for node in range(len(self.nodes))}
        nodes = {n: self.node_mean(cut, n) for n in range(len(self.nodes))}
        if len(nodes) == 1:
            return nodes
        sends = _GRAPHS[self.reducer]().send_to(len(self.nodes), self.parts_sent // self.count, part)
        return {n: torch.stack([nodes[n], *(nodes[m] for m, to in enumerate(sends) if n in to)]).mean(0) for n in nodes}

    def arrive(self, part: int, means: Vectors) -> Vectors:
        """What nodes get to merge, from the means."""
        if self.merge not in _OUTER:
            return means
        new: Vectors = {}
        for node, mean in means.items():
            key = node if self.reducer in _GRAPHS else 0
            if key not in new:
                self.outer_step(key, part, self.references[key][part] - mean)
                new[key] = self.references[key][part].clone()
        return {node: new[node if self.reducer in _GRAPHS else 0] for node in means}

    def write(self, part: int, values: Vectors) -> None:
        for rank, flat in self.x.items():
            flat[self.parts[part]] = values[rank]
            self.put(rank, flat)

    def synchronize_now(self, parts: Sequence[int]) -> None:
        for part in parts:
            arrived = self.arrive(part, self.means(self.x, part))
            x = self.x
            keep = self.keep
            self.write(part, {r: keep * x[r][self.parts[part]] + (1 - keep) * arrived[self.node_of[r]] for r in x})
        self.parts_sent += len(parts) * self.count // len(self.parts)
        is_all = len(parts) == len(self.parts)
        if is_all and self.c.state and not keep and self.reducer not in _GRAPHS:
            self.average_state()

    def turn(self, step: int, leaving: Sequence[int]) -> None:
        """Merge what has come, and send."""
        # one at a time: a new epoch restarts the count, and merges the pending exchange of the last one early
        for exchange in [e for e in self.flying if e[0] == step or leaving]:
            self.flying.remove(exchange)
            _, parts, sent, arrived, sent_at = exchange
            for part in parts:
                self.merge_part(part, sent, arrived[part], step - sent_at)
        if leaving:
            x = self.x
            landed = {part: self.arrive(part, self.means(x, part)) for part in leaving}
            self.flying.append((step + self.staleness, list(leaving), x, landed, step))
            self.parts_sent += len(leaving) * self.count // len(self.parts)

    def merge_part(self, part: int, sent: Vectors, arrived: Vectors, s: int) -> None:
        """One part, so many steps after it was sent."""
        here, x, nodes = self.parts[part], self.x, len(self.nodes)
        if nodes > 1 and self.reducer in _GRAPHS:  # each meets as many in each turn
            nodes = 1 + len(_GRAPHS[self.reducer]().send_to(nodes, 0, 0)[0])
        new: Vectors = {}
        for rank, flat in x.items():
            mean = arrived[self.node_of[rank]]
            if self.merge == "eq1":
                new[rank] = (2 * s * flat[here] + nodes * mean) / (2 * s + nodes)
            elif self.merge == "delta":
                new[rank] = flat[here] + mean - sent[rank][here]
            else:
                new[rank] = self.keep * flat[here] + (1 - self.keep) * mean
        self.write(part, new)

    def one_step(self, step: int, in_epoch: int, epoch: int, last: bool) -> None:
        if self.is_alone:
            super().one_step(step, in_epoch, epoch, last)
        elif step <= self.c.synchronous_steps:
            super().one_step(step, in_epoch, epoch, last)
            if step == self.c.synchronous_steps:
                self.begin()
        elif self.c.scheme == "periodic":
            self.periodic_step(step, in_epoch, epoch, last)
        else:
            super().one_step(step, in_epoch, epoch, last)
            if self.c.scheme == "daso":
                self.daso_step(step, in_epoch, epoch, last)
            elif self.staleness:
                self.turn(step, self.due(step + self.staleness, in_epoch + self.staleness))
            else:
                due = self.due(step, in_epoch)
                if due:
                    self.synchronize_now(due)

    def periodic_step(self, step: int, in_epoch: int, epoch: int, last: bool) -> None:
        """Average all nodes every few steps of an epoch, and at its end."""
        is_due, args = bool(self.due(step, in_epoch)), self.c.arguments
        at_end = last and args["at_epoch_end"]
        if args["order"] == "before_step":
            gradients = self.gradients()
            if is_due or (at_end and self.knows_last):
                self.synchronize_now([0])
            for rank, gradient in gradients.items():
                self.optimize(rank, gradient)
        else:
            super().one_step(step, in_epoch, epoch, last)
            if is_due:
                self.synchronize_now([0])
        has_averaged = is_due if args["order"] == "after_step" else self.knows_last
        if at_end and not has_averaged:
            self.synchronize_now([0])

    def daso_step(self, step: int, in_epoch: int, epoch: int, last: bool) -> None:
        args = self.c.arguments
        cooldown = args["cooldown"].epochs
        waits = epoch < args["warmup"].epochs or (bool(cooldown) and epoch >= self.c.epochs - cooldown)
        leaves = (in_epoch - 1) % self.period == 0
        if waits or (not self.staleness and leaves and not (last and self.knows_last)):
            self.flying.clear()
            self.synchronize_now([0])
        elif not (last and self.knows_last):
            self.turn(step, [0] if leaves and self.staleness else [])
        if last and not waits and (self.knows_last or not leaves or self.staleness):
            self.flying.clear()
            self.synchronize_now([0])
        if in_epoch == self.c.steps and not waits and args["plateau"] is not None:
            self.judge(epoch)

    def judge(self, epoch: int) -> None:
        """Halve the period and the staleness when the loss no longer falls."""
        args = self.c.arguments
        plateau = args["plateau"]
        loss = sum(weight * (self.c.loss(rank, epoch) or 0.0) for rank, weight in enumerate(self.weights))
        if loss < self.best * (1 - plateau.threshold):
            self.best, self.bad = loss, 0
            return
        self.bad += 1
        if self.bad > plateau.patience:
            self.bad = 0
            least = min(1, args["staleness"])
            if (self.period, self.staleness) == (1, least):
                self.period, self.staleness = args["sync_every"], args["staleness"]
            else:
                self.period, self.staleness = max(1, self.period // 2), max(least, self.staleness // 2)
            self.stale_now = self.staleness


class Delayed(Reference):
    """A parameter server that every node sends to, and pulls from every few steps."""

    def begin(self) -> None:
        self.server = {name: self.parameters[0][name].clone() for name in self.shapes}
        if not hasattr(self, "kept"):
            self.kept = _OPTIMIZERS[self.c.optimizer](list(self.server.values()))
        else:
            state = [self.kept.state[p] for g in self.kept.param_groups for p in g["params"]]
            self.kept = _OPTIMIZERS[self.c.optimizer](list(self.server.values()))
            for parameter, of_parameter, name in zip(self.server.values(), state, self.shapes, strict=True):
                if of_parameter and name in self.names:
                    self.kept.state[parameter] = of_parameter
        self.u = 0
        self.arriving: Tensor | None = None
        self.pre = self.w
        self.kept_by_rule: Vectors = {}

    def all_optimizers(self) -> list[Optimizer]:
        return [*super().all_optimizers(), self.kept]

    @property
    def w(self) -> Tensor:
        return flattened([self.server[name] for name in self.names])

    def averaged(self) -> Tensor:
        return self.mean(self.x) if len(self.nodes) == 1 else self.w

    def write_outside(self, of: Callable[[Tensor], Tensor]) -> None:
        super().write_outside(of)
        for name in self.names:  # in the warm-up the server's weights are everybody's
            self.server[name].copy_(of(self.server[name]))

    def one_step(self, step: int, in_epoch: int, epoch: int, last: bool) -> None:
        if len(self.nodes) == 1:
            super().one_step(step, in_epoch, epoch, last)
            return
        args, x = self.c.arguments, self.x
        gradients = self.gradients()
        sent = {r: torch.zeros_like(g) if self.skips(r) else g for r, g in gradients.items()}
        for name, part in zip(self.names, self.mean(sent).split(self.sizes), strict=True):
            self.server[name].grad = part.view(self.shapes[name]).clone()
        self.kept.step()
        if step <= args["warmup_steps"]:
            for rank in x:
                self.put(rank, self.w)
            self.pre = self.w
            return
        group, k = self.kept.param_groups[0], args["delay"]
        momentum, decay = group.get("momentum", 0.0), group["weight_decay"]
        rate, arrived = group["lr"], self.arriving
        rule = args["local_update"]
        scale = 1 / ((1 - momentum) * 2.5) if rule == "glu" else 0.25
        for rank, own in x.items():
            weights = (own if arrived is None else arrived).clone()
            guess = (self.pre - weights) * (1 - momentum) / (rate * k)
            if not self.skips(rank):
                g = gradients[rank]
                kept = self.kept_by_rule.get(rank, torch.zeros_like(g))
                if rule == "sgd":
                    weights -= scale * rate * (g + decay * weights)
                elif rule == "dc_asgd":
                    self.kept_by_rule[rank] = 0.95 * kept + 0.05 * g * g
                    strength = 2.0 / (self.kept_by_rule[rank] + 1e-7).sqrt()
                    weights -= rate * (g + strength * g * g * (weights - own) + decay * weights)
                else:
                    weights -= scale * rate * (2.0 * gradients[rank] + decay * weights + 0.5 * guess)
            self.put(rank, weights)
        self.pre = self.pre if arrived is None else arrived
        self.arriving = self.w if self.u % k == k - 1 else None
        self.u += 1


class Gossiping(Reference):
    """Push-sum; x and w of every node, by fragment."""

    def begin(self) -> None:
        self.units = self.nodes
        self.parts = self.pieces(self.c.argument("fragments"))
        self.w = {u: [1.0] * len(self.parts) for u in range(len(self.units))}
        self.pending: tuple[int, dict[int, Tensor], dict[int, list[float]]] | None = None

    def scaled(self, unit: int, flat: Tensor, power: float) -> Tensor:
        new = flat.clone()
        for part, weight in zip(self.parts, self.w[unit], strict=True):
            new[part] *= weight**power
        return new

    def averaged(self) -> Tensor:
        size = len(self.units)
        if size == 1:
            return self.mean(self.x)
        x = self.x
        return sum((self.scaled(u, x[ranks[0]], 1.0) for u, ranks in enumerate(self.units)), torch.zeros(())) / size  # type: ignore[return-value]

    def one_step(self, step: int, in_epoch: int, epoch: int, last: bool) -> None:
        if len(self.units) == 1:
            super().one_step(step, in_epoch, epoch, last)
            return
        gradients = self.gradients()
        self.mix()
        for unit, ranks in enumerate(self.units):
            share = len(self.units) * sum(self.weights[r] for r in ranks)
            for rank in ranks:
                before = self.scaled(unit, self.x[rank], 1.0)
                self.put(rank, before)
                self.optimize(rank, gradients[rank])
                self.put(rank, self.scaled(unit, before + share * (self.x[rank] - before), -1.0))
        x = self.x
        values = {u: self.scaled(u, x[ranks[0]], 1.0) for u, ranks in enumerate(self.units)}
        change = {u: torch.zeros_like(v) for u, v in values.items()}
        after = {u: list(self.w[u]) for u in self.w}
        push_sum = self.c.argument("push_sum")
        for index, part in enumerate(self.parts):
            sends = _GRAPHS[self.c.argument("graph")]().send_to(len(self.units), step - 1, index)
            receives = [[u for u, to in enumerate(sends) if unit in to] for unit in range(len(self.units))]
            for unit in values:
                sources = [unit, *receives[unit]]
                shares = [1 / (len(sends[s]) + 1) if push_sum else 1 / len(sources) for s in sources]
                mixed = sum(p * values[s][part] for p, s in zip(shares, sources, strict=True))
                change[unit][part] = mixed - values[unit][part]
                if push_sum:
                    after[unit][index] = sum(p * self.w[s][index] for p, s in zip(shares, sources, strict=True))
        self.pending = (step, change, after)
        if not self.c.argument("overlap"):
            self.mix()

    def mix(self) -> None:
        if self.pending is None:
            return
        _, change, after = self.pending
        self.pending = None
        for unit, ranks in enumerate(self.units):
            for rank in ranks:
                x = self.scaled(unit, self.x[rank], 1.0) + change[unit]
                weights, self.w[unit] = self.w[unit], after[unit]
                self.put(rank, self.scaled(unit, x, -1.0))
                self.w[unit] = weights
        self.w = after


_REFERENCES: dict[str, type[Reference]] = {
    "all_reduce": Reference,
    "periodic": Averaging,
    "daso": Averaging,
    "diloco": Averaging,
    "parameter_sync": Averaging,
    "steps_delay": Delayed,
    "gossip": Gossiping,
}


# ---- what must hold --------------------------------------------------------------------------------------------------


def check(c: Combination) -> None:
    """Run a combination, and see that it is right.

    Raises:
        AssertionError: If it is not.
    """
    records = run(c, resumes=False)
    _check_equalities(c, records)
    if c.looks:
        _check_same(records, run(c, looks=False, resumes=False), "reading the averaged model changed the run")
    if c.resume is not None:
        _check_same(records, run(c), f"a resume after step {c.resume} changed the run")
    tolerance = tolerance_of(c)
    if tolerance is not None:
        for half, shapes in enumerate(halves_of(c)):
            _compare(c, [ranks[half] for ranks in records], _REFERENCES[c.scheme](c, shapes).run(), tolerance)


def tolerance_of(c: Combination) -> float | None:
    """How far a run may be from its reference; None: they are not to be compared."""
    if c.dtype == "mixed and narrow":
        return None
    parts = c.argument("fragments", 1)
    if c.dtype == "mixed" and (isinstance(parts, int) and parts > 1):
        return None  # cut by bytes, each type by itself
    narrow = c.wire not in (None, "float32") or (c.wire == "float32" and c.dtype != "float32")
    draws = c.argument("graph", c.argument("reducer")) in _RANDOM_GRAPHS
    draws_by_bucket = c.scheme == "parameter_sync" and c.bucket_bytes < 2**20 and parts != 1
    if c.raw or (draws and (draws_by_bucket or c.dtype == "mixed")):
        return None
    if c.wire == "float32" and c.dtype == "float64":
        return 1e-4
    if narrow or c.dtype == "bfloat16":  # of values near 1
        return 6e-2 if c.wire == "int4" else 2e-2
    return 1e-9 if c.dtype == "float64" else 2e-4


def _check_equalities(c: Combination, records: list[list[Record]]) -> None:
    for half in range(len(records[0])):
        own = [ranks[half] for ranks in records]
        for rank, each in enumerate(own):
            assert each.end is not None
            assert each.end.isfinite().all(), f"rank {rank} ends with {each.end.tolist()}"
            same(each.last, own[0].last, f"rank {rank} ends otherwise than rank 0")
        for node in _NODES[c.nodes]:
            for rank in node[1:]:
                same(own[rank].trace, own[node[0]].trace, f"ranks {rank} and {node[0]} of a node differ")


def _check_same(records: list[list[Record]], other: list[list[Record]], message: str) -> None:
    for rank, halves in enumerate(zip(records, other, strict=True)):
        for one, two in zip(*halves, strict=True):
            same([*one.trace, *one.last], [*two.trace, *two.last], f"{message}: rank {rank}")


def same(one: list[Tensor], other: list[Tensor], message: str, strict: bool = True) -> None:
    for step, (a, b) in enumerate(zip(one, other, strict=strict)):
        assert torch.equal(a, b), f"{message}: step {step}: {a.tolist()} and {b.tolist()}"


def _compare(c: Combination, records: list[Record], reference: Reference, tolerance: float) -> None:
    buffer = _expected_statistics(c) if c.buffer == "statistics" and c.reweight is None else None
    for rank, seen in enumerate(records):
        assert seen.end is not None
        is_close(seen.end.double(), reference.end.double(), tolerance, f"rank {rank} ends with")
        if buffer is not None:
            assert seen.buffer is not None
            expected = torch.full_like(seen.buffer.double(), buffer)
            is_close(seen.buffer.double(), expected, 1e-5, f"rank {rank} ends with the buffer")
    for step, expected in enumerate(reference.trace):
        for rank, seen in enumerate(records):
            is_close(seen.trace[step], expected[rank], tolerance, f"after step {step} rank {rank} holds")
    for step, values in reference.looks.items():
        for rank, seen in enumerate(records):
            is_close(seen.looks[step], values, tolerance, f"after step {step} rank {rank}'s averaged model is")


def _expected_statistics(c: Combination) -> float:
    """Return the final running mean; its steps are linear, so the time of averaging has no effect."""
    node = {rank: number for number, ranks in enumerate(_NODES[c.nodes]) for rank in ranks}
    mean = 0.0
    for rank, weight in zip(c.ranks, c.weights_at(c.total), strict=True):
        own = 1.0
        for _ in range(c.total):
            own = 0.9 * own + 0.1 * node[rank]
        mean += weight * own
    return mean


def is_close(actual: Tensor, expected: Tensor, tolerance: float, message: str) -> None:
    assert torch.allclose(actual, expected, rtol=tolerance, atol=tolerance), (
        f"{message} {actual.tolist()} instead of {expected.tolist()}"
    )


# ---- all of them ----------------------------------------------------------------------------------------------------


C = TypeVar("C")


def failure(c: C, check: Callable[[C], None]) -> str | None:
    """What is wrong with a combination, in one line."""
    try:
        check(c)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, AssertionError) else f" ({Path(last.filename).name}:{last.lineno})"
        return f"{type(error).__name__}: {error}{where}"
    return None


def tell(
    doc: str | None,
    module: str,
    drawn: Callable[[int], C],
    check: Callable[[C], None],
    among: int = 200,
    places: Mapping[str, Callable[[], AbstractContextManager[object]]] = {"cpu": nullcontext},
) -> int:
    """A command line that checks so many drawn combinations; the exit status tells of failures."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--random", type=int, default=among, metavar="RUNS", help="so many combinations")
    parser.add_argument("--seed", type=int, default=0, help="of the first million of numbers")
    parser.add_argument(
        "--only", type=int, nargs="+", metavar="N", help="these alone, by the numbers that were printed"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after so many")
    parser.add_argument("--device", choices=places, default="cpu", help="where ranks compute")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    first = arguments.seed * 10_000_000
    began, failed, done = time.monotonic(), 0, 0
    with places[arguments.device]():
        for number in arguments.only or range(first, first + arguments.random):
            if time.monotonic() - began > arguments.seconds:
                break
            if done and done % _SAID_EVERY == 0:
                print(f"{done} in {time.monotonic() - began:.0f} s: {failed} failed", flush=True)
            done += 1
            combination = drawn(number)
            message = failure(combination, check)
            if message is not None:
                failed += 1
                again = f"python -m {module} --device {arguments.device} --only {number}"
                print(f"{number}: {combination}\n    {message}\n    {again}", flush=True)
    print(f"{done} combinations in {time.monotonic() - began:.0f} s: {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(tell(__doc__, "tools.combinations", drawn, check, places={"cpu": nullcontext, "gpu": on_a_gpu}))
