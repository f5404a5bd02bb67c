"""Which runs come next, by their worth; their results, one file each; processes that train them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.language import corpus
from benchmarks.language.methods import METHODS
from benchmarks.language.model import SIZES
from benchmarks.language.nodes import Outcome, Plan, train
from lightning_hiercomm.schemes.nonfinite import NonfiniteError

STORED = Path(__file__).resolve().parents[1] / "results" / "language"
_MOST_RUNGS = 6  # of a ladder
_MOST_FAILURES = 3  # of one run, after which the others go on without it
_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Key:
    """A run of a size.

    Attributes:
        method: Its name.
        rung: Of the ladder of learning rates.
        seed: Of the model and the batches; None for a short run, which only compares learning rates.
    """

    method: str
    rung: int
    seed: int | None

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.method}.{self.rung:+d}.{'short' if self.seed is None else self.seed}"

    @classmethod
    def named(cls, name: str) -> Key:
        """Return the key of a name."""
        method, rung, seed = name.split(".")
        return cls(method, int(rung), None if seed == "short" else int(seed))


def rate_of(rung: int) -> float:
    """Return a learning rate of the ladder, whose rungs are a factor of 2 apart."""
    return 4e-3 * 2.0**rung


@dataclass(frozen=True)
class Run:
    """A result.

    Attributes:
        points: Steps, and the loss on the tuning and on the judging part; empty if the run diverged.
        sent: Bytes per node and step.
        seconds: Processor time.
        wall: Seconds of the clock.
        parts: How often the run was begun or continued.
        fingerprint: Of everything that would change the result.
    """

    points: list[list[float]]
    sent: float
    seconds: float
    wall: float
    parts: int
    fingerprint: str

    @property
    def tuning(self) -> float | None:
        """The last loss on the tuning part; None if the run diverged."""
        return self.points[-1][1] if self.points else None

    @property
    def judging(self) -> float | None:
        """The last loss on the judging part; None if the run diverged."""
        return self.points[-1][2] if self.points else None


Known = dict[Key, Run]


def fingerprint(size: str, method: str, nodes: int) -> str:
    """Return another text for another model, method, number of nodes, or schedule."""
    about = (*asdict(SIZES[size]).values(), METHODS[method].title, nodes)
    return hashlib.blake2b(repr(about).encode(), digest_size=6).hexdigest()


def load(size: str, nodes: int, folder: Path) -> Known:
    """Read what is stored in a folder: single runs, and the file with many."""
    texts = [json.loads(path.read_text()) for path in sorted((folder / name_of(size, nodes)).glob("*.json"))]
    together = folder / f"{name_of(size, nodes)}.json"
    if together.exists():
        texts += json.loads(together.read_text())["runs"]
    found: Known = {}
    for text in texts:
        key = Key.named(text.pop("run"))
        if key.method in METHODS and text["fingerprint"] == fingerprint(size, key.method, nodes):
            found[key] = Run(**text)
    return found


def name_of(size: str, nodes: int) -> str:
    """Return the name of a setting's files."""
    return size if nodes == 8 else f"{size}-{nodes}-nodes"


def store(size: str, nodes: int, known: Mapping[Key, Run], folder: Path) -> Path:
    """Write all runs of a setting into one file."""
    texts = corpus.load()
    about = {
        "size": asdict(SIZES[size]),
        "nodes": nodes,
        "torch": torch.__version__,
        "corpus": {"files": len(texts.files), "bytes": len(texts.training), "checksum": texts.checksum},
    }
    runs = ",\n".join(json.dumps({"run": key.name, **asdict(run)}) for key, run in sorted(known.items(), key=_by_name))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name_of(size, nodes)}.json"
    _replace(path, f"{json.dumps(about)[:-1]},\n" + f'"runs": [\n{runs}\n]}}\n')
    return path


def _by_name(item: tuple[Key, Run]) -> str:
    return item[0].name


def _replace(path: Path, text: str) -> None:
    path.with_suffix(".tmp").write_text(text)
    os.replace(path.with_suffix(".tmp"), path)


def rungs(known: Mapping[Key, Run], method: str) -> dict[int, float | None]:
    """Return the losses of a method's short runs on the tuning part, by rung; None if one diverged."""
    return {key.rung: run.tuning for key, run in known.items() if key.method == method and key.seed is None}


def peak(known: Mapping[Key, Run], method: str) -> int | None:
    """Return the rung with the lowest loss of the short runs; None without any."""
    losses = rungs(known, method)
    return min(sorted(losses), key=lambda rung: math.inf if losses[rung] is None else losses[rung], default=None)  # type: ignore[arg-type,return-value]


def is_bracketed(known: Mapping[Key, Run], method: str) -> bool:
    """Whether both neighbors of the best rung are known, so that it is a peak."""
    best = peak(known, method)
    return best is not None and {best - 1, best + 1} <= set(rungs(known, method))


def due(known: Mapping[Key, Run], methods: Sequence[str], seeds: int) -> Iterator[Key]:
    """Yield the runs that are known to be missing, the most valuable first.

    Short runs at two rates of all methods; at the neighbors of the better one, until it has both; then a whole run of
    each method at its peak; then further seeds.
    """
    wanted = [Key(method, rung, None) for rung in (0, -1) for method in methods]
    for method in methods:
        found, best = rungs(known, method), peak(known, method)
        if best is not None and {-1, 0} <= set(found) and max(found) - min(found) + 1 < _MOST_RUNGS:
            wanted += [Key(method, best + side, None) for side in (-1, 1)]
    for seed in range(seeds):
        for method in methods:
            best = peak(known, method)
            if best is not None and is_bracketed(known, method):
                wanted.append(Key(method, best, seed))
    yield from (key for key in dict.fromkeys(wanted) if key not in known)


