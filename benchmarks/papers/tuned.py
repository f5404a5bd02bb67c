"""Methods against each other where both sides are tuned.

Every method climbs a ladder of learning rates, a factor of the square root of 2 apart, to a peak with lower values on
both sides; the accuracy there is that of seeds and examples which do nothing else. At the peak other seeds train, and
other examples judge. Differences are of runs with the same seed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.papers.many import (
    Arena,
    Averages,
    Delayed,
    Gossips,
    Method,
    Outer,
    Stale,
    Synchronous,
    accuracies,
    crossover,
    data,
    push,
    ring,
    train,
)
from benchmarks.papers.paired import difference
from lightning_hiercomm.schemes.reducers.graphs import RandomPermutation

STORED = Path(__file__).resolve().parents[1] / "results" / "tuned"
"""What the documentation goes by."""

TUNING_SEEDS = (100, 101, 102, 103)
JUDGING_SEEDS = tuple(range(10))
_HIGHEST, _LOWEST = 4, -26
"""Rungs of the ladder, the limits of the search: learning rates 4 and 0.00012."""


def rate_of(rung: int) -> float:
    """A learning rate of the ladder, to three digits."""
    return float(f"{math.sqrt(2) ** rung:.3g}")


@dataclass(frozen=True)
class Contender:
    """A method in an arena.

    Attributes:
        name: What tables call it.
        make: Of the arena; everything that sets it apart is in ``about``.
        about: In words that change when the method does: what is stored of other words is forgotten.
        starts: The rung in the middle of the first ones.
        other_seeds: What is added to every seed, under whose own number the run is kept.
        more_seeds: Seeds that judge beyond those of the comparison.
    """

    name: str
    make: Callable[[Arena], Method]
    about: str
    starts: int = -6
    other_seeds: int = 0
    more_seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A baseline and what is compared with it.

    Attributes:
        arena: Where.
        contenders: The first one is the baseline.
        seeds: That judge.
        looks: Number of evaluations, at equal distances, of the runs that judge; the last one at their end. 0: only
            their end is evaluated, and no curve is stored.
        beyond: Rungs on either side of the peak that must be lower; more than one where the curve is flat.
    """

    arena: Arena
    contenders: tuple[Contender, ...]
    seeds: tuple[int, ...] = JUDGING_SEEDS
    looks: int = 0
    beyond: int = 1

    @property
    def name(self) -> str:
        """Of its file."""
        return self.arena.name

    @property
    def steps_of_looks(self) -> list[int]:
        """Numbers of steps after which the runs that judge are evaluated."""
        return [self.arena.steps * (number + 1) // self.looks for number in range(self.looks)]

    def fingerprint(self, contender: Contender) -> str:
        """Another one for another arena or method."""
        arena = self.arena
        sets = (arena.nodes, arena.batch, arena.epochs, contender.about)
        unusual = [value for value in (arena.optimizer, arena.model) if value not in ("sgd", "cnn")]
        text = repr((*sets, *unusual))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass
class Climb:
    """What is known of one contender.

    Attributes:
        tuning: Accuracy in percent on tuning data, by rung and seed; None where it diverged.
        judging: The same on judging data.
        seconds: Of processor time that it took.
        curves: Accuracies on judging data on the way, by rung and seed, where a comparison evaluates them.
    """

    tuning: dict[int, dict[int, float | None]] = field(default_factory=dict)
    judging: dict[int, dict[int, float | None]] = field(default_factory=dict)
    seconds: float = 0.0
    curves: dict[int, dict[int, list[float | None]]] = field(default_factory=dict)

    def mean(self, rung: int) -> float:
        """On tuning data; a run that diverged counts as none right."""
        return fmean(value or 0.0 for value in self.tuning[rung].values())

    @property
    def peak(self) -> int | None:
        """The best rung so far; the lower one of two."""
        return max(sorted(self.tuning), key=self.mean, default=None)

    def missing(self, starts: int, beyond: int = 1) -> list[int]:
        """Rungs to try next; none if ``beyond`` rungs on both sides of the peak are lower, or the ladder ends there."""
        peak = self.peak
        near = range(starts - 1, starts + 2) if peak is None else range(peak - beyond, peak + beyond + 1)
        return [rung for rung in near if rung not in self.tuning and _LOWEST <= rung <= _HIGHEST]

    @property
    def judged(self) -> Mapping[int, float | None]:
        """At the peak, by seed."""
        return {} if self.peak is None else self.judging.get(self.peak, {})

    @property
    def judged_curves(self) -> Mapping[int, list[float | None]]:
        """At the peak, by seed."""
        return {} if self.peak is None else self.curves.get(self.peak, {})

    def lacks(self, comparison: Comparison) -> bool:
        """Whether seeds of a comparison have not judged the peak yet."""
        known = set(self.judged_curves if comparison.looks else self.judged)
        return bool(set(comparison.seeds) - known)

    def text(self) -> str:
        """Mean and standard deviation at the peak, and how many diverged."""
        values = [value for value in self.judged.values() if value is not None]
        if len(values) < 2:
            return ""
        lost = len(self.judged) - len(values)
        shown = f"{fmean(values):.1f} ± {stdev(values):.1f}"
        return f"{shown} ({lost} of {len(self.judged)} diverged)" if lost else shown


def load(comparison: Comparison, folder: Path) -> dict[str, Climb]:
    """What is stored of the contenders of today."""
    path = folder / f"{comparison.name}.json"
    stored = json.loads(path.read_text())["contenders"] if path.exists() else {}
    known = {}
    for contender in comparison.contenders:
        found = stored.get(contender.name, {})
        if found.get("fingerprint") == comparison.fingerprint(contender):
            known[contender.name] = Climb(
                _rungs(found["tuning"]), _rungs(found["judging"]), found["seconds"], _rungs(found.get("curves", {}))
            )
    return known


def _rungs(stored: Mapping[str, Mapping[str, Any]]) -> dict[int, dict[int, Any]]:
    return {int(rung): {int(seed): value for seed, value in by_seed.items()} for rung, by_seed in stored.items()}


def store(comparison: Comparison, known: Mapping[str, Climb], folder: Path) -> None:
    """Write down all that is known, at once or not at all."""
    contenders = {
        contender.name: {
            "fingerprint": comparison.fingerprint(contender),
            "about": contender.about,
            "seconds": round(climb.seconds, 1),
            "tuning": climb.tuning,
            "judging": climb.judging,
            **({"curves": climb.curves} if comparison.looks else {}),
        }
        for contender in comparison.contenders
        if (climb := known.get(contender.name)) is not None
    }
    arena = comparison.arena
    about = {"nodes": arena.nodes, "batch": arena.batch, "epochs": arena.epochs, "torch": torch.__version__}
    if comparison.looks:
        about |= {"optimizer": arena.optimizer, "model": arena.model, "looks": comparison.steps_of_looks}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{comparison.name}.json"
    text = json.dumps({**about, "contenders": contenders}, indent=None if comparison.looks else 1)
    path.with_suffix(".tmp").write_text(text.replace('}, "', '},\n"') + "\n")
    os.replace(path.with_suffix(".tmp"), path)


def climb(comparison: Comparison, folder: Path, until: float = math.inf) -> None:
    """Tune and judge every contender; what is stored is not done again.

    Args:
        comparison: Which.
        folder: Of what is stored.
        until: A time (as ``time.time`` has it) after which nothing more begins.
    """
    torch.set_num_threads(1)
    known = load(comparison, folder)
    for contender in comparison.contenders:
        found = known.setdefault(contender.name, Climb())
        while time.time() < until and (rungs := found.missing(contender.starts, comparison.beyond)):
            played, _ = _play(comparison.arena, contender, rungs, TUNING_SEEDS, 1, found)
            found.tuning.update(played)
            store(comparison, known, folder)
            _tell(comparison, contender, {rung: found.mean(rung) for rung in rungs})
        if found.missing(contender.starts, comparison.beyond) or time.time() >= until:
            continue
        peak = found.peak
        assert peak is not None
        known_seeds = found.judged_curves if comparison.looks else found.judged
        seeds = [seed for seed in (*comparison.seeds, *contender.more_seeds) if seed not in known_seeds]
        if seeds:
            looks = comparison.steps_of_looks
            played, curves = _play(comparison.arena, contender, [peak], seeds, 2, found, looks)
            found.judging.setdefault(peak, {}).update(played[peak])
            if looks:
                found.curves.setdefault(peak, {}).update(curves[peak])
            store(comparison, known, folder)
            _tell(comparison, contender, {peak: fmean(value or 0.0 for value in found.judged.values())}, "judged")


def _play(
    arena: Arena,
    contender: Contender,
    rungs: Sequence[int],
    seeds: Sequence[int],
    judge: int,
    found: Climb,
    looks: Sequence[int] = (),
) -> tuple[dict[int, dict[int, float | None]], dict[int, dict[int, list[float | None]]]]:
    """Accuracy at the end by rung and seed, on the examples of this number; and on the way, if that is asked for."""
    began = time.process_time()
    runs = [(rung, seed) for rung in rungs for seed in seeds]
    played_seeds = [(rate_of(rung), seed + contender.other_seeds) for rung, seed in runs]
    examples = data(arena.model)[judge]
    on_the_way: list[list[float | None]] = []
    asked = (looks, lambda averaged: on_the_way.append(accuracies(arena, averaged, examples))) if looks else ()
    ended = train(arena, contender.make(arena), played_seeds, *asked)
    values = accuracies(arena, ended, examples)
    found.seconds += time.process_time() - began
    played: dict[int, dict[int, float | None]] = {rung: {} for rung in rungs}
    curves: dict[int, dict[int, list[float | None]]] = {rung: {} for rung in rungs} if looks else {}
    for index, (rung, seed) in enumerate(runs):
        played[rung][seed] = _rounded(values[index])
        if looks:
            curves[rung][seed] = [_rounded(values[index], 2) for values in on_the_way]
    return played, curves


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def _tell(comparison: Comparison, contender: Contender, means: Mapping[int, float], how: str = "tuning") -> None:
    found = ", ".join(f"{rate_of(rung):g}: {mean:.1f} %" for rung, mean in sorted(means.items()))
    print(f"{comparison.name}, {contender.name}, {how}: {found}", file=sys.stderr, flush=True)


_ALL_REDUCE = Contender("AllReduce", lambda _: Synchronous(), "all-reduce")


def _with_itself(contenders: tuple[Contender, ...]) -> tuple[Contender, ...]:
    """Return the same, and all-reduce again with seeds of its own: the difference that chance alone makes."""
    first, *others = contenders
    again = replace(first, name=f"{first.name}, other seeds", about=f"{first.about}, seeds + 1000", other_seeds=1000)
    return (first, again, *others)


def _common() -> tuple[Contender, ...]:
    return (
        _ALL_REDUCE,
        Contender("PeriodicAveraging(4)", lambda _: Averages(4), "means every 4 steps"),
        Contender(
            "DASO(4), a whole run", lambda _: Stale(4, 1, 2, 2), "B 4, S 1, 2 + 2 epochs, adapts, patience 0", -8
        ),
        Contender("Crossover-SGD, flat", lambda _: crossover(), "8 fragments"),
        Contender("SGP, flat", lambda _: push(), "directed exponential"),
        Contender("StepsDelay(4), warm-up of 0.8 of the run", lambda _: Delayed(4, 0.8), "GLU, k 4, 0.8"),
        Contender("StepsDelay(4), warm-up of half the run", lambda _: Delayed(4, 0.5), "GLU, k 4, 0.5", -8),
        Contender("StepsDelay(4), warm-up of a sixth", lambda _: Delayed(4, 1 / 6), "GLU, k 4, 1/6", -8),
        Contender("PeriodicAveraging, epoch ends", lambda _: Averages(None), "means at epoch ends", -10),
        Contender("DASO(4), delta", lambda _: Stale(4, 1, 2, 2, "delta"), "B 4, S 1, 2 + 2, adapts, delta", -8),
    )


def _unequal(starts: int = -6) -> tuple[Contender, ...]:
    """Ranks of speeds 20 : 4 : 1, which `HeterogeneousBatches` gives 51, 10 and 3 of 64 examples."""
    sizes = (51, 10, 3)
    samples = tuple(size / 64 for size in sizes)
    speeds = (20 / 25, 4 / 25, 1 / 25)
    return (
        Contender("equal weights", lambda _: Synchronous(sizes, (1 / 3,) * 3), "51 10 3, equal", starts),
        Contender("weights by samples", lambda _: Synchronous(sizes, samples), "51 10 3, samples", starts),
        Contender("weights by speed", lambda _: Synchronous(sizes, speeds), "51 10 3, speed", starts),
    )


def _staleness() -> tuple[Contender, ...]:
    """B and S without phases."""
    pairs = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 4), (8, 1), (8, 8))
    return (
        _ALL_REDUCE,
        *(
            Contender(
                f"B = {every}, S = {stale}",
                lambda _, every=every, stale=stale: Stale(every, stale, 0, 0, adapts=False),  # type: ignore[misc]
                f"B {every}, S {stale}, no phases, fixed",
                -8,
            )
            for every, stale in pairs
        ),
    )


