"""Ranks that die, raise, freeze, lag or get a signal: the others end soon, with the rank's name, or go on."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from launches import Job
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from problems import Oracle
from torch.multiprocessing.spawn import ProcessException

from lightning_hiercomm.nodes.connect import connect_world
from lightning_hiercomm.trainer import hooks

SOON = 90  # seconds after an accident, on whatever machine; ranks that do not notice it go on for longer
LONG = ("--steps", "4000", "--sync-every", "4000")  # no synchronization shows a lost rank


@pytest.mark.pairwise
@pytest.mark.parametrize("accident", ["raise", "kill"])
@pytest.mark.parametrize(
    ("launcher", "ranks"),
    # two ranks are two nodes, too
    [("fork", 2), ("torchrun", 2), ("slurm", 2), ("popen", 2), ("openmpi", 1), ("mpich", 1)],
)
def test_a_lost_rank_ends_the_run_within_seconds_and_is_named(job, launcher, ranks, accident):
    slow = ["--slow-rank", "0", "--slow-seconds", "0.2", *LONG]
    victim = ranks  # the first rank of the second node
    getattr(job, launcher)("--victim", str(victim), "--at", "3", "--accident", accident, *slow, ranks=ranks)
    codes, output = job.end()
    message = {
        # a parent that forked sees it first, and ends the others before they can speak
        "raise": rf"rank {victim} \(node 1\) failed: ValueError: the dog ate the batch"
        rf"|Process {victim} terminated with the following",
        "kill": rf"lightning_hiercomm: rank {victim} \(node 1\) died",
    }[accident]
    if (launcher, accident) == ("mpich", "kill"):  # it kills all as soon as one dies, so that none is left to name it
        message = "CLEANING UP REMAINING PROCESSES"
    seconds = time.time() - float((job.folder / "accident").read_text())
    assert all(codes), output
    assert re.search(message, output), output
    print(f"ended {seconds:.1f} seconds after the accident")
    assert seconds < SOON, output


@pytest.mark.parametrize("victim", [0, 1])
def test_a_sigterm_on_one_rank_stops_all_at_one_batch_with_a_checkpoint(job, victim):
    job.without_agents(  # an agent would wait for what a forked worker returns, but this one just ends
        *("--steps", "200", "--sync-every", "10", "--slow-rank", "1", "--slow-seconds", "0.05"),
        *("--victim", victim, "--at", "7", "--accident", "term"),
        ranks=1,
    )
    _, output = job.end()
    traces = [report["trace"] for report in job.reports(2)]
    assert len(traces[0]) == len(traces[1]) < 150, output
    saved = torch.load(job.folder / "stopped.ckpt", weights_only=True)
    assert saved["state_dict"]["x"].item() == pytest.approx(sum(trace[-1] for trace in traces) / 2)


def test_a_lost_rank_is_named_over_ipv6(job):
    slowly = ("--slow-rank", "1", "--slow-seconds", "0.02", "--sync-every", "10")
    job.without_agents(*slowly, *("--victim", "1", "--at", "3", "--accident", "kill"), ranks=1, address="::1")
    codes, output = job.end()
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


def check_ends_soon(fit, capfd, module, named: str, devices: int) -> None:
    """Check that a fit ends with the rank's name; a rank that waits for the lost one waits for hang_timeout, 100 s."""
    began = time.monotonic()
    with pytest.raises(ProcessException) as caught:
        fit(module, {"ranks_per_node": 1}, devices=devices)
    assert re.search(named, capfd.readouterr().err + str(caught.value))
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize(
    ("moment", "accident", "victim", "named"),
    [
        ("before setup_environment", _kill, 1, "rank 1 of 2 did not answer|process 1"),
        ("prepare_data", _raise, 0, r"rank 0 \(node 0\) failed: ValueError: the dog"),
        ("configure_model", partial(os._exit, 0), 1, r"rank 1 \(node 1\) died"),
        ("configure_model", _raise, 1, r"rank 1 \(node 1\) failed: ValueError: the dog"),
    ],
)
def test_a_rank_that_dies_before_training_ends_the_run_in_seconds(fit, capfd, moment, accident, victim, named):
    check_ends_soon(fit, capfd, Fragile(moment, accident, victim), named, devices=2)


