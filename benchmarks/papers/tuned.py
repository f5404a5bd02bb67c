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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.papers.many import (
    Arena,
    Averages,
    Delayed,
    Method,
    Stale,
    Synchronous,
    accuracies,
    crossover,
    data,
    push,
    train,
)
from benchmarks.papers.paired import Difference, difference

TUNING_SEEDS = (100, 101, 102, 103)
JUDGING_SEEDS = tuple(range(10))
_HIGHEST, _LOWEST = 4, -16
"""Rungs of the ladder, beyond which nobody looks: learning rates 4 and 0.004."""


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
    """

    name: str
    make: Callable[[Arena], Method]
    about: str
    starts: int = -6


@dataclass(frozen=True)
class Comparison:
    """A baseline and what is compared with it.

    Attributes:
        arena: Where.
        contenders: The first one is the baseline.
    """

    arena: Arena
    contenders: tuple[Contender, ...]

    @property
    def name(self) -> str:
        """Of its file."""
        return self.arena.name

    def fingerprint(self, contender: Contender) -> str:
        """Another one for another arena or method."""
        arena = self.arena
        text = repr((arena.nodes, arena.batch, arena.epochs, contender.about))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass
class Climb:
    """What is known of one contender.

    Attributes:
        tuning: Accuracy in percent on tuning data, by rung and seed; None where it diverged.
        judging: The same on judging data.
        seconds: Of processor time that it took.
    """

    tuning: dict[int, dict[int, float | None]] = field(default_factory=dict)
    judging: dict[int, dict[int, float | None]] = field(default_factory=dict)
    seconds: float = 0.0

    def mean(self, rung: int) -> float:
        """On tuning data; a run that diverged counts as none right."""
        return fmean(value or 0.0 for value in self.tuning[rung].values())

    @property
    def peak(self) -> int | None:
        """The best rung so far; the lower one of two."""
        return max(sorted(self.tuning), key=self.mean, default=None)

    def missing(self, starts: int) -> list[int]:
        """Rungs to try next; none if the peak has lower values on both sides, or is at an end of the ladder."""
        peak = self.peak
        near = range(starts - 1, starts + 2) if peak is None else (peak - 1, peak + 1)
        return [rung for rung in near if rung not in self.tuning and _LOWEST <= rung <= _HIGHEST]

    @property
    def judged(self) -> Mapping[int, float | None]:
        """At the peak, by seed."""
        return {} if self.peak is None else self.judging.get(self.peak, {})

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
            known[contender.name] = Climb(_rungs(found["tuning"]), _rungs(found["judging"]), found["seconds"])
    return known


def _rungs(stored: Mapping[str, Mapping[str, float | None]]) -> dict[int, dict[int, float | None]]:
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
        }
        for contender in comparison.contenders
        if (climb := known.get(contender.name)) is not None
    }
    arena = comparison.arena
    about = {"nodes": arena.nodes, "batch": arena.batch, "epochs": arena.epochs, "torch": torch.__version__}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{comparison.name}.json"
    path.with_suffix(".tmp").write_text(json.dumps({**about, "contenders": contenders}, indent=1) + "\n")
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
        while time.time() < until and (rungs := found.missing(contender.starts)):
            played = _play(comparison.arena, contender, rungs, TUNING_SEEDS, 1, found)
            found.tuning.update(played)
            store(comparison, known, folder)
            _tell(comparison, contender, {rung: found.mean(rung) for rung in rungs})
        if found.missing(contender.starts) or time.time() >= until:
            continue
        peak = found.peak
        assert peak is not None
        if peak not in found.judging:
            found.judging.update(_play(comparison.arena, contender, [peak], JUDGING_SEEDS, 2, found))
            store(comparison, known, folder)
            _tell(comparison, contender, {peak: fmean(value or 0.0 for value in found.judged.values())}, "judged")


def _play(
    arena: Arena, contender: Contender, rungs: Sequence[int], seeds: Sequence[int], judge: int, found: Climb
) -> dict[int, dict[int, float | None]]:
    """Accuracy by rung and seed, on the examples of this number."""
    began = time.process_time()
    runs = [(rung, seed) for rung in rungs for seed in seeds]
    ended = train(arena, contender.make(arena), [(rate_of(rung), seed) for rung, seed in runs])
    values = accuracies(ended, data()[judge])
    found.seconds += time.process_time() - began
    played: dict[int, dict[int, float | None]] = {rung: {} for rung in rungs}
    for (rung, seed), value in zip(runs, values, strict=True):
        played[rung][seed] = None if value is None else round(value, 3)
    return played


def _tell(comparison: Comparison, contender: Contender, means: Mapping[int, float], how: str = "tuning") -> None:
    told = ", ".join(f"{rate_of(rung):g}: {mean:.1f} %" for rung, mean in sorted(means.items()))
    print(f"{comparison.name}, {contender.name}, {how}: {told}", file=sys.stderr, flush=True)


def _common(nodes: int) -> tuple[Contender, ...]:
    return (
        Contender("AllReduce", lambda _: Synchronous(), "all-reduce"),
        Contender("PeriodicAveraging(4)", lambda _: Averages(4), "means every 4 steps"),
        Contender("DASO(4), a whole run", lambda _: Stale(4, 1, 2, 2), "B 4, S 1, 2 + 2 epochs, adapts, patience 0", -8),
        Contender("Crossover-SGD, flat", lambda _: crossover(), "8 segments"),
        Contender("SGP, flat", lambda _: push(), "directed exponential"),
        Contender("StepsDelay(4), warm-up of half the run", lambda _: Delayed(4, 0.5), "GLU, k 4, 0.5", -8),
        Contender("StepsDelay(4), warm-up of a sixth", lambda _: Delayed(4, 1 / 6), "GLU, k 4, 1/6", -8),
        Contender("PeriodicAveraging, epoch ends", lambda _: Averages(None), "means at epoch ends", -10),
        Contender("DASO(4), delta", lambda _: Stale(4, 1, 2, 2, "delta"), "B 4, S 1, 2 + 2, adapts, delta", -8),
    )


def _unequal() -> tuple[Contender, ...]:
    """Three ranks of speeds 20 : 4 : 1, which `HeterogeneousBatches` gives 51, 10 and 3 of 64 examples."""
    sizes = (51, 10, 3)
    samples = tuple(size / 64 for size in sizes)
    speeds = (20 / 25, 4 / 25, 1 / 25)
    return (
        Contender("equal weights", lambda _: Synchronous(sizes, (1 / 3,) * 3), "51 10 3, equal"),
        Contender("weights by samples", lambda _: Synchronous(sizes, samples), "51 10 3, samples"),
        Contender("weights by speed", lambda _: Synchronous(sizes, speeds), "51 10 3, speed"),
    )


COMPARISONS = {
    comparison.name: comparison
    for comparison in (
        Comparison(Arena("nodes-8", 8, 8, 12), _common(8)),
        Comparison(Arena("unequal-ranks", 1, 64, 12), _unequal()),
        Comparison(Arena("nodes-32", 32, 2, 12), _common(32)),
    )
}
"""By name."""


def table(comparison: Comparison, known: Mapping[str, Climb]) -> list[list[str]]:
    """A row per contender that was judged: name, best rate, how much rate against the baseline, accuracy, difference."""
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


def apart(known: Mapping[str, Climb], one: str, other: str) -> Difference:
    """Of two contenders, each at its peak."""
    return difference(known[one].judged, known[other].judged)


def names(chosen: Iterable[str]) -> list[str]:
    """Of comparisons; all if none is chosen."""
    return list(chosen) or list(COMPARISONS)


def known_of(name: str, folder: Path) -> dict[str, Any]:
    """What is stored of a comparison."""
    return load(COMPARISONS[name], folder)