def _periods() -> tuple[Contender, ...]:
    return (
        _ALL_REDUCE,
        *(
            Contender(
                f"PeriodicAveraging({every})",
                lambda _, every=every: Averages(every),  # type: ignore[misc]
                f"means every {every} steps",
                -7,
            )
            for every in (2, 4, 16, 62)
        ),
        *(
            Contender(
                f"StepsDelay({delay}), warm-up of {share:g} of the run",
                lambda _, delay=delay, share=share: Delayed(delay, share),  # type: ignore[misc]
                f"GLU, k {delay}, {share:g}",
                -9,
            )
            for delay, share in ((1, 0.16), (1, 0.5), (1, 0.8), (4, 0.65), (4, 0.8))
        ),
    )


def _long() -> tuple[Contender, ...]:
    return (
        _ALL_REDUCE,
        Contender("PeriodicAveraging(4)", lambda _: Averages(4), "means every 4 steps", -7),
        Contender("DASO(4), its defaults", lambda _: Stale(4, 1, 4, 4, patience=2), "B 4, S 1, 4 + 4, adapts, 2", -7),
        Contender("Crossover-SGD, flat", lambda _: crossover(), "8 fragments"),
    )


def _outer() -> tuple[Contender, ...]:
    """How often, with which outer optimizer, and what a node keeps of its own where the outer step comes later."""
    outers = ((1.0, 0.0), (0.7, 0.9), (0.7, 0.5))
    return (
        replace(_ALL_REDUCE, starts=-14),
        *(
            Contender(
                f"plain averages, H = {every}"
                if not momentum
                else f"DiLoCo, H = {every}, outer {rate:g}, {momentum:g}",
                lambda _, every=every, rate=rate, momentum=momentum: Outer(every, rate, momentum),  # type: ignore[misc]
                f"H {every}, outer {rate:g}, {momentum:g}",
                -14,
            )
            for every in (64, 128, 256, 512)
            for rate, momentum in outers
        ),
    )


