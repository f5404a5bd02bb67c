"""HierarchicalFabricStrategy: a scheme between nodes for training loops of one's own, on Lightning Fabric."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import TBroadcast
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hiercomm._lightning.ddp import (
    FabricSyncControl,
    check_ddp_arguments,
    ignore_in_ddp,
    in_ddp,
    is_not_insisted_on,
    keep_sync_batchnorm_in_group,
    register_bucket_hook,
    unused_parameters,
    warning_of_unused_parameters,
)
from lightning_hiercomm._lightning.launcher import place_of, settle_as_fork
from lightning_hiercomm.checkpoints.formats import FORMAT, check_format
from lightning_hiercomm.comm.autocast import outside_autocast
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.meter import Mark
from lightning_hiercomm.elastic import Elastic
from lightning_hiercomm.nodes.connect import connect_world, process_group
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run import traffic
from lightning_hiercomm.run.averaged_model import AveragedModel
from lightning_hiercomm.run.replicas import (
    Replicas,
    broadcast_values,
    check_initialized,
    per_rank_tensors,
    tensors_without,
    trained_by,
)
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.run.unreduced import GradientCheck
from lightning_hiercomm.schemes import DASO, RunningScheme, Scheme, SchemeName
from lightning_hiercomm.schemes.health.nonfinite import OnNonfinite
from lightning_hiercomm.schemes.health.verification import VerifyReplicas
from lightning_hiercomm.schemes.optimizer_state import evaluates_loss
from lightning_hiercomm.trainer.checks import check_launch
from lightning_hiercomm.trainer.settings import ARGUMENTS_OF_SCHEMES, Settings, check_start, register_schemes


class HierarchicalFabricStrategy(DDPStrategy):
    """What :class:`~lightning_hiercomm.HierarchicalStrategy` is for a ``Trainer``, for ``lightning.fabric.Fabric``.

    The ranks of a node agree on gradients at every step, through DDP over the node's own process group; the nodes agree
    when, and how, the scheme says. The loop is yours, and a strategy cannot see where it begins and ends: say it with
    :meth:`epochs`. Until then the ranks hold parameters of their own; :meth:`averaged_model` is where to validate, and
    ``fabric.save`` saves the agreed ones by itself. All of these are collective: every rank calls them, like
    ``fabric.save``.

    Example::

        strategy = HierarchicalFabricStrategy(DASO(warmup_epochs=1, cooldown_epochs=1))
        fabric = Fabric(strategy=strategy, devices=4, num_nodes=2)
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
        for epoch in strategy.epochs(10):
            for batch in loader:
                fabric.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            with strategy.averaged_model():
                validate(model)
        fabric.save("last.ckpt", {"model": model, "optimizer": optimizer, "schedule": strategy})

    The last entry, if it is there, is the schemes' schedule (the steps taken, DASO's plateau, the outer optimizer's
    state): load it in the same way, with ``fabric.load``, before :meth:`epochs`.

    What belongs to the Trainer is not here: ``HeterogeneousBatches``, checkpoints of every rank's own parameters, and
    the control plane that names a rank that died; without it the others end by the process group's timeout.

    Args:
        scheme: As for ``HierarchicalStrategy``, and so are the next nine.
        ranks_per_node: The size of every node, or a list of sizes. Default: what the cluster environment says.
        inter_node: ``"torch"``, ``"gloo"`` or ``"mpi"``; see ``HierarchicalStrategy``.
        wire_dtype: Payload type of inter-node traffic.
        wire_raw: Cast the parameters themselves, not their differences.
        average_buffers: Let float buffers (BatchNorm statistics) agree together with the parameters; or the names of
            those that do, in which ``*`` stands for anything, as in ``["*running_mean", "*running_var"]``: the others,
            such as queues of samples, stay each rank's own.
        average_optimizer_state: Also average the optimizer's state at agreements of ``PeriodicAveraging``, in the form
            of ``wire_dtype``.
        on_nonfinite: What becomes of parameters that are NaN or infinite: ``"raise"``, ``"skip"`` or ``"ignore"``.
        verify_replicas: Compare the ranks of a node at agreements: ``"off"``, ``"warn"`` or ``"raise"``.
        bucket_mb: Size in MiB of the buckets in which parameters travel between nodes.
        gradient_as_bucket_view: Let gradients lie in DDP's buckets, which saves a copy of them.
        accelerator: As for Fabric's ``DDPStrategy``.
        parallel_devices: As for Fabric's ``DDPStrategy``.
        cluster_environment: As for Fabric's ``DDPStrategy``.
        checkpoint_io: As for Fabric's ``DDPStrategy``.
        precision: As for Fabric's ``DDPStrategy``.
        process_group_backend: As for Fabric's ``DDPStrategy``.
        timeout: As for Fabric's ``DDPStrategy``.
        start_method: As for Fabric's ``DDPStrategy``.
        elastic: Refused: nodes that leave and join are for ``HierarchicalStrategy`` only.
        **ddp_kwargs: Whatever ``torch.nn.parallel.DistributedDataParallel`` takes, such as ``find_unused_parameters``.

    Attributes:
        topology: The nodes; None before ``fabric.launch``.

    Raises:
        ValueError: For arguments that make no sense, naming what would be right.
        TypeError: For arguments of a wrong type, and keywords that neither this strategy nor
            ``DistributedDataParallel`` knows.
    """

    def __init__(
        self,
        scheme: Scheme | SchemeName = "all_reduce",
        ranks_per_node: int | list[int] | None = None,
        inter_node: Literal["torch", "gloo", "mpi"] = "torch",
        wire_dtype: Literal["float32", "bfloat16", "float16", "int8", "int4", "top4"] | None = None,
        wire_raw: bool = False,
        average_buffers: bool | list[str] = True,
        average_optimizer_state: bool = False,
        on_nonfinite: OnNonfinite = "raise",
        verify_replicas: VerifyReplicas = "off",
        bucket_mb: float = 4.0,
        gradient_as_bucket_view: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        elastic: Elastic | str | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        if elastic is not None:
            raise ValueError(
                f"elastic={elastic!r}: the loop is yours, so HierarchicalFabricStrategy cannot take a newcomer to where"
                " the others are in it: take a Trainer with HierarchicalStrategy(elastic=...); or let"
                " `torchrun --max-restarts` start all nodes again from what fabric.save wrote"
            )
        check_ddp_arguments(ddp_kwargs, type(self), ARGUMENTS_OF_SCHEMES)
        check_start(timeout, start_method, process_group_backend)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **ddp_kwargs,
        )
        if isinstance(scheme, DASO) and scheme.adapt and scheme.monitor is not None:
            raise ValueError(
                f"monitor={scheme.monitor!r} is a metric that LightningModules log, which Fabric has not: leave it out,"
                " which watches the loss that goes through fabric.backward, or take adapt=False"
            )
        self._settings = Settings.checked(
            scheme=scheme,
            ranks_per_node=ranks_per_node,
            inter_node=inter_node,
            wire_dtype=wire_dtype,
            wire_raw=wire_raw,
            average_buffers=average_buffers,
            average_optimizer_state=average_optimizer_state,
            on_nonfinite=on_nonfinite,
            verify_replicas=verify_replicas,
            bucket_mb=bucket_mb,
        )
        first_phase = getattr(self._settings.scheme, "first_phase", 0)
        if first_phase:
            raise ValueError(
                f"warmup_steps={first_phase} needs a Trainer, whose strategy changes the ranks between which DDP"
                " averages gradients: leave it out, or train the first steps with AllReduce"
            )
        self._backward_sync_control = FabricSyncControl()
        self.topology: Topology | None = None
        self._starts_ranks = False
        self._runs: list[TrainingRun] = []
        self._without_optimizer: list[nn.Module] = []
        self._without_ddp: list[nn.Module] = []
        self._in_ddp: list[tuple[nn.Module, nn.Module, dict[int, nn.Parameter]]] = []
        self._per_rank: dict[int, set[str]] = {}  # by a module's id, names of tensors whose shapes differ between ranks
        self._has_gone_backward = False
        self._last_bucket: tuple[str, Mark] | None = None
        self._losses: list[Tensor] = []
        self._losses_have_stepped = False
        self._has_begun = False
        self._is_saving = False
        self._length: tuple[int | None, int | None] = None, None  # of the run, in epochs and steps
        self._epoch = 0
        self._epoch_is_open = False
        self._steps_of_epoch: int | None = None
        self._loaded: list[list[dict[str, Any]]] = []
        self._loaded_trained: list[list[str]] = []
        self._loaded_without_mean: list[list[str]] = []
        self._loaded_losses: list[dict[str, Any]] = []
        self._loaded_epoch: tuple[int, bool] = 0, False

    def __deepcopy__(self, memo: object) -> HierarchicalFabricStrategy:
        """Itself: what ``fabric.setup`` returns holds it, and people copy that for an average of its weights."""
        return self

    def __repr__(self) -> str:
        """The strategy as one would write it, and the nodes, where they are known."""
        sizes = None if self.topology is None else [len(ranks) for ranks in self.topology.nodes]
        return f"{type(self).__name__}({', '.join(self._settings.said_of(type(self), sizes))})"

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        register_schemes(cls, strategy_registry)

    # ---- the loop, as its author tells it ------------------------------------------------------------------------

    def epochs(self, count: int, first: int = 0, steps: int | None = None) -> Iterator[int]:
        """Numbers of epochs, to loop over: schemes learn where an epoch begins and ends, and where the run does.

        After the last one every rank holds the agreed parameters, and training is over. If the loop is left before
        (``break``), that is so after :meth:`finish`, or when another one begins.

        Args:
            count: Epochs of the whole run.
            first: Where a run that is resumed goes on.
            steps: Optimizer steps of an epoch, if they are known: then an exchange that the end of the epoch would
                make useless is left out, and schemes may count steps to the end of the run.

        Yields:
            ``first``, ..., ``count - 1``.
        """
        self._steps_of_epoch = steps
        self._begin(count, None if steps is None else count * steps)
        if self._loaded_epoch == (first - 1, True):  # when the file was saved, it had not ended
            self._begin_epoch(first - 1)
            self._load_losses()
            self._end_epoch()
        self._loaded_epoch = 0, False
        for epoch in range(first, count):
            self._begin_epoch(epoch)
            yield epoch
            self._end_epoch()
        self.finish()

    @contextmanager
    def averaged_model(self) -> Iterator[None]:
        """Inside, every rank's modules hold the agreed parameters; afterwards training goes on from its own."""
        with ExitStack() as agreed:
            for model in self._averaged_models():
                agreed.enter_context(model())
            yield

    def _averaged_models(self) -> list[AveragedModel]:
        """Those of all modules; of those without an optimizer, too, which the program moves (teachers)."""
        settings = self._settings
        moved = []
        for module in self._without_optimizer:
            replicas = Replicas(
                module, [], settings.bucket_bytes, settings.average_buffers, per_rank=self._per_rank[id(module)]
            )
            model = AveragedModel([], replicas, self._topology)
            model.has_found_unequal = partial(self._leave_to_ranks, module)
            moved.append(model)
        return [*(run.averaged_model for run in self._runs), *moved]

    def _leave_to_ranks(self, module: nn.Module, names: Collection[str]) -> None:
        """Exchange no more tensors of a module whose shapes differ between ranks."""
        self._per_rank[id(module)].update(names)
        for own, wrapped, _ in self._in_ddp:
            if own is module and isinstance(wrapped, DistributedDataParallel):
                ignore_in_ddp(wrapped, names)

    def finish(self) -> None:
        """Training is over, and every rank holds the agreed parameters; for loops that do without :meth:`epochs`."""
        for run in self._runs:
            run.finish()
        for model in self._averaged_models():
            model.average_module()
        for run in self._runs:
            run.remember_values()

    def communication(self) -> dict[str, float]:
        """This rank's counters, and the schemes' present values; see ``HierarchicalStrategy.communication``."""
        return traffic.communication(None if self.topology is None else self.topology.meter, self.schemes, None)

    @property
    def schemes(self) -> list[RunningScheme[Scheme]]:
        """One per optimizer, in the order of ``fabric.setup``."""
        return [scheme for run in self._runs for scheme in run.schemes]

    # ---- setting up ----------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        backend, sizes = self._process_group_backend, self._settings.ranks_per_node
        check_launch(self.parallel_devices, backend, sizes, self.world_size)
        assert self.cluster_environment is not None
        self._starts_ranks = not self.cluster_environment.creates_processes_externally
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        settle_as_fork(self._start_method)  # the first thing that a rank does
        super().setup_environment()
        assert self.cluster_environment is not None
        settings = self._settings
        place = place_of(self.cluster_environment, self.node_rank, self.local_rank, self._starts_ranks)
        self.topology = connect_world(
            self.global_rank, self.world_size, place, settings.ranks_per_node, settings.inter_node, self._timeout
        )

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}  # nodes may have unequal numbers of ranks

    @override
    def setup_module(self, module: nn.Module) -> Any:
        """``fabric.setup(module)``, whose one optimizer ``fabric.setup_optimizers`` brings later."""
        self._begin_equal(module)
        self._without_optimizer.append(module)
        return self._wrapped(module)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Any:
        """``fabric.setup_optimizers(optimizer)``, after ``fabric.setup(module)``.

        Raises:
            TypeError: If it trains no module that is waiting for an optimizer.
        """
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for place, module in enumerate(self._without_optimizer):
            if any(id(parameter) in trained for parameter in module.parameters()):
                del self._without_optimizer[place]
                self._start_run(module, [optimizer])
                return optimizer
        raise TypeError(
            f"{type(optimizer).__name__} trains no module that was set up without an optimizer: call"
            " fabric.setup(module, optimizer), with all optimizers of a module that has several"
        )

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Any, list[Optimizer], Any]:
        self._begin_equal(module)
        self._start_run(module, optimizers)
        return self._wrapped(module), optimizers, scheduler

    def _begin_equal(self, module: nn.Module) -> None:
        """Give all ranks rank 0's values; collective."""
        world = self._topology.world
        check_initialized(module)
        own = per_rank_tensors(module, world, self.root_device, self._settings.average_buffers)
        self._per_rank[id(module)] = own
        broadcast_values(tensors_without(module, own), world)

    def _start_run(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        self._check_one_module(module, optimizers)
        settings = self._settings
        replicas = Replicas(
            module, optimizers, settings.bucket_bytes, settings.average_buffers, per_rank=self._per_rank[id(module)]
        )
        run, group = settings.new_run(replicas, self._topology), self._sharing_gradients
        run.averaged_model.has_found_unequal = partial(self._leave_to_ranks, module)
        run.knows_batches = False
        run.optimizer_steps.before_inner_step = self._begin_if_needed
        if group is not None and group.size > 1:
            run.gradient_check = GradientCheck(module, group, _REMEDY)
        self._runs.append(run)
        module.register_forward_pre_hook(_BeforeForward(run))
        if self._has_begun:  # the others train already
            run.begin(*self._length)
            run.begin_epoch(self._epoch, {})

    def _check_one_module(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        """Refuse optimizers that train other modules, too, which were set up apart.

        Raises:
            TypeError: If one does.
        """
        own = set(map(id, module.parameters()))
        others = [run.module for run in self._runs] + [each for each in self._without_optimizer if each is not module]
        of_others = {id(parameter) for other in others for parameter in other.parameters()} - own
        for optimizer in optimizers:
            if any(id(parameter) in of_others for group in optimizer.param_groups for parameter in group["params"]):
                raise TypeError(
                    f"{type(optimizer).__name__} trains parameters of {type(module).__name__} and of another module,"
                    " which was set up apart: put both into one nn.ModuleList or nn.ModuleDict, and give fabric.setup"
                    " that and the optimizer"
                )

    def _wrapped(self, module: nn.Module) -> nn.Module:
        """The module in DDP over whoever shares gradients, if DDP has anything to do."""
        topology, group = self._topology, self._sharing_gradients
        keep_sync_batchnorm_in_group(module, process_group(topology.intra))
        if group is None:
            return module
        if group.size == 1:
            if not any(self._ddp_kwargs.get(name) for name in ("find_unused_parameters", "static_graph")):
                self._without_ddp.append(module)
            return module
        wrapped = module
        if any(p.requires_grad for p in module.parameters()):
            self._ddp_kwargs = {**self._ddp_kwargs, "process_group": process_group(group)}
            devices, settled, own = self._determine_ddp_device_ids(), topology.num_nodes > 1, self._per_rank[id(module)]
            wrapped = in_ddp(module, devices, self._ddp_kwargs, settled, own)
            register_bucket_hook(wrapped, partial(_reduce_bucket, weakref.ref(self), weakref.ref(module)))
        self._in_ddp.append((module, wrapped, {id(p): p for p in module.parameters() if p.requires_grad}))
        return wrapped

    # ---- training ------------------------------------------------------------------------------------------------

    @override
    @is_not_insisted_on
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if self._watches_loss:
            if self._losses_have_stepped:
                self._losses, self._losses_have_stepped = [], False
            self._losses.append(tensor.detach())
        with ExitStack() as backward:
            for run in self._runs:
                run.note_loss_scale(self.precision)
                run.optimizer_steps.end_forward()
                backward.enter_context(run.backward())
            super().backward(tensor, module, *args, **kwargs)
        self._has_gone_backward = True
        if self._last_bucket is not None:  # from its hook to here, training waited for gradients
            for run in self._runs:
                run.note_reduction()
            (tier, start), self._last_bucket = self._last_bucket, None
            meter = self._topology.meter
            meter.add_wait(tier, start, meter.mark(self.root_device))
        self._reduce_late()
        self._look_for_unused_parameters()

    @property
    def _watches_loss(self) -> bool:
        return any(scheme.config.watches_loss for scheme in self.schemes)

    def _late(self) -> Iterator[tuple[nn.Module, nn.Module, list[Tensor]]]:
        """Modules, what DDP has made of them, and what is trained of them that was frozen, or not there, then."""
        for module, wrapped, known in self._in_ddp:
            optimizers = [optimizer for run in self._runs if run.module is module for optimizer in run.optimizers]
            trained = dict.fromkeys(parameter for optimizer in optimizers for parameter in trained_by(optimizer))
            yield module, wrapped, [parameter for parameter in trained if id(parameter) not in known]

    @outside_autocast()
    def _reduce_late(self) -> None:
        """Average gradients of parameters that DDP does not know."""
        for module, wrapped, late in self._late():
            if not late or not getattr(wrapped, "require_backward_grad_sync", True):
                continue
            gradients = self._run_with(module).gradients
            # those of embeddings, by what all ranks see alike: a rank may have no gradient
            embeddings = (layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag))
            sparse = {id(layer.weight) for layer in embeddings if layer.sparse}
            group = self._sharing_gradients
            assert group is not None
            # what nobody uses gets no gradient: with one of zeros its optimizer would move it, by decay and momentum
            are_somewhere = torch.tensor([p.grad is not None for p in late], dtype=torch.uint8, device=late[0].device)
            group.all_reduce(are_somewhere, op="max").wait()
            late = [p for p, is_somewhere in zip(late, are_somewhere.tolist(), strict=True) if is_somewhere]
            for parameter in late:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if id(parameter) in sparse:
                    own = parameter.grad if parameter.grad.is_sparse else parameter.grad.to_sparse(1)
                    parameter.grad = gradients.reduce_sparse(own)
            held = [(p, p.grad) for p in late if p.grad is not None and id(p) not in sparse]
            owners = {id(gradient): p for p, gradient in held}
            for place, bucket in enumerate(Replica([gradient for _, gradient in held]).buckets):
                gradients.note_contents(-2 - place, ((owners[id(each.tensor)], each.start) for each in bucket.pieces))
                flat = bucket.pack()
                gradients.reduce(flat, index=-2 - place).wait()
                bucket.unpack(flat)

    def _look_for_unused_parameters(self) -> None:
        """After a module's first backward pass, say what DDP would say after it on nodes of several ranks."""
        for module in list(self._without_ddp):
            if any(p.grad is not None for p in module.parameters()):
                self._without_ddp.remove(module)
                if unused := unused_parameters(module):
                    rank_zero_warn(warning_of_unused_parameters(unused, type(self), "the forward pass"))

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self._begin_if_needed()
        step, run, closure = super().optimizer_step, self._run_of(optimizer), kwargs.get("closure")
        last = run.scheme_of(optimizer).step_in_epoch + 1 == self._steps_of_epoch
        if closure is None:
            self._watch_losses(run)
            return run.step(optimizer, lambda: step(optimizer, **kwargs), last=last)
        if evaluates_loss(optimizer):
            kwargs["closure"] = lambda: run.common_loss(closure())
        result = run.step(optimizer, lambda: step(optimizer, **kwargs), last=last)
        self._watch_losses(run)  # which go backward inside
        return result

    def _begin_if_needed(self) -> bool:
        if not self._has_begun:  # a loop without epochs is one
            self._begin(None, None)
            self._begin_or_go_on()
        return True

    def _watch_losses(self, run: TrainingRun) -> None:
        if not self._has_gone_backward and (self._watches_loss or any(late for _, _, late in self._late())):
            raise RuntimeError(
                f"{type(self).__name__} requires you to call `fabric.backward(loss)` instead of `loss.backward()`."
            )
        for loss in self._losses:  # a loss is that of the optimizers that step before the next backward pass
            run.watch_loss(loss)
        self._losses_have_stepped = True

    def _begin(self, epochs: int | None, steps: int | None) -> None:
        goes_on, self._has_begun = self._has_begun, True
        self._length = epochs, steps
        for run in self._runs:
            if goes_on and not run.has_finished:  # somebody left the loop before, but what nodes have learned counts
                run.finish()
                run.averaged_model.average_module()
                run.remember_values()
            run.averaged_model.compare_shapes()
            if run.values_have_changed():  # since `fabric.setup`: pretrained weights, say
                broadcast_values(tensors_without(run.module, run.replicas.per_rank), self._topology.world)
                run.begin_from_module()
            run.begin(epochs, steps)

    def _begin_or_go_on(self) -> None:
        """Begin the one epoch of a loop without, but for one that had begun when its file was saved."""
        epoch, is_open = self._loaded_epoch
        self._loaded_epoch = 0, False
        if not is_open:
            self._begin_epoch(0)
            return
        self._epoch, self._epoch_is_open = epoch, True
        self._load_losses()

    def _load_losses(self) -> None:
        for run, loss in zip(self._runs, self._loaded_losses, strict=False):
            run.load_loss(loss)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._epoch_is_open = epoch, True
        for run in self._runs:
            run.begin_epoch(epoch, {})

    def _end_epoch(self) -> None:
        self._epoch_is_open = False
        for run in self._runs:
            run.end_epoch()

    # ---- collectives that a program starts by Fabric, for metrics ----------------------------------------------------

    @override
    def all_reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any | None = "mean") -> Tensor:
        with self._excused():
            return super().all_reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        with nullcontext() if tensor.requires_grad else self._excused():
            return super().all_gather(tensor, group, sync_grads)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._excused():
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        with self._excused():
            return super().broadcast(obj, src)

    @contextmanager
    def _excused(self) -> Iterator[None]:
        with ExitStack() as excused:
            for run in self._runs:
                excused.enter_context(run.optimizer_steps.excused())
            yield

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.averaged_model():
            self._is_saving = True
            try:
                super().save_checkpoint(*args, **kwargs)
            finally:
                self._is_saving = False

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if hasattr(optimizer, "consolidate_state_dict"):  # torch's ZeroRedundancyOptimizer, whose state Fabric gathers
            return super().get_optimizer_state(optimizer)
        only_on = 0 if self._is_saving else None  # the rank that writes; or the user asks, on any
        return self._run_of(optimizer).scheme_of(optimizer).optimizer_state(only_on)

    @override
    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        if not state:  # somebody only wants to read
            return rest
        read = [run for run in self._runs if _holds(state, run.module)]
        for run in read:
            run.begin_from_module()  # all ranks have read the same
        if self._loaded:
            if len(self._loaded) != len(self._runs):
                raise ValueError(
                    f"the checkpoint holds the schedules of {len(self._loaded)} modules, but {len(self._runs)} are set"
                    " up: call fabric.setup(module, optimizer) for the same ones before fabric.load"
                )
            self._load_schedules()
        for run in read:
            run.remember_values()
        return rest

    def _load_schedules(self) -> None:
        goes_on = self._has_begun and self._epoch_is_open and self._length[0] is not None
        known = zip(self._loaded, self._loaded_trained, self._loaded_without_mean, strict=True)
        for run, (schedules, trained, without_mean) in zip(self._runs, known, strict=True):
            run.go_on_without_mean(without_mean)
            where = [(scheme.epoch, scheme.step_in_epoch) for scheme in run.schemes]
            with run.training(trained):
                run.load_schedules(schedules)
            if goes_on:  # back to a better state, inside a loop that is where it is
                run.begin(*self._length)
                for scheme, (epoch, step_in_epoch) in zip(run.schemes, where, strict=True):
                    scheme.epoch, scheme.step_in_epoch = epoch, step_in_epoch
        self._loaded = []
        self._has_begun = goes_on
        if goes_on:
            self._loaded_epoch = 0, False

    def state_dict(self) -> dict[str, Any]:
        """The schemes' schedules, which are the same on every rank, and what they train. Collective."""
        return {
            "format": FORMAT,
            "schedules": [run.schedules() for run in self._runs],
            "trained": [run.trained() for run in self._runs],
            "without_mean": [sorted(run.replicas.without_mean) for run in self._runs],
            "losses": [run.mean_loss_so_far() for run in self._runs],
            "epoch": (self._epoch, self._epoch_is_open),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take :meth:`state_dict`; it counts once ``fabric.load`` has read the parameters as well.

        Raises:
            ValueError: If another version of this package has saved it in another format.
        """
        check_format(
            state.get("format"),
            "the strategy's entry in the checkpoint",
            "Leave the strategy out of what fabric.load fills, to go on from the parameters alone.",
        )
        self._loaded = list(state["schedules"])
        self._loaded_trained = list(state["trained"])
        self._loaded_without_mean = list(state["without_mean"])
        self._loaded_losses = list(state["losses"])
        self._loaded_epoch = tuple(state["epoch"])

    # ---- what is there from some moment on -----------------------------------------------------------------------

    @property
    def node_process_group(self) -> dist.ProcessGroup | None:
        """The process group of this node's ranks, which hold equal parameters, for programs that communicate.

        Optimizers such as ``ZeroRedundancyOptimizer`` take it as ``process_group``. It exists after ``fabric.launch``.
        """
        return self._settings.node_process_group(self._topology)

    @property
    def _topology(self) -> Topology:
        if self.topology is None:
            raise RuntimeError("there are no nodes yet: call fabric.launch() before fabric.setup(...)")
        return self.topology

    @property
    def _sharing_gradients(self) -> Communicator | None:
        """The ranks whose gradients are averaged; None if everyone goes by its own."""
        topology = self._topology
        return {"node": topology.intra, "world": topology.world, "none": None}[self._settings.scheme.gradients]

    def _run_with(self, module: nn.Module) -> TrainingRun:
        for run in self._runs:
            if run.module is module:
                return run
        raise RuntimeError(
            f"{type(module).__name__} has no optimizer yet: call fabric.setup(module, optimizer), or"
            " fabric.setup_optimizers(optimizer) before the first backward pass; or freeze its parameters"
            " (requires_grad_(False)) if nothing is to train them"
        )

    def _run_of(self, optimizer: Optimizer) -> TrainingRun:
        for run in self._runs:
            if any(own is optimizer for own in run.optimizers):
                return run
        raise RuntimeError("this optimizer is unknown: set it up together with its module, fabric.setup(module, it)")


_REMEDY = "Call the module that fabric.setup returned, not the one that was given to it."


class _BeforeForward:
    """Lets nodes agree before a forward pass if parameters were unfrozen; copies of the module have no run to ask."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def __call__(self, module: nn.Module, inputs: object) -> None:
        if torch.is_grad_enabled():
            is_plain = not torch.compiler.is_compiling()
            if is_plain:
                self._run.end_batch()
            self._run.follow_unfrozen()
            if is_plain:
                self._run.optimizer_steps.begin_forward()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_nothing,)


def _reduce_bucket(
    strategy: weakref.ref[HierarchicalFabricStrategy], module: weakref.ref[nn.Module], bucket: Any
) -> Future[Tensor]:
    """What DDP is given: its other half, not Python's, would keep for ever what has DDP itself."""
    own, trained = strategy(), module()
    assert own is not None
    assert trained is not None
    gradients = own._run_with(trained).gradients
    future = gradients.reduce_bucket(bucket)
    if bucket.is_last():
        own._last_bucket = gradients.tier, own._topology.meter.mark(bucket.buffer().device)
    return future


def _nothing(module: nn.Module, inputs: object) -> None:
    """What a copy does in place of :class:`_BeforeForward`."""


def _holds(state: Any, module: nn.Module) -> bool:
    """Whether what a file is read into has a module, perhaps wrapped."""
    values = state.values() if isinstance(state, Mapping) else [state]
    return any(each is module for value in values if isinstance(value, nn.Module) for each in value.modules())
