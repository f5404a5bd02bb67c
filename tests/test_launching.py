"""Real launches: torchrun on two nodes, ranks that die, raise, lag, or are told to stop."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

JOB = Path(__file__).parent / "jobs" / "oracle.py"
Mpiexec = Callable[[str, int], tuple[list[str], dict[str, str]]]
SECONDS = 60  # until a launch that should have ended is killed, and the test fails


class Launch:
    """Processes that belong to one test, and what they said."""

    def __init__(self, folder: Path, mpiexec: Mpiexec) -> None:
        self.folder = folder
        self._mpiexec = mpiexec
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def job(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start(sys.executable, str(JOB), "--out", str(self.folder), *arguments)

    def torchrun(self, *arguments: str, ranks_per_node: Sequence[int] = (2, 2)) -> None:
        port, nodes = str(_free_port()), len(ranks_per_node)
        for node, ranks in enumerate(ranks_per_node):
            self.start(
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(node)),
                *("--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", port),
                *(str(JOB), "--out", str(self.folder), "--num-nodes", str(nodes), "--devices", str(ranks), *arguments),
            )

    def mpiexec(self, library: str, *ranks: Sequence[str]) -> None:
        """One rank per list of arguments."""
        (program, *options, _, _), environment = self._mpiexec(library, len(ranks))
        job = [sys.executable, str(JOB), "--out", str(self.folder)]
        sections = [argument for own in ranks for argument in (":", "-n", "1", *job, *own)]
        self.start(program, *options, *sections[1:], environment=environment)

    def slurm(self, *arguments: str, nodes: int = 2, ranks: int = 2) -> None:
        """What srun does: one process per task, which finds its place in the environment."""
        job = {
            "SLURM_JOB_ID": str(_free_port() - 15_000),  # Lightning makes it the port
            "SLURM_JOB_NAME": "digits",
            "SLURM_NTASKS": str(nodes * ranks),
            "SLURM_NTASKS_PER_NODE": str(ranks),
            "SLURM_NNODES": str(nodes),
            "SLURM_NODELIST": "127.0.0.1",
        }
        for task in range(nodes * ranks):
            place = {
                "SLURM_PROCID": str(task),
                "SLURM_NODEID": str(task // ranks),
                "SLURM_LOCALID": str(task % ranks),
            }
            self.start(
                *(sys.executable, str(JOB), "--out", str(self.folder)),
                *("--num-nodes", str(nodes), "--devices", str(ranks), *arguments),
                environment={**job, **place},
            )

    def end(self) -> tuple[list[int], str]:
        """Exit codes and everything printed."""
        outputs = [process.communicate(timeout=SECONDS)[0] for process in self.processes]
        return [process.returncode for process in self.processes], "\n".join(outputs)

    def report(self, rank: int) -> dict:
        return json.loads((self.folder / f"rank-{rank}.json").read_text())


@pytest.fixture
def launch(tmp_path: Path, mpiexec: Mpiexec) -> Iterator[Launch]:
    """Starts processes, and ends what the test left of them."""
    launched = Launch(tmp_path, mpiexec)
    yield launched
    for process in launched.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


Start = Callable[[Launch, list[str]], None]


def _with_popen(launch: Launch, arguments: list[str]) -> None:
    launch.job("--devices", "4", "--ranks-per-node", "2", *arguments)


def _with_fork(launch: Launch, arguments: list[str]) -> None:
    launch.job("--devices", "4", "--ranks-per-node", "2", "--start-method", "fork", *arguments)


def _with_torchrun(launch: Launch, arguments: list[str]) -> None:
    launch.torchrun(*arguments)


def _with_slurm(launch: Launch, arguments: list[str]) -> None:
    launch.slurm(*arguments)


def _with_mpiexec(library: str, inter_node: str) -> Start:
    def start(launch: Launch, arguments: list[str]) -> None:
        # start_method is for the ranks that Lightning itself starts: here it does nothing
        options = ["--devices", "4", "--ranks-per-node", "2", "--inter-node", inter_node, "--start-method", "fork"]
        launch.mpiexec(library, *[[*options, *arguments]] * 4)

    return start


EVERY_LAUNCHER = {
    "popen": _with_popen,
    "fork": _with_fork,
    "torchrun": _with_torchrun,
    "slurm": _with_slurm,
    "openmpi": _with_mpiexec("openmpi", "mpi"),
    "mpich": _with_mpiexec("mpich", "mpi"),
    "openmpi with gloo between nodes": _with_mpiexec("openmpi", "torch"),
}

every_launcher = pytest.mark.parametrize("start", EVERY_LAUNCHER.values(), ids=EVERY_LAUNCHER)


@every_launcher
def test_every_launcher_follows_the_table_to_the_digit(launch, start: Start):
    start(launch, ["--epochs", "2"])
    codes, output = launch.end()
    assert not any(codes), output
    expected = [(0.5, 3.5), (3, 3), (2, 5), (3.75, 3.75), (3.875, 3.875), (2.4375, 5.4375), (3.96875, 3.96875)]
    reports = [launch.report(rank) for rank in range(4)]
    for rank, report in enumerate(reports):
        assert report["nodes"] == [[0, 1], [2, 3]]
        assert report["trace"][:7] == [pair[rank // 2] for pair in expected]
        assert report["x"] == reports[0]["x"]
    assert sorted(sample for report in reports for sample in report["samples"]) == sorted([*range(20)] * 2)


def test_nodes_of_a_torchrun_may_be_unequal(launch):
    launch.torchrun(ranks_per_node=[3, 1])
    codes, output = launch.end()
    assert codes == [0, 0], output
    reports = [launch.report(rank) for rank in range(4)]
    assert [report["nodes"] for report in reports] == [[[0, 1, 2], [3]]] * 4
    assert [report["trace"][1] for report in reports] == [3.0] * 4  # weighted by their ranks
    assert sorted(sample for report in reports for sample in report["samples"]) == [*range(20)]


def test_host_names_decide_what_a_node_is_under_mpiexec_however_unequal_and_scattered(launch):
    places = [("localhost", "3"), ("localhost", "3"), ("127.0.0.1", "1"), ("localhost", "3")]
    options = ["--num-nodes", "2", "--inter-node", "mpi"]
    launch.mpiexec("openmpi", *(["--host-name", host, "--devices", devices, *options] for host, devices in places))
    codes, output = launch.end()
    assert codes == [0], output
    reports = [launch.report(rank) for rank in range(4)]
    assert [report["nodes"] for report in reports] == [[[0, 1, 3], [2]]] * 4
    assert [report["trace"][1] for report in reports] == [3.0] * 4
    assert sorted(sample for report in reports for sample in report["samples"]) == [*range(20)]


def test_devices_must_be_the_ranks_of_this_node(launch):
    launch.mpiexec("openmpi", *[["--devices", "1"]] * 2)
    codes, output = launch.end()
    assert all(codes)
    assert "Trainer(devices=1), but 2 ranks were started on this node: give devices=2" in output


@every_launcher
@pytest.mark.parametrize(
    ("accident", "message"),
    [
        # a parent that forked sees it first, and ends the others before they can speak
        (
            "raise",
            r"rank 2 \(node 1\) failed: ValueError: the dog ate the batch|Process 2 terminated with the following",
        ),
        ("kill", r"lightning_hiercomm: rank 2 \(node 1\) died"),
    ],
)
def test_a_lost_rank_ends_the_run_within_seconds_and_is_named(launch, start: Start, accident, message):
    # no agreement for a long time: nobody would notice by communicating
    slow = ["--slow-rank", "0", "--slow-seconds", "0.2", "--steps", "400", "--sync-every", "400"]
    start(launch, ["--victim", "2", "--at", "3", "--accident", accident, *slow])
    codes, output = launch.end()
    seconds = time.time() - float((launch.folder / "accident").read_text())
    assert all(codes), output
    assert re.search(message, output), output
    print(f"ended {seconds:.1f} seconds after the accident")
    assert seconds < 20, output  # torchrun's agents alone take a few seconds to end


def test_a_fast_node_does_not_wait_for_a_slow_one_between_agreements(launch):
    launch.job(
        *("--devices", "2", "--ranks-per-node", "1", "--start-method", "fork", "--steps", "20", "--sync-every", "10"),
        *("--slow-rank", "1", "--slow-seconds", "0.1"),
    )
    codes, output = launch.end()
    assert codes == [0], output
    started = launch.report(0)["started"]
    # the slow node needs a second for ten steps; the fast one spends it in one wait, at the agreement
    waits = [after - before for before, after in itertools.pairwise(started)]
    assert waits[9] > 0.5
    assert sum(waits[:9]) < 0.3
    assert sum(waits[10:]) < 0.3


@pytest.mark.parametrize("victim", [0, 1])
def test_a_sigterm_on_one_rank_stops_all_at_one_batch_with_a_checkpoint(launch, victim):
    launch.torchrun(
        *("--steps", "200", "--sync-every", "10", "--slow-rank", "1", "--slow-seconds", "0.05"),
        *("--victim", str(victim), "--at", "7", "--accident", "term"),
        ranks_per_node=[1, 1],
    )
    began = time.monotonic()
    _, output = launch.end()
    assert time.monotonic() - began < 30
    reports = [launch.report(rank) for rank in range(2)]
    assert len(reports[0]["trace"]) == len(reports[1]["trace"]) < 150, output
    saved = torch.load(launch.folder / "stopped.ckpt", weights_only=True)
    traces = [report["trace"][-1] for report in reports]
    assert saved["state_dict"]["x"].item() == pytest.approx(sum(traces) / 2)
