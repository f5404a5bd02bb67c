"""What becomes of runs in which something happens to one rank: ``python -m tests.faults``, in a checkout.

Every run has two nodes of one or two ranks, whatever the launcher. It passes if it ends in time, if what everyone else
says names the rank, if nothing is left of it (processes, half-written files), and if its checkpoints can be read.

Without options all faults happen at all moments, each under the next scheme and launcher. ``--random 2000 --seed 1``
draws runs from everything that can be combined.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE / "startup", HERE / "jobs"):
    sys.path.append(str(folder))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE / "startup"), *filter(None, [os.environ.get("PYTHONPATH")])])

import torch  # noqa: E402
from forked import ForkedPython  # noqa: E402
from lightning.fabric.plugins.environments.lightning import find_free_network_port  # noqa: E402
from unlucky import BATCHES, EPOCHS, FAULTS, MOMENTS, SCHEMES  # noqa: E402

SECONDS = 60.0  # after which a run counts as hanging
LAUNCHERS = ("fork", "torchrun", "slurm")
_GRACE = 3.0  # for processes to go after their parents


@dataclass(frozen=True)
class Case:
    """One run: what happens to whom, when, and in what run.

    Attributes:
        fault: What happens.
        moment: The hook in which it happens.
        time: For how many times the rank comes there unharmed.
        scheme: How nodes agree.
        launcher: How ranks start.
        ranks: On each of the two nodes.
        victim: The rank.
        replicas: Whether checkpoints have companions.
    """

    fault: str
    moment: str
    time: int
    scheme: str
    launcher: str
    ranks: int
    victim: int
    replicas: bool

    def __str__(self) -> str:
        whom = f"rank {self.victim} of {2 * self.ranks}"
        how = f"{self.scheme}{' with companions' if self.replicas else ''}"
        return f"{self.fault:13} | {self.moment} ({self.time}), {whom} | {how} | {self.launcher}"


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        seconds: From the fault to the end of the last process; None if it hung.
        struck: Whether the rank came to the moment at all.
        named: Whether it says which rank it was.
        left: What is left of it.
        output: All that it said.
    """

    seconds: float | None
    struck: bool
    named: bool
    left: tuple[str, ...]
    output: str

    @property
    def is_good(self) -> bool:
        """Whether it is as it should be."""
        return self.seconds is not None and self.struck and self.named and not self.left


def listed() -> Iterator[Case]:
    """All faults at all moments."""
    schemes, launchers, ranks, victims = cycle(SCHEMES), cycle(LAUNCHERS), cycle((1, 2, 2)), cycle((1, 0, 3, 2, 1))
    for fault, moment in product(FAULTS, MOMENTS):
        size = next(ranks)
        yield _case(fault, moment, 1, next(schemes), next(launchers), size, next(victims) % (2 * size), False)


def drawn(number: int, seed: int) -> Iterator[Case]:
    """Random runs, always the same for a seed."""
    draw = random.Random(seed)
    for _ in range(number):
        ranks = draw.choice((1, 2, 2))
        yield _case(
            draw.choice([*FAULTS]),
            draw.choice(MOMENTS),
            draw.randrange(EPOCHS * BATCHES),
            draw.choice([*SCHEMES]),
            draw.choice(LAUNCHERS),
            ranks,
            draw.randrange(2 * ranks),
            draw.random() < 0.3,
        )


def _case(fault: str, moment: str, at: int, *rest: object) -> Case:
    """With a number of times that the moment comes."""
    once = {"configure_model", "on_fit_start", "on_train_end"}
    an_epoch = {"validation_step", "on_train_epoch_end", "on_save_checkpoint"}
    times = 1 if moment in once else EPOCHS if moment in an_epoch else EPOCHS * BATCHES
    return Case(fault, moment, at % times, *rest)  # type: ignore[arg-type]


def run(case: Case, folder: Path) -> Outcome:
    """Run a case, in an empty folder; at least one process is started in a session of its own."""
    processes = list(_start(case, folder))
    deadline = time.monotonic() + SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    ended = time.time()
    hangs = [process for process in processes if process.poll() is None]
    for process in hangs:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    struck = folder / "struck"
    at = float(struck.read_text()) if struck.exists() else None
    output = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("output-*")))
    left = (*_processes_left([process.pid for process in processes], folder), *_files_left(folder))
    seconds = None if hangs else ended - (at or ended)
    return Outcome(seconds, at is not None, _is_named(case, output), left, output)


