"""Attributes and reports of the Trainer's strategies, and errors for what a Trainer has not set yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from lightning_hiercomm._lightning.tree import as_shown, fabric, pl
from lightning_hiercomm.batches.running import RunningBatches
from lightning_hiercomm.checkpoints.plain import Checkpoints
from lightning_hiercomm.nodes.connect import process_group
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run import traffic
from lightning_hiercomm.run.replicas import broadcast_values
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import RunningScheme, Scheme
from lightning_hiercomm.trainer.elastic import ElasticNode
from lightning_hiercomm.trainer.epoch_clock import EpochClock
from lightning_hiercomm.trainer.settings import Settings
from lightning_hiercomm.trainer.unequal_data import UnequalNodes
from lightning_hiercomm.trainer.watch import RunControl

T = TypeVar("T")


class StrategyState(pl.strategies.ParallelStrategy):
    """Attributes of the Trainer's strategies, and public descriptions, which do not change them.

    Attributes:
        scheme: As the user configured it.
        batches: Batch sizes by the ranks' speeds, of the present or the last ``fit``, or None.
        topology: The nodes; None before a Trainer has started the processes.
    """

    _settings: Settings
    topology: Topology | None
    set_world_ranks: Callable[[], None]
    _ddp_kwargs: dict[str, Any]  # only of strategies that use DDP
    _timeout: timedelta | None
    _process_group_backend: str | None

    def _configure(self) -> None:
        settings = self._settings
        self.scheme = settings.scheme
        self.wire = settings.wire
        self._checkpoints = Checkpoints(settings.checkpoint_replicas)
        self._starts_ranks = False
        # these exist only inside a process that trains, and go into no pickle and no copy
        self.topology = None
        self.batches: RunningBatches | None = None
        self._run_or_none: TrainingRun | None = None
        self._epoch_clock: EpochClock | None = None
        self._elastic_node: ElasticNode | None = None
        self._unequal: UnequalNodes | None = None
        self._own_tensors: set[str] = set()  # names of tensors that are never broadcast

    def __getstate__(self) -> dict[str, Any]:
        # spawn pickles a strategy before it trains, and programs copy and pickle Trainers at any time
        state: dict[str, Any] = super().__getstate__()
        absent = ("topology", "batches", "_run_or_none", "_epoch_clock", "_elastic_node", "_unequal")
        return {key: value for key, value in state.items() if key != "_control"} | dict.fromkeys(absent)

    @cached_property
    def _control(self) -> RunControl:
        return RunControl()  # a copy of the strategy is not connected

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
        return process_group(self._topology.intra)

    @property
    def is_idle(self) -> bool:
        """Whether this node has no batch of its own at present: hooks of batches then get its last one again."""
        return self._unequal is not None and self._unequal.is_idle

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

    # ---- reports -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """The strategy as a user writes it."""
        return as_shown(f"{type(self).__name__}({self._settings.as_written()})")

    def communication(self) -> dict[str, float]:
        """Return this rank's counters since the run began, and the schemes' present values, without communication.

        Returns:
            ``intra_bytes``, ``inter_bytes``, ``world_bytes`` (bytes sent by this rank), ``intra_messages``, ...,
            ``exposed_seconds`` (the time training waited) and its parts ``intra_exposed_seconds``, ...,
            ``synchronizations``, ``steps``, and the scheme's own scalars.
        """
        meter = None if self.topology is None else self.topology.meter
        values = traffic.communication(meter, self.schemes, self.batches)
        return values if self._elastic_node is None else values | self._elastic_node.membership.history.scalars()

    def history(self) -> list[str]:
        """Return lines about the nodes that joined and left, and the time lost; empty without ``elastic``."""
        return [] if self._elastic_node is None else self._elastic_node.membership.history.lines()


def announce(settings: Settings, topology: Topology, schemes: Sequence[RunningScheme[Scheme]]) -> None:
    """Log the nodes, the scheme and what it synchronizes, on rank 0."""
    megabytes = sum(scheme.replica.nbytes for scheme in schemes) / 1e6
    if topology.is_one_node:
        log = pl.utilities.rank_zero_info if topology.world_size == 1 else pl.utilities.rank_zero_warn
        log(
            f"there is one node, so {settings.scheme!r} is plain data-parallel training. If there are more, the cluster"
            " environment does not report them: set ranks_per_node."
        )
        return
    written = replace(settings, ranks_per_node=None).as_written()  # the nodes are listed before it
    nodes = " ".join(str(list(ranks)) for ranks in topology.nodes[:8]) + (" ..." if topology.num_nodes > 8 else "")
    pl.utilities.rank_zero_info(
        f"{topology.num_nodes} nodes {nodes} over {settings.transport.inter_node}; {written};"
        f" {megabytes:.3g} MB of parameters and buffers"
    )


def required(value: T | None, what: str, set_by: str) -> T:
    """Return a value, or raise a ``RuntimeError`` that names what is missing and what sets it up."""
    if value is None:
        raise RuntimeError(f"there is no {what} yet: it is set up by {set_by}")
    return value
