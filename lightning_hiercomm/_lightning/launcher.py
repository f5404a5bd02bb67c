"""Starts ranks with Lightning's launchers and environments: one function per private use, with its reason."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
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


class RankLauncher(pl.strategies.launchers._MultiProcessingLauncher):
    """Lightning's launcher of forked and spawned ranks, with three corrections.

    Lightning runs ``Strategy.on_exception`` and ``teardown`` in the launching process only, which does not know the
    failed rank, and waits forever after ``sys.exit()`` on one rank. A forked rank may hang when it collects garbage of
    its parent. The launching process rejects rank 0's buffers if their shapes have changed.
    """

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        settle_as_fork(self._start_method)
        assert isinstance(self._strategy, pl.strategies.DDPStrategy)
        try:
            super()._wrapping_function(process_idx, *args, **kwargs)
        except BaseException as error:
            self._strategy.on_exception(error)
            self._strategy.teardown()
            if isinstance(error, SystemExit) and not error.code:
                raise SystemExit(1) from error
            raise

    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        with taking_shapes(trainer.lightning_module):  # a rank's buffers may have grown
            super()._recover_results_in_main_process(worker_output, trainer)


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