def runs_of_all(methods: Sequence[str], seeds: int) -> int:
    """Return how many runs a setting needs at the least: three rungs, and the seeds at the best."""
    return len(methods) * (3 + seeds)


def run_one(size: str, nodes: int, key: Key, folder: Path, device: str, cpu: int | None = None) -> Run:
    """Train, or continue, one run, and store its result."""
    if cpu is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpu})
    plan = Plan(size, key.method, rate_of(key.rung), key.seed or 0, nodes, device, short=key.seed is None)
    checkpoint = folder / name_of(size, nodes) / f"{key.name}.checkpoint"
    parent = os.getppid()

    def after_step(_: int) -> None:
        if os.getppid() != parent:
            raise KeyboardInterrupt("the process that began this run has ended")

    try:
        outcome = train(plan, checkpoint, after_step)
        lost = not all(math.isfinite(loss) for loss in outcome.points[-1][1:])
    except NonfiniteError:
        outcome, lost = Outcome(), True
    points = [] if lost else [[step, round(first, 5), round(second, 5)] for step, first, second in outcome.points]
    spent = (round(outcome.sent), round(outcome.seconds, 1), round(outcome.wall, 1), outcome.parts)
    run = Run(points, *spent, fingerprint(size, key.method, nodes))
    path = folder / name_of(size, nodes) / f"{key.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, json.dumps({"run": key.name, **asdict(run)}) + "\n")
    checkpoint.unlink(missing_ok=True)
    return run


class Driver:
    """Trains what is due in processes of one thread each, until nothing is, or time is up.

    Args:
        size: Of the model.
        nodes: Number of nodes.
        methods: Names, in the order of their worth.
        seeds: At the best rate of each.
        folder: Of results and checkpoints.
        device: Of the nodes.
        workers: Processes at a time.
    """

    def __init__(
        self, size: str, nodes: int, methods: Sequence[str], seeds: int, folder: Path, device: str, workers: int
    ) -> None:
        self._size, self._nodes, self._methods, self._seeds = size, nodes, methods, seeds
        self._folder, self._device, self._workers = folder, device, workers
        self._running: dict[Key, tuple[subprocess.Popen[bytes], int]] = {}
        self._failures: Counter[Key] = Counter()

    def known(self) -> Known:
        """Return all results so far."""
        return {**load(self._size, self._nodes, STORED), **load(self._size, self._nodes, self._folder)}

    def run(self, until: float) -> None:
        """Begin runs until a time (as ``time.time`` has it), and stop those that are unfinished then."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another driver would train the same runs
            self._run(until)

    def _run(self, until: float) -> None:
        try:
            while time.time() < until:
                self._collect()
                known = self.known()
                waiting = [
                    key
                    for key in due(known, self._methods, self._seeds)
                    if key not in self._running and self._failures[key] < _MOST_FAILURES
                ]
                while waiting and len(self._running) < self._workers:
                    self._begin(waiting.pop(0))
                if not self._running:
                    break
                time.sleep(_POLL_SECONDS)
        finally:
            for process, _ in self._running.values():
                process.terminate()

    def _begin(self, key: Key) -> None:
        taken = {cpu for _, cpu in self._running.values()}
        cpu = next(number for number in range(self._workers) if number not in taken)
        command = [sys.executable, "-m", "benchmarks", "language", "--one", key.name, "--size", self._size]
        command += ["--nodes", str(self._nodes), "--out", str(self._folder), "--device", self._device]
        if self._device == "cpu":
            command += ["--cpu", str(cpu % (os.cpu_count() or 1))]
        self._running[key] = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}), cpu

    def _collect(self) -> None:
        for key, (process, _) in list(self._running.items()):
            if process.poll() is None:
                continue
            del self._running[key]
            if process.returncode:
                self._failures[key] += 1
            print(f"{time.strftime('%H:%M:%S')} {key.name}: {self._told(key)}", flush=True)

    def _told(self, key: Key) -> str:
        run = self.known().get(key)
        if run is None:
            return "failed"
        loss = "diverged" if run.judging is None else f"{run.judging:.4f} nats per byte"
        return f"{loss}, {run.seconds:.0f} s; {self.estimate()}"

    def estimate(self) -> str:
        """Return how much is done, and the hours that the rest would take on processors of its own."""
        known = self.known()
        mine = {key: run for key, run in known.items() if key.method in self._methods}
        size, total = SIZES[self._size], runs_of_all(self._methods, self._seeds)
        if not mine:
            return f"0 of at least {total} runs"
        whole = len(self._methods) * self._seeds - sum(key.seed is not None for key in mine)
        short = max(total - len(mine) - whole, sum(key.seed is None for key in due(known, self._methods, self._seeds)))
        steps = sum(size.short if key.seed is None else size.steps for key in mine)
        per_step = sum(run.seconds for run in mine.values()) / steps
        hours = per_step * (whole * size.steps + short * size.short) / self._workers / 3600
        text = f"{len(mine)} of at least {len(mine) + whole + short} runs"
        return f"{text}, {hours:.1f} hours left with {self._workers} quiet cores"


def about(known: Mapping[Key, Run]) -> dict[str, Any]:
    """Return sums over results: runs, runs that were cut short, hours of processors."""
    return {
        "runs": len(known),
        "cut": sum(run.parts > 1 for run in known.values()),
        "hours": sum(run.seconds for run in known.values()) / 3600,
    }
