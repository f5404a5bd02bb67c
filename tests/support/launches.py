"""Processes as launchers start them: the variables that each sets for its ranks, and jobs that belong to one test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partialmethod
from pathlib import Path

from forked import ForkedPython, forking_workers, stand_in_for_python
from ports import free_port

ORACLE = Path(__file__).parents[1] / "jobs" / "oracle.py"
Mpiexec = Callable[[str, int], tuple[list[str], dict[str, str]]]
SECONDS = 180  # until a launch that should have ended is killed, and the test fails


def torchrun(nodes: int, ranks: int, address: str = "127.0.0.1") -> list[dict[str, str]]:
    """The variables that torchrun sets, by rank."""
    world = {"WORLD_SIZE": str(nodes * ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "none"}
    world |= {"MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    return [
        {**world, "RANK": str(rank), "LOCAL_RANK": str(rank % ranks), "GROUP_RANK": str(rank // ranks)}
        for rank in range(nodes * ranks)
    ]


def slurm(nodes: int, ranks: int) -> list[dict[str, str]]:
    """The variables that srun sets, by task."""
    job = {
        "SLURM_JOB_ID": str(free_port() - 15_000),  # Lightning makes it the port
        "SLURM_JOB_NAME": "tests",
        "SLURM_NTASKS": str(nodes * ranks),
        "SLURM_NTASKS_PER_NODE": str(ranks),
        "SLURM_NNODES": str(nodes),
        "SLURM_NODELIST": "127.0.0.1",
    }
    return [
        {**job, "SLURM_PROCID": str(r), "SLURM_NODEID": str(r // ranks), "SLURM_LOCALID": str(r % ranks)}
        for r in range(nodes * ranks)
    ]


def torchrun_agents(ranks_per_node: Sequence[int]) -> Iterator[list[str]]:
    """The beginning of Python's arguments for torchrun on each node."""
    port, nodes = str(free_port()), str(len(ranks_per_node))
    for node, ranks in enumerate(ranks_per_node):
        agent = ["-m", "torch.distributed.run", "--nnodes", nodes, "--node-rank", str(node)]
        yield [*agent, "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", port]


class Job:
    """Processes of ``jobs/oracle.py``, on two nodes of so many ``ranks`` each, and what they printed and reported."""

    def __init__(self, folder: Path, mpiexec: Mpiexec) -> None:
        self.folder = folder
        self._mpiexec = mpiexec
        self.processes: list[subprocess.Popen[str] | ForkedPython] = []

    def python(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """Start Python in a fork that need not import Lightning."""
        output = self.folder / f"output-{len(self.processes)}"
        self.processes.append(ForkedPython(arguments, {**os.environ, **(environment or {})}, output, self.folder))

    def oracle(self, *arguments: object, environment: Mapping[str, str] | None = None) -> None:
        self.python(str(ORACLE), "--out", str(self.folder), *map(str, arguments), environment=environment)

    def ranks(self, places: Sequence[Mapping[str, str]], *arguments: object, hosts: Sequence[str] = ()) -> None:
        """Start a rank with each of these variables, on hosts that are called so."""
        for rank, place in enumerate(places):
            self.oracle(*(("--host-name", hosts[rank]) if hosts else ()), *arguments, environment=place)

    def popen(self, *arguments: object, ranks: int = 2, how: str = "popen") -> None:
        """Let Lightning start the other ranks; that it executes Python itself is shown by the quickstart."""
        python = () if how == "fork" else ("--python", stand_in_for_python())
        self.oracle("--devices", 2 * ranks, "--ranks-per-node", ranks, "--start-method", how, *python, *arguments)

    fork = partialmethod(popen, how="fork")
    spawn = partialmethod(popen, how="spawn")

    def torchrun(self, *arguments: object, ranks: int = 2) -> None:
        """Start torchrun on every node."""
        for agent in torchrun_agents([ranks, ranks]):
            own = ("--out", self.folder, "--num-nodes", 2, "--devices", ranks, *arguments)
            self.python(*agent, *forking_workers(), str(ORACLE), *map(str, own))

    def without_agents(self, *arguments: object, ranks: int = 2, address: str = "127.0.0.1") -> None:
        """Start ranks as torchrun does, but without an agent that ends them together."""
        self.ranks(torchrun(2, ranks, address), "--num-nodes", 2, "--devices", ranks, *arguments)

    def slurm(self, *arguments: object, ranks: int = 2) -> None:
        self.ranks(slurm(2, ranks), "--num-nodes", 2, "--devices", ranks, *arguments)

    def mpiexec(self, library: str, *ranks: Sequence[str], python: str | None = None) -> None:
        """Start one rank per list of arguments."""
        (program, *options, _, _), environment = self._mpiexec(library, len(ranks))
        job = [python or stand_in_for_python(), str(ORACLE), "--out", str(self.folder)]
        sections = [argument for own in ranks for argument in (":", "-n", "1", *job, *own)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.processes.append(subprocess.Popen([program, *options, *sections[1:]], env=environment, **pipes))

    def mpi(self, library: str, *arguments: str, ranks: int = 2, python: str | None = None) -> None:
        # start_method is for the ranks that Lightning itself starts: here it does nothing
        options = ["--devices", str(2 * ranks), "--ranks-per-node", str(ranks), "--start-method", "fork"]
        self.mpiexec(library, *[[*options, "--inter-node", "mpi", *arguments]] * (2 * ranks), python=python)

    openmpi = partialmethod(mpi, "openmpi")
    mpich = partialmethod(mpi, "mpich")

    def end(self, seconds: float = SECONDS) -> tuple[list[int], str]:
        """Wait for all processes; their exit codes, and what they printed."""
        outputs = [process.communicate(timeout=seconds)[0] for process in self.processes]
        return [process.returncode for process in self.processes], "\n".join(outputs)

    def report(self, rank: int) -> dict:
        """What a rank has written; ranks that rank 0 has started may end after it, and nothing waits for them."""
        file, deadline = self.folder / f"rank-{rank}.json", time.monotonic() + 10.0
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return json.loads(file.read_text())

    def reports(self, ranks: int) -> list[dict]:
        return [self.report(rank) for rank in range(ranks)]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
