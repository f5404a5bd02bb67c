"""Starts ranks with Lightning's launchers and environments: one function per private use, with its reason."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.context
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed import Store
from torch.distributed.rendezvous import _rendezvous_handlers

from lightning_hiercomm._lightning.saves import taking_shapes
from lightning_hiercomm._lightning.tree import fabric, pl
from lightning_hiercomm.comm.mpi import load_mpi
from lightning_hiercomm.nodes.hosts import Place

environments = fabric.plugins.environments


class WatchfulLauncher(pl.strategies.launchers._MultiProcessingLauncher):
    """Lightning's launcher of forked and spawned ranks, with four corrections.

    Lightning runs ``Strategy.on_exception`` and ``teardown`` in the launching process only, which does not know the
    failed rank. After ``sys.exit()`` or ``os._exit(0)`` on one rank, the launcher and the other ranks wait forever. A
    forked rank may hang when it collects garbage of its parent. The launching process rejects rank 0's buffers if their
    shapes have changed.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        assert isinstance(self._strategy, pl.strategies.DDPStrategy)
        # shared with the ranks, also when they are spawned
        self._has_finished = multiprocessing.get_context(self._start_method).RawArray("b", self._strategy.num_processes)
        self._watcher: tuple[threading.Thread, threading.Event] | None = None
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:
            if self._watcher is not None:  # a thread that ends during the next fork may leave a lock held
                thread, is_over = self._watcher
                is_over.set()
                thread.join()
                self._watcher = None

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if multiprocessing.context.get_spawning_popen() is None:  # otherwise a new rank inherits it
            state["_has_finished"] = None
        return {**state, "_watcher": None}

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        settle_as_fork(self._start_method)
        try:
            super()._wrapping_function(process_idx, *args, **kwargs)
            self._has_finished[process_idx] = 1
        except BaseException as error:
            self._strategy.on_exception(error)
            self._strategy.teardown()
            if isinstance(error, SystemExit) and not error.code:
                raise SystemExit(1) from error
            raise

    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        with taking_shapes(trainer.lightning_module):  # a rank's buffers may have grown
            super()._recover_results_in_main_process(worker_output, trainer)

    @property
    def procs(self) -> list[Any]:
        """The ranks' processes; set when they have been started."""
        processes: list[Any] = self.__dict__.get("procs", [])
        return processes

    @procs.setter
    def procs(self, processes: list[Any]) -> None:
        self.__dict__["procs"] = processes
        if processes and self._start_method in (
            "fork",
            "spawn",
        ):  # a fork server has one waiter
            is_over = threading.Event()
            watched = (processes, self._has_finished, is_over)
            thread = threading.Thread(target=self._watch, args=watched, name="hiercomm-launcher", daemon=True)
            self._watcher = thread, is_over
            thread.start()

    @staticmethod
    def _watch(processes: list[Any], has_finished: Any, is_over: threading.Event) -> None:
        running = dict(enumerate(processes))
        while running and not is_over.wait(0.2):
            for index, process in [*running.items()]:
                exit_code = _exit_code(process)
                if exit_code is None:
                    continue
                del running[index]
                if exit_code == 0 and not has_finished[index]:
                    message = f"local rank {index} ended, with exit code 0, before its work was done"
                    print(f"lightning_hiercomm: {message}", file=sys.stderr, flush=True)
                    _end_soon([*running.values()])
                    return


def settle_as_fork(start_method: str) -> None:
    """Prevent a forked rank from collecting garbage of its parent, and create its thread pool.

    Garbage that owns threads, such as a process group, would wait for threads that exist in the parent only. torch
    creates a fork's thread pool on first use. Threads of a backward pass that use it at once may find none, which ends
    the process ("Invalid thread pool").

    Raises:
        RuntimeError: If torch refuses backward passes in forks of the parent.
    """
    if start_method == "fork":
        gc.freeze()
        torch.set_num_threads(torch.get_num_threads())
        try:
            torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise RuntimeError(
                "a forked rank cannot compute gradients, because torch.compile or a GPU has done so in the launching"
                " process. Compute none before the fit starts, or start the ranks with torchrun or start_method='spawn'"
            ) from error


