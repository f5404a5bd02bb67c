"""Launches of several processes: on two nodes, with ranks that die, raise, lag, or get a signal.

Python itself starts only where MPICH's ranks end well: importing Lightning takes seconds. Otherwise processes are
forked; for MPI, Lightning and where multiprocessing spawns them, behind a program that stands for Python. The commands
that people type are run in examples/test_clusters.py.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from forked import ForkedPython, forking_workers, stand_in_for_python
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from ports import free_port
from problems import Oracle
from torch.multiprocessing.spawn import ProcessException

from lightning_hiercomm._lightning.launcher import WatchfulLauncher
from lightning_hiercomm.control import open_files
from lightning_hiercomm.nodes.connect import connect_world
from lightning_hiercomm.trainer import hooks

JOB = Path(__file__).parent / "jobs" / "oracle.py"
Mpiexec = Callable[[str, int], tuple[list[str], dict[str, str]]]
SECONDS = 180  # until a launch that should have ended is killed, and the test fails
SOON = 90  # seconds after an accident, on whatever machine; ranks that do not notice it go on for longer
LONG = (
    "--steps",
    "4000",
    "--sync-every",
    "4000",
)  # no synchronization shows a lost rank


class Launch:
    """Processes that belong to one test, and what they said."""

    def __init__(self, folder: Path, mpiexec: Mpiexec) -> None:
        self.folder = folder
        self._mpiexec = mpiexec
        self.processes: list[subprocess.Popen[str] | ForkedPython] = []

    def execute(self, *command: str, environment: Mapping[str, str] | None = None) -> None:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            start_new_session=True,
        )
        self.processes.append(process)

    def python(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """``execute`` with Python, but in a fork that need not import Lightning."""
        output = self.folder / f"output-{len(self.processes)}"
        self.processes.append(ForkedPython(arguments, {**os.environ, **(environment or {})}, output))

    def torchrun(self, *arguments: str, ranks_per_node: Sequence[int] = (2, 2)) -> None:
        port, nodes = str(free_port()), len(ranks_per_node)
        for node, ranks in enumerate(ranks_per_node):
            self.python(
                *("-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(node)),
                *forking_workers(),
                *("--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", port),
                *(str(JOB), "--out", str(self.folder), "--num-nodes", str(nodes), "--devices", str(ranks), *arguments),
            )

    def mpiexec(self, library: str, *ranks: Sequence[str], python: str | None = None) -> None:
        """One rank per list of arguments."""
        (program, *options, _, _), environment = self._mpiexec(library, len(ranks))
        job = [python or stand_in_for_python(), str(JOB), "--out", str(self.folder)]
        sections = [argument for own in ranks for argument in (":", "-n", "1", *job, *own)]
        self.execute(program, *options, *sections[1:], environment=environment)

    def slurm(self, *arguments: str, nodes: int = 2, ranks: int = 2) -> None:
        """What srun does: one process per task, which finds its place in the environment."""
        job = {
            "SLURM_JOB_ID": str(free_port() - 15_000),  # Lightning makes it the port
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
            self.python(
                *(str(JOB), "--out", str(self.folder), "--num-nodes", str(nodes), "--devices", str(ranks), *arguments),
                environment={**job, **place},
            )

    def processes_on(self, hosts: Sequence[str], variables: Callable[[int], dict[str, str]], *arguments: str) -> None:
        """Start a process per name of a host, with the variables that a scheduler sets for its rank."""
        for rank, host in enumerate(hosts):
            job = [str(JOB), "--out", str(self.folder), "--host-name", host]
            self.python(*job, *arguments, environment=variables(rank))

    def ranks_of_torchrun(self, *arguments: str, nodes: int = 2, ranks: int = 2, address: str = "127.0.0.1") -> None:
        """Start ranks as torchrun does, without an agent that watches them."""
        port = str(free_port())
        for rank in range(nodes * ranks):
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(nodes * ranks),
                "LOCAL_RANK": str(rank % ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "GROUP_RANK": str(rank // ranks),
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": "none",
            }
            self.python(
                *(str(JOB), "--out", str(self.folder), "--num-nodes", str(nodes), "--devices", str(ranks), *arguments),
                environment=place,
            )

    def end(self) -> tuple[list[int], str]:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in self.processes]
        return [process.returncode for process in self.processes], "\n".join(outputs)

    def report(self, rank: int) -> dict:
        """What a rank has written; ranks that rank 0 has started may end after it, and nothing waits for them."""
        file, deadline = self.folder / f"rank-{rank}.json", time.monotonic() + 10.0
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return json.loads(file.read_text())

    def close(self) -> None:
        if (self.folder / "fifo").exists():  # a child may still wait for it
            os.close(os.open(self.folder / "fifo", os.O_RDWR))
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def launch(tmp_path: Path, mpiexec: Mpiexec) -> Iterator[Launch]:
    """Starts processes, and ends what the test left of them."""
    launched = Launch(tmp_path, mpiexec)
    yield launched
    launched.close()


Start = Callable[[Launch, int, list[str]], None]  # with so many ranks on each of two nodes


def _with_popen(launch: Launch, ranks: int, arguments: list[str]) -> None:
    options = ["--devices", str(2 * ranks), "--ranks-per-node", str(ranks)]
    options += ["--python", stand_in_for_python()]  # that Lightning executes Python itself is shown by the quickstart
    launch.python(str(JOB), "--out", str(launch.folder), *options, *arguments)  # executes the other ranks


def _with_fork(launch: Launch, ranks: int, arguments: list[str]) -> None:
    options = ["--devices", str(2 * ranks), "--ranks-per-node", str(ranks), "--start-method", "fork"]
    launch.python(str(JOB), "--out", str(launch.folder), *options, *arguments)


def _with_torchrun(launch: Launch, ranks: int, arguments: list[str]) -> None:
    launch.torchrun(*arguments, ranks_per_node=[ranks, ranks])


def _with_slurm(launch: Launch, ranks: int, arguments: list[str]) -> None:
    launch.slurm(*arguments, ranks=ranks)


def _with_mpiexec(library: str, launch: Launch, ranks: int, arguments: list[str], python: str | None = None) -> None:
    # start_method is for the ranks that Lightning itself starts: here it does nothing
    options = ["--devices", str(2 * ranks), "--ranks-per-node", str(ranks), "--start-method", "fork"]
    launch.mpiexec(library, *[[*options, "--inter-node", "mpi", *arguments]] * (2 * ranks), python=python)


_with_mpich = partial(_with_mpiexec, "mpich")


EVERY_LAUNCHER = {
    "popen": _with_popen,
    "fork": _with_fork,
    "torchrun": _with_torchrun,
    "slurm": _with_slurm,
    "openmpi": partial(_with_mpiexec, "openmpi"),
    # MPICH kills a stand-in whose fork has ended well, before it can say so itself
    "mpich": partial(_with_mpiexec, "mpich", python=sys.executable),
}


@pytest.mark.long("starts Python for every rank, and Lightning is imported there")
@pytest.mark.parametrize(
    "start",
    # here MPICH's ranks import Lightning; on a push two of them train until one is lost
    [
        pytest.param(start, id=name, marks=[pytest.mark.nightly] * (name == "mpich"))
        for name, start in EVERY_LAUNCHER.items()
    ],
)
def test_every_launcher_follows_the_table_to_the_digit(launch, start: Start):
    start(launch, 2, ["--epochs", "2"])
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


def test_host_names_define_nodes_under_mpiexec(launch):
    places = [("localhost", "3"), ("localhost", "3"), ("127.0.0.1", "1"), ("localhost", "3")]
    options = ["--num-nodes", "2", "--inter-node", "torch"]  # MPI starts the ranks, and gloo joins them
    launch.mpiexec("openmpi", *(["--host-name", host, "--devices", devices, *options] for host, devices in places))
    codes, output = launch.end()
    assert codes == [0], output
    reports = [launch.report(rank) for rank in range(4)]
    assert [report["nodes"] for report in reports] == [[[0, 1, 3], [2]]] * 4
    assert [report["trace"][1] for report in reports] == [3.0] * 4
    assert sorted(sample for report in reports for sample in report["samples"]) == [*range(20)]


def _check_nodes(launch: Launch, nodes: list[list[int]]) -> str:
    """Check that a run of four ranks had these nodes, and synchronized them by the oracle's table; its output."""
    codes, output = launch.end()
    assert not any(codes), output
    reports = [launch.report(rank) for rank in range(4)]
    assert [report["nodes"] for report in reports] == [nodes] * 4, output
    assert [report["trace"][1] for report in reports] == [3.0] * 4
    assert sorted(sample for report in reports for sample in report["samples"]) == [*range(20)]
    return output


