"""Experiments that are repeated over seeds, and kept as they finish, so that a run which is broken off goes on."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.papers.paired import difference
from benchmarks.simulate.simulation import Curve, Experiment, Site, simulate
from lightning_hiercomm.schemes.nonfinite import NonfiniteError

_LOOKS = 20


@dataclass(frozen=True)
class Setting:
    """One row of a paper's experiment, before its seeds.

    Attributes:
        key: What the results call it; no two settings of a study have the same.
        make: Gives the experiment of a seed.
        site: What the virtual clock goes by.
        play: What trains: :func:`~benchmarks.simulate.simulation.simulate`, or something that it has
            no scheme for.
        looks: How often the averaged model is judged.
    """

    key: str
    make: Callable[[int], Experiment]
    site: Site
    play: Callable[[Experiment, Site, int], Curve] = simulate
    looks: int = _LOOKS

    def fingerprint(self, seed: int) -> str:
        """Identifies the experiment; stored runs of another one are repeated."""
        text = repr((described(self.make(seed)), unusual(self.site), self.play.__name__, self.looks))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def run(self, seed: int) -> dict[str, Any]:
        """What becomes of one seed, as JSON has it."""
        experiment = self.make(seed)
        about = {
            "fingerprint": self.fingerprint(seed),
            "scheme": repr(experiment.scheme),
            "task": experiment.task.name,
            "nodes": experiment.nodes,
            "ranks_per_node": experiment.ranks_per_node,
            "batch": experiment.batch,
            "learning_rate": experiment.learning_rate,
            "steps": experiment.steps,
        }
        try:
            curve = self.play(experiment, self.site, self.looks)
        except NonfiniteError:
            return {**about, "error": "diverged", "points": []}
        points = [[p.step, round(p.seconds, 3), round(p.accuracy, 5), round(p.loss, 5)] for p in curve.points]
        error = None if all(math.isfinite(value) for point in points for value in point) else "diverged"
        finite = [point for point in points if all(map(math.isfinite, point))]
        history = list(getattr(experiment.scheme, "history", []))
        run = {**about, "error": error, "points": finite, "took": round(curve.took, 2), "bytes": curve.inter_bytes}
        return {**run, "history": history} if history else run


def described(experiment: Experiment) -> dict[str, str]:
    """What sets an experiment apart from the default; functions by their names, which are the same in every process."""
    of_experiment = unusual(experiment)
    del of_experiment["label"]
    return {**of_experiment, "task": f"{experiment.task.name}: {experiment.task.build(10)!r}"}


def unusual(value: Any) -> Any:
    """The fields of a dataclass that differ from their defaults, so that a new one with a default changes nothing."""
    if not is_dataclass(value):
        return getattr(value, "__qualname__", repr(value))
    of_fields = {part.name: getattr(value, part.name) for part in fields(value)}
    usual = {part.name: part.default for part in fields(value)}
    return {name: unusual(found) for name, found in of_fields.items() if found != usual[name]}


@dataclass(frozen=True)
class Sample:
    """One number over the seeds.

    Attributes:
        by_seed: None of those that diverged.
    """

    by_seed: Mapping[int, float | None]

    @property
    def values(self) -> tuple[float, ...]:
        """Of every seed that has one, by seed."""
        return tuple(value for _, value in sorted(self.by_seed.items()) if value is not None)

    @property
    def failed(self) -> int:
        """How many diverged."""
        return len(self.by_seed) - len(self.values)

    @property
    def mean(self) -> float:
        """NaN if there is nothing."""
        return fmean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float:
        """The standard deviation between the seeds; 0 of a single one."""
        return stdev(self.values) if len(self.values) > 1 else 0.0

    def differs_from(self, other: Sample) -> bool:
        """Whether 0 lies outside the 95 % interval of the difference, by runs of the same seeds."""
        return difference(self.by_seed, other.by_seed).is_shown

    def text(self, digits: int = 1) -> str:
        """``61.2 ± 0.8``, and how many seeds diverged."""
        seeds = len(self.values) + self.failed
        if not self.values:
            return "diverged" if seeds else ""
        shown = f"{self.mean:.{digits}f} ± {self.spread:.{digits}f}"
        return f"{shown} ({self.failed} of {seeds} diverged)" if self.failed else shown

    def against(self, other: Sample) -> str:
        """The mean difference of runs of the same seeds, and its 95 % interval; bold where 0 lies outside."""
        return difference(self.by_seed, other.by_seed).text()


@dataclass(frozen=True)
class Results:
    """What is known of a study.

    Attributes:
        runs: What :meth:`Setting.run` gave, by key and by seed.
        extra: Other results of the study.
    """

    runs: Mapping[str, Mapping[int, Mapping[str, Any]]]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def sample(self, key: str, of: Callable[[Mapping[str, Any]], float | None]) -> Sample:
        """Return a number of every seed's run; runs where it is None count as failed."""
        runs = self.runs.get(key, {})
        return Sample({seed: None if run["error"] else of(run) for seed, run in runs.items()})

    def accuracy(self, key: str) -> Sample:
        """Of the averaged model at the end, in percent."""
        return self.sample(key, lambda run: 100 * float(run["points"][-1][2]))

    def best(self, key: str) -> Sample:
        """The highest accuracy on the way, in percent."""
        return self.sample(key, lambda run: 100 * max(float(point[2]) for point in run["points"]))

    def loss(self, key: str) -> Sample:
        """Held out, at the end."""
        return self.sample(key, lambda run: float(run["points"][-1][3]))

    def seconds(self, key: str) -> Sample:
        """That the run would have taken on the site."""
        return self.sample(key, lambda run: float(run["points"][-1][1]))

    def best_of(self, keys: Sequence[str]) -> str:
        """The key with the highest mean accuracy at the end among those that never diverged, if there are any."""
        known = [key for key in keys if self.accuracy(key).values]
        safe = [key for key in known if not self.accuracy(key).failed] or known or list(keys)
        return max(safe, key=lambda key: self.accuracy(key).mean if key in known else -math.inf)

    @property
    def seeds(self) -> int:
        """The most that any setting has."""
        return max(map(len, self.runs.values()), default=0)