def _end_soon(processes: list[Any], patience: float = 3.0) -> None:
    """Kill ranks that have not ended after some seconds, in which they can report their error."""
    deadline = time.monotonic() + patience
    while processes and time.monotonic() < deadline:
        time.sleep(0.1)
        processes = [process for process in processes if _exit_code(process) is None]
    for process in processes:
        process.kill()


def _exit_code(process: Any) -> int | None:
    """Return the exit code of a child process, if it has ended, without reaping it for the launcher."""
    try:
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the launcher has reaped it
        code: int | None = process._popen.returncode
        return code
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def place_of(environment: fabric.plugins.ClusterEnvironment, node: int, local_rank: int, starts_ranks: bool) -> Place:
    """Return where this rank is, as its cluster environment reports it.

    torchrun's agents and Lightning's launcher run once per node, so several of them on one host are deliberate. MPI's
    nodes are found by host name. Kubeflow makes every process a separate node, and variables that are set by hand or by
    a scheduler may do so by mistake.
    """
    names_nodes = isinstance(
        environment, (environments.torchelastic.TorchElasticEnvironment, environments.mpi.MPIEnvironment)
    ) or (isinstance(environment, environments.lightning.LightningEnvironment) and starts_ranks)
    return Place(node, local_rank, type(environment).__name__, names_nodes)


def check_ranks_of_node(environment: fabric.plugins.ClusterEnvironment) -> None:
    """Compare ``Trainer(devices=...)`` with the ranks that torchrun or mpiexec started on this node.

    ``TorchElasticEnvironment`` insists on ``devices * num_nodes`` ranks, but nodes may be unequal; ``MPIEnvironment``
    checks nothing, and ranks without a device fail one by one.
    """
    if isinstance(environment, environments.torchelastic.TorchElasticEnvironment):
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    elif isinstance(environment, environments.mpi.MPIEnvironment):
        node = environment.node_rank()
        ranks = load_mpi().COMM_WORLD.allgather(node).count(node)
    else:
        return

    environment.validate_settings = partial(_check_devices, ranks)  # type: ignore[method-assign]


def _check_devices(ranks: int, num_devices: int, num_nodes: int) -> None:
    if num_devices != ranks:
        raise ValueError(
            f"Trainer(devices={num_devices}), but {ranks} ranks were started on this node: give devices={ranks}"
            " here. Nodes may have unequal numbers of ranks."
        )


def check_program_can_run_again() -> None:
    """Raise an error if ranks would start by running the program again in a notebook or at a Python prompt.

    Lightning does too, but its remedy is its own ``ddp_notebook``.
    """
    if fabric.utilities.imports._IS_INTERACTIVE:
        raise fabric.utilities.exceptions.MisconfigurationException(
            "start_method='popen' starts ranks by running the script again, but an interactive session has none. Use"
            " HierarchicalStrategy(..., start_method='fork'), or a name that ends in _notebook, such as"
            " Trainer(strategy='hierarchical_periodic_notebook')."
        )


@contextmanager
def process_group_meets_at(store: Store | None, rank: int, size: int) -> Iterator[None]:
    """Make ``init_process_group`` use a store instead of ``env://``.

    The store of torchrun's agent still holds addresses of dead ranks, which restarted ranks fail to reach
    (pytorch/pytorch#135712, #167288). Lightning does not pass a store.

    Args:
        store: The same on every rank, without keys of a process group; None for ``env://``.
        rank: This rank.
        size: Number of ranks.
    """
    if store is None:
        yield
        return
    original = _rendezvous_handlers["env"]
    _rendezvous_handlers["env"] = lambda *_, **__: iter([(store, rank, size)])
    try:
        yield
    finally:
        _rendezvous_handlers["env"] = original
