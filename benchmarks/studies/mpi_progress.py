"""Does an MPI sum go on while its owner computes? Two nodes of one rank, joined by a slow link.

For three ways to do it: launch a sum, compute for twice as long as the sum takes alone, wait for it. What that costs
beyond the computation, as a share of the sum's time alone, is 0 when the two overlap perfectly and 1 when not at all.

- ``tested``: what :mod:`lightning_hiercomm.comm.mpi` does: a thread tests the move, and sleeps between the tests.
- ``thread``: a thread calls the blocking MPI function.
- ``library``: the program calls MPI only for the wait.

Run as root, with Open MPI's mpiexec or MPICH's::

    python -m benchmarks.studies.mpi_progress
    export MPI4PY_LIBMPI=$PWD/.venv/mpich/lib/libmpi.so.12
    python -m benchmarks.studies.mpi_progress --mpiexec $PWD/.venv/mpich/bin/mpiexec
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.network import NamespaceNetwork, Node
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.mpi import connect_mpi, load_mpi

REPETITIONS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mpiexec", default=str(Path(sys.executable).with_name("mpiexec")))
    parser.add_argument("--mbit", type=float, default=500.0)
    parser.add_argument("--mebibytes", type=float, default=8.0)
    parser.add_argument("--on-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_rank:
        measure(int(arguments.mebibytes * 2**20) // 4)
        return
    with NamespaceNetwork(2) as network, tempfile.TemporaryDirectory() as folder:
        network.set_rate(arguments.mbit)
        agent = write_agent(network, Path(folder))
        if "mpich" in arguments.mpiexec:
            options = ["-hosts", "node0,node1", "-ppn", "1", "-n", "2", "-launcher", "ssh", "-launcher-exec", agent]
            options += ["-iface", network.nodes[0].interface]
        else:
            options = ["--allow-run-as-root", "--host", "node0:1,node1:1", "-n", "2"]
            options += ["--prtemca", "plm_ssh_agent", agent, "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"]
        program = [
            sys.executable,
            "-m",
            "benchmarks.studies.mpi_progress",
            "--on-rank",
            "--mebibytes",
            str(arguments.mebibytes),
        ]
        # MPICH's transports would find out that the two nodes share one memory
        environment = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": network.nodes[0].interface, "FI_PROVIDER": "tcp"}
        environment |= {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
        process = network.start(
            network.nodes[0], [arguments.mpiexec, *options, *program], environment, sys.stdout.buffer
        )
        try:
            sys.exit(process.wait(timeout=120))
        except subprocess.TimeoutExpired:
            sys.exit("hung")


def write_agent(network: NamespaceNetwork, folder: Path) -> str:
    """A program that mpiexec takes for ssh: it runs a command on the node whose name is its first argument."""
    agent = folder / "agent"

    def enter(node: Node) -> str:
        command = network._on_node(node, ["sh", "-c", '"$*"'])
        return " ".join(part if part.isalnum() else "'" + part.replace("'", "'\\''") + "'" for part in command[:-1])

    cases = "\n".join(f'  {node.hostname}) exec {enter(node)} "$*" ;;' for node in network.nodes)
    # options of ssh, such as -x, come before the name
    agent.write_text(
        f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\nhost=$1; shift\ncase $host in\n{cases}\nesac\n'
    )
    agent.chmod(0o755)
    return str(agent)


def measure(numel: int) -> None:
    """On each rank: print the table."""
    torch.set_num_threads(1)
    mpi = load_mpi()
    rank = mpi.COMM_WORLD.Get_rank()
    ours = connect_mpi(Meter(), rank, 2)([range(2)], "inter")
    assert ours is not None
    plain = mpi.COMM_WORLD.Dup()
    tensor = torch.zeros(numel)
    memory = tensor.numpy()
    matrix = torch.rand(256, 256)

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(REPETITIONS):
            plain.Barrier()
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return plain.allreduce(statistics.median(times), op=mpi.MAX)

    def compute(products: int) -> None:
        for _ in range(products):
            matrix @ matrix

    blocking = seconds(lambda: plain.Allreduce(mpi.IN_PLACE, memory))
    products = int(plain.bcast(2 * blocking / (seconds(lambda: compute(100)) / 100)))
    alone = seconds(lambda: compute(products))

    def tested() -> None:
        handle = ours.all_reduce(tensor)
        compute(products)
        handle.wait()

    def in_thread() -> None:
        thread = threading.Thread(target=lambda: plain.Allreduce(mpi.IN_PLACE, memory))
        thread.start()
        compute(products)
        thread.join()

    def by_library() -> None:
        request = plain.Iallreduce(mpi.IN_PLACE, memory)
        compute(products)
        request.Wait()

    if rank == 0:
        print(mpi.Get_library_version().splitlines()[0].split(",")[0])
        print(f"the sum alone {blocking * 1e3:.1f} ms, the computation alone {alone * 1e3:.1f} ms")
    for name, work in [("tested", tested), ("thread", in_thread), ("library", by_library)]:
        both = seconds(work)
        if rank == 0:
            print(f"{name:8} together {both * 1e3:6.1f} ms: the sum costs {(both - alone) / blocking:6.1%} of its time")


if __name__ == "__main__":
    main()
