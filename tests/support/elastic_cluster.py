"""Elastic nodes as processes of this machine: a lighthouse, and nodes that are restarted as torchrun does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from ports import free_port

from lightning_hiercomm.elastic.quorum import FINISHED_EXIT_CODE

_JOBS = Path(__file__).parents[1] / "jobs"
JOB, LIGHTHOUSE = _JOBS / "elastic_node.py", _JOBS / "elastic_lighthouse.py"


class Process(Protocol):
    pid: int

    def poll(self) -> int | None: ...


Start = Callable[[Sequence[str], Mapping[str, str], Path], Process]


class Cluster:
    """Nodes named 0, 1, ... of one run.

    Args:
        folder: For what they write.
        start: Starts `python *arguments` in a session of its own, given its environment and a file for its output.
        dead_after: Seconds.
        min_nodes: Of all nodes.
        incarnations: How often a node is started again at most.
        namespaces: By node, the network namespace in which it is; the lighthouse's is under ``"lighthouse"``.
        address: Of the lighthouse.
        settings: Of all nodes, see `elastic_node.Node`.

    Attributes:
        job: What a node runs.
    """

    job = JOB

    def __init__(
        self,
        folder: Path,
        start: Start,
        dead_after: float = 1.5,
        min_nodes: int = 2,
        incarnations: int = 5,
        namespaces: Mapping[str, str] | None = None,
        address: str = "127.0.0.1",
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.min_nodes = min_nodes
        self.dead_after = dead_after
        self.incarnations: dict[str, int] = {}
        self._most_lives = incarnations
        self._namespaces = namespaces or {}
        self._address = address
        self.ended: list[tuple[str, int, float]] = []
        self.started: dict[str, list[float]] = {}
        self._start = start
        self._nodes: dict[str, Process] = {}
        self._arguments: dict[str, dict[str, Any]] = {}
        self._environments: dict[str, dict[str, str]] = {}
        self.port = free_port()
        self._lighthouse: Process | None = None

    def __enter__(self) -> Cluster:
        self.start_lighthouse()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_lighthouse()
        for process in self._nodes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it leads no session yet
                    os.killpg(process.pid, signal.SIGKILL)
                os.kill(process.pid, signal.SIGKILL)
        for process in self._nodes.values():
            while process.poll() is None:
                time.sleep(0.01)

    def start_lighthouse(self) -> None:
        environment = {**os.environ, "NAMESPACE": self._namespaces.get("lighthouse", "")}
        self._lighthouse = self._start(self._lighthouse_command(), environment, self.folder / "lighthouse.log")

    def _lighthouse_command(self) -> list[str]:
        bind = ["--bind", f"{self._address}:{self.port}"]
        return [str(LIGHTHOUSE), "lighthouse", *bind, "--dead-after", str(self.dead_after)]

    def stop_lighthouse(self) -> None:
        assert self._lighthouse is not None
        if self._lighthouse.poll() is None:
            os.killpg(self._lighthouse.pid, signal.SIGKILL)

    def start(self, node: int | str, environment: Mapping[str, str] | None = None, **settings: Any) -> None:
        """Start a node; its later incarnations get the same settings."""
        name = str(node)
        elastic = {"min_nodes": self.min_nodes, "dead_after": self.dead_after}
        self._arguments[name] = {"folder": str(self.folder), "elastic": elastic, **self.settings, **settings}
        self._environments[name] = dict(environment or {})
        self._live(name)

    def start_all(self, number: int, fault: str = "", at: int = -1, **settings: Any) -> None:
        """Start so many nodes; a ``fault`` strikes the one with the number ``at``."""
        for node in range(number):
            self.start(node, fault=fault if node == at else "", **settings)

    def _live(self, name: str) -> None:
        incarnation = self.incarnations[name] = self.incarnations.get(name, -1) + 1
        environment = {
            **os.environ,
            "HIERCOMM_LIGHTHOUSE": f"{self._address}:{self.port}",
            "NAMESPACE": self._namespaces.get(name, ""),
            "HIERCOMM_NODE": name,
            "TORCHELASTIC_RESTART_COUNT": str(incarnation),
            "OMP_NUM_THREADS": "1",
            **self._environments[name],
        }
        arguments = [str(self.job), json.dumps(self._arguments[name])]
        self.started.setdefault(name, []).append(time.time())
        self._nodes[name] = self._start(arguments, environment, self.folder / f"{name}.{incarnation}.log")

    def signal(self, node: int | str, number: signal.Signals) -> None:
        os.killpg(self._nodes[str(node)].pid, number)

    def watch(self, timeout: float = 120.0, restarts: bool = True, until: Callable[[], bool] | None = None) -> None:
        """Wait until all nodes have ended well, starting those again that did not, or until `until()` holds."""
        deadline = time.monotonic() + timeout
        while self._nodes and not (until is not None and until()):
            assert time.monotonic() < deadline, f"nodes {sorted(self._nodes)} still run\n{self.said_by_the_living()}"
            self.look(restarts)
            time.sleep(0.01)

    def watch_until(self, node: int, step: int) -> None:
        """Wait until a node has taken a step."""
        self.watch(until=lambda: any(number >= step for _, number in self.steps(node)[-1:]))

    def look(self, restarts: bool = True) -> None:
        for name, process in list(self._nodes.items()):
            code = process.poll()
            if code is None:
                continue
            self.ended.append((name, code, time.time()))
            del self._nodes[name]
            if code not in (0, FINISHED_EXIT_CODE) and restarts and self.incarnations[name] < self._most_lives:
                self._live(name)

    @property
    def living(self) -> dict[str, Process]:
        """The nodes that have not ended."""
        return self._nodes

    def steps(self, node: int | str) -> list[tuple[float, int]]:
        """Return times and numbers of a node's steps."""
        path = self.folder / f"{node}.steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(float(when), int(step)) for when, step in map(str.split, lines)]

    def samples(self) -> dict[int, list[int]]:
        """Return the samples of all nodes by epoch, with `notes_samples`."""
        seen: dict[int, list[int]] = {}
        for path in self.folder.glob("*.samples.*"):
            for epoch, _, samples in (line.partition(" ") for line in path.read_text().splitlines()):
                seen.setdefault(int(epoch), []).extend(json.loads(samples))
        return seen

    def result(self, node: int | str) -> dict[str, Any]:
        path = self.folder / f"{node}.json"
        assert path.exists(), self.said()
        return json.loads(path.read_text())

    def log(self, node: int | str, incarnation: int = 0) -> str:
        return (self.folder / f"{node}.{incarnation}.log").read_text()

    def said_by_the_living(self) -> str:
        """The same, and where each thread of the nodes is that have not ended."""
        for process in self._nodes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGQUIT)
        time.sleep(1.0)
        return self.said()

    def said(self) -> str:
        """All logs, for a test that fails."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(self.folder.glob("*.log")))


def exact(result: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a result that must be equal to the bit."""
    return {key: value for key, value in result.items() if key not in ("communication", "milliseconds", "val")}


