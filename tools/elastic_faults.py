"""What becomes of elastic nodes that are killed, stopped and cut off again and again.

``python -m tools.elastic_faults --nodes 8 --minutes 30 --seed 1 --every 15-30``, in a checkout. Every node is a fork
that trains a small model at a pace of its own (a step sleeps), and is started again by this program when it ends.
Faults are drawn from the seed; ``cut`` needs root, and network namespaces.

It counts how often the run stood still; how long survivors waited for each fault at most, compared with their
undisturbed pace; which share of an undisturbed run's steps was taken by the survivors (``waits alone``), and by all
nodes together (``with restarts``: what a node has trained since the last synchronization is lost with it); and whether
all end with equal bits.

``--torchft SECONDS`` lets the same faults happen to torchft's own DiLoCo, with a Manager of that timeout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
CHECKOUT = TESTS.parent
for folder in (TESTS / "support", TESTS / "startup", TESTS / "jobs"):
    sys.path.append(str(folder))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS / "startup"), *filter(None, [os.environ.get("PYTHONPATH")])])

from elastic_cluster import Cluster  # noqa: E402
from forked import ForkedPython  # noqa: E402

HANGS_AFTER = 60.0
"""Seconds without a step of anybody."""


@dataclass
class Fault:
    """Something that happens to a node."""

    wait: float  # seconds after the one before
    what: str  # ``"kill"``, ``"stop"`` or ``"cut"``
    node: int  # to whom; if it does not train at that moment, the next one does
    lasts: float  # seconds until it goes on, of a node that is stopped or cut off
    at: float = 0.0  # when it happened, in seconds since the run began
    # how long any other node stood still at most from the fault on, until that one was back
    survivors_waited: float | None = None


def drawn(arguments: argparse.Namespace) -> Iterator[Fault]:
    """Faults, one after the other, as the seed has it."""
    numbers = random.Random(arguments.seed)
    while True:
        yield Fault(
            wait=numbers.uniform(*arguments.every),
            what=numbers.choice(arguments.kinds),
            node=numbers.randrange(arguments.nodes),
            lasts=numbers.uniform(1.2, 4.0) * arguments.dead_after,
        )


@dataclass
class Outcome:
    """What became of a run."""

    faults: list[Fault] = field(default_factory=list)  # that happened
    hangs: int = 0  # how often no node took a step for a minute
    steps: int = 0  # of the run
    seconds: float = 0.0  # from the first fault to the last one's end
    pace: float = 0.0  # seconds per step, with synchronizations: the median of all periods; most are undisturbed
    kept_waits_alone: float = 0.0  # which share of the undisturbed run's steps the run took in that time
    kept_with_restarts: float = 0.0  # the same of all nodes' steps, less those that were lost
    missed_end: int = 0  # how many came back when the others had ended
    equal: bool = False  # whether all the others ended with equal bits
    loss: float = 0.0  # with which
    incarnations: int = 0
    codes: dict[str, int] = field(default_factory=dict)  # with which codes they ended
    troubles: list[str] = field(default_factory=list)  # what should not have been


class Run:
    """A run with faults.

    Args:
        nodes: Started.
        names: Of the nodes.
        every: Steps between two synchronizations.
        period: Seconds between them.
        cut: Cuts a node off, or connects it again.
    """

    def __init__(
        self, nodes: Cluster, names: Sequence[int], every: int, period: float, cut: Callable[[int, bool], None]
    ) -> None:
        self._nodes = nodes
        self._names = names
        self._every = every
        self._period = period
        self._cut = cut
        self._began = time.time()
        self._pending: list[tuple[float, Callable[[], None]]] = []
        self._away_until: dict[int, float] = {}
        self.outcome = Outcome()

    # ---- the time of the run -------------------------------------------------------------------------------------

    def go_on(self, seconds: float = 1e9, until: Callable[[], bool] = lambda: False) -> None:
        """Watch, start again who ended, let those go on that were stopped, until `until()` holds."""
        end = time.time() + seconds
        while time.time() < end and self._nodes.living:
            for moment, act in [each for each in self._pending if each[0] <= time.time()]:
                self._pending.remove((moment, act))
                act()
            self._nodes.look()
            if until():
                return
            newest = max((path.stat().st_mtime for path in self._nodes.folder.glob("*.steps")), default=self._began)
            if time.time() - max(newest, self._began) > HANGS_AFTER:
                self.outcome.hangs += 1
                raise RuntimeError("no node took a step for a minute\n" + self._nodes.said_by_the_living())
            time.sleep(0.02)

    def trains(self, node: int) -> bool:
        """Whether a node is alive, and its present life has taken a step."""
        incarnation = self._nodes.incarnations.get(str(node), 0)
        is_there = str(node) in self._nodes.living and self._nodes.living[str(node)].poll() is None
        return is_there and (self._nodes.folder / f"{node}.{incarnation}.trains").exists()

    def all_train(self) -> bool:
        return all(map(self.trains, self._names))

    def is_with_others(self, node: int) -> bool:
        """Return whether a node trains at the step of the others; a stopped node may lag, and cannot heal others."""
        is_here = self.trains(node)
        if is_here and node in self._away_until:
            is_near = self._nodes.steps(node)[-1][1] + 2 * self._every > self.last_step()
            is_here = is_near and time.time() > self._away_until[node] + self._period
        return is_here

    def last_step(self) -> int:
        return max((steps[-1][1] for steps in map(self._nodes.steps, self._names) if steps), default=0)

    # ---- faults --------------------------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        """Apply a fault, unless its node is the only one left."""
        nodes = (*range(fault.node, len(self._names)), *range(fault.node))
        able = [node for node in nodes if self.is_with_others(node)]
        if len(able) < 2:
            return
        fault.node, fault.at = able[0], time.time() - self._began
        later = time.time() + fault.lasts
        process = self._nodes.living[str(fault.node)]

        def signalled(number: signal.Signals) -> None:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, number)

        if fault.what == "kill":
            signalled(signal.SIGKILL)
        elif fault.what == "stop":
            signalled(signal.SIGSTOP)
            self._away_until[fault.node] = later
            self._pending.append((later, lambda: signalled(signal.SIGCONT)))
        else:
            self._cut(fault.node, True)
            self._away_until[fault.node] = later
            self._pending.append((later, lambda: self._cut(fault.node, False)))
        self.outcome.faults.append(fault)

    # ---- what was seen -------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Let all end at one step."""
        step = (self.last_step() // self._every + 4) * self._every
        (self._nodes.folder / "end.new").write_text(str(step))
        (self._nodes.folder / "end.new").rename(self._nodes.folder / "end")
        self.go_on()

    def count(self, disturbed: tuple[float, float]) -> None:
        """Sum up; ``disturbed`` is from the first fault until all were back after the last."""
        outcome, every = self.outcome, self._every
        steps = {node: self._nodes.steps(node) for node in self._names}
        taken = [each for of_node in steps.values() for each in of_node]
        first: dict[int, float] = {}
        for when, step in taken:
            if step % every == 1 % every:
                first[step] = min(first.get(step, when), when)
        periods = [first[step + every] - first[step] for step in first if step + every in first]
        outcome.pace = statistics.median(periods) / every
        usual = statistics.median(after[0] - before[0] for each in steps.values() for before, after in pairwise(each))
        begin, end = disturbed
        outcome.seconds = end - begin
        possible = (end - begin) / outcome.pace
        front = [
            max((step for each in steps.values() for when, step in each if when <= t), default=0) for t in disturbed
        ]
        outcome.kept_waits_alone = (front[1] - front[0]) / possible
        kept = sum(self._kept(each, disturbed) for each in steps.values())
        outcome.kept_with_restarts = kept / (possible * len(steps))
        for number, fault in enumerate(outcome.faults):
            struck = self._began + fault.at
            others = [other for other in outcome.faults if other is not fault]
            back = self._returned(fault, struck)
            until = min([back + self._period, end, *(self._began + other.at for other in others[number:])])
            waits = [
                after[0] - max(before[0], struck) - usual
                for node, each in steps.items()
                for before, after in pairwise(each)
                if before[0] < until and after[0] > struck and after[1] == before[1] + 1
                if not self._is_struck(node, before[0], after[0])
            ]
            fault.survivors_waited = round(max(waits, default=0.0), 3)

    def _is_struck(self, node: int, begin: float, end: float) -> bool:
        """Whether a node has a fault of its own in this time."""
        own = [(self._began + fault.at, fault.lasts) for fault in self.outcome.faults if fault.node == node]
        return any(struck <= end and struck + lasts >= begin for struck, lasts in own)

    def _returned(self, fault: Fault, struck: float) -> float:
        """When the node trained again: in its next life, if that began."""
        name = str(fault.node)
        lives = (life for life, started in enumerate(self._nodes.started[name]) if started >= struck)
        began = self._nodes.folder / f"{name}.{next(lives, -1)}.began"
        return began.stat().st_mtime if began.exists() else struck + fault.lasts

    def _kept(self, steps: Sequence[tuple[float, int]], between: tuple[float, float]) -> float:
        """Return the steps of one node in this time, without those lost after its last synchronization."""
        kept = 0
        for index, (when, step) in enumerate(steps):
            if not between[0] < when <= between[1]:
                continue
            kept += 1
            following = steps[index + 1][1] if index + 1 < len(steps) else step + 1
            if following != step + 1:  # its next life begins elsewhere
                kept -= step % self._every
        return float(kept)


class TorchftCluster(Cluster):
    """Nodes of torchft's own DiLoCo, and its lighthouse."""

    job = CHECKOUT / "benchmarks" / "torchft_diloco.py"

    def _lighthouse_command(self) -> list[str]:
        return [str(self.job), "lighthouse", f"{self._address}:{self.port}", str(self.dead_after)]


@contextlib.contextmanager
def network(nodes: int, may_cut: bool) -> Iterator[Any]:
    """Namespaces, which need root, the lighthouse's last; or None: the machine's own loopback."""
    if not may_cut:
        yield None
        return
    sys.path.append(str(CHECKOUT))
    from benchmarks.network import NamespaceNetwork

    with NamespaceNetwork(nodes + 1) as made:
        yield made


def play(arguments: argparse.Namespace, folder: Path) -> Outcome:
    names = range(arguments.nodes)
    with network(arguments.nodes, "cut" in arguments.kinds) as made:
        is_theirs = arguments.torchft is not None
        places = [] if made is None else made.nodes
        namespaces = {
            str(name): str(place.namespace) for name, place in zip([*names, "lighthouse"], places, strict=False)
        }

        def cut(node: int, off: bool) -> None:
            """Cut a node off from all others and the lighthouse, or connect it again."""
            link = ["link", "set", f"port{node}", "down" if off else "up"]
            subprocess.run(["ip", "-n", made._switch, *link], check=True, timeout=30)  # noqa: SLF001

        nodes = (TorchftCluster if is_theirs else Cluster)(
            folder,
            ForkedPython,
            dead_after=arguments.dead_after,
            min_nodes=1,
            incarnations=10**6,
            namespaces=namespaces,
            address=places[-1].address if places else "127.0.0.1",
            scheme=arguments.scheme,
            every=arguments.sync_every,
            pause=arguments.pause,
            epochs=10**6,
            batches=arguments.sync_every * 10,
            **({"timeout": arguments.torchft} if is_theirs else {}),
        )
        period = arguments.sync_every * arguments.pause
        with nodes:
            for node in names:
                place = places[node] if is_theirs and places else None
                nodes.start(node, place and {"NODE_ADDRESS": place.address, "GLOO_SOCKET_IFNAME": place.interface})
            run = Run(nodes, names, arguments.sync_every, period, cut)
            try:
                run.go_on(until=run.all_train)
                run.go_on(period + arguments.calm)
                begin = time.time()
                faults = drawn(arguments)
                while time.time() - begin < 60 * arguments.minutes and len(run.outcome.faults) < arguments.faults:
                    fault = next(faults)
                    run.go_on(fault.wait)
                    run.strike(fault)
                run.go_on(max(fault.lasts, arguments.dead_after) + 1.0)
                run.go_on(until=run.all_train)
                run.go_on(period)
                end = time.time()
                run.end()
                run.count((begin, end))
            except RuntimeError as error:
                run.outcome.troubles.append(str(error)[-20000:])
                return run.outcome
        outcome = run.outcome
        outcome.incarnations = sum(nodes.incarnations.values())
        for _, code, _ in nodes.ended:
            outcome.codes[str(code)] = outcome.codes.get(str(code), 0) + 1
        results = [nodes.result(node) for node in names if (folder / f"{node}.json").exists()]
        outcome.missed_end = len(names) - len(results)
        outcome.steps = results[0]["global_step"]
        outcome.loss = results[0]["loss"]
        outcome.equal = len({(each["parameters"], each["global_step"]) for each in results}) == 1
        if not outcome.equal:
            outcome.troubles.append(f"nodes ended unequal: {results}\n{nodes.said()}")
        # all that have the state may be stopped at once, or have ended: who is started again then says so
        refused = sum("ends: this run " in path.read_text() for path in folder.glob("*.log"))
        allowed = {"0": 10**9, "75": 10**9, "69": 10**9, "-9": 10**9, "1": refused}
        wrong = {code for code, number in outcome.codes.items() if number > allowed.get(code, 0)}
        if wrong:
            outcome.troubles.append(f"nodes ended with {wrong}\n{nodes.said()}")
        return outcome


def said(outcome: Outcome, arguments: argparse.Namespace) -> str:
    bound = arguments.dead_after + 1.0
    waits = sorted(fault.survivors_waited or 0.0 for fault in outcome.faults)
    kinds = ", ".join(
        f"{sum(fault.what == kind for fault in outcome.faults)} {kind}" for kind in ("kill", "stop", "cut")
    )
    late = sum(wait > bound for wait in waits)
    lines = [
        f"{len(outcome.faults)} faults ({kinds}) in {outcome.seconds:.0f} s, {outcome.steps} steps of the run",
        f"hangs: {outcome.hangs}",
        f"steps kept, waits alone: {outcome.kept_waits_alone:.2%}; with restarts: {outcome.kept_with_restarts:.2%}",
        f"lives: {outcome.incarnations} more; exit codes {outcome.codes}",
        f"equal bits at the end: {outcome.equal} ({outcome.missed_end} nodes missed it); loss {outcome.loss:.6f}",
    ]
    if waits:
        median = statistics.median(waits)
        lines.insert(
            2, f"survivors waited: median {median:.2f} s, longest {waits[-1]:.2f} s; {late} beyond {bound:.1f} s"
        )
    return "\n".join(lines)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.elastic_faults", description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--faults", type=int, default=10**9, help="how many at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", default="15-30", help="seconds between two faults, from-to")
    parser.add_argument("--kinds", default=["kill", "stop", "cut"], nargs="+", help="of faults")
    parser.add_argument("--scheme", default="diloco")
    parser.add_argument("--sync-every", type=int, default=40, help="optimizer steps between synchronizations")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds that a step sleeps")
    parser.add_argument("--dead-after", type=float, default=2.0)
    parser.add_argument("--torchft", type=float, help="torchft's own DiLoCo, with a Manager's timeout in seconds")
    parser.add_argument("--calm", type=float, default=30.0, help="seconds before the first fault, for the pace")
    parser.add_argument("--out", type=Path, help="a JSON file for all of it")
    parser.add_argument("--keep", type=Path, help="a folder for what the nodes write")
    chosen = parser.parse_args(arguments)
    low, _, high = chosen.every.partition("-")
    chosen.every = float(low), float(high or low)
    return chosen


def main(given: Sequence[str] | None = None) -> int:
    arguments = parsed(given)
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        outcome = play(arguments, folder)
    print(said(outcome, arguments), *outcome.troubles, sep="\n", flush=True)
    if arguments.out:
        whole = {"arguments": {key: str(value) for key, value in vars(arguments).items()}, **asdict(outcome)}
        arguments.out.write_text(json.dumps(whole, indent=1) + "\n")
    return 1 if outcome.troubles or outcome.hangs else 0


if __name__ == "__main__":
    sys.exit(main())
