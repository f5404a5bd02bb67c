"""The Lightning hooks of a strategy whose nodes agree by a scheme: each hands on to the room that it belongs to."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hiercomm._lightning.averages import heal_averages
from lightning_hiercomm._lightning.launcher import check_ranks_of_node, process_group_meets_at
from lightning_hiercomm._lightning.saves import entries_of_rank, with_base_io
from lightning_hiercomm._lightning.trainer import (
    is_interrupted,
    put_callback_first,
    raw_optimizer,
    remove_callback,
    shown_with_tree,
    skips_backward,
)
from lightning_hiercomm.checkpoints.durable import DurableCheckpointIO
from lightning_hiercomm.checkpoints.plain import Checkpoints
from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.mpi import abort_on_uncaught_exceptions
from lightning_hiercomm.control.rendezvous import Rendezvous
from lightning_hiercomm.elastic import Elastic
from lightning_hiercomm.elastic.topology import ElasticTopology
from lightning_hiercomm.nodes.connect import check_backend, check_equal_work, connect_world
from lightning_hiercomm.nodes.topology import Topology, nodes_by_count
from lightning_hiercomm.run import traffic
from lightning_hiercomm.run.replicas import Replicas, broadcast_values, check_initialized
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import Scheme
from lightning_hiercomm.trainer.batches import WeightedMeans, attach_batches, begin_batches, detach_batches
from lightning_hiercomm.trainer.elastic import BoundaryCallback, ElasticNode
from lightning_hiercomm.trainer.epoch_clock import EpochClock
from lightning_hiercomm.trainer.settings import Settings
from lightning_hiercomm.trainer.watch import RunControl

T = TypeVar("T")


class HierarchicalHooks(ParallelStrategy):
    """Stands before one of Lightning's strategies, which trains inside a node, and lets the nodes agree.

    That strategy is the next base class, as in ``class HierarchicalStrategy(HierarchicalHooks, DDPStrategy)``, and what
    ``super()`` means here. The constructor calls :meth:`_configure` after Lightning's own.

    Attributes:
        scheme: As the user configured it.
        batches: Batch sizes by the ranks' speeds, or None.
        topology: The nodes; None before a Trainer has started the processes.
    """

    topology: Topology | None
    set_world_ranks: Callable[[], None]
    _timeout: timedelta | None
    _process_group_backend: str | None

    def _configure(self, settings: Settings) -> None:
        self._settings = settings
        self.scheme = settings.scheme
        self.batches = settings.batches
        self.wire = settings.wire
        self._checkpoints = Checkpoints(settings.checkpoint_replicas)
        self._control = RunControl()
        self._means = WeightedMeans()
        # these exist only inside a process that trains, and go into no pickle and no copy
        self.topology = None
        self._run_or_none: TrainingRun | None = None
        self._epoch_clock: EpochClock | None = None
        self._elastic_node: ElasticNode | None = None
        self._boundary: BoundaryCallback | None = None

    def __getstate__(self) -> dict[str, Any]:
        # spawn pickles a strategy before it trains, and programs copy and pickle Trainers, and what they gave them, at
        # any time
        state: dict[str, Any] = super().__getstate__()
        alone = {"topology": None, "_run_or_none": None, "_epoch_clock": None, "_control": RunControl()}
        alone |= {"_elastic_node": None, "_boundary": None}
        return {**state, **alone}

    def __repr__(self) -> str:
        """The strategy as one would write it, and the nodes, where they are known."""
        name, sizes = type(self).__name__, None
        if self.topology is not None:
            sizes = [len(ranks) for ranks in self.topology.nodes]
        elif self._settings.ranks_per_node is not None and self._knows_ranks:
            with contextlib.suppress(ValueError):  # they do not fit, which a Trainer says
                sizes = [len(ranks) for ranks in nodes_by_count(self._settings.ranks_per_node, self.world_size)]
        said = self._settings.said_of(type(self), sizes)
        return shown_with_tree(name, f"{name}({', '.join(said)})")

    # ---- setting up ----------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        for device in self.parallel_devices or ():
            streams.check_known(device)
        check_backend(self._process_group_backend, self.parallel_devices or ())
        if self._environment.creates_processes_externally:
            check_ranks_of_node(self._environment)
            if isinstance(self._environment, MPIEnvironment):
                abort_on_uncaught_exceptions()
        if self._settings.ranks_per_node is not None:  # here, where no process has been started
            nodes_by_count(self._settings.ranks_per_node, self.world_size)
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        # before the process group, if there is none yet: what makes it waits long for ranks that die on their way to it
        self.set_world_ranks()
        meets_first = self.world_size > 1 and not dist.is_initialized()
        store = None
        if meets_first:
            rendezvous = Rendezvous(
                self._environment.main_address,
                self._environment.main_port,
                self.global_rank,
                self.world_size,
                self._timeout,
            )
            self._start_control(rendezvous.broadcast, rendezvous.gather)
            store = rendezvous.store
        with process_group_meets_at(store, self.global_rank, self.world_size):
            super().setup_environment()
        if self.topology is None or self.topology.is_closed:
            self.topology = connect_world(
                self.global_rank,
                self.world_size,
                (self.node_rank, self.local_rank),
                self._settings.ranks_per_node,
                self._settings.inter_node,
                self._timeout,
            )
            if self._settings.elastic is not None:
                self.topology = ElasticTopology(self.topology)
        if not meets_first:
            world = self.topology.world
            self._start_control(self.broadcast, lambda own, alarm, among="": world.all_gather_object(own))

    def _start_control(self, broadcast: Callable[[Any], Any], gather: Callable[..., list[Any]]) -> None:
        node, sizes = self.node_rank, self._settings.ranks_per_node
        if sizes is not None:
            nodes = nodes_by_count(sizes, self.world_size)
            node = next(node for node, ranks in enumerate(nodes) if self.global_rank in ranks)
        address = self._environment.main_address, self._settings.control_port
        hang_timeout = self._settings.hang_timeout
        self._control.start(self.global_rank, self.world_size, node, address, hang_timeout, broadcast, gather)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            check_initialized(self._module)
        if self.batches is not None and is_fitting:  # setting up optimizers may ask for the dataloaders' length
            attach_batches(self.batches, trainer, self._topology, self._means, self.root_device)
        super().setup(trainer)
        if is_fitting:
            self._run_or_none = self._new_run()
            self._run.after_healing = lambda: heal_averages(trainer)
            self._epoch_clock = EpochClock(self._run, self.batches, self._control, self.begin_validation)
            if self._settings.elastic is not None:
                self._join(trainer, self._settings.elastic)
            put_callback_first(trainer, self._epoch_clock)
            self._control.watch_over(trainer)
            self._announce()  # here, or it would end up in the line of a progress bar

    def _join(self, trainer: pl.Trainer, elastic: Elastic) -> None:
        """Come to the other nodes; a node that is healed there goes on from what it gets, like from a checkpoint."""
        self._elastic_node = node = ElasticNode(elastic, self._checkpoints)
        self._boundary = BoundaryCallback(node)
        put_callback_first(trainer, self._boundary)
        topology = self._topology
        assert isinstance(topology, ElasticTopology)
        node.join(trainer, topology, self._run)

    def _new_run(self) -> TrainingRun:
        settings = self._settings
        optimizers = [raw_optimizer(optimizer) for optimizer in self.optimizers]
        replicas = Replicas(self._module, optimizers, settings.bucket_bytes, settings.average_buffers)
        return settings.new_run(replicas, self._topology)

    def _begin_equal(self) -> None:
        """Give all ranks rank 0's values; collective."""
        broadcast_values([*self._module.parameters(), *self._module.buffers()], self._topology.world)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.batches is not None and self._module.trainer.training:
            return self.batches.process_dataloader(dataloader)
        return super().process_dataloader(dataloader)

    @override
    def on_exception(self, exception: BaseException) -> None:
        # callbacks hear first, but ours is there only since `setup`
        self._control.note_exception(exception, self.lightning_module)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        trainer = self._trainer_or_none
        if trainer is not None:
            if self._epoch_clock is not None:
                remove_callback(trainer, self._epoch_clock)
            detach_batches(trainer)
        if self._elastic_node is not None:
            self._elastic_node.leave(trainer, at_once=is_interrupted(trainer))
            if trainer is not None and self._boundary is not None:
                remove_callback(trainer, self._boundary)
        if self._run_or_none is not None:
            self._run_or_none.close(timeout=1.0)
        self._control.stop(trainer)
        super().teardown()
        if self.topology is not None and not is_interrupted(trainer):  # others may be gone, or stuck
            self.topology.close()

    # ---- training ------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        trainer = self._module.trainer
        self._control.note_start()
        self._checkpoints.check_equal(self._topology)
        check_equal_work(self._topology, trainer.num_training_batches)
        epochs, steps = _length(trainer)
        length = math.inf if steps is None else steps
        if self._topology.may_grow:  # an epoch is as long as nodes are many
            epochs, steps = _length_as_given(trainer)
        for warning in self.scheme.check_run(self._topology.num_nodes, _steps_of_epoch(trainer), length):
            rank_zero_warn(warning)
        if self.batches is not None:
            begin_batches(self.batches, trainer)
        if self._run.values_have_changed():  # in the user's `on_fit_start` or `on_train_start`
            self._begin_equal()
            self._run.begin_from_module()
        if not trainer.lightning_module.automatic_optimization:  # how often its optimizers step is nobody's to know
            steps = trainer.max_steps if trainer.max_steps >= 0 else None
        self._run.begin(epochs, steps)

    def _announce(self) -> None:
        """Say once what runs."""
        topology, megabytes = self._topology, sum(scheme.replica.nbytes for scheme in self.schemes) / 1e6
        if topology.is_one_node and self.scheme.gradients != "none":
            say = rank_zero_info if topology.world_size == 1 else rank_zero_warn
            say(
                f"there is one node, so {self.scheme!r} is plain data-parallel training. If there are more, the cluster"
                " environment does not say so: set ranks_per_node."
            )
            return
        nodes = " ".join(str(list(ranks)) for ranks in topology.nodes[:8]) + (" ..." if topology.num_nodes > 8 else "")
        rank_zero_info(
            f"{topology.num_nodes} nodes {nodes} over {self._settings.inter_node}; {self.scheme!r};"
            f" {megabytes:.3g} MB of parameters and buffers"
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and skips_backward(self._module.trainer):
            self._run.begin_anew()  # StochasticWeightAveraging put its average, and new statistics, into the module
        self._run.follow_thawed()
        self._checkpoints.restore_random_state()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        self._run.watch_loss(output)
        return output

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scale = 1.0 if self.batches is None else self.batches.gradient_scale
        return super().backward(closure_loss if scale == 1.0 else closure_loss * scale, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        step = super().optimizer_step
        last = self._module.automatic_optimization and self._module.trainer.is_last_batch
        raw = raw_optimizer(optimizer)
        return self._run.step(raw, lambda: step(optimizer, closure, model, **kwargs), last=last)

    def on_train_end(self) -> None:
        if self._may_communicate:  # callbacks have put their own averages into the module
            self._run.agreed_model.average_module()
            self._checkpoints.settle(self._topology, self.checkpoint_io)

    # ---- the agreed model ----------------------------------------------------------------------------------------

    @contextmanager
    def agreed_model(self) -> Iterator[None]:
        """Inside, every rank's module holds the agreed parameters; afterwards training goes on from its own."""
        if not self._may_communicate:
            yield
            return
        with self._run.agreed_model():
            yield

    def begin_validation(self) -> None:
        """Put the agreed model into the module; before any callback hears of the validation, and may swap weights."""
        if self.batches is not None:
            self.batches.pause()
        if self._settings.evaluate == "consensus" and self._may_communicate:
            self._run.agreed_model.enter()
            if self._settings.on_nonfinite == "skip":
                heal_averages(self._module.trainer)  # which may take their place, before this rank is healed itself

    def on_validation_end(self) -> None:  # callbacks have heard of it, and put back what they took out
        if self._run_or_none is not None and self._settings.evaluate == "consensus":
            self._run.agreed_model.leave()

    @property
    def _may_communicate(self) -> bool:
        """Whether there is a run that is not over, and all ranks are there."""
        return self._run_or_none is not None and not self._run.is_closed and self._ranks_are_together

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._may_communicate or self._run.agreed_model.is_in_module:
            return super().lightning_module_state_dict()
        with self.agreed_model():
            if not self._run.agreed_model.holds_own_values:
                return super().lightning_module_state_dict()
            return {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in super().lightning_module_state_dict().items()
            }

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = with_base_io(self._checkpoint_io, DurableCheckpointIO())
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        self._control.note_progress("saving a checkpoint", self._trainer_or_none)
        if not self.schemes:
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        together, run, checkpoints = self._may_communicate, self._run, self._checkpoints
        entries = entries_of_rank(checkpoint)
        if together or run.is_closed:
            checkpoints.average_foreign_weights(checkpoint, run)
        checkpoints.add_to(checkpoint, run, self.batches, together)
        if self._elastic_node is not None and not self._elastic_node.writes:
            return  # another node does
        io = self.checkpoint_io
        with contextlib.ExitStack() as beside:
            if checkpoints.with_replicas and together:
                mid_epoch = not self._module.trainer.is_last_batch
                beside.enter_context(
                    checkpoints.companions(
                        checkpoint,
                        run,
                        mid_epoch,
                        lambda own: self.broadcast(own),
                        io,
                        filepath,
                        storage_options,
                        self.precision_plugin.state_dict(),
                        entries,
                    )
                )
            super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero:
            checkpoints.remove_stale_companions(io, filepath, checkpoint)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._elastic_node is None or self._elastic_node.writes:
            self._checkpoints.remove(self.checkpoint_io, filepath, self.global_rank)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        trainer = self._trainer_or_none
        is_fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        topology = self._topology if is_fitting else None
        self._checkpoints.take(checkpoint, checkpoint_path, self.batches, self.checkpoint_io, topology)
        return checkpoint

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self._may_communicate:
            return super().optimizer_state(optimizer)
        return self._run.scheme_of(raw_optimizer(optimizer)).optimizer_state(only_on=0)  # which writes

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._checkpoints.restore(self._run, self.precision_plugin)
        if self._elastic_node is not None:
            self._elastic_node.end_if_over(self._module.trainer)

    # ---- means over ranks, barriers (abstract in ParallelStrategy, but not in what comes next) -----------------------

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any | None = "mean") -> Tensor:
        if isinstance(tensor, Tensor) and str(reduce_op).lower() in ("mean", "avg"):
            if not tensor.is_floating_point():
                tensor = tensor.float()  # the mean of integers is seldom one
            if self._means.apply_now and self.batches is not None and group is None:
                return super().reduce(tensor * self.batches.share, group, "sum")  # type: ignore[safe-super]
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._ranks_are_together:
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return super().broadcast(obj, src) if self._ranks_are_together else obj  # type: ignore[safe-super]

    # ---- what others may ask -------------------------------------------------------------------------------------

    @property
    def schemes(self) -> list[Scheme]:
        """One scheme per optimizer, of the present or the last ``fit``; empty before the first."""
        return self._run_or_none.schemes if self._run_or_none is not None else []

    @property
    def meter(self) -> Meter | None:
        """Counts this rank's traffic; None before a Trainer has started the processes."""
        return self.topology.meter if self.topology is not None else None

    @property
    def phase(self) -> str:
        """What the (first) scheme is doing, such as ``"warm-up"``."""
        return self.schemes[0].phase if self.schemes else "not training"

    def communication(self) -> dict[str, float]:
        """This rank's counters since the run began, and the schemes' present values; costs nothing.

        Returns:
            ``intra_bytes``, ``inter_bytes``, ``world_bytes`` (bytes sent by this rank), ``intra_messages``, ...,
            ``exposed_seconds`` (the time training waited) and its parts ``intra_exposed_seconds``, ...,
            ``agreements``, ``steps``, and the scheme's own scalars.
        """
        values = traffic.communication(self.meter, self.schemes, self.batches)
        return values if self._elastic_node is None else values | self._elastic_node.scalars()

    def node_communication(self) -> dict[str, float]:
        """:meth:`communication` with the meter's counters summed over this node's ranks. Collective over the node."""
        topology = self._topology
        return traffic.summed_over(topology.intra, topology.meter, self.communication(), self.root_device)

    def total_communication(self) -> dict[str, float]:
        """:meth:`communication` with the meter's counters summed over all ranks. Collective over the world."""
        topology = self._topology
        return traffic.summed_over(topology.world, topology.meter, self.communication(), self.root_device)

    def history(self) -> list[str]:
        """Who came and went in this run, and what it has cost, in words; empty where nodes stay."""
        return [] if self._elastic_node is None else self._elastic_node.history()

    def ddp_inter_bytes(self, steps: float) -> float:
        """Bytes that ring DDP would have sent out of all nodes together in ``steps`` optimizer steps."""
        return traffic.ddp_inter_bytes(self._topology, self.schemes, steps)

    # ---- what is there from some moment on -----------------------------------------------------------------------

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
    def _environment(self) -> ClusterEnvironment:
        return required(self.cluster_environment, "cluster environment", "the Trainer's constructor")

    @property
    def _knows_ranks(self) -> bool:
        """Whether a Trainer has said how many ranks there will be."""
        return self.cluster_environment is not None and bool(self.parallel_devices)

    @property
    def _trainer_or_none(self) -> pl.Trainer | None:
        module = self.lightning_module
        return None if module is None else module._trainer

    @property
    def _ranks_are_together(self) -> bool:
        return self._control.ranks_are_together(self._trainer_or_none)


def required(value: T | None, what: str, set_by: str) -> T:
    """``value``, if it is there.

    Raises:
        RuntimeError: If not, naming what it is and what sets it up.
    """
    if value is None:
        raise RuntimeError(f"there is no {what} yet: it is set up by {set_by}")
    return value


def _steps_of_epoch(trainer: pl.Trainer) -> float:
    """Optimizer steps; where the last accumulates fewer batches, it is a fraction of one."""
    return trainer.num_training_batches / trainer.accumulate_grad_batches


def _length_as_given(trainer: pl.Trainer) -> tuple[int | None, int | None]:
    """Epochs and optimizer steps after which the user wants a run to end."""
    epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else None
    return epochs, trainer.max_steps if trainer.max_steps >= 0 else None


def _length(trainer: pl.Trainer) -> tuple[int | None, int | None]:
    """After how many epochs, and after how many optimizer steps, a run will end, as far as that is known."""
    epochs, steps = _length_as_given(trainer)
    per_epoch = _steps_of_epoch(trainer)
    if not 0 < per_epoch < math.inf:
        return epochs, steps
    whole = math.ceil(per_epoch)
    if steps is not None and trainer.lightning_module.automatic_optimization:
        needed = math.ceil(steps / whole)
        epochs = needed if epochs is None else min(epochs, needed)
    if epochs is not None:
        steps = epochs * whole if steps is None else min(steps, epochs * whole)
    return epochs, steps