@dataclass(frozen=True)
class Study:
    """A paper.

    Attributes:
        number: What the command line calls it.
        title: Of the section.
        source: The paper, with the tables and figures that this follows, and what is played here in their place.
        settings: Makes them all.
        report: Markdown: tables with the paper's numbers, and conclusions.
        draw: Makes the figure.
        left_out: What of the paper is not here, and why.
        compute: Results without seeds, stored with the runs.
    """

    number: str
    title: str
    source: str
    settings: Callable[[], list[Setting]]
    report: Callable[[Results], str]
    draw: Callable[[Results, Path], None]
    left_out: str = ""
    compute: Callable[[], dict[str, Any]] = dict

    @cached_property
    def by_key(self) -> dict[str, Setting]:
        """The settings."""
        settings = self.settings()
        found = {setting.key: setting for setting in settings}
        if len(found) < len(settings):
            raise ValueError(f"study {self.number}: two settings have one key")
        return found


def known_results(study: Study, path: Path) -> Results:
    """What is kept and still belongs to the study's settings; says how many others there are."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    runs: dict[str, dict[int, Any]] = {key: {} for key in study.by_key}
    others = 0
    for key, by_seed in stored.get("runs", {}).items():
        for seed, run in by_seed.items():
            setting = study.by_key.get(key)
            if setting is not None and run["fingerprint"] == setting.fingerprint(int(seed)):
                runs[key][int(seed)] = run
            else:
                others += 1
    if others:
        print(f"{path}: {others} runs are of settings that are no more", file=sys.stderr, flush=True)
    return Results(runs, stored.get("extra", {}))


Play = Callable[[str, str, int], dict[str, Any]]
"""What becomes of one seed of a study's setting, by the study's number and the setting's key; in any process."""


def collect(
    study: Study, path: Path, seeds: int, processes: int, about: Mapping[str, Any], play: Play | None = None
) -> Results:
    """Do what is not known yet, one seed of all settings after the other, and write every run down as it ends.

    Args:
        study: Which.
        path: Of the JSON file.
        seeds: Of every setting.
        processes: That train at the same time.
        about: Stored with the results.
        play: Finds the study in another process. Default: all is done in this one.
    """
    known = known_results(study, path)
    runs = {key: dict(by_seed) for key, by_seed in known.runs.items()}
    extra = known.extra or study.compute()

    def keep() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({**about, "extra": extra, "runs": runs}, separators=(",", ":")) + "\n")
        os.replace(temporary, path)

    missing = [(key, seed) for seed in range(seeds) for key in study.by_key if seed not in runs[key]]
    for done, (key, seed, run) in enumerate(_played(study, missing, processes, play), 1):
        runs[key][seed] = run
        keep()
        end = run["error"] or f"{100 * run['points'][-1][2]:.1f} %, {run['took']:.1f} s"
        print(f"[{done} of {len(missing)}] {key}, seed {seed}: {end}", file=sys.stderr, flush=True)
    keep()
    return Results({key: dict(sorted(by_seed.items())) for key, by_seed in runs.items()}, extra)


def _played(
    study: Study, missing: Sequence[tuple[str, int]], processes: int, play: Play | None
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Every run as it ends; in this process if one is enough."""
    if processes < 2 or len(missing) < 2 or play is None:
        torch.set_num_threads(1)  # other processes train at the same time
        for key, seed in missing:
            yield key, seed, study.by_key[key].run(seed)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        runs = {pool.submit(play, study.number, key, seed): (key, seed) for key, seed in missing}
        try:
            for future in as_completed(runs):
                yield *runs[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