# the root of the tree in which they first talk, and a leaf
@pytest.mark.parametrize("victim", [0, 5])
def test_a_rank_that_dies_while_connecting_blocks_no_rank(fit, capfd, monkeypatch, victim):
    # gloo's own wait for a peer that was never there may have no end (https://github.com/pytorch/gloo/issues/520)
    def dies(rank, *others, **settings):
        if rank == victim:
            _kill()
        return connect_world(rank, *others, **settings)

    monkeypatch.setattr(hooks, "MOST_IN_MESH", 1)
    monkeypatch.setattr(hooks, "connect_world", dies)
    check_ends_soon(fit, capfd, Oracle(2), rf"rank {victim} \(node {victim}\) died|process {victim}", devices=6)


class Collects(Callback):
    def on_train_start(self, trainer, pl_module):
        gc.collect()


@pytest.mark.timeout(60)
def test_a_forked_rank_leaves_the_garbage_of_its_parent_alone(fit, process_group_in_the_garbage):
    fit(Oracle(2), devices=2, callbacks=[Collects()])


def test_a_spawned_rank_that_exits_before_training_ends_the_others(job):
    job.spawn("--victim", "1", "--accident", "leave", ranks=1)
    codes, output = job.end()
    assert codes == [1]
    assert "process 1 terminated with exit code 1" in output


HANG = "4"
"""Seconds of silence; a busy machine may be that slow to wake a thread for less."""

FROZEN = ("stop", "hold")
SLEEPS = ("--steps", "40", "--sync-every", "10")  # a long step, and then all others
SILENT = ("--slow-rank", "1", "--slow-seconds", "0.05", "--victim", "1", "--at", "20", "--hang-timeout", HANG)


@pytest.fixture(scope="module")
def silent(tmp_path_factory, mpiexec) -> Iterator[Callable[[str], tuple[Job, list[int], str]]]:
    """``silent(accident)``: the job, its exit codes and what it printed. They wait, so all of them do at once."""
    jobs = {accident: Job(tmp_path_factory.mktemp(accident), mpiexec) for accident in (*FROZEN, "sleep")}
    for accident, job in jobs.items():
        job.without_agents(*SILENT, *(SLEEPS if accident == "sleep" else LONG), "--accident", accident, ranks=1)
    ended = {accident: (job, *job.end()) for accident, job in jobs.items()}
    yield ended.__getitem__
    for job in jobs.values():
        job.close()


@pytest.mark.long("four seconds of silence are what makes a rank frozen")
@pytest.mark.parametrize("accident", FROZEN)
def test_a_frozen_rank_is_named_with_its_step_and_ends_the_run(silent, accident):
    job, codes, output = silent(accident)
    ended = max(path.stat().st_mtime for path in job.folder.glob("output-*"))
    seconds = ended - float((job.folder / "accident").read_text())
    assert all(codes), output
    assert "(hang_timeout): rank 1 (node 1) is frozen: it sent nothing\n" in output, output
    assert re.search(r"rank 1 \(node 1\) \| is frozen +\| (past )?training batch \d+ of epoch 0, after", output), output
    assert float(HANG) / 2 <= seconds < SOON


@pytest.mark.long("a step lasts longer than the four seconds of silence that are asked about")
def test_a_step_longer_than_hang_timeout_goes_on(silent):
    job, _, output = silent("sleep")
    reports = job.reports(2)
    assert [len(report["trace"]) for report in reports] == [40] * 2, output
    assert reports[0]["x"] == reports[1]["x"]
    assert output.count(f"lightning_hiercomm: no rank made progress for {HANG} s (hang_timeout): the run goes on") <= 1


@pytest.mark.long("four seconds of silence are what makes a rank frozen")
def test_a_stopped_forked_rank_leaves_no_process_or_file(job):
    job.fork(*SILENT, *("--accident", "stop", "--steps", "400", "--sync-every", "10"), ranks=1)
    codes, output = job.end()
    assert codes == [1]
    assert "rank 1 (node 1) is frozen" in output
    assert not [process for process in Path("/proc").glob("[0-9]*") if _is_in_session(process, job.processes[0].pid)]


def _is_in_session(process: Path, session: int) -> bool:
    with contextlib.suppress(OSError):
        return process.joinpath("stat").read_text().rpartition(")")[2].split()[3] == str(session)
    return False