def heals_to_the_bit(nodes: Cluster) -> int:
    """That nodes begin with all that a node had at that step which nothing had befallen; how many were healed."""
    healed = 0
    for path in nodes.folder.glob("*.has"):
        begins, step = json.loads(path.read_text()), path.suffixes[-2]
        had = [json.loads(given.read_text()) for given in nodes.folder.glob(f"*{step}.gave")]
        for part in begins if had else ():
            assert begins[part] in [each[part] for each in had], (path.name, part)
        healed += bool(had)
    return healed


def ends_equal(nodes: Cluster, names: list[int]) -> dict[str, Any]:
    """That all nodes have ended with the same bits, and where an undisturbed one ends; what the first one said."""
    results = [nodes.result(name) for name in names]
    first = results[0]
    heals_to_the_bit(nodes)
    for result in results:
        assert exact(result) == exact(first), nodes.said()
        assert result["val"] == pytest.approx(first["val"], rel=1e-5), "nodes of several ranks sum in another order"
    steps = first["global_step"]
    assert first["batches"] == [steps, steps]
    assert first["logger_step"] == first["scheme"][0] == steps
    return first


def not_forked(arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> Process:
    """A `start` for nodes that use CUDA, which a fork cannot."""
    with output.open("w") as log:
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env=dict(environment), stdout=log, stderr=log, start_new_session=True)
