"""Runs jobs on a network: one torchrun per node, the jobs in turn inside the same processes.

A job that fails or hangs takes its processes down; later jobs start new processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from benchmarks.contenders import ROWS
from benchmarks.job import Job, Record
from benchmarks.network import Network, free_port
from benchmarks.peers import PeerMissing, interpreter

START_SECONDS = 90.0
REPOSITORY = Path(__file__).parent.parent

# glibc keeps all that a process frees, for what it allocates next; by itself it learns how much, and begins with little
_KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def run(
    network: Network, ranks_per_node: int, jobs: list[Job], log_folder: Path, say: Callable[[str], None] = print
) -> dict[str, list[Record]]:
    """Do the jobs and return every rank's record of each, by job id. A job that failed has one record with an error."""
    results: dict[str, list[Record]] = {}
    log_folder.mkdir(parents=True, exist_ok=True)
    for venv, group in groupby(jobs, key=lambda job: ROWS[job.row].venv):
        waiting = list(group)
        try:
            python = interpreter(venv)
        except PeerMissing as missing:
            results |= {job.id: [_failure(job, f"does not install: {missing}")] for job in waiting}
            continue
        while waiting:
            finished = _session(network, ranks_per_node, waiting, python, log_folder, say)
            results |= finished
            waiting = [job for job in waiting if job.id not in results]
    return results


@contextlib.contextmanager
def machine_lock(path: str | None) -> Iterator[None]:
    """Hold a file lock, so that several people can share the processors."""
    if path is None:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _session(
    network: Network, ranks_per_node: int, jobs: list[Job], python: str, log_folder: Path, say: Callable[[str], None]
) -> dict[str, list[Record]]:
    """One start of all processes. Returns the records of the jobs that ended, the failed one included."""
    world_size = ranks_per_node * len(network.nodes)
    results: dict[str, list[Record]] = {}
    with tempfile.TemporaryDirectory(prefix="hiercomm-bench-") as name, contextlib.ExitStack() as stack:
        stack.callback(network.stop_processes)
        folder = Path(name)
        (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
        port = str(free_port())
        processes = [
            network.start(
                node,
                [
                    *(python, "-m", "torch.distributed.run", "--nnodes", str(len(network.nodes))),
                    *("--node-rank", str(node.index), "--nproc-per-node", str(ranks_per_node)),
                    *("--master-addr", network.nodes[0].address, "--master-port", port),
                    *("-m", "benchmarks.worker", str(folder / "jobs.json"), str(folder)),
                ],
                {
                    "PYTHONPATH": str(REPOSITORY),
                    "OMP_NUM_THREADS": "1",
                    "MKL_NUM_THREADS": "1",
                    "PYTHONUNBUFFERED": "1",
                    **_KEEPS_MEMORY,  # or a row depends on what the rows before it have freed
                },
                stack.enter_context(open(log_folder / f"{node.hostname}.log", "ab")),
            )
            for node in network.nodes
        ]
        for number, job in enumerate(jobs):
            seconds = job.timeout + (START_SECONDS if number == 0 else 0)
            began = time.monotonic()
            ended = _wait(folder / f"{number}.done", processes, seconds)
            records = _records(folder, job)
            if ended and len(records) == world_size:
                results[job.id] = records
                say(f"  {job.row:<24} {time.monotonic() - began:6.1f} s")
                continue
            hung = time.monotonic() - began >= seconds
            reason = f"hung for {seconds:.0f} s" if hung else f"processes ended early, see {log_folder}"
            reason = next((record.error for record in records if record.error), reason)
            results[job.id] = [_failure(job, reason)]
            say(f"  {job.row:<24} failed: {reason}")
            break
    return results


def _wait(path: Path, processes: list[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Wait until a file is there; False when a process ended without it, or when it takes too long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists():
            return True
        if any(process.poll() is not None for process in processes):
            return path.exists()
        time.sleep(0.05)
    return False


def _records(folder: Path, job: Job) -> list[Record]:
    files = sorted(folder.glob(f"{job.id}.rank*.json"))
    return [Record(**json.loads(file.read_text())) for file in files]


def _failure(job: Job, reason: str) -> Record:
    return Record(job.id, rank=0, node=0, error=reason)
