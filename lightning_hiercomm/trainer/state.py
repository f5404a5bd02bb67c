"""Attributes of the Trainer's strategies, and errors for those that a Trainer has not set yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from lightning_hiercomm._lightning.tree import fabric, pl
from lightning_hiercomm.batches.running import RunningBatches
from lightning_hiercomm.checkpoints.plain import Checkpoints
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import broadcast_values
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import RunningScheme, Scheme
from lightning_hiercomm.trainer.batches import WeightedMeans
from lightning_hiercomm.trainer.elastic import ElasticNode
from lightning_hiercomm.trainer.epoch_clock import EpochClock
from lightning_hiercomm.trainer.settings import HierarchicalArguments
from lightning_hiercomm.trainer.watch import RunControl

T = TypeVar("T")


class StrategyState(HierarchicalArguments, pl.strategies.ParallelStrategy):
    """Attributes of the Trainer's strategies.

    Attributes:
        scheme: As the user configured it.
        batches: Batch sizes by the ranks' speeds, or None.
        topology: The nodes; None before a Trainer has started the processes.
    """

    topology: Topology | None
    set_world_ranks: Callable[[], None]
    _timeout: timedelta | None
    _process_group_backend: str | None

    def _configure(self) -> None:
        settings = self._settings
        self.scheme = settings.scheme
        self.batches = None if settings.batches is None else RunningBatches(settings.batches)
        self.wire = settings.wire
        self._checkpoints = Checkpoints(settings.checkpoint_replicas)
        self._control = RunControl()
        self._means = WeightedMeans()
        self._starts_ranks = False
        # these exist only inside a process that trains, and go into no pickle and no copy
        self.topology = None
        self._run_or_none: TrainingRun | None = None
        self._epoch_clock: EpochClock | None = None
        self._elastic_node: ElasticNode | None = None
        self._own_tensors: set[str] = set()  # names of tensors that are never broadcast

    def __getstate__(self) -> dict[str, Any]:
        # spawn pickles a strategy before it trains, and programs copy and pickle Trainers at any time
        state: dict[str, Any] = super().__getstate__()
        absent = ("topology", "_run_or_none", "_epoch_clock", "_elastic_node")
        return {**state, **dict.fromkeys(absent), "_control": RunControl()}

    @property
    def schemes(self) -> list[RunningScheme[Scheme]]:
        """One scheme per optimizer, of the present or the last ``fit``; empty before the first."""
        return self._run_or_none.schemes if self._run_or_none is not None else []

    @property
    def node_process_group(self) -> dist.ProcessGroup | None:
        """The process group of this node's ranks, which hold equal parameters, for programs that communicate.

        Optimizers such as ``ZeroRedundancyOptimizer`` take it as ``process_group``. It exists from
        ``configure_model`` on.
        """
        return self._settings.node_process_group(self._topology)

    def _broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast rank 0's values of tensors. Collective."""
        broadcast_values(tensors, self._topology.world)

    @property
    def _topology(self) -> Topology:
        return required(self.topology, "topology", "Strategy.setup_environment, when a Trainer starts")

    @property
    def _run(self) -> TrainingRun:
        return required(self._run_or_none, "training run", "Strategy.setup, when a Trainer starts to fit")

    @property
    def _module(self) -> pl.LightningModule:
        return required(self.lightning_module, "LightningModule", "Strategy.connect, when a Trainer starts")

    @property
    def _environment(self) -> fabric.plugins.ClusterEnvironment:
        return required(self.cluster_environment, "cluster environment", "the Trainer's constructor")

    @property
    def _knows_ranks(self) -> bool:
        return self.cluster_environment is not None and bool(self.parallel_devices)

    @property
    def _trainer_or_none(self) -> pl.Trainer | None:
        module = self.lightning_module
        return None if module is None else module._trainer

    @property
    def _is_fitting(self) -> bool:
        trainer = self._trainer_or_none
        return trainer is not None and trainer.state.fn == pl.trainer.states.TrainerFn.FITTING

    @property
    def _ranks_are_together(self) -> bool:
        return self._control.ranks_are_together(self._trainer_or_none)

    @property
    def _may_communicate(self) -> bool:
        """Whether there is a run that is not over, and all ranks take part."""
        return self._run_or_none is not None and not self._run.is_closed and self._ranks_are_together


def required(value: T | None, what: str, set_by: str) -> T:
    """Return a value, or raise a ``RuntimeError`` that names what is missing and what sets it up."""
    if value is None:
        raise RuntimeError(f"there is no {what} yet: it is set up by {set_by}")
    return value
