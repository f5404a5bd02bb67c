"""How ranks are started, as Lightning's launchers and environments do it: one function a touch, with its reason."""

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

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities import imports
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import _rendezvous_handlers

from lightning_hiercomm._lightning.saves import taking_shapes
from lightning_hiercomm.comm.mpi import load_mpi
from lightning_hiercomm.nodes.hosts import Place


class WatchfulLauncher(_MultiProcessingLauncher):
    """Lightning's launcher of forked and spawned ranks, with four gaps closed.

    There ``Strategy.on_exception`` and ``teardown`` run in the process that launched only, where nothing is known of
    the rank that raised. And after ``sys.exit()`` or ``os._exit(0)`` on one rank the launcher waits for the others, and
    they for that one. And a forked rank may hang when it collects what its parent left behind. And the process that
    launched refuses rank 0's buffers if their shapes have changed.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        assert isinstance(self._strategy, DDPStrategy)
        # shared with the ranks, also when they are spawned
        self._has_finished = multiprocessing.get_context(self._start_method).RawArray("b", self._strategy.num_processes)
        self._watcher: tuple[threading.Thread, threading.Event] | None = None
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:
            if self._watcher is not None:  # a thread that ends while the next launch forks may leave a lock behind
                thread, is_over = self._watcher
                is_over.set()
                thread.join()
                self._watcher = None

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if multiprocessing.context.get_spawning_popen() is None:  # else a rank that starts inherits what it shares
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
        if processes and self._start_method in ("fork", "spawn"):  # of the fork server's only one may ask how they end
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
    """Keep a forked rank from collecting what its parent left behind, and give it threads of its own.

    If garbage owns threads, as a process group does, its end would wait for ever: they are in the parent only. Torch
    makes a fork's pool of threads where it is first asked for: threads of a backward pass that ask at once may find
    none, which ends the process ("Invalid thread pool").
    """
    if start_method == "fork":
        gc.freeze()
        torch.set_num_threads(torch.get_num_threads())


def _end_soon(processes: list[Any], patience: float = 3.0) -> None:
    """Kill what has not ended after some seconds: a rank that is just telling why it ends must not be broken off."""
    deadline = time.monotonic() + patience
    while processes and time.monotonic() < deadline:
        time.sleep(0.1)
        processes = [process for process in processes if _exit_code(process) is None]
    for process in processes:
        process.kill()


def _exit_code(process: Any) -> int | None:
    """How a child process has ended, if it has; left for the launcher to find out, who would else get nothing."""
    try:
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the launcher has found out
        code: int | None = process._popen.returncode
        return code
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def place_of(environment: ClusterEnvironment, node: int, local_rank: int, starts_ranks: bool) -> Place:
    """Return where this rank is, as its cluster environment reports it.

    Torchrun's agents and Lightning's launcher are started once per node, so several of them on one host are deliberate.
    MPI's nodes are found by host name already. Kubeflow gives every process a node of its own, and variables that are
    set by hand or by a scheduler may do so by mistake.

    Args:
        environment: Of the Trainer.
        node: This rank's node, as the strategy has it.
        local_rank: Its place on that node.
        starts_ranks: Whether the strategy's launcher starts the ranks.
    """
    names_nodes = isinstance(environment, (TorchElasticEnvironment, MPIEnvironment)) or (
        isinstance(environment, LightningEnvironment) and starts_ranks
    )
    return Place(node, local_rank, type(environment).__name__, names_nodes)


def check_ranks_of_node(environment: ClusterEnvironment) -> None:
    """Compare ``Trainer(devices=...)`` with the ranks that torchrun or mpiexec started on this node.

    ``TorchElasticEnvironment`` insists on ``devices * num_nodes`` ranks, but nodes may be unequal; ``MPIEnvironment``
    checks nothing, and ranks without a device fail one by one.
    """
    if isinstance(environment, TorchElasticEnvironment):
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    elif isinstance(environment, MPIEnvironment):
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
    """Refuse to start ranks by running the program again where there is none: in a notebook, or at a Python prompt.

    Lightning refuses it, too, but the remedy it names is its own ``ddp_notebook``.
    """
    if imports._IS_INTERACTIVE:
        raise MisconfigurationException(
            "start_method='popen' starts ranks by running the script again, but an interactive session has none. Use"
            " HierarchicalStrategy(..., start_method='fork'), or a name that ends in _notebook, such as"
            " Trainer(strategy='hierarchical_periodic_notebook')."
        )


@contextmanager
def process_group_meets_at(store: Store | None, rank: int, size: int) -> Iterator[None]:
    """Let ``init_process_group`` meet at a store, in place of the one that ``env://`` stands for.

    That of torchrun's agent still holds the addresses of ranks that died: ranks that are started again call those, and
    give up (pytorch/pytorch#135712, #167288). Lightning passes no store on.

    Args:
        store: The same on every rank, with no process group's words in it; None for what ``env://`` stands for.
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
