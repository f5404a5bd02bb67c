"""The front of accuracy and time: how much sooner does a method reach the accuracy of float32 all-reduce?

Every method is tuned and judged as in :mod:`benchmarks.papers.tuned`, and the runs that judge are evaluated on the way.
What a step would take comes from the cost model of :mod:`benchmarks.predict`, for a model of realistic
size (:data:`WORKLOAD`): stored are accuracies by step, so that other assumptions need no new run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean, median

from benchmarks.papers.many import (
    Arena,
    Averages,
    Compressed,
    Delayed,
    Gossips,
    Method,
    Outer,
    Stale,
    Synchronous,
    synchronous_steps,
    warm_up_steps,
)
from benchmarks.papers.paired import Difference, difference
from benchmarks.papers.power_sgd import PowerSGD, shapes_of, share_sent
from benchmarks.papers.tuned import Climb, Comparison, Contender, load, rate_of
from benchmarks.papers.wires import wire_named
from benchmarks.predict.cluster import Cluster, Link, Workload
from benchmarks.predict.cost import Prediction, predict
from lightning_hiercomm.planning.plan import RULE
from lightning_hiercomm.schemes import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, Scheme, StepsDelay
from lightning_hiercomm.schemes.reducers.graphs import RandomPermutation

STORED = Path(__file__).resolve().parents[1] / "results" / "front"
"""What the documentation uses."""

WORKLOAD = Workload.of_step(25e6, 0.1)
"""25 million float32 parameters, as ResNet-50 has them, and 0.1 s of computation per step and node.

Little but the ratio matters for the table: 1 GB of gradients per second of computation.
"""
RATES = {"100 Mbit/s": 100e6, "1 Gbit/s": 1e9, "10 Gbit/s": 10e9}
LATENCY = 1e-4
MEMORY_BANDWIDTH = 500e9
"""Bytes per second that encoding and merging read and write: a GPU's, far from its peak."""

MARGIN = 1.0
"""Points below all-reduce's final accuracy that count as reached."""
LOOKS = 25
NODES = (2, 8, 32)
OPTIMIZERS = ("sgd", "adamw")
STATE = {"sgd": ("momentum",), "adamw": ("first moment", "second moment")}
"""What an optimizer remembers of every parameter."""
LENGTHS = {"short": 1, "long": 4}
_EXAMPLES = {"cnn": 64, "batchnorm": 64, "characters": 256}
_EPOCHS = {"cnn": 12, "batchnorm": 12, "characters": 1}
_STARTS = {
    ("cnn", "sgd"): -5,
    ("cnn", "adamw"): -10,
    ("batchnorm", "sgd"): -4,
    ("batchnorm", "adamw"): -9,
    ("characters", "sgd"): -2,
    ("characters", "adamw"): -11,
}
_SEEDS, _SEEDS_OF_UNSTEADY, _SEEDS_OF_ADVICE = 10, 20, 30
_ADVISED = {
    *("AllReduce", *(f"AllReduce, {wire}" for wire in ("bfloat16", "int8", "int4", "sparse2"))),
    *(f"PeriodicAveraging({every}), {wire}" for every in (2, 4) for wire in ("int4", "sparse2")),
}
"""Methods that the documentation recommends, and what they are compared with: judged by more seeds."""
_WORDS = {
    "cnn": "the CNN of MNIST-1D",
    "batchnorm": "the CNN of MNIST-1D with BatchNorm",
    "characters": "a character model",
    "sgd": "momentum SGD",
    "adamw": "AdamW",
}


@dataclass(frozen=True)
class Way:
    """One method of the front.

    Attributes:
        name: What tables call it.
        family: The scheme, as :mod:`benchmarks.palette` has it.
        wire: What travels: a ``wire_dtype``.
        make: Makes the method that trains.
        scheme_at: The scheme whose cost a step of the run has, by the step's number from 0.
        about: Changes when the method does; what is stored of other words is forgotten.
        lower: Rungs by which its ladder begins below all-reduce's, with momentum SGD.
        optimizers: With which it is tried.
        with_state: Whether what the optimizer remembers travels with parameters; once as it is, which bytes and times
            leave out.
        share_sent: The share of the parameters' elements that travels, by the arena's network.
    """

    name: str
    family: str
    wire: str
    make: Callable[[Arena], Method]
    scheme_at: Callable[[Arena, int], Scheme]
    about: str
    lower: int = 0
    optimizers: tuple[str, ...] = OPTIMIZERS
    with_state: bool = False
    share_sent: Callable[[Arena], float] = lambda _: 1.0

    def contender(self, arena: Arena) -> Contender:
        """Return the method as the ladder takes it."""
        starts = _STARTS[arena.model, arena.optimizer] - (self.lower if arena.optimizer == "sgd" else 0)
        # ten seeds hid losses of half a point and showed some that thirty do not
        more = tuple(range(_SEEDS, _SEEDS_OF_ADVICE)) if self.name in _ADVISED else ()
        return Contender(self.name, self.make, self.about, starts, more_seeds=more)