@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_kubeflow_processes_of_one_host_are_one_node(launch, ranks_per_node):
    port = str(free_port())

    def variables(rank: int) -> dict[str, str]:  # as the operator sets them in pods
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "4", "RANK": str(rank)}

    options = ["--kubeflow", "--devices", "1", "--num-nodes", "4"]
    options += ["--ranks-per-node", str(ranks_per_node)] if ranks_per_node else []
    launch.processes_on(["pod-a", "pod-a", "pod-b", "pod-b"], variables, *options)
    output = _check_nodes(launch, [[0, 1], [2, 3]] if ranks_per_node is None else [[0], [1], [2], [3]])
    warning = (
        "KubeflowEnvironment reports the nodes [0] [1] [2] [3], but by host name they are [0, 1] [2, 3] (on pod-a,"
        " pod-b). The host names are used. Set ranks_per_node to choose the nodes, such as ranks_per_node=1 for those"
        " of the environment."
    )
    assert output.count(warning) == (ranks_per_node is None), output


def test_lsf_nodes_are_hosts_of_the_rank_file(launch, tmp_path):
    hosts = ["localhost", "localhost", "127.0.0.1", "127.0.0.1"]
    (tmp_path / "ranks").write_text("\n".join(["launch-node", *hosts]))
    job = {"LSB_JOBID": "7", "LSB_DJOB_RANKFILE": str(tmp_path / "ranks"), "MASTER_PORT": str(free_port())}

    def variables(rank: int) -> dict[str, str]:  # as jsrun sets them
        place = {"JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_LOCAL_RANK": str(rank % 2)}
        return {**job, "JSM_NAMESPACE_SIZE": "4", **place}

    launch.processes_on(hosts, variables, "--devices", "2", "--num-nodes", "2")
    assert "The host names are used" not in _check_nodes(launch, [[0, 1], [2, 3]])


