"""Lightning's strategy hooks, with the synchronization of nodes by a scheme."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hiercomm._lightning.averages import heal_averages
from lightning_hiercomm._lightning.launcher import place_of, process_group_meets_at
from lightning_hiercomm._lightning.saves import (
    copied_where,
    dump_within,
    entries_of_rank,
    restore_dump,
    taking_shapes,
    with_base_io,
)
from lightning_hiercomm._lightning.trainer import (
    draw_first_indices,
    exception_of_tuner,
    is_between_batches,
    is_of_tuner,
    put_callback_first,
    raw_optimizer,
    remove_callback,
    skips_backward,
)
from lightning_hiercomm.checkpoints.durable import DurableCheckpointIO
from lightning_hiercomm.checkpoints.plain import per_rank_names
from lightning_hiercomm.comm.mpi import abort_on_uncaught_exceptions
from lightning_hiercomm.comm.torch import connecting_when_needed
from lightning_hiercomm.control.bootstrap import Bootstrap
from lightning_hiercomm.control.open_files import has_mesh, needed_files, raise_limit
from lightning_hiercomm.elastic import Elastic
from lightning_hiercomm.elastic.topology import ElasticTopology
from lightning_hiercomm.nodes.connect import connect_world, leave_behind
from lightning_hiercomm.nodes.topology import nodes_by_count
from lightning_hiercomm.run.replicas import (
    Replicas,
    broadcast_values,
    check_initialized,
    per_rank_tensors,
    tensors_without,
)
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes.optimizer_state import evaluates_loss
from lightning_hiercomm.trainer.batches import attach_batches, begin_batches, detach_batches
from lightning_hiercomm.trainer.checks import check_launch, check_training
from lightning_hiercomm.trainer.elastic import BoundaryCallback, elastic_node
from lightning_hiercomm.trainer.elastic_refusals import check_trainer
from lightning_hiercomm.trainer.epoch_clock import EpochClock, length_as_given, length_of_run
from lightning_hiercomm.trainer.reports import Reports

REMEDY_IN_MANUAL_OPTIMIZATION = "In manual optimization, call self.manual_backward(loss) instead of loss.backward()."


class HierarchicalHooks(Reports):
    """Adds the synchronization of nodes to one of Lightning's strategies, which trains inside a node.

    That strategy is the next base class, as in ``class HierarchicalStrategy(HierarchicalHooks, DDPStrategy)``.
    """

    # ---- setting up ----------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        if isinstance(self._environment, MPIEnvironment):
            abort_on_uncaught_exceptions()
        backend, sizes = self._process_group_backend, self._settings.ranks_per_node
        check_launch(self.parallel_devices, backend, sizes, self.world_size, self._environment)
        self._starts_ranks = not self._environment.creates_processes_externally
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        # the control plane starts before the process group, whose creation waits long for ranks that die meanwhile
        self.set_world_ranks()
        meets_first = self.world_size > 1 and not dist.is_initialized()
        store = None
        if meets_first:
            raise_limit(2 * needed_files(self.world_size))  # torch before 2.8 always connects all pairs
            bootstrap = Bootstrap(
                self._environment.main_address,
                self._environment.main_port,
                self.global_rank,
                self.world_size,
                self._timeout,
            )
            self._start_control(bootstrap.broadcast, bootstrap.gather)
            store = bootstrap.store
        elif self.world_size > 1:
            self.barrier()  # a new process group would wait for an ended process until the timeout
        with (
            process_group_meets_at(store, self.global_rank, self.world_size),
            nullcontext() if has_mesh(self.world_size) else connecting_when_needed(),
        ):
            super().setup_environment()
        if self.topology is None or self.topology.is_closed or self.topology.is_left_behind:
            self.topology = connect_world(
                self.global_rank,
                self.world_size,
                place_of(self._environment, self.node_rank, self.local_rank, self._starts_ranks),
                self._settings.ranks_per_node,
                self._settings.transport.inter_node,
                self._timeout,
            )
            if self._settings.elastic is not None:
                self.topology = ElasticTopology(self.topology)
        if not meets_first:
            world = self.topology.world
            self._start_control(self.broadcast, lambda own, alarm, among="", aloud=False: world.all_gather_object(own))

    def _start_control(self, broadcast: Callable[[Any], Any], gather: Callable[..., list[Any]]) -> None:
        node, sizes = self.node_rank, self._settings.ranks_per_node
        if sizes is not None:
            nodes = nodes_by_count(sizes, self.world_size)
            node = next(node for node, ranks in enumerate(nodes) if self.global_rank in ranks)
        address = self._environment.main_address, self._settings.health.control_port or 0
        hang_timeout = self._settings.health.hang_timeout
        timeout = None if self._timeout is None else self._timeout.total_seconds()
        self._control.start(self.global_rank, self.world_size, node, address, hang_timeout, broadcast, gather, timeout)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._control.barrier("run", f" trainer.{TrainerFn(trainer.state.fn).value}")
        if is_fitting:
            check_initialized(self._module)
        if self.batches is not None and is_fitting:  # setting up optimizers may need the dataloaders' length
            attach_batches(self.batches, trainer, self._topology, self._means, self.root_device)
        super().setup(trainer)
        if is_fitting:
            self._run_or_none = self._new_run()
            self._run.after_healing = lambda: heal_averages(trainer)
            self._run.averaged_model.barrier = self._control.barrier
            self._epoch_clock = EpochClock(self._run, self.batches, self._control, self.begin_validation)
            if self._settings.elastic is not None:
                self._join(trainer, self._settings.elastic)
            put_callback_first(trainer, self._epoch_clock)
            dump_within(trainer, self._dumped)
            self._control.watch_over(trainer, None if self._elastic_node is None else self._elastic_node.leave_others)
            self._announce()  # before a progress bar starts

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
            trainer, elastic, topology, self._run, self._checkpoints, self._control.told_to_leave
        )
        self._boundary = BoundaryCallback(node)
        put_callback_first(trainer, self._boundary)
        node.join(topology)

    def _new_run(self) -> TrainingRun:
        settings = self._settings
        optimizers = [raw_optimizer(optimizer) for optimizer in self.optimizers]
        replicas = Replicas(
            self._module, optimizers, settings.bucket_bytes, settings.average_buffers, per_rank=self._per_rank
        )
        replicas.check_names()
        return settings.new_run(replicas, self._topology)

    def _begin_equal(self) -> None:
        """Broadcast rank 0's values of the module's tensors, except where shapes differ. Collective."""
        world, average_buffers = self._topology.world, self._settings.average_buffers
        self._per_rank = per_rank_tensors(self._module, world, self.root_device, average_buffers)
        self._share(tensors_without(self._module, self._per_rank))

    def _share(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast rank 0's values of tensors. Collective."""
        broadcast_values(tensors, self._topology.world)

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
        if self._may_communicate and not self._run.has_begun and self._elastic_node is None:
            self._run.finish()  # there was nothing to train, perhaps no more, and so no `on_train_end`
            self._run.averaged_model.average_module()
        if trainer is not None:
            if self._epoch_clock is not None:
                remove_callback(trainer, self._epoch_clock)
                restore_dump(trainer)
            detach_batches(trainer)
        if self._elastic_node is not None:
            self._elastic_node.leave(at_once=self._control.is_interrupted(trainer))
            if trainer is not None and self._boundary is not None:
                remove_callback(trainer, self._boundary)
        if self._run_or_none is not None:
            self._run_or_none.close(timeout=1.0)
        self._checkpoints.forget_random_state()
        self._control.stop(trainer)
        super().teardown()
        if self.topology is not None:
            if not self._control.is_interrupted(trainer):
                self.topology.close()
            else:
                leave_behind(self.topology)

    # ---- training ------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        trainer = self._module.trainer
        self._control.note_start()
        self._checkpoints.check_equal(self._topology)
        self._control.steps = lambda: [scheme.state.steps for scheme in self.schemes]
        check_training(trainer, self.scheme, self._topology)
        # with elastic nodes the length of an epoch depends on their number
        epochs, steps = length_as_given(trainer) if self._topology.may_grow else length_of_run(trainer)
        if self.batches is not None:
            begin_batches(self.batches, trainer)
        self._run.averaged_model.compare_shapes()
        if self._topology.may_grow:
            self._check_values()
        elif self._run.values_have_changed():  # in the user's `on_fit_start` or `on_train_start`
            self._synchronize_written()
        optimizers = max(1, len(self.schemes))
        if not trainer.lightning_module.automatic_optimization:
            # Lightning counts the steps of all optimizers together, each scheme those of its own: assume that they
            # step equally often
            steps = math.ceil(trainer.max_steps / optimizers) if trainer.max_steps >= 0 else None
        if steps is not None and not self._topology.may_grow and not any(scheme.state.steps for scheme in self.schemes):
            # after a checkpoint of another strategy or an earlier `fit`, schemes count from here
            steps = max(0, steps - trainer.global_step // optimizers)
        self._run.begin(epochs, steps)
        if self._elastic_node is not None:
            self._elastic_node.begin_training()
        if self._checkpoints.has_random_state:
            draw_first_indices(trainer)
            self._checkpoints.restore_random_state()

    def _synchronize_written(self) -> None:
        """Broadcast rank 0's values of what the program has written; trained parameters only if these have changed."""
        per_rank = self._run.replicas.per_rank
        if self._run.values_have_changed(of_trained=True):
            self._share(tensors_without(self._module, per_rank))
            self._run.begin_from_module()
        else:  # a teacher, say
            kept = per_rank.union(self._run.trained())
            self._share([p for name, p in self._module.named_parameters() if name not in kept])
            self._run.remember_values()

    def _check_values(self) -> None:
        """Check that parameters have not changed since elastic nodes synchronized their first values.

        Raises:
            ValueError: If they have.
        """
        if self._run.values_have_changed(of_trained=True):
            raise ValueError(
                "elastic nodes: parameters were changed in on_fit_start or on_train_start, after the nodes had"
                " synchronized their first values, so other nodes do not receive them. Change them in configure_model"
                " or setup"
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and skips_backward(self._module.trainer):
            self._run.restart_from_average()  # StochasticWeightAveraging has written its average to the module
        self._run.follow_unfrozen()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._run.optimizer_steps.forward():
            output = super().training_step(*args, **kwargs)
        self._run.watch_loss(output)
        return output

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._run.note_loss_scale(self.precision_plugin)
        scale = 1.0 if self.batches is None else self.batches.gradient_scale
        with self._run.backward():
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
        raw, run = raw_optimizer(optimizer), self._run
        evaluate = (lambda: run.common_loss(closure())) if evaluates_loss(raw) else closure
        return run.step(raw, lambda: step(optimizer, evaluate, model, **kwargs), last=last)

    def on_train_end(self) -> None:
        if self._may_communicate:  # callbacks have written their own averages to the module
            self._control.barrier()
            self._run.averaged_model.average_module()
            self._checkpoints.settle(self._topology, self.checkpoint_io)

    # ---- the averaged model --------------------------------------------------------------------------------------

    @contextmanager
    def averaged_model(self) -> Iterator[None]:
        """Inside, every rank's module holds the averaged parameters; afterwards training continues from its own."""
        if not self._may_communicate:
            yield
            return
        with self._run.averaged_model():
            yield

    def begin_validation(self) -> None:
        """Write the averaged model to the module, before callbacks for validation, which may swap weights."""
        if self.batches is not None:
            self.batches.pause()
        if self._settings.evaluate == "consensus" and self._may_communicate:
            self._run.begin_validation()
            if self._settings.health.on_nonfinite == "skip":
                # callbacks' averages may replace the parameters before this rank recovers
                self._run.averaged_model.stand_in(heal_averages(self._module.trainer))

    def on_validation_end(self) -> None:  # after callbacks, which may have swapped weights
        if self._run_or_none is not None and self._run.averaged_model.is_watched:
            self._run.end_validation(self._share)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._may_communicate or self._run.averaged_model.is_in_module:
            return super().lightning_module_state_dict()
        with self.averaged_model():
            if not self._run.averaged_model.holds_own_values:
                return super().lightning_module_state_dict()
            return {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in super().lightning_module_state_dict().items()
            }

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _dumped(self, dump: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a checkpoint that is made of the averaged model."""
        if not self._may_communicate:
            return dump()
        run, model = self._run, self._run.averaged_model
        if run.has_finished:
            self._control.barrier()
            model.average_module()  # callbacks that average may have written to it
        elif model.is_asked_for:
            self._control.barrier()
        if model.is_asked_for or (run.has_finished and model.is_in_module):
            return dump()
        with model() if run.has_finished else run.saving(self._share):
            checkpoint = dump()
            if not model.holds_own_values:
                return checkpoint
            return copied_where(checkpoint, run.replicas.sees_memory())

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
        if self._run_or_none is None:
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        together, run, checkpoints = self._may_communicate, self._run, self._checkpoints
        looks = is_of_tuner(filepath) and self._elastic_node is None
        has_sidecars = (checkpoints.with_replicas or looks) and together
        entries = entries_of_rank(checkpoint) if has_sidecars else {}  # before they hold the mean
        if together or run.is_closed:
            checkpoints.average_foreign_weights(checkpoint, run)
        checkpoints.add_to(checkpoint, run, self.batches, together)
        if self._elastic_node is not None and not self._elastic_node.writes:
            return  # another node writes
        io = self.checkpoint_io
        with contextlib.ExitStack() as stack:
            if has_sidecars:
                # a tuner restores its file before the epoch's dataloader draws a seed
                mid_epoch = not self._module.trainer.is_last_batch and not looks
                stack.enter_context(
                    checkpoints.sidecars(
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
            checkpoints.remove_stale_sidecars(io, filepath, checkpoint)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._elastic_node is None or self._elastic_node.writes:
            self._checkpoints.remove(self.checkpoint_io, filepath, self.global_rank)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        exception = exception_of_tuner()
        if exception is not None:
            self._control.note_exception(exception, self._module)
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        trainer = self._trainer_or_none
        is_fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            io, topology = self.checkpoint_io, self._topology
            self._checkpoints.take(checkpoint, checkpoint_path, self.batches, io, topology, weights_only)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with taking_shapes(self._module, per_rank_names(checkpoint)):
            super().load_model_state_dict(checkpoint, strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self._may_communicate:
            return super().optimizer_state(optimizer)
        raw = raw_optimizer(optimizer)
        if hasattr(raw, "consolidate_state_dict"):  # torch's ZeroRedundancyOptimizer, whose state Lightning gathers
            return super().optimizer_state(raw)
        return self._run.scheme_of(raw).optimizer_state(only_on=0)  # which writes

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._topology.may_grow:
            self._check_values()  # before restored values hide what was written in `on_fit_start`
        self._checkpoints.restore(self._run, self.precision_plugin)
        if self._elastic_node is not None:
            self._elastic_node.go_on()

    # ---- means over ranks, barriers (abstract in ParallelStrategy, but not in the next base class) -------------------

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any | None = "mean") -> Tensor:
        if not self._ranks_are_together:
            return tensor
        if isinstance(tensor, Tensor) and str(reduce_op).lower() in ("mean", "avg"):
            if not tensor.is_floating_point():
                tensor = tensor.float()  # the mean of integers is seldom an integer
            if self._means.apply_now and self.batches is not None and group is None:
                tensor, reduce_op = tensor * self.batches.share, "sum"
        trainer = self._trainer_or_none
        if isinstance(tensor, Tensor) and group is None and trainer is not None and is_between_batches(trainer):
            operation = getattr(reduce_op, "op", reduce_op)  # the text of a ReduceOp differs between ranks
            what = f" ({operation} of {str(tensor.dtype).removeprefix('torch.')})"
            self._control.barrier("reduce", what)  # a value that only some ranks log must not mix with others
        with self._excused():
            return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._ranks_are_together:
            return
        try:
            with self._excused():
                super().barrier(*args, **kwargs)  # type: ignore[safe-super]
        except RuntimeError as error:
            if self._control.plane is not None:  # which explains it
                raise
            raise RuntimeError(
                f"rank {self.global_rank} waits for a rank that has ended. Call trainer.fit, validate, test, predict"
                " and save_checkpoint on all ranks, not inside `if trainer.is_global_zero:`"
            ) from error

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not self._ranks_are_together:
            return obj
        with self._excused():
            return super().broadcast(obj, src)  # type: ignore[safe-super]

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        with nullcontext() if tensor.requires_grad else self._excused():
            return super().all_gather(tensor, group, sync_grads)

    def _excused(self) -> AbstractContextManager[None]:
        """Inside, collectives do not count as the program's own: Lightning starts them for metrics and logging."""
        return nullcontext() if self._run_or_none is None else self._run_or_none.optimizer_steps.excused()