# ---- the methods -----------------------------------------------------------------------------------------------------


@cache
def _made(kind: type[Scheme], *arguments: object, **named: object) -> Scheme:
    """Return a scheme; a run has one for each of its steps."""
    return kind(*arguments, **named)


def _all_reduce(wire: str) -> Way:
    def make(_: Arena) -> Method:
        return Synchronous() if wire == "float32" else Compressed(wire_named(wire))

    about = "all-reduce" if wire == "float32" else f"all-reduce of {wire} gradients"
    return Way(_named("AllReduce", wire), "all_reduce", wire, make, lambda *_: _made(AllReduce), about)


def _power_sgd(rank: int) -> Way:
    return Way(
        f"PowerSGD({rank})",
        "power_sgd",
        "float32",
        lambda _: PowerSGD(rank),
        lambda *_: _made(AllReduce),
        f"PowerSGD of rank {rank}, warm start",
        share_sent=lambda arena: share_sent(shapes_of(arena), rank),
    )


def _periodic(every: int, wire: str, lower: int) -> Way:
    def scheme_at(arena: Arena, step: int) -> Scheme:
        # nodes also average at the end of an epoch, so its last period may be shorter
        per_epoch = arena.steps_per_epoch
        rest = per_epoch % every
        return _made(PeriodicAveraging, rest if step % per_epoch >= per_epoch - rest else every)

    return Way(
        _named(f"PeriodicAveraging({every})", wire),
        "periodic",
        wire,
        lambda _: Averages(every, wire_named(wire)),
        scheme_at,
        f"means every {every} steps and at epoch ends, {wire}",
        lower,
    )


def _post_local(every: int, wire: str, share: float, with_state: bool, lower: int) -> Way:
    averaging = _periodic(every, wire, lower)

    def scheme_at(arena: Arena, step: int) -> Scheme:
        is_synchronous = step < synchronous_steps(arena, share)
        return _made(AllReduce) if is_synchronous else averaging.scheme_at(arena, step)

    state = ", with optimizer state" if with_state else ""
    return replace(
        averaging,
        name=_named(f"PeriodicAveraging({every}, warmup_steps={share:g}){state}", wire),
        make=lambda _: Averages(every, wire_named(wire), share, with_state),
        scheme_at=scheme_at,
        about=f"gradients for {share:g} of the run, then {averaging.about}{state}",
        with_state=with_state,
    )