def _muons() -> tuple[Contender, ...]:
    """MuLoCo: Muon inside."""
    return tuple(
        replace(contender, starts=-12)
        for contender in _outer()
        if contender.name == "AllReduce" or "H = 64" in contender.name or "H = 512" in contender.name
    )


def _late(every: int, momentum: float) -> tuple[Contender, ...]:
    """What a node keeps of its own where the outer step comes eight steps later."""
    return tuple(
        Contender(
            f"keep_local = {kept:g}",
            lambda _, kept=kept: Outer(every, 0.7, momentum, 8, kept),  # type: ignore[misc]
            f"H {every}, outer 0.7, {momentum:g}, S 8, alpha {kept:g}",
            -14,
        )
        for kept in (0.0, 0.5)
    )


def _perceptrons() -> tuple[Contender, ...]:
    """What the audit of the page looked at, in runs of 24 epochs."""
    return (
        replace(_ALL_REDUCE, starts=-2),
        Contender("PeriodicAveraging(4)", lambda _: Averages(4), "means every 4 steps", -3),
        Contender("DASO(4), a whole run", lambda _: Stale(4, 1, 4, 4), "B 4, S 1, 4 + 4, adapts", -4),
        Contender("Crossover-SGD, flat", lambda _: crossover(), "8 fragments", -2),
        Contender("SGP, flat", lambda _: push(), "directed exponential", -2),
        Contender("ring", lambda _: ring(), "ring", -3),
        Contender("StepsDelay(5), warm-up of 0.64 of the run", lambda _: Delayed(5, 0.64), "GLU, k 5, 0.64", -4),
        Contender("StepsDelay(5), warm-up of 0.16 of the run", lambda _: Delayed(5, 0.16), "GLU, k 5, 0.16", -6),
    )