def test_components_of_a_slurm_heterogeneous_job_are_unequal_nodes(launch):
    """In a step over several components SLURM counts tasks and nodes over all of them."""
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "digits",
        "SLURM_HET_SIZE": "2",
        "SLURM_NTASKS": "4",
        "SLURM_NNODES": "2",
        "MASTER_ADDR": "127.0.0.1",  # SLURM_NODELIST is that of a component
        "MASTER_PORT": str(free_port()),
    }
    places = [("a", 0, 0, 3), ("a", 0, 1, 3), ("a", 0, 2, 3), ("b", 1, 0, 1)]
    for rank, (host, node, local_rank, devices) in enumerate(places):
        place = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local_rank)}
        launch.python(
            *(str(JOB), "--out", str(launch.folder), "--host-name", host),
            *("--num-nodes", "2", "--devices", str(devices)),
            environment={**job, **place, "SLURM_NTASKS_PER_NODE": str(devices), "SLURM_NODELIST": host},
        )
    assert "The host names are used" not in _check_nodes(launch, [[0, 1, 2], [3]])


def test_slurm_tasks_that_each_have_a_node_id_on_one_host_are_one_node(launch):
    """Several jobs' steps or containers may each count their nodes from their own; host names then decide."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "digits", "SLURM_NTASKS": "4", "SLURM_NNODES": "4"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_NTASKS_PER_NODE": "1"}

    def variables(rank: int) -> dict[str, str]:
        return {**job, **address, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"}

    launch.processes_on(["a", "a", "b", "b"], variables, "--devices", "1", "--num-nodes", "4")
    assert _check_nodes(launch, [[0, 1], [2, 3]]).count("SLURMEnvironment reports the nodes [0] [1] [2] [3]") == 1


def test_devices_must_be_the_ranks_of_this_node(launch):
    launch.mpiexec("openmpi", *[["--devices", "1"]] * 2)
    codes, output = launch.end()
    assert all(codes)
    assert "Trainer(devices=1), but 2 ranks were started on this node: give devices=2" in output


@pytest.mark.pairwise
@pytest.mark.parametrize("accident", ["raise", "kill"])
@pytest.mark.parametrize(
    ("start", "ranks"),
    [
        pytest.param(start, ranks, id=name)
        for name, start, ranks in [
            ("fork", _with_fork, 2),
            ("torchrun", _with_torchrun, 2),
            ("slurm", _with_slurm, 2),
            ("popen", _with_popen, 2),
            # two ranks are two nodes, too
            ("openmpi", partial(_with_mpiexec, "openmpi"), 1),
            ("mpich", _with_mpich, 1),
        ]
    ],
)
def test_a_lost_rank_ends_the_run_within_seconds_and_is_named(launch, start: Start, ranks, accident):
    slow = ["--slow-rank", "0", "--slow-seconds", "0.2", *LONG]
    victim = ranks  # the first rank of the second node
    start(launch, ranks, ["--victim", str(victim), "--at", "3", "--accident", accident, *slow])
    codes, output = launch.end()
    message = {
        # a parent that forked sees it first, and ends the others before they can speak
        "raise": rf"rank {victim} \(node 1\) failed: ValueError: the dog ate the batch"
        rf"|Process {victim} terminated with the following",
        "kill": rf"lightning_hiercomm: rank {victim} \(node 1\) died",
    }[accident]
    if (
        start is _with_mpich and accident == "kill"
    ):  # it kills all ranks as soon as one dies, so that none is left to name it
        message = "CLEANING UP REMAINING PROCESSES"
    seconds = time.time() - float((launch.folder / "accident").read_text())
    assert all(codes), output
    assert re.search(message, output), output
    print(f"ended {seconds:.1f} seconds after the accident")
    assert seconds < SOON, output


def test_fast_node_does_not_wait_for_a_slow_one_between_syncs(launch):
    _with_fork(launch, 1, ["--steps", "10", "--sync-every", "5", "--last-rank", "1"])
    codes, output = launch.end()
    assert codes == [0], output
    assert len(launch.report(0)["trace"]) == len(launch.report(1)["trace"]) == 10


@pytest.mark.parametrize("victim", [0, 1])
def test_a_sigterm_on_one_rank_stops_all_at_one_batch_with_a_checkpoint(launch, victim):
    launch.ranks_of_torchrun(  # whose agent would wait for what a forked worker returns, but this one just ends
        *("--steps", "200", "--sync-every", "10", "--slow-rank", "1", "--slow-seconds", "0.05"),
        *("--victim", str(victim), "--at", "7", "--accident", "term"),
        ranks=1,
    )
    _, output = launch.end()
    reports = [launch.report(rank) for rank in range(2)]
    assert len(reports[0]["trace"]) == len(reports[1]["trace"]) < 150, output
    saved = torch.load(launch.folder / "stopped.ckpt", weights_only=True)
    traces = [report["trace"][-1] for report in reports]
    assert saved["state_dict"]["x"].item() == pytest.approx(sum(traces) / 2)


SLOWLY = ("--slow-rank", "1", "--slow-seconds", "0.02", "--sync-every", "10")


def _check_trained(launch: Launch, steps: int, output: str) -> None:
    reports = [launch.report(rank) for rank in range(2)]
    assert [len(report["trace"]) for report in reports] == [steps] * 2, output
    assert reports[0]["x"] == reports[1]["x"]


def test_a_lost_rank_is_named_over_ipv6(launch):
    launch.ranks_of_torchrun(*SLOWLY, *("--victim", "1", "--at", "3", "--accident", "kill"), ranks=1, address="::1")
    codes, output = launch.end()
    assert all(codes)
    assert "rank 1 (node 1) died" in output


class Fragile(BoringModel):
    """A module that comes to grief on rank 1, at a moment and in a way."""

    def __init__(self, moment: str, accident: Callable[[], object], victim: int) -> None:
        super().__init__()
        self.moment, self.accident, self.victim = moment, accident, victim

    def _reach(self, moment: str) -> None:
        if moment == self.moment and int(os.environ["LOCAL_RANK"]) == self.victim:
            self.accident()

    def configure_callbacks(self) -> list:
        self._reach("before setup_environment")
        return []

    def prepare_data(self) -> None:
        self._reach("prepare_data")

    def configure_model(self) -> None:
        self._reach("configure_model")


def _raise() -> None:
    raise ValueError("the dog ate the data")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("moment", "accident", "victim", "named"),
    [
        # Lightning's launcher notices what does not say 0, and names it
        ("before setup_environment", partial(os._exit, 0), 1, "local rank 1 ended, with exit code 0, before its work"),
        ("before setup_environment", partial(os._exit, 0), 0, "local rank 0 ended, with exit code 0, before its work"),
        ("before setup_environment", _kill, 1, "rank 1 had not come yet|process 1"),
        ("prepare_data", _raise, 0, r"rank 0 \(node 0\) failed: ValueError: the dog"),
        ("configure_model", partial(os._exit, 0), 1, r"rank 1 \(node 1\) died"),
        ("configure_model", _raise, 1, r"rank 1 \(node 1\) failed: ValueError: the dog"),
    ],
)
def test_a_rank_that_dies_before_training_ends_the_run_in_seconds(fit, capfd, moment, accident, victim, named):
    began = time.monotonic()
    with pytest.raises(ProcessException) as caught:
        fit(Fragile(moment, accident, victim), {"ranks_per_node": 1}, devices=2)
    assert re.search(named, capfd.readouterr().err + str(caught.value))
    assert time.monotonic() - began < SOON  # a rank that waits for the lost one waits for hang_timeout, 100 s


# the root of the tree in which they first talk, a leaf, a branch
@pytest.mark.parametrize("victim", [0, 5, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_rank_that_dies_while_connecting_blocks_no_rank(fit, capfd, monkeypatch, victim):
    # gloo's own wait for a peer that was never there may have no end (https://github.com/pytorch/gloo/issues/520)
    def dies(rank, *others, **settings):
        if rank == victim:
            _kill()
        return connect_world(rank, *others, **settings)

    monkeypatch.setattr(open_files, "_MOST_IN_MESH", 1)
    monkeypatch.setattr(hooks, "connect_world", dies)
    began = time.monotonic()
    with pytest.raises(ProcessException) as caught:
        fit(Oracle(2), {"ranks_per_node": 1}, devices=6)
    named = rf"rank {victim} \(node {victim}\) died|process {victim}"
    assert re.search(named, capfd.readouterr().err + str(caught.value))
    assert time.monotonic() - began < SOON


def _exit_after(seconds: float, code: int) -> None:
    time.sleep(seconds)
    os._exit(code)


def test_a_rank_that_reports_its_error_is_not_killed_early():
    # killed while it wrote the file that the launcher reads, it made of the error an "EOFError: Ran out of input"
    fork = multiprocessing.get_context("fork")
    left, telling, waiting = ranks = [
        fork.Process(target=_exit_after, args=args, daemon=True) for args in [(0.0, 0), (1.5, 7), (200.0, 0)]
    ]
    for rank in ranks:
        rank.start()
    began = time.monotonic()
    WatchfulLauncher._watch(ranks, has_finished=[0, 0, 0], is_over=threading.Event())  # noqa: SLF001
    assert time.monotonic() - began < SOON
    for rank in ranks:
        rank.join(20)
    assert [left.exitcode, telling.exitcode, waiting.exitcode] == [0, 7, -signal.SIGKILL]


class Collects(Callback):
    def on_train_start(self, trainer, pl_module):
        gc.collect()


@pytest.mark.timeout(60)
def test_a_forked_rank_leaves_the_garbage_of_its_parent_alone(fit, process_group_in_the_garbage):
    fit(Oracle(2), devices=2, callbacks=[Collects()])


def test_nothing_of_a_launch_goes_on_while_the_next_one_forks(fit):
    # a lock that a thread holds when its process forks is held in the child for ever
    fit(Oracle(2), devices=2)
    assert not [thread for thread in threading.enumerate() if thread.name == "hiercomm-launcher"]


def test_a_spawned_rank_that_leaves_too_early_is_named(launch):
    options = ["--devices", "2", "--ranks-per-node", "1", "--start-method", "spawn", "--python", stand_in_for_python()]
    launch.python(str(JOB), "--out", str(launch.folder), *options, *("--victim", "1", "--accident", "leave"))
    codes, output = launch.end()
    assert codes == [1]
    assert "lightning_hiercomm: local rank 1 ended, with exit code 0, before its work was done" in output


HANG = "4"
"""Seconds of silence; a busy machine may be that slow to wake a thread for less."""

FROZEN = {
    "stop": "it sent nothing",
    "hold": "it sent nothing",
    "disk": "its main thread has been stopped or stuck",
    "worker": r"its worker \d+ has been stopped or stuck",
}


def _ends(process: int) -> bool:
    """Return whether a process has ended, within five seconds."""
    deadline = time.monotonic() + 5.0
    with contextlib.suppress(OSError):
        while "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    return True


SLEEPS = ("--steps", "40", "--sync-every", "10")  # a long step, and then all others


@pytest.fixture(scope="module")
def silent(tmp_path_factory, mpiexec) -> Iterator[Callable[[str], tuple[Launch, list[int], str]]]:
    """``silent(accident)``: the launch, its exit codes and what it printed. They wait, so all of them do at once."""
    launches = {}
    for accident in (*FROZEN, "sleep"):
        launches[accident] = Launch(tmp_path_factory.mktemp(accident), mpiexec)
        launches[accident].ranks_of_torchrun(
            *("--slow-rank", "1", "--slow-seconds", "0.05", *(SLEEPS if accident == "sleep" else LONG)),
            *("--victim", "1", "--at", "20", "--accident", accident, "--hang-timeout", HANG),
            ranks=1,
        )
    ended = {accident: (launch, *launch.end()) for accident, launch in launches.items()}
    yield ended.__getitem__
    for launch in launches.values():
        launch.close()


@pytest.mark.long("four seconds of silence are what makes a rank frozen")
@pytest.mark.parametrize("accident", FROZEN)
def test_a_frozen_rank_is_named_with_its_step_and_ends_the_run(silent, accident):
    launch, codes, output = silent(accident)
    ended = max(path.stat().st_mtime for path in launch.folder.glob("output-*"))
    seconds = ended - float((launch.folder / "accident").read_text())
    assert all(codes), output
    doing = "beginning to train" if accident == "worker" else r"(past )?training batch \d+ of epoch 0, after \d+ steps"
    named = rf"rank 1 \(node 1\) is frozen: {FROZEN[accident]} for {HANG} s, and before it was {doing}\n"
    assert re.search(f"lightning_hiercomm: {named}", output), output
    assert output.count("Thread 0x") >= 2  # stacks, also of the frozen one
    if accident in ("hold", "disk"):
        assert re.search(r'oracle\.py", line \d+ in (wait_as_for_a_disk|training_step)', output), output
    for worker in launch.folder.glob("worker-*"):
        assert _ends(int(worker.read_text())), output
    assert float(HANG) <= seconds < SOON


@pytest.mark.long("a step lasts longer than the four seconds of silence that are asked about")
def test_a_long_step_goes_on_and_all_ranks_report_where_they_are(silent):
    launch, _, output = silent("sleep")
    _check_trained(launch, 40, output)
    assert output.count(f"lightning_hiercomm: no rank made progress for {HANG} s (hang_timeout), and") == 1, output
    assert output.count("lightning_hiercomm: what rank 1 (node 1) does, which is training batch 20 of epoch 0") == 1


@pytest.mark.long("four seconds of silence are what makes a rank frozen")
def test_a_stopped_forked_rank_leaves_no_process_or_file(launch):
    _with_fork(
        launch,
        1,
        [
            *("--slow-rank", "1", "--slow-seconds", "0.05", "--steps", "400", "--sync-every", "10"),
            *("--victim", "1", "--at", "20", "--accident", "stop", "--hang-timeout", HANG),
        ],
    )
    codes, output = launch.end()
    assert codes == [1]
    assert "rank 1 (node 1) is frozen" in output
    assert not [process for process in Path("/proc").glob("[0-9]*") if _is_in_session(process, launch.processes[0].pid)]


def _is_in_session(process: Path, session: int) -> bool:
    with contextlib.suppress(OSError):
        return process.joinpath("stat").read_text().rpartition(")")[2].split()[3] == str(session)
    return False