def _daso_phases(arena: Arena) -> float:
    """Return the default epochs of warm-up and of cool-down: 4, or a quarter of a short run."""
    return float(min(4, arena.epochs // 4)) or arena.epochs / 4


def _daso(every: int, staleness: int, merge: str, wire: str) -> Way:
    def make(arena: Arena) -> Method:
        length = _daso_phases(arena)
        return Stale(every, staleness, length, length, merge, adapts=False, codec=wire_named(wire))  # type: ignore[arg-type]

    def scheme_at(arena: Arena, step: int) -> Scheme:
        per_epoch = arena.steps_per_epoch
        length = int(_daso_phases(arena) * per_epoch)
        is_blocking = not length <= step < arena.steps - length or step % per_epoch == per_epoch - 1
        return _made(PeriodicAveraging, 1) if is_blocking else _made(DASO, every, staleness, merge=merge, plateau=None)

    return Way(
        _named(f"DASO({every}, {staleness}), {merge}", wire),
        "daso",
        wire,
        make,
        scheme_at,
        f"B {every}, S {staleness}, {merge}, phases of a quarter or 4 epochs, fixed, {wire}",
        1,
    )


def _diloco(every: int, wire: str, lower: int) -> Way:
    return Way(
        _named(f"DiLoCo({every})", wire),
        "diloco",
        wire,
        lambda _: Outer(every, 0.7, 0.9, codec=wire_named(wire)),
        lambda *_: _made(DiLoCo, every),
        f"H {every}, outer 0.7, 0.9, {wire}",
        lower,
    )


def _gossip(wire: str) -> Way:
    return Way(
        _named("Gossip", wire),
        "gossip",
        wire,
        lambda _: Gossips(RandomPermutation, 8, wire_named(wire)),
        lambda *_: _made(Gossip),
        f"8 fragments, {wire}",
        1,
    )


def _steps_delay(delay: int, warm_up: float) -> Way:
    def scheme_at(arena: Arena, step: int) -> Scheme:
        waits = step < warm_up_steps(arena, delay, warm_up)
        return _made(AllReduce) if waits else _made(StepsDelay, delay, warmup_steps=0)

    return Way(
        f"StepsDelay({delay}), warm-up of {warm_up:g} of the run",
        "steps_delay",
        "float32",
        lambda _: Delayed(delay, warm_up),
        scheme_at,
        f"GLU, k {delay}, {warm_up:g}",
        optimizers=("sgd",),  # its local rule is made for SGD
    )


def _named(name: str, wire: str) -> str:
    return name if wire == "float32" else f"{name}, {wire}"


WAYS = (
    *map(_all_reduce, ("float32", "bfloat16", "int8", "int4", "sparse2")),
    _power_sgd(2),
    *(
        _periodic(every, wire, lower)
        for every, lower in ((2, 1), (4, 1), (8, 2), (16, 3), (64, 4))
        for wire in (("float32", "int4", "sparse2") if every <= 4 else ("float32", "int4"))
    ),
    *(_post_local(4, "int4", 0.25, with_state, 1) for with_state in (False, True)),
    *(_daso(4, 1, "delta", wire) for wire in ("float32", "int4")),
    *(_diloco(every, wire, lower) for every, lower in ((16, 5), (64, 6)) for wire in ("float32", "int4")),
    *map(_gossip, ("float32", "int4")),
    _steps_delay(4, 0.8),
)
"""All methods; float32 all-reduce first."""


# ---- the settings ----------------------------------------------------------------------------------------------------


def _comparison(nodes: int, optimizer: str, length: str, model: str) -> Comparison:
    arena = Arena(
        f"{nodes}-{optimizer}-{length}-{model}",
        nodes,
        _EXAMPLES[model] // nodes,
        _EPOCHS[model] * LENGTHS[length],
        optimizer,  # type: ignore[arg-type]
        model,  # type: ignore[arg-type]
    )
    contenders = tuple(way.contender(arena) for way in WAYS if optimizer in way.optimizers)
    # at the best rates of momentum SGD one run in twenty of this network nearly diverges
    is_unsteady = (model, optimizer, length) == ("cnn", "sgd", "short")
    seeds = tuple(range(_SEEDS_OF_UNSTEADY if is_unsteady else _SEEDS))
    # here accuracies of neighboring rates differ by less than four seeds can tell
    return Comparison(arena, contenders, seeds, LOOKS, beyond=2 if model == "characters" else 1)


SETTINGS = {
    comparison.name: comparison
    for comparison in (
        _comparison(nodes, optimizer, length, model)
        for length, model, optimizer, nodes in product(LENGTHS, _EXAMPLES, OPTIMIZERS, NODES)
    )
}
"""By name."""


def ways_of(comparison: Comparison) -> Mapping[str, Way]:
    """The methods of a setting, by name."""
    names = {contender.name for contender in comparison.contenders}
    return {way.name: way for way in WAYS if way.name in names}


# ---- time and bytes --------------------------------------------------------------------------------------------------


@cache
def _predicted(scheme: Scheme | None, wire: str, nodes: int, rate: float, workload: Workload) -> Prediction:
    inter = Link(rate / 8, LATENCY)
    cluster = Cluster(nodes, 1, Link(1e12), inter, memory_bandwidth=MEMORY_BANDWIDTH)
    return predict(scheme, cluster, workload, None if wire == "float32" else wire)


@cache
def _schemes(way: Way, arena: Arena) -> list[Scheme]:
    return [way.scheme_at(arena, step) for step in range(arena.steps)]


def _of_steps(way: Way | None, arena: Arena, rate: float, workload: Workload) -> list[Prediction]:
    """The prediction for every step of a run."""
    if way is None:
        return [_predicted(None, "float32", arena.nodes, rate, workload)] * arena.steps
    workload = replace(workload, parameters=way.share_sent(arena) * workload.parameters)
    copies = 1 + (len(STATE[arena.optimizer]) if way.with_state else 0)
    with_state = replace(workload, parameters=copies * workload.parameters)
    schemes = _schemes(way, arena)
    costs = {
        scheme: _predicted(
            scheme, way.wire, arena.nodes, rate, workload if isinstance(scheme, AllReduce) else with_state
        )
        for scheme in {*schemes}
    }
    return [costs[scheme] for scheme in schemes]


def bytes_per_step(way: Way, arena: Arena, workload: Workload = WORKLOAD) -> float:
    """Return the bytes that a node sends to others per step, the mean over a run."""
    return fmean(prediction.inter_bytes for prediction in _of_steps(way, arena, min(RATES.values()), workload))


def seconds_by_step(way: Way | None, arena: Arena, rate: float, workload: Workload = WORKLOAD) -> list[float]:
    """Predict the seconds from the beginning of a run to the end of every step.

    Args:
        way: The method; None is Lightning's ``DDPStrategy``, which overlaps float32 gradients with backward.
        arena: Of the run.
        rate: Bits per second of a node's link.
        workload: What a rank trains.
    """
    return list(accumulate(prediction.seconds for prediction in _of_steps(way, arena, rate, workload)))


# ---- the table -------------------------------------------------------------------------------------------------------


def median_curve(climb: Climb) -> list[float]:
    """Return the accuracy at every evaluation, the median over the seeds; that of a run that diverged is 0.

    A median, because one run that nearly diverged would move the target by a point.
    """
    by_look = zip(*climb.judged_curves.values(), strict=True)
    return [median(value or 0.0 for value in values) for values in by_look]


def first_step(curve: Sequence[float], looks: Sequence[int], target: float) -> int | None:
    """Return the number of steps after which an accuracy is first reached; None if it never is."""
    return next((step for step, value in zip(looks, curve, strict=True) if value >= target), None)


@dataclass(frozen=True)
class Row:
    """Results of a method in a setting.

    Attributes:
        way: The method.
        climb: Its runs.
        apart: Its difference from float32 all-reduce, in points; None of all-reduce itself.
        megabytes: Sent by a node per step.
        share: The same as a share of what float32 all-reduce sends.
        step: Number of steps after which the median over the seeds first reaches the target; None if it never does.
        times: Time to the target by link rate, where that of DDP is 1; empty if the target is never reached.
    """

    way: Way
    climb: Climb
    apart: Difference | None
    megabytes: float
    share: float
    step: int | None
    times: Mapping[str, float]

    def share_text(self) -> str:
        """Return ``1/7.88`` for a share."""
        return f"1/{1 / self.share:.3g}" if self.share < 0.995 else f"{self.share:.2g}"

    def time_text(self, rate: str) -> str:
        """Return the time to the target at a link rate, or ``never``."""
        return f"{self.times[rate]:.2g}" if self.times else "never"


def target_of(comparison: Comparison, known: Mapping[str, Climb]) -> float:
    """Return all-reduce's final accuracy less the margin."""
    return median_curve(known[comparison.contenders[0].name])[-1] - MARGIN


def rows(comparison: Comparison, known: Mapping[str, Climb]) -> list[Row]:
    """Return a row per method that was judged; none before all-reduce was."""
    arena, looks, ways = comparison.arena, comparison.steps_of_looks, ways_of(comparison)
    judged = {name: known[name] for name in ways if name in known and not known[name].lacks(comparison)}
    baseline = judged.get(comparison.contenders[0].name)
    if baseline is None:
        return []
    target = target_of(comparison, known)
    reached = first_step(median_curve(baseline), looks, target)
    assert reached is not None
    of_ddp = {name: seconds_by_step(None, arena, rate)[reached - 1] for name, rate in RATES.items()}
    whole = bytes_per_step(ways[comparison.contenders[0].name], arena)
    found = []
    for name, climb in judged.items():
        way, step = ways[name], first_step(median_curve(climb), looks, target)
        times = (
            {}
            if step is None
            else {at: seconds_by_step(way, arena, rate)[step - 1] / of_ddp[at] for at, rate in RATES.items()}
        )
        sent = bytes_per_step(way, arena)
        apart = None if climb is baseline else difference(climb.judged, baseline.judged)
        found.append(Row(way, climb, apart, sent / 1e6, sent / whole, step, times))
    return found


def table(comparison: Comparison, known: Mapping[str, Climb]) -> str:
    """Return the table in Markdown, with a line before it if methods are missing."""
    found = rows(comparison, known)
    lines = [
        "| | MB per node and step | of float32 | best rate | accuracy, % | against float32 all-reduce, 95 % | "
        + " | ".join(f"time to target, {rate}" for rate in RATES)
        + " |",
        "|---|" + "--:|" * (5 + len(RATES)),
    ]
    for row in found:
        assert row.climb.peak is not None
        cells = [
            row.way.name,
            f"{row.megabytes:.3g}",
            row.share_text(),
            f"{rate_of(row.climb.peak):g}",
            row.climb.text(),
            "" if row.apart is None else row.apart.text(),
            *map(row.time_text, RATES),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    missing = len(comparison.contenders) - len(found)
    partial_mark = f"**Not complete: {missing} of {len(comparison.contenders)} methods are missing.**\n\n"
    return (partial_mark if missing else "") + "\n".join(lines)


_PLANNED = ("2-adamw-short-cnn", "8-adamw-short-cnn", "32-adamw-short-cnn", "8-sgd-short-cnn", "8-adamw-long-cnn")
"""Settings that ``plan`` quotes."""


def accuracy_rows(folder: Path) -> Iterator[tuple[str | int | float, ...]]:
    """Yield what ``plan`` quotes: method, nodes, optimizer, steps, unit, mean difference, the ends of its interval."""
    for choice in RULE:
        for comparison in map(SETTINGS.__getitem__, _PLANNED):
            arena = comparison.arena
            if choice.measured is not None and (
                choice.steps == arena.steps or not (choice.steps or "long" in arena.name)
            ):
                (apart,) = (
                    row.apart for row in rows(comparison, load(comparison, folder)) if row.way.name == choice.measured
                )
                assert apart is not None
                ends = (round(value, 3) for value in (apart.mean, apart.low, apart.high))
                yield choice.measured, arena.nodes, arena.optimizer, arena.steps, "points", *ends


def title(comparison: Comparison) -> str:
    """Return the setting in words."""
    arena = comparison.arena
    return f"{arena.nodes} nodes, {_WORDS[arena.optimizer]}, {_WORDS[arena.model]}, {arena.steps:,} steps"


_SIZE = f"{WORKLOAD.parameters / 1e6:.0f} million float32 parameters, {WORKLOAD.model_bytes / 1e6:.0f} MB of gradients"


def page(folder: Path) -> str:
    """Return all stored settings as one document."""
    parts = [PREFACE]
    for name, comparison in SETTINGS.items():
        known = load(comparison, folder)
        if not rows(comparison, known):
            continue
        arena = comparison.arena
        minutes = sum(climb.seconds for climb in known.values()) / 60
        parts += [
            f"## {title(comparison)}",
            f"`{name}`: batches of {arena.batch} per node, {_seeds_text(comparison, known)}, {minutes:.0f} processor"
            f" minutes. The target is {target_of(comparison, known):.1f} %.",
            table(comparison, known),
            f"![accuracy against bytes and time]({name}.png)",
        ]
    return "\n\n".join(parts) + "\n"


def _seeds_text(comparison: Comparison, known: Mapping[str, Climb]) -> str:
    most = max(len(climb.judged) for climb in known.values())
    few = len(comparison.seeds)
    return f"{few} seeds" if most == few else f"{few} seeds, {most} of the methods that we recommend"


PREFACE = f"""# Accuracy and time

How much sooner does a method reach the accuracy that float32 all-reduce ends with? `python -m benchmarks front`
measures (one setting: `python -m benchmarks front 8-sgd-short-cnn`; if it is interrupted, the same command continues),
`python -m benchmarks report` writes this page.

**Accuracy is measured.** Every method has its own best learning rate, from the ladder of
[the tuned comparisons](../tuned/README.md): four seeds on tuning data choose it, other seeds on other data judge it.
The difference from float32 all-reduce is over runs with the same seed, with its 95 % interval; **bold** where 0 lies
outside. Learning rates rise over the first tenth of a run and then follow a cosine to zero. Nodes are of one rank; a
test compares every method with the scheme's own code. `DASO` has a fixed period here.

**Time is predicted by a cost model.** The tasks are tiny, so the table assumes a larger network: {_SIZE} (about a
ResNet-50) that computes {1e3 * WORKLOAD.seconds:.0f} ms per step on every node, a third of it forward; links with
{1e3 * LATENCY:g} ms of latency; encoding at {MEMORY_BANDWIDTH / 1e9:.0f} GB/s of memory. The cost model of
`python -m lightning_hiercomm plan` predicts a step of that. With twice the parameters and twice the computation the
ratios stay nearly the same.

- **MB per node and step**: sent to other nodes, the mean over the run, for the assumed network. PowerSGD's share is
  that of the small network that was trained; matrices of a larger one shrink further.
- **time to target**: until the median accuracy over the seeds first reaches the final one of float32 all-reduce less
  {MARGIN:g} point, where the time of float32 DDP, which overlaps gradients with backward, is 1. **never**: the method
  does not reach it in as many steps. A run is evaluated {LOOKS} times. All runs of a setting have the same number of
  steps and the same schedule, in which accuracy often rises until the end. The accuracy column has the mean and the
  standard deviation; a run that nearly diverges moves these, and hardly the median.
"""