def _adam() -> tuple[Contender, ...]:
    return (
        Contender("AllReduce", lambda _: Synchronous(), "all-reduce", -12),
        Contender("PeriodicAveraging(4)", lambda _: Averages(4), "means every 4 steps", -13),
    )


def _gossips() -> tuple[Contender, ...]:
    return (
        Contender("Crossover-SGD, flat", lambda _: crossover(), "8 fragments"),
        Contender("SGP, flat", lambda _: push(), "directed exponential"),
        Contender("Crossover-SGD, one fragment", lambda _: Gossips(RandomPermutation, 1), "one fragment"),
        Contender("ring", lambda _: ring(), "ring", -8),
    )


_TWENTY = tuple(range(20))

COMPARISONS = {
    comparison.name: comparison
    for comparison in (
        Comparison(Arena("nodes-8", 8, 8, 12), _with_itself(_common())),
        Comparison(Arena("unequal-ranks", 1, 64, 12), _unequal()),
        Comparison(Arena("nodes-32", 32, 2, 12), _common()),
        Comparison(Arena("nodes-4", 4, 16, 12), _periods()),
        Comparison(Arena("adamw-8", 8, 8, 12, "adamw"), _adam()),
        Comparison(Arena("rare-2", 2, 16, 16, "adamw"), _with_itself(_outer())),
        *(
            Comparison(Arena(f"late-{every}-{momentum:g}", 2, 16, 16, "adamw"), _late(every, momentum))
            for every in (64, 256)
            for momentum in (0.9, 0.5)
        ),
        Comparison(Arena("muon-2", 2, 16, 16, "muon"), _muons()),
        Comparison(Arena("long-8", 8, 8, 48), _long()),
        Comparison(Arena("gossip-16", 16, 4, 12), _gossips(), _TWENTY),
        Comparison(Arena("gossip-32", 32, 2, 12), _gossips(), _TWENTY),
        Comparison(Arena("perceptron-8", 8, 16, 24, model="perceptron"), _with_itself(_perceptrons())),
        Comparison(Arena("perceptron-32", 32, 4, 24, model="perceptron"), _perceptrons()),
        Comparison(Arena("perceptron-unequal", 1, 64, 16, model="perceptron"), _unequal(-4)),
        Comparison(Arena("stale-8", 8, 8, 12), _staleness()),
    )
}
"""By name."""


def table(comparison: Comparison, known: Mapping[str, Climb]) -> list[list[str]]:
    """A row per contender that was judged: name, best rate, that of the baseline's, accuracy, difference."""
    first = known.get(comparison.contenders[0].name, Climb())
    rows = []
    for contender in comparison.contenders:
        found = known.get(contender.name, Climb())
        if not found.judged or found.peak is None:
            continue
        apart = ""
        times = ""
        if contender is not comparison.contenders[0] and first.peak is not None:
            apart = difference(found.judged, first.judged).text()
            times = f"{math.sqrt(2) ** (found.peak - first.peak):.2g}"
        rows.append([contender.name, f"{rate_of(found.peak):g}", times, found.text(), apart])
    return rows
