"""Lightning's strategy hooks, in the order in which a fit calls them, with a scheme that synchronizes the nodes."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hiercomm._lightning.collectives import (
    collectives_begun,
    collectives_of_default_group,
    store_of_default_group,
)
from lightning_hiercomm._lightning.launcher import check_ranks_of_node, place_of, process_group_meets_at
from lightning_hiercomm._lightning.places import begin_stateful_loader
from lightning_hiercomm._lightning.saves import dump_within
from lightning_hiercomm._lightning.trainer import (
    draw_first_indices,
    is_between_batches,
    put_callback_first,
    raw_optimizer,
    reduces_mean_of_a_step,
    remove_callback,
    restore_trainer,
    skips_backward,
)
from lightning_hiercomm._lightning.tree import check_tree, fabric, pass_to_ranks, pl
from lightning_hiercomm.checkpoints.sidecar import set_random_state
from lightning_hiercomm.comm.mpi import abort_on_uncaught_exceptions
from lightning_hiercomm.comm.torch import MOST_IN_MESH, connecting_when_needed, raise_limit_on_open_files
from lightning_hiercomm.control.bootstrap import Bootstrap
from lightning_hiercomm.elastic import Elastic
from lightning_hiercomm.elastic.topology import ElasticTopology
from lightning_hiercomm.nodes.connect import connect_world, leave_behind
from lightning_hiercomm.nodes.hosts import Place
from lightning_hiercomm.nodes.interfaces import use_reachable_interface
from lightning_hiercomm.nodes.topology import nodes_by_count
from lightning_hiercomm.run.losses import common_loss
from lightning_hiercomm.run.replicas import (
    Replicas,
    check_initialized,
    own_tensors,
    tensors_without,
)
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import RunningScheme, Scheme
from lightning_hiercomm.schemes.gradient_path import GradientPath
from lightning_hiercomm.schemes.optimizer_state import evaluates_loss
from lightning_hiercomm.trainer.batches import attach_batches, begin_batches
from lightning_hiercomm.trainer.checkpoint_hooks import CheckpointHooks
from lightning_hiercomm.trainer.elastic import elastic_node
from lightning_hiercomm.trainer.elastic_refusals import check_first_values, check_one_node, check_trainer
from lightning_hiercomm.trainer.epoch_clock import EpochClock, check_training, length_as_given, length_of_run
from lightning_hiercomm.trainer.state import announce, required
from lightning_hiercomm.trainer.unequal_data import UnequalNodes
from lightning_hiercomm.trainer.watch import RunControl

log = logging.getLogger(__name__)


class HierarchicalHooks(CheckpointHooks):
    """Adds the synchronization of nodes to one of Lightning's strategies, which trains inside a node.

    That strategy is the next base class, as in ``class HierarchicalStrategy(HierarchicalHooks, DDPStrategy)``, whose
    hooks are for gradients. Hooks for checkpoints are in ``CheckpointHooks``, attributes in ``StrategyState``.
    """

    # ---- processes start, and connect ----------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        pass_to_ranks()
        if isinstance(self._environment, fabric.plugins.environments.mpi.MPIEnvironment):
            abort_on_uncaught_exceptions()
        self._settings.check_launch(self.parallel_devices, self._process_group_backend, self.world_size)
        self._starts_ranks = not self._environment.creates_processes_externally
        if not self._starts_ranks:
            check_ranks_of_node(self._environment)
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        check_tree(self._module.trainer.callbacks)  # type: ignore[attr-defined]
        # the control plane starts before the process group, whose creation waits long for ranks that die meanwhile
        self.set_world_ranks()
        is_first = self.world_size > 1 and not dist.is_initialized()
        store = None
        if is_first:
            raise_limit_on_open_files()
            host, port = self._environment.main_address, self._environment.main_port
            bootstrap = Bootstrap(host, port, self.global_rank, self.world_size, self._timeout)
            if (found := use_reachable_interface(host, bootstrap.gather)) is not None:
                pl.utilities.rank_zero_info(found)
            self._start_control(bootstrap.store("control"), f"hiercomm/{bootstrap.attempt}/control")
            store = bootstrap.store("process group")
        elif self.world_size > 1:
            self.barrier()  # a new process group would wait for an ended process until the timeout
        else:
            self._control = RunControl()
        with (
            process_group_meets_at(store, self.global_rank, self.world_size),
            nullcontext() if self.world_size <= MOST_IN_MESH else connecting_when_needed(),
        ):
            self._start_process()
        if self.topology is None or self.topology.is_closed or self.topology.is_left_behind:
            self.topology = connect_world(
                self.global_rank,
                self.world_size,
                self._place(),
                self._settings.ranks_per_node,
                self._settings.transport.inter_node,
                self._timeout,
            )
            if self._settings.elastic is not None:
                check_one_node(self.topology)
                self.topology = ElasticTopology(self.topology)
        if self.world_size > 1 and not is_first:
            world = self.topology.world
            # not by `self.broadcast`, which does nothing while the exception of a fit before is handled
            default, name = store_of_default_group(), world.all_gather_object(secrets.token_hex(8))[0]
            self._start_control(default, f"hiercomm/{name}/control")

    def _start_process(self) -> None:
        """Let Lightning's strategy set up the device and the process group."""
        super().setup_environment()

    def _place(self) -> Place:
        return place_of(self._environment, self.node_rank, self.local_rank, self._starts_ranks)

    def _start_control(self, store: dist.Store | None, name: str) -> None:
        """Start the control plane in a new part of a store."""
        if self._control.is_connected:
            return
        node, sizes = self.node_rank, self._settings.ranks_per_node
        if sizes is not None:
            nodes = nodes_by_count(sizes, self.world_size)
            node = next(node for node, ranks in enumerate(nodes) if self.global_rank in ranks)
        self._control = RunControl(
            self.global_rank,
            self.world_size,
            f"rank {self.global_rank} (node {node})",
            self._settings.health.hang_timeout,
            None if self._timeout is None else self._timeout.total_seconds(),
            lambda: (collectives_of_default_group(), collectives_begun()),
            self.global_rank - self.local_rank,
        )
        if store is None:
            log.warning("No control plane, because the default process group has no store: ranks wait for each other")
        else:
            self._control.start(store, name)

    # ---- a fit is set up -----------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._control.barrier(f"called trainer.{pl.trainer.states.TrainerFn(trainer.state.fn).value}")
        if trainer.state.fn != pl.trainer.states.TrainerFn.FITTING:
            super().setup(trainer)
            return
        check_initialized(self._module)
        if self._settings.unequal_data:
            self._unequal = UnequalNodes(self._settings.unequal_data, self.scheme, self._topology, self.root_device)
            self._unequal.attach(trainer)
        if self._settings.batches is not None:  # setting up optimizers may need the dataloaders' length
            config, state = self._settings.batches, self._checkpoints.loaded.get("batches")
            self.batches = attach_batches(config, trainer, self._topology, self.root_device, state)
        super().setup(trainer)
        self._run_or_none = self._new_run()
        self._run.averaged_model.barrier = self._control.barrier
        self._epoch_clock = EpochClock(self._run, self.batches, self._control, self.begin_validation)
        if self._settings.elastic is not None:
            self._join(trainer, self._settings.elastic)
        put_callback_first(trainer, self._epoch_clock)
        dump_within(trainer, self._dumped)
        self._control.watch_over(trainer, None if self._elastic_node is None else self._elastic_node.leave_others)
        announce(self._settings, self._topology, self.schemes)  # before a progress bar starts

    def _begin_equal(self) -> None:
        """Broadcast rank 0's values of the module's tensors, except those that stay each rank's own. Collective."""
        world, average_buffers = self._topology.world, self._settings.average_buffers
        self._own_tensors = own_tensors(self._module, world, self.root_device, average_buffers)
        self._broadcast_tensors(tensors_without(self._module, self._own_tensors))

    def _new_run(self, mesh: Mapping[str, int] | None = None, gradients: GradientPath | None = None) -> TrainingRun:
        settings = self._settings
        optimizers = [raw_optimizer(optimizer) for optimizer in self.optimizers]
        replicas = Replicas(self._module, optimizers, settings.bucket_bytes, settings.average_buffers, mesh)
        replicas.check_names()
        return settings.new_run(replicas, self._topology, gradients)

    def _join(self, trainer: pl.Trainer, elastic: Elastic) -> None:
        """Join the other nodes; a recovering node continues from their state, as from a checkpoint."""
        if not self.schemes:
            raise ValueError(
                f"elastic={elastic!r}: nodes leave and join at optimizer steps, and configure_optimizers returned no"
                " optimizer: return one, or leave elastic out"
            )
        check_trainer(trainer)
        topology = self._topology
        assert isinstance(topology, ElasticTopology)
        self._elastic_node = node = elastic_node(
            trainer, elastic, topology, self._run, self._checkpoints, self._control.exception_to_leave
        )
        put_callback_first(trainer, node)
        node.join(topology)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._settings.batches is not None and self._module.trainer.training:
            batches = required(self.batches, "division of batches", "Strategy.setup, after the module's setup hook")
            return batches.process_dataloader(dataloader)
        trainer = self._trainer_or_none
        if trainer is not None and self._is_fitting:
            begin_stateful_loader(dataloader, trainer.current_epoch)
        dataloader = super().process_dataloader(dataloader)
        if self._unequal is not None and self._module.trainer.training:
            self._unequal.check_loader(dataloader)
        return dataloader

    # ---- training begins -----------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        trainer = self._module.trainer
        if self._unequal is not None:
            self._unequal.check_program(trainer, self._run, self._ddp_kwargs)
        self._control.doing = "beginning to train"
        self._checkpoints.check_equal(self._topology)
        self._control.steps = lambda: [scheme.state.steps for scheme in self.schemes]
        check_training(trainer, self.scheme, self._topology)
        epochs, steps = _length(trainer, self._settings.elastic is not None, self.schemes)
        if self.batches is not None:
            begin_batches(self.batches, trainer)
        self._run.averaged_model.check_shapes()
        if self._settings.elastic is not None:
            check_first_values(self._run)
        elif self._run.values_have_changed():  # in the user's `on_fit_start` or `on_train_start`
            self._synchronize_written()
        self._run.begin(epochs, steps)
        if self._elastic_node is not None:
            self._elastic_node.begin_training()
        if self._checkpoints.random_state is not None:
            draw_first_indices(trainer)
            set_random_state(self._checkpoints.random_state)
            self._checkpoints.random_state = None

    def _synchronize_written(self) -> None:
        """Broadcast rank 0's values of what the program has written; trained parameters only if these have changed."""
        if self._run.values_have_changed(of_trained=True):
            own = self._run.replicas.own_tensors(self._topology.world)
            self._broadcast_tensors(tensors_without(self._module, own))
            self._run.begin_from_module()
        else:  # a teacher, say
            kept = {*self._run.scheme_states.trained(), *self._run.replicas.not_averaged}
            self._broadcast_tensors([p for name, p in self._module.named_parameters() if name not in kept])
            self._run.remember_values()

    # ---- a batch -------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and skips_backward(self._module.trainer):
            # StochasticWeightAveraging has written its average to the module
            self._run.averaged_model.average_module()
            self._run.begin_from_module()
        self._run.follow_unfrozen()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        step, run, raw = super().optimizer_step, self._run, raw_optimizer(optimizer)
        last = self._module.automatic_optimization and self._module.trainer.is_last_batch

        def evaluate() -> Any:
            return common_loss(closure(), run.topology, run.gradients_over) if evaluates_loss(raw) else closure()

        return run.step(raw, lambda: step(optimizer, evaluate, model, **kwargs), last=last)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        take = super().training_step

        def step() -> Any:
            output = take(*args, **kwargs)
            self._run.loss.add(output)
            return output

        if self._unequal is None:
            return step()
        return self._unequal.training_step(self._module.trainer, self._run, self.model, step)

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._run.note_loss_scale(self.precision_plugin)
        return super().backward(closure_loss, *args, **kwargs)

    # ---- a validation --------------------------------------------------------------------------------------------

    def begin_validation(self) -> None:
        """Write the averaged model to the module, before callbacks for validation, which may swap weights."""
        if self.batches is not None:
            self.batches.pause()
        if self._may_communicate:
            self._run.averaged_model.enter()

    def on_validation_end(self) -> None:  # after callbacks, which may have swapped weights
        if self._run_or_none is not None and self._run.averaged_model.is_asked_for:
            self._run.averaged_model.leave()

    # ---- collectives of Lightning or the program: none while this rank handles an exception others may not have -----

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any | None = "mean") -> Tensor:
        if self._unequal is not None:
            self._unequal.check_outside_step("self.log(..., sync_dist=True) at a step", group)
        if not self._ranks_are_together:
            return tensor
        trainer = self._trainer_or_none if group is None else None
        if isinstance(tensor, Tensor) and str(reduce_op).lower() in ("mean", "avg"):
            if not tensor.is_floating_point():
                tensor = tensor.float()  # the mean of integers is seldom an integer
            if self.batches is not None and trainer is not None and reduces_mean_of_a_step(trainer):
                tensor, reduce_op = tensor * self.batches.share, "sum"
        if isinstance(tensor, Tensor) and trainer is not None and is_between_batches(trainer):
            operation = getattr(reduce_op, "op", reduce_op)  # the text of a ReduceOp differs between ranks
            what = f"reduced a value ({operation} of {str(tensor.dtype).removeprefix('torch.')})"
            self._control.barrier(what)  # a value that only some ranks log must not mix with others
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._ranks_are_together:
            return
        try:
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]
        except RuntimeError as error:
            if self._control.is_connected:  # which explains it
                raise
            raise RuntimeError(
                f"rank {self.global_rank} waits for a rank that has ended. Call trainer.fit, validate, test, predict"
                " and save_checkpoint on all ranks, not inside `if trainer.is_global_zero:`"
            ) from error

    @override
    def broadcast(
        self, obj: fabric.strategies.strategy.TBroadcast, src: int = 0
    ) -> fabric.strategies.strategy.TBroadcast:
        if not self._ranks_are_together:
            return obj
        return super().broadcast(obj, src)  # type: ignore[safe-super]

    # ---- the fit ends --------------------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        if self._may_communicate:  # callbacks have written their own averages to the module
            self._control.barrier()
            self._run.averaged_model.average_module()

    @override
    def on_exception(self, exception: BaseException) -> None:
        # callbacks come first, but ours is there only since `setup`
        self._control.note_exception(exception, self.lightning_module)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        trainer, unequal, self._unequal = self._trainer_or_none, self._unequal, None
        if self._may_communicate and not self._run.has_begun and self._elastic_node is None:
            self._run.finish()  # there was nothing to train, perhaps no more, and so no `on_train_end`
            self._run.averaged_model.average_module()
        if trainer is not None:
            for own in (unequal, self._epoch_clock, self._elastic_node):
                if own is not None:
                    remove_callback(trainer, own)
            restore_trainer(trainer)
        if self._elastic_node is not None:
            self._elastic_node.leave(at_once=self._control.is_interrupted(trainer))
        if self._run_or_none is not None:
            self._run_or_none.close(timeout=1.0)
        self._checkpoints.random_state = None
        self._control.stop(trainer)
        super().teardown()
        if self.topology is not None:
            if not self._control.is_interrupted(trainer):
                self.topology.close()
            else:
                leave_behind(self.topology)


def _length(
    trainer: pl.Trainer, is_elastic: bool, schemes: Sequence[RunningScheme[Scheme]]
) -> tuple[int | None, int | None]:
    """Return the epochs and optimizer steps of the run, as far as they are known, as each scheme counts them."""
    # the length of an epoch depends on the number of elastic nodes
    epochs, steps = length_as_given(trainer) if is_elastic else length_of_run(trainer)
    optimizers = max(1, len(schemes))
    if not trainer.lightning_module.automatic_optimization:
        # Lightning counts the steps of all optimizers together, each scheme those of its own: assume that they
        # step equally often
        steps = math.ceil(trainer.max_steps / optimizers) if trainer.max_steps >= 0 else None
    if steps is not None and not is_elastic and not any(scheme.state.steps for scheme in schemes):
        # after a checkpoint of another strategy or an earlier `fit`, schemes count from here
        steps = max(0, steps - trainer.global_step // optimizers)
    return epochs, steps
