"""Runs in which one rank fails: ``python -m tools.faults``, in a checkout.

Every run has two nodes of one or two ranks. It passes if it ends in time, if the output of the other ranks names the
failed one, if it leaves no process and no half-written file behind, and if its checkpoints can be read.

A hundred runs, the default, are all faults at all moments; schemes, launchers and the rest are drawn from ``--seed``.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
for folder in (TESTS / "support", TESTS / "startup", TESTS / "jobs"):
    sys.path.append(str(folder))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS / "startup"), *filter(None, [os.environ.get("PYTHONPATH")])])

import torch  # noqa: E402
from forked import ForkedPython, stand_in_for_python  # noqa: E402
from launches import slurm, torchrun_agents  # noqa: E402
from oracle import FAULTS, MOMENTS  # noqa: E402

EPOCHS, BATCHES = 3, 6
SECONDS = 60.0  # after the fault, when a run counts as hanging
_START_SECONDS = 120.0  # until the fault
SCHEMES = ("all_reduce", "periodic", "daso", "stale", "streaming", "steps_delay", "gossip, overlapped")
LAUNCHERS = ("fork", "spawn", "popen", "torchrun", "slurm")
_GRACE = 15.0  # for processes to go after their parents: ranks have 4 s, a loader's workers look every 5 s
_EXITS_WELL = ("os._exit(0)",)  # what torchrun takes for a rank that has done its work
_TIMES = {"configure_model": 1, "on_fit_start": 1, "on_train_end": 1}
_TIMES |= dict.fromkeys(("validation_step", "on_train_epoch_end", "on_save_checkpoint"), EPOCHS)
"""How often a moment comes, other than after every batch."""


@dataclass(frozen=True)
class Case:
    """One run: what happens to whom, when, and in what run."""

    fault: str  # what happens
    moment: str  # the hook in which it happens
    time: int  # for how many times the rank comes there unharmed
    scheme: str  # the scheme
    launcher: str  # how ranks start
    ranks: int  # on each of the two nodes
    victim: int  # the rank
    replicas: bool  # whether checkpoints have sidecars
    workers: bool  # whether batches come from a process of their own

    def __str__(self) -> str:
        whom = f"rank {self.victim} of {2 * self.ranks}"
        more = [name for name, has in (("sidecars", self.replicas), ("workers", self.workers)) if has]
        how = " with ".join([self.scheme, *filter(None, [" and ".join(more)])])
        return f"{self.fault:13} | {self.moment} ({self.time}), {whom} | {how} | {self.launcher}"


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    seconds: float | None  # from the fault to the end of the last process; None if it hung
    # torchrun still waited when all ranks had ended: it gives the others 300 s after ranks that exit with 0
    launcher_waits: bool
    struck: bool  # whether the rank came to the moment at all
    named: bool  # whether it says which rank it was
    left: tuple[str, ...]  # what is left of it
    output: str  # all that it said

    @property
    def is_good(self) -> bool:
        """Whether it is as it should be."""
        return self.seconds is not None and self.struck and self.named and not self.left


def drawn(seed: int) -> Iterator[Case]:
    """Random runs without end, always the same for a seed; in every hundred, each fault at each moment."""
    draw = random.Random(seed)
    while True:
        for fault, moment in draw.sample([*product(FAULTS, MOMENTS)], len(FAULTS) * len(MOMENTS)):
            ranks = draw.choice((1, 2, 2))
            launcher = draw.choice((*LAUNCHERS, *(name for name in LAUNCHERS if name != "spawn")))
            at, workers = draw.randrange(_TIMES.get(moment, EPOCHS * BATCHES)), draw.random() < 0.3
            run = draw.choice(SCHEMES), launcher, ranks, draw.randrange(2 * ranks), draw.random() < 0.3
            yield Case(fault, moment, at, *run, workers and launcher != "spawn")


def run(case: Case, folder: Path) -> Outcome:
    """Run a case, in an empty folder; at least one process is started in a session of its own."""
    processes = list(_start(case, folder))
    launchers = [process.pid for process in processes]
    began, alone_since = time.time(), None
    while any(process.poll() is None for process in processes):
        time.sleep(0.02)
        struck_at = _read_time(folder / "accident")
        if time.time() > (began + _START_SECONDS if struck_at is None else struck_at) + SECONDS:
            break
        if case.launcher == "torchrun" and case.fault in _EXITS_WELL:
            alone = (folder / "accident").exists() and not {*_processes_of(launchers, folder)} - {*launchers}
            alone_since = (alone_since or time.time()) if alone else None
            if alone_since is not None and time.time() - alone_since > 3:
                break
    hangs = [process for process in processes if process.poll() is None]
    for process in hangs:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    at = _read_time(folder / "accident")
    left = [*processes_left(launchers, folder)]  # under popen, ranks outlive rank 0, which started them
    ended = time.time()
    left += files_left(folder)
    output = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("output-*")))
    launcher_waits = bool(hangs) and alone_since is not None
    if launcher_waits and alone_since is not None:
        ended = alone_since
    seconds = None if hangs and not launcher_waits else ended - (at or ended)
    return Outcome(seconds, launcher_waits, at is not None, is_named_in(case, output), (*left,), output)


def _read_time(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # it is not there, or just being written
        return None


def is_named_in(case: Case, output: str) -> bool:
    if case.fault in ("term", "Ctrl-C"):  # the user sent it; all ranks stop together, or at once
        return True
    # an agent that ends at once, with its store, names the rank that failed, and others say to look there
    first = rf"Root Cause[^=]*\n\s+rank +: {case.victim} \(local_rank"
    if "See there which rank failed first" in output and re.search(first, output):
        return True
    # the latter is Lightning's, which looks for ended children every 5 s and kills all others without a grace
    who = rf"([Rr]ank {case.victim}|[Pp]rocess {case.victim}|\[rank: {case.victim}\] Child process)\b"
    reasons = r"(?! \(node \d+\) ends because)"  # of a rank that tells of another one
    return (
        re.search(rf"{who}{reasons}[^\n]*(died|failed|ended|terminated|did not answer|is frozen)", output) is not None
    )


def _start(case: Case, folder: Path) -> Iterator[ForkedPython]:
    job = [
        *(str(TESTS / "jobs" / "oracle.py"), "--out", str(folder), "--accident", case.fault, "--moment", case.moment),
        *("--at", str(case.time), "--victim", str(case.victim), "--scheme", case.scheme),
        *("--steps", str(BATCHES), "--epochs", str(EPOCHS), "--saves", *(["--replicas"] if case.replicas else [])),
        *("--workers", str(int(case.workers)), *(["--hang-timeout", "4"] if case.fault in ("stop", "hold") else [])),
    ]
    ranks = case.ranks
    outputs = (folder / f"output-{number}" for number in range(2 * ranks))
    if case.launcher in ("fork", "spawn", "popen"):
        where = ("--devices", str(2 * ranks), "--ranks-per-node", str(ranks), "--start-method", case.launcher)
        python = () if case.launcher == "fork" else ("--python", stand_in_for_python())
        yield ForkedPython([*job, *where, *python], os.environ, next(outputs), folder)
        return
    on_nodes = ("--devices", str(ranks), "--num-nodes", "2")
    if case.launcher == "torchrun":
        worker = ("--monitor-interval", "0.1", "--no-python", stand_in_for_python(), *job, *on_nodes)
        for agent in torchrun_agents([ranks, ranks]):
            yield ForkedPython([*agent, *worker], os.environ, next(outputs), folder)
        return
    for place in slurm(2, ranks):
        yield ForkedPython([*job, *on_nodes], {**os.environ, **place}, next(outputs), folder)


def processes_left(sessions: Sequence[int], folder: Path) -> list[str]:
    """Processes of the sessions, or whose working folder is the run's, that do not go; ends them."""
    deadline = time.monotonic() + _GRACE
    while left := [*_processes_of(sessions, folder)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return [f"process {pid}" for pid in left]


def _processes_of(sessions: Sequence[int], folder: Path) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            works_there = Path(os.readlink(entry / "cwd")) == folder
        except OSError:  # it has just ended, or is another user's
            continue
        if state != "Z" and (int(session) in sessions or works_there):
            yield int(entry.name)


def files_left(folder: Path) -> Iterator[str]:
    """Half-written files, and checkpoints that cannot be read."""
    for path in sorted((folder / "checkpoints").glob("*.ckpt")):
        try:
            torch.load(path, weights_only=True)
        except Exception as error:
            yield f"{path.name}: {error}"


def failures(cases: Sequence[Case], jobs: int = 2, seconds: float = float("inf"), keep: Path | None = None) -> int:
    """Run cases, some at a time, and print a line of a table for each; how many did not pass.

    No run begins after so many ``seconds``; ``keep`` gets what was said in runs that did not pass.
    """
    began, done, failed = time.monotonic(), 0, 0

    def one(case: Case) -> Outcome | None:
        if time.monotonic() - began > seconds:
            return None
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            return run(case, Path(folder).resolve())

    print("| fault | moment (after so many), to whom | scheme | launcher | seconds | named | left behind |")
    print("|---|---|---|---|---|---|---|")
    with ThreadPoolExecutor(jobs) as threads:
        for number, (case, outcome) in enumerate(zip(cases, threads.map(one, cases), strict=True)):
            if outcome is None:
                continue
            done, failed = done + 1, failed + (not outcome.is_good)
            took = "HANGS" if outcome.seconds is None else f"{outcome.seconds:.1f}" if outcome.struck else "not struck"
            took += ", then torchrun waits" if outcome.launcher_waits else ""
            named, left = "yes" if outcome.named else "NO", ", ".join(outcome.left) or "nothing"
            print(f"| {case} | {took} | {named} | {left} |", flush=True)
            if not outcome.is_good and keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{number}.txt").write_text(f"{case!r}\n\n{outcome.output}")
    print(f"\n{done} runs: {failed} failed.")
    return failed


def main() -> int:
    atexit.register(gc.freeze)  # as startup/sitecustomize.py says
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", type=int, default=100, metavar="RUNS", help="so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of them, which another call has run")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="repeat these alone, counted from 0")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--keep", type=Path, help="folder for what was said in runs that did not pass")
    given = parser.parse_args()
    cases = [*islice(drawn(given.seed), given.random if given.only is None else 1 + max(given.only))]
    cases = cases[given.skip :] if given.only is None else [cases[number] for number in given.only]
    return int(failures(cases, given.jobs, given.seconds, given.keep) > 0)


if __name__ == "__main__":
    sys.exit(main())