def _is_named(case: Case, output: str) -> bool:
    if case.fault in ("SIGTERM", "Ctrl-C"):  # whoever does that knows; all stop together, or at once
        return True
    who = rf"([Rr]ank|[Pp]rocess) {case.victim}\b"
    return re.search(rf"{who}[^\n]*(died|failed|ended|terminated|had not come)", output) is not None


def _start(case: Case, folder: Path) -> Iterator[ForkedPython]:
    job = [
        *(str(HERE / "jobs" / "unlucky.py"), "--out", str(folder), "--fault", case.fault, "--moment", case.moment),
        *("--time", str(case.time), "--victim", str(case.victim), "--scheme", case.scheme),
        *(["--replicas"] if case.replicas else []),
    ]
    port, ranks = str(find_free_network_port()), case.ranks
    outputs = (folder / f"output-{number}" for number in range(2 * ranks))
    if case.launcher == "fork":
        where = ("--devices", str(2 * ranks), "--ranks-per-node", str(ranks), "--start-method", "fork")
        yield ForkedPython([*job, *where], os.environ, next(outputs), folder)
        return
    on_nodes = ("--devices", str(ranks), "--num-nodes", "2")
    if case.launcher == "torchrun":
        fork = ("--run-path", "--start-method", "fork", "--signals-to-handle", "SIGINT", "--monitor-interval", "0.1")
        for node in range(2):
            agent = ("-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), *fork)
            address = ("--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", port)
            yield ForkedPython([*agent, *address, *job, *on_nodes], os.environ, next(outputs), folder)
        return
    for task in range(2 * ranks):
        environment = {
            **os.environ,
            "SLURM_JOB_ID": str(int(port) - 15_000),  # Lightning makes it the port
            "SLURM_JOB_NAME": "faults",
            "SLURM_NTASKS": str(2 * ranks),
            "SLURM_NTASKS_PER_NODE": str(ranks),
            "SLURM_NNODES": "2",
            "SLURM_NODELIST": "127.0.0.1",
            "SLURM_PROCID": str(task),
            "SLURM_NODEID": str(task // ranks),
            "SLURM_LOCALID": str(task % ranks),
        }
        yield ForkedPython([*job, *on_nodes], environment, next(outputs), folder)


def _processes_left(sessions: Sequence[int], folder: Path) -> list[str]:
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


def _files_left(folder: Path) -> Iterator[str]:
    """Half-written files, and checkpoints that cannot be read."""
    for path in sorted((folder / "checkpoints").glob("*")):
        if path.name.endswith(".ckpt"):
            try:
                torch.load(path, weights_only=True)
            except Exception as error:
                yield f"{path.name}: {error}"


def report(cases: Sequence[Case], jobs: int, seconds: float, keep: Path | None = None) -> Counter[str]:
    """Run cases, print a line of a table for each, and what was said in those that did not pass.

    Args:
        cases: What to run.
        jobs: How many at a time.
        seconds: After which no further run begins.
        keep: Gets what was said in runs that did not pass.

    Returns:
        How many runs there were, and how many hung, were not named, and left something.
    """
    began = time.monotonic()
    counts: Counter[str] = Counter()
    slowest = 0.0

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
            counts.update(
                runs=1,
                hung=outcome.seconds is None,
                unnamed=not outcome.named,
                left=bool(outcome.left),
                missed=not outcome.struck,
                bad=not outcome.is_good,
            )
            slowest = max(slowest, outcome.seconds or 0.0)
            took = "HANGS" if outcome.seconds is None else f"{outcome.seconds:.1f}" if outcome.struck else "not struck"
            print(f"| {case} | {took} | {'yes' if outcome.named else 'NO'} | {', '.join(outcome.left) or 'nothing'} |")
            sys.stdout.flush()
            if not outcome.is_good and keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{number}.txt").write_text(f"{case!r}\n\n{outcome.output}")
    print(
        f"\n{counts['runs']} runs: {counts['hung']} hung, {counts['unnamed']} did not name the rank, {counts['left']}"
        f" left something behind, {counts['missed']} ended before the fault; the slowest end took {slowest:.1f} s"
    )
    return counts


def main() -> int:
    atexit.register(gc.freeze)  # as startup/sitecustomize.py says
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", type=int, metavar="RUNS", help="so many random runs, instead of the list")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of them, which another call has run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--keep", type=Path, help="folder for what was said in runs that did not pass")
    arguments = parser.parse_args()
    cases = [*(listed() if arguments.random is None else drawn(arguments.random, arguments.seed))][arguments.skip :]
    return int(report(cases, arguments.jobs, arguments.seconds, arguments.keep)["bad"] > 0)


if __name__ == "__main__":
    sys.exit(main())
