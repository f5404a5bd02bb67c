"""The strategy: where Lightning meets the schemes."""

from __future__ import annotations

import copy
import gc
import logging
import math
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hiercomm import _lightning
from lightning_hiercomm.batches import HeterogeneousBatches
from lightning_hiercomm.batches.rehearsal import rehearsal
from lightning_hiercomm.comm.base import Communicator, Connect
from lightning_hiercomm.comm.meter import Mark, Meter
from lightning_hiercomm.comm.mpi import abort_on_uncaught_exceptions, connect_mpi, load_mpi
from lightning_hiercomm.comm.torch import TorchCommunicator, connect_torch
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.companion import (
    companion_path,
    companion_state,
    load_companion,
    restore_companion,
    set_random_state,
)
from lightning_hiercomm.control import ControlPlane, RankFailure, start_control_plane
from lightning_hiercomm.rendezvous import Rendezvous
from lightning_hiercomm.replica import Replica
from lightning_hiercomm.schemes import SCHEMES, Scheme, SchemeName
from lightning_hiercomm.schemes.averaging import Average
from lightning_hiercomm.topology import Topology, nodes_by_count, nodes_by_place

log = logging.getLogger(__name__)

_CHECKPOINT_KEY = "hiercomm"


class HierarchicalStrategy(DDPStrategy):
    """Train any LightningModule on nodes joined by a network much slower than the links inside them.

    The ranks of a node agree on gradients at every step, through DDP over the node's own process group. The nodes agree
    when, and how, the scheme says. Between agreements the nodes hold different parameters; what a person sees is the
    *agreed* model: validation runs on it, a checkpoint holds it (a plain Lightning checkpoint that any strategy loads),
    and ``fit`` ends on it.

    Args:
        scheme: When and how the nodes agree: a :class:`~lightning_hiercomm.schemes.Scheme`, or the name of one with its
            default arguments.
        batches: Gives ranks of unequal speed batches of unequal size. None: all take what the dataloader says.
        ranks_per_node: The size of every node, or a list of sizes for unequal nodes, in rank order. Default: what the
            cluster environment says (found by asking every rank, so ranks of a node need not be consecutive).
        inter_node: What carries traffic between nodes: ``"torch"`` (the process group's backend) or ``"mpi"`` (mpi4py;
            start the program with ``mpiexec``). Inside a node, and over all ranks at once, it is always torch.
        wire_dtype: Payload type of inter-node traffic (``"bfloat16"``, ``"float16"``); None is the tensors' own.
            Parameters then travel as differences from the last agreed ones, see
            :class:`~lightning_hiercomm.comm.wire.Wire`.
        wire_raw: Cast the parameters themselves instead, as DASO's paper does. It saves a copy of this rank's part of
            the model, but updates smaller than half a unit in the last place of ``wire_dtype`` are lost.
        average_buffers: Let float buffers (BatchNorm statistics) agree together with the parameters.
        average_optimizer_state: Also average the optimizer's state (momentum, Adam's moments) at agreements of
            ``PeriodicAveraging``.
        evaluate: What in-fit validation runs on: the agreed parameters (``"consensus"``), or each rank's own
            (``"replica"``), which costs no communication.
        checkpoint_replicas: Also store every rank's own parameters, optimizer and scheme state beside each checkpoint,
            for a bit-exact resume. Without it a run resumes from the agreed parameters.
        control_port: Port of rank 0's node on which the control plane listens, a few bytes beside the collectives that
            say who died and when to stop; every rank must be able to reach it. None (or 0): any free port.
        hang_timeout: Seconds of silence on the control plane after which a rank is taken for frozen (stopped, on a lost
            machine, holding the interpreter's lock, or stuck in the kernel): it is named with its last step, all ranks
            dump their stacks and the run ends. Long steps, validations and waits are not silent. None: never.
        bucket_mb: Size in MiB of the buckets in which parameters travel between nodes.
        gradient_as_bucket_view: Let gradients lie in DDP's buckets, where DDP by itself copies them in and out: that
            saves the time and a copy of all gradients in memory. False if something keeps ``.grad`` tensors for
            longer than a step.
        accelerator: As for ``DDPStrategy``.
        parallel_devices: As for ``DDPStrategy``.
        cluster_environment: As for ``DDPStrategy``.
        checkpoint_io: As for ``DDPStrategy``.
        precision_plugin: As for ``DDPStrategy``.
        process_group_backend: As for ``DDPStrategy``.
        timeout: As for ``DDPStrategy``.
        start_method: As for ``DDPStrategy``.
        **ddp_kwargs: Whatever ``torch.nn.parallel.DistributedDataParallel`` takes, such as ``find_unused_parameters``.

    Raises:
        ValueError: For arguments that make no sense, naming what would be right.
    """

    strategy_name = "hierarchical"

    def __init__(
        self,
        scheme: Scheme | SchemeName = "periodic",
        batches: HeterogeneousBatches | None = None,
        ranks_per_node: int | list[int] | None = None,
        inter_node: Literal["torch", "mpi"] = "torch",
        wire_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        wire_raw: bool = False,
        average_buffers: bool = True,
        average_optimizer_state: bool = False,
        evaluate: Literal["consensus", "replica"] = "consensus",
        checkpoint_replicas: bool = False,
        control_port: int | None = None,
        hang_timeout: float | None = 300.0,
        bucket_mb: float = 4.0,
        gradient_as_bucket_view: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_kwargs: Any,
    ) -> None:
        # jsonargparse fills **kwargs with every default of DDPStrategy and of DDP: what is None was not asked for
        owned = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "process_group")
        for name, value in ddp_kwargs.items():
            if name in owned and value is not None:
                raise ValueError(
                    f"{name} cannot be set: HierarchicalStrategy owns DDP's process group and communication hook."
                    " Choose what nodes exchange with `scheme` and `wire_dtype`."
                )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **ddp_kwargs,
        )
        if isinstance(scheme, str):
            if scheme not in SCHEMES:
                raise ValueError(f"scheme={scheme!r} is unknown; use one of {', '.join(SCHEMES)}, or a Scheme")
            scheme = SCHEMES[scheme]()
        if not isinstance(scheme, Scheme):
            raise ValueError(f"scheme={scheme!r} must be a Scheme or one of {', '.join(SCHEMES)}")
        if evaluate not in ("consensus", "replica"):
            raise ValueError(f"evaluate={evaluate!r} must be 'consensus' or 'replica'")
        if inter_node not in ("torch", "mpi"):
            raise ValueError(f"inter_node={inter_node!r} must be 'torch' or 'mpi'")
        if inter_node == "mpi":
            load_mpi()  # or Lightning finds mpi4py without a library, and fails with less to say
        if bucket_mb <= 0:
            raise ValueError(f"bucket_mb={bucket_mb} must be positive")
        if control_port is not None and not 0 <= control_port < 65536:
            raise ValueError(f"control_port={control_port} must be a port number, from 1 to 65535, or None for any")
        if hang_timeout is not None and not 1 <= hang_timeout < math.inf:
            raise ValueError(f"hang_timeout={hang_timeout} must be a number of seconds from 1 on, or None for never")
        self.scheme = scheme
        self.batches = batches
        if wire_raw and wire_dtype is None:
            raise ValueError("wire_raw=True needs a wire_dtype to cast to, such as 'bfloat16'")
        self.wire = Wire.named(wire_dtype, wire_raw)
        self._ranks_per_node = ranks_per_node
        self._inter_node = inter_node
        self._average_buffers = average_buffers
        self._average_optimizer_state = average_optimizer_state
        self._evaluate = evaluate
        self._checkpoint_replicas = checkpoint_replicas
        self._control_port = control_port
        self._hang_timeout = hang_timeout
        self._bucket_bytes = max(1, int(bucket_mb * 2**20))

        # all of the following exists only inside a process that trains: a strategy is pickled by spawn
        self.meter: Meter | None = None
        self.topology: Topology | None = None
        self.schemes: list[Scheme] = []
        self._control: ControlPlane | None = None
        self._before_evaluation: list[list[Tensor] | None] | None = None
        self._is_stopping_together = False
        self._has_noted_exception = False
        self._epoch_clock = _EpochClock(self)
        self._weighs_means = False
        self._last_bucket: Mark | None = None
        self._frozen: list[torch.nn.Parameter] = []
        self._loss_sum: Tensor | None = None
        self._loss_count = 0
        self._checkpoint: Mapping[str, Any] | None = None
        self._checkpoint_path: Any = None
        self._random_state: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        # `pytorch_lightning.Trainer` prints this when it refuses the strategy, so say what is wrong with it there
        return f"<{type(self).__name__} for `lightning.pytorch.Trainer`; `pytorch_lightning` is another class tree>"

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("hierarchical", cls, description="Nodes agree by periodic averaging", override=True)
        for name in SCHEMES:
            strategy_registry.register(
                f"hierarchical_{name}", cls, description=f"Nodes agree by {name}", override=True, scheme=name
            )

    # ---- setting up ----------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if environment.creates_processes_externally:
            self._start_method = "popen"  # whose launcher starts nothing where someone else did
            _lightning.check_ranks_of_node(environment)
            if isinstance(environment, MPIEnvironment):
                abort_on_uncaught_exceptions()
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = _lightning.WatchfulLauncher(self, start_method=self._start_method)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}  # nodes may have unequal numbers of ranks

    @override
    def setup_environment(self) -> None:
        assert self.cluster_environment is not None
        self.set_world_ranks()
        # before the process group, if there is none yet: what makes it waits long for ranks that die on their way to it
        rendezvous = None
        if self.world_size > 1 and self._control is None and not dist.is_initialized():
            address, port = self.cluster_environment.main_address, self.cluster_environment.main_port
            rendezvous = Rendezvous(address, port, self.global_rank, self.world_size, self._timeout)
            self._start_control_plane(rendezvous.broadcast, rendezvous.gather)
        super().setup_environment()
        if self.topology is None:
            self.meter = Meter()
            self.topology = Topology(self._find_nodes(), self.global_rank, self._connect(self.meter), self.meter)
        if self.world_size > 1 and self._control is None and rendezvous is None:
            world = self.topology.world
            self._start_control_plane(self.broadcast, lambda own, _: world.all_gather_object(own))

    def _start_control_plane(self, broadcast: Callable[[Any], Any], gather: Callable[..., list[Any]]) -> None:
        assert self.cluster_environment is not None
        node = self.node_rank
        if self._ranks_per_node is not None:
            nodes = nodes_by_count(self._ranks_per_node, self.world_size)
            node = next(node for node, ranks in enumerate(nodes) if self.global_rank in ranks)
        self._control = start_control_plane(
            self.global_rank,
            self.world_size,
            f"rank {self.global_rank} (node {node})",
            self.cluster_environment.main_address,
            self._control_port or 0,
            self._hang_timeout,
            broadcast,
            gather,
        )

    def _connect(self, meter: Meter) -> Connect:
        by_torch = connect_torch(meter, self._timeout, launching=_lightning.unprofiled)
        if self._inter_node == "torch":
            return by_torch
        by_mpi = connect_mpi(meter, self.global_rank, self.world_size)

        def connect(groups: Sequence[Sequence[int]], tier: str) -> Communicator | None:
            return by_mpi(groups, tier) if tier == "inter" else by_torch(groups, tier)

        return connect

    def _find_nodes(self) -> list[list[int]]:
        if self._ranks_per_node is not None:
            return nodes_by_count(self._ranks_per_node, self.world_size)
        places: list[Any] = [None] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(places, (self.node_rank, self.local_rank))
        else:
            places = [(0, 0)]
        return nodes_by_place(places)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.batches is not None and trainer.state.fn == TrainerFn.FITTING:
            self._bind_batches(trainer, self.batches)  # setting up optimizers may ask for the dataloaders' length
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._bind_schemes()
        _lightning.put_callback_first(trainer, self._epoch_clock)
        if self._control is not None:
            _lightning.replace_sigterm_broadcast(trainer, self._control.should_stop, self._control.request_stop)

    @override
    def configure_ddp(self) -> None:
        assert self.topology is not None
        assert isinstance(self.model, pl.LightningModule)
        module, intra, world = self.model, self.topology.intra, self.topology.world
        # DDP over the node would leave the nodes with different initial values
        for bucket in Replica([*module.parameters(), *module.buffers()]).buckets:
            flat = bucket.pack()
            world.broadcast(flat, source=0).wait()
            bucket.unpack(flat)
        assert isinstance(intra, TorchCommunicator)
        assert isinstance(world, TorchCommunicator)
        _lightning.keep_sync_batchnorm_in_group(module, intra.group)
        # its own group tells DDP which parameters nobody used: those get no gradient
        group = world.group if self.scheme.gradients == "world" else intra.group
        self._ddp_kwargs = {**self._ddp_kwargs, "process_group": group}
        self._wrap_in_ddp()

    def _wrap_in_ddp(self) -> None:
        assert self.lightning_module is not None
        self._frozen = [p for p in self.lightning_module.parameters() if not p.requires_grad]
        if self._gradients_cross_ranks():
            super().configure_ddp()

    def _waiting_for_buffers(self) -> AbstractContextManager[None]:
        assert self.meter is not None
        return self.meter.waiting("intra", self.root_device)

    def _gradients_cross_ranks(self) -> bool:
        """Whether DDP has anything to do: not on a node of one rank whose gradients stay on the node."""
        assert self.topology is not None
        group = {"intra": self.topology.intra, "world": self.topology.world, "none": None}[self.scheme.gradients]
        return group is not None and group.size > 1

    @override
    def _register_ddp_hooks(self) -> None:
        # DDPStrategy registers hooks on CUDA only and drops them in silence elsewhere
        assert isinstance(self.model, DistributedDataParallel)

        def hook(_: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
            return self._reduce_bucket(bucket)

        # DDP compares the types themselves, not their names
        hook.__annotations__ = {"bucket": dist.GradBucket, "return": Future[Tensor]}  # type: ignore[attr-defined]
        self.model.register_comm_hook(None, hook)
        _lightning.time_buffer_broadcasts(self.model, self._waiting_for_buffers)

    def _reduce_bucket(self, bucket: Any) -> Future[Tensor]:
        assert self.meter is not None
        gradients = bucket.buffer()
        future = self.schemes[0].reduce_gradients(gradients).future(gradients)
        if bucket.is_last():
            self._last_bucket = self.meter.mark(gradients.device)
        return future

    def _bind_schemes(self) -> None:
        assert self.topology is not None
        assert self.lightning_module is not None
        optimizers = [_lightning.raw_optimizer(optimizer) for optimizer in self.optimizers]
        self.schemes = [copy.deepcopy(self.scheme) for _ in optimizers]
        for scheme, optimizer in zip(self.schemes, optimizers, strict=True):
            scheme.optimizer = optimizer
            scheme.averages_optimizer_state = self._average_optimizer_state
        for scheme in self.schemes:
            scheme.bind(self._replica_of(scheme), self.topology, scheme.optimizer, self.wire)

    def _replica_of(self, scheme: Scheme) -> Replica:
        assert self.lightning_module is not None
        optimizers = [other.optimizer for other in self.schemes if other.optimizer is not None]
        buffers = _buffers_by_optimizer(self.lightning_module, optimizers) if self._average_buffers else {}
        own = optimizers.index(scheme.optimizer) if scheme.optimizer is not None else 0
        named = self.lightning_module.named_parameters()
        return Replica(_trained_by(optimizers[own]), buffers.get(own, ()), self._bucket_bytes, named)

    def _bind_batches(self, trainer: pl.Trainer, batches: HeterogeneousBatches) -> None:
        assert self.topology is not None
        assert self.meter is not None
        batches.bind(self.topology, self.meter, self.root_device)
        _lightning.leave_train_dataloaders_alone(trainer)
        _lightning.mark_means_of_a_step(trainer, self._reducing_means_of_a_step)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.batches is not None and self._trainer.training:
            return self.batches.process_dataloader(dataloader)
        return super().process_dataloader(dataloader)

    # ---- training ------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        trainer = self._trainer
        if self._control is not None:
            self._control.doing = "beginning to train"
        self._check_equal_work(trainer)
        if self.batches is not None:
            self._begin_batches(trainer, self.batches)
        epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else None
        for scheme in self.schemes:
            scheme.begin_run(epochs, trainer.max_steps if trainer.max_steps >= 0 else None)

    def _begin_batches(self, trainer: pl.Trainer, batches: HeterogeneousBatches) -> None:
        if batches.needs_measuring:
            with rehearsal(trainer) as rehearse:
                batches.measure(rehearse)
        if batches.go_to(trainer.current_epoch):
            with isolate_rng():
                _lightning.restart_train_dataloaders(trainer)

    def _check_equal_work(self, trainer: pl.Trainer) -> None:
        assert self.topology is not None
        batches = self.topology.world.all_gather_object(trainer.num_training_batches)
        if len(set(batches)) > 1:
            raise ValueError(
                f"the ranks' train dataloaders have unequal lengths: {batches} batches. Every rank must take the same"
                " number of steps: give all ranks dataloaders of one length, or set Trainer(limit_train_batches="
                f"{min(batches)})."
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and _lightning.skips_backward(self._trainer):
            self._begin_anew()
        if any(p.requires_grad for p in self._frozen):  # DDP ignores what was frozen when it was made
            self.model = self.lightning_module
            gc.collect()  # the old DDP's hooks die with it
            self._wrap_in_ddp()
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if self.schemes and self.schemes[0].watches_loss:
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if isinstance(loss, Tensor):
                loss = loss.detach().float().mean()
                self._loss_sum = loss if self._loss_sum is None else self._loss_sum + loss
                self._loss_count += 1
        return output

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._last_bucket is not None:
            # from the last bucket's hook to the end of backward, training waited for gradients
            assert self.meter is not None
            tier = "inter" if self.schemes[0].gradients == "world" else "intra"
            self.meter.add_wait(tier, self._last_bucket, self.meter.mark(self.root_device))
            self._last_bucket = None

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        step = super().optimizer_step
        trainer, module = self._trainer, self.lightning_module
        last = module is not None and module.automatic_optimization and trainer.is_last_batch
        scheme = self._scheme_of(optimizer)
        self._follow_thawed_parameters(scheme)
        return scheme.step(lambda: step(optimizer, closure, model, **kwargs), last=last)

    def _follow_thawed_parameters(self, scheme: Scheme) -> None:
        """Callbacks like BackboneFinetuning thaw parameters, or add groups, in mid-run: then the nodes begin anew."""
        assert scheme.optimizer is not None
        trained = _trained_by(scheme.optimizer)
        known = scheme.replica.parameters
        if len(trained) != len(known) or any(a is not b for a, b in zip(trained, known, strict=True)):
            scheme.agree()
            scheme.unagreed_steps = 0
            scheme.bind(self._replica_of(scheme), scheme.topology, scheme.optimizer, scheme.wire)

    def _scheme_of(self, optimizer: Optimizer) -> Scheme:
        raw = _lightning.raw_optimizer(optimizer)
        return next(scheme for scheme in self.schemes if scheme.optimizer is raw)

    def begin_epoch(self) -> None:
        """An epoch starts. Called by the strategy's own callback, before the user's callbacks."""
        self._loss_sum, self._loss_count = None, 0
        if self.batches is not None:
            self.batches.begin_epoch(self._trainer.current_epoch)
        for scheme in self.schemes:
            scheme.begin_epoch(self._trainer.current_epoch, self._trainer.callback_metrics)

    def end_epoch(self) -> None:
        """The epoch's last batch is done. Called before the user's callbacks, validation and checkpoints."""
        loss = self._loss_sum / self._loss_count if self._loss_sum is not None else None
        for scheme in self.schemes:
            scheme.end_epoch(loss)

    def finish(self) -> None:
        """The run is over: every rank holds the agreed parameters. Called before the user's callbacks."""
        for scheme in self.schemes:
            scheme.finish()

    def _begin_anew(self) -> None:
        """StochasticWeightAveraging has put its average, and new BatchNorm statistics, into the module in mid-run."""
        self._agree_on_module()
        for scheme in self.schemes:
            scheme.unagreed_steps = 0
            scheme.bind(self._replica_of(scheme), scheme.topology, scheme.optimizer, scheme.wire)

    def on_train_end(self) -> None:
        """Callbacks like StochasticWeightAveraging have put their own averages into the module, each node another."""
        if self.schemes:
            self._agree_on_module()

    def _agree_on_module(self) -> None:
        """Average the module itself over all ranks, if it differs: what callbacks wrote into it no scheme knows."""
        assert self.topology is not None
        assert self.lightning_module is not None
        module = self.lightning_module
        if self.topology.num_nodes > 1:
            floats = [b for b in module.buffers() if b.is_floating_point()] if self._average_buffers else []
            whole = Replica((), [*module.parameters(), *floats], self._bucket_bytes)
            if len(set(self.topology.world.all_gather_object(whole.fingerprint()))) > 1:
                Average(whole, self.topology)()

    # ---- the agreed model ----------------------------------------------------------------------------------------

    @contextmanager
    def agreed_model(self) -> Iterator[None]:
        """Inside, every rank's module holds the agreed parameters; afterwards training goes on from its own."""
        snapshots = self._agree()
        try:
            yield
        finally:
            self._go_on(snapshots)

    def _agree(self) -> list[list[Tensor] | None]:
        if self._before_evaluation is not None or not self._ranks_are_together:
            return [None] * len(self.schemes)
        snapshots: list[list[Tensor] | None] = []
        for scheme in self.schemes:
            snapshots.append(None if scheme.is_agreed else scheme.replica.snapshot())
            scheme.agree()
        return snapshots

    def _go_on(self, snapshots: Sequence[list[Tensor] | None]) -> None:
        for scheme, snapshot in zip(self.schemes, snapshots, strict=True):
            if snapshot is not None:
                scheme.replica.restore(snapshot)

    @property
    def _ranks_are_together(self) -> bool:
        """False while an exception is handled that only this rank may have: no collective would end."""
        return self._is_stopping_together or not _lightning.is_interrupted(self._trainer_or_none)

    def on_validation_start(self) -> None:
        if self.batches is not None:
            self.batches.pause()
        if self.schemes and self._evaluate == "consensus":
            self._before_evaluation = self._agree()

    def on_validation_end(self) -> None:
        if self._before_evaluation is not None:
            self._go_on(self._before_evaluation)
            self._before_evaluation = None

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._before_evaluation is not None or all(scheme.is_agreed for scheme in self.schemes):
            return super().lightning_module_state_dict()
        with self.agreed_model():
            return {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in super().lightning_module_state_dict().items()
            }

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        self.note_progress("saving a checkpoint")
        if self.schemes and self._ranks_are_together and _lightning.holds_averaged_weights(checkpoint):
            assert self.topology is not None
            state_dict = {name: copy.deepcopy(value) for name, value in checkpoint["state_dict"].items()}
            floats = [v for v in state_dict.values() if isinstance(v, Tensor) and v.is_floating_point()]
            Average(Replica((), floats, self._bucket_bytes), self.topology)()
            checkpoint["state_dict"] = state_dict
        saves_replicas = self._checkpoint_replicas and self.schemes and self._ranks_are_together
        if self.schemes:
            state: dict[str, Any] = {"schemes": [scheme.schedule() for scheme in self.schemes]}
            if self.batches is not None:
                state["batches"] = self.batches.state_dict()
            if saves_replicas:
                state["identity"] = self.broadcast(secrets.token_hex(8))
            checkpoint[_CHECKPOINT_KEY] = state
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if saves_replicas:
            self._save_companion(state["identity"], filepath, storage_options)

    def _save_companion(self, identity: str, filepath: Any, storage_options: Any | None) -> None:
        assert self.topology is not None
        assert self.lightning_module is not None
        own_values: dict[int, Tensor] = {}
        snapshots: Sequence[list[Tensor] | None] = self._before_evaluation or [None] * len(self.schemes)
        for scheme, snapshot in zip(self.schemes, snapshots, strict=True):
            scheme.settle()
            if snapshot is not None:
                own_values.update(zip(map(id, scheme.replica.tensors), snapshot, strict=True))
        optimizers = [scheme.optimizer for scheme in self.schemes if scheme.optimizer is not None]
        mid_epoch = not self._trainer.is_last_batch
        self.checkpoint_io.save_checkpoint(
            companion_state(
                identity, self.topology, self.lightning_module, optimizers, self.schemes, own_values, mid_epoch
            ),
            companion_path(filepath, self.global_rank),
            storage_options,
        )

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        companion = companion_path(filepath, self.global_rank)
        if self._checkpoint_replicas and Path(companion).exists():
            self.checkpoint_io.remove_checkpoint(companion)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._checkpoint = checkpoint.get(_CHECKPOINT_KEY, {})
        if self.batches is not None:
            self.batches.load_state_dict(self._checkpoint.get("batches", {}))
        self._checkpoint_path = checkpoint_path
        return checkpoint

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self.schemes or not self._ranks_are_together:
            return super().optimizer_state(optimizer)
        return self._scheme_of(optimizer).optimizer_state()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        saved = self._checkpoint or {}
        if self._checkpoint_replicas:
            assert self.topology is not None
            assert self.lightning_module is not None
            companion = load_companion(
                self.checkpoint_io, self._checkpoint_path, saved.get("identity"), self.topology, self.schemes
            )
            optimizers = [scheme.optimizer for scheme in self.schemes if scheme.optimizer is not None]
            restore_companion(companion, self.lightning_module, optimizers, self.schemes)
            # the epoch's loader draws a seed when it starts: in mid-epoch that has been drawn, at its end it has not
            if companion["mid_epoch"]:
                self._random_state = companion["random"]
            else:
                set_random_state(companion["random"])
            return
        if not saved:
            return
        if len(saved["schemes"]) != len(self.schemes):
            raise ValueError(
                f"the checkpoint holds {len(saved['schemes'])} schemes, but this run has {len(self.schemes)} optimizers"
            )
        for scheme, state in zip(self.schemes, saved["schemes"], strict=True):
            scheme.load_state_dict({**state, "unagreed_steps": 0})

    # ---- what others may ask -------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """What the (first) scheme is doing, such as ``"warm-up"``."""
        return self.schemes[0].phase if self.schemes else "not training"

    def communication(self) -> dict[str, float]:
        """This rank's counters since the run began, and the schemes' present values; costs nothing.

        Returns:
            ``intra_bytes``, ``inter_bytes``, ``world_bytes`` (bytes sent by this rank), ``intra_messages``, ...,
            ``exposed_seconds`` (the time training waited), ``agreements``, ``steps``, and the scheme's own scalars.
        """
        values = self.meter.snapshot() if self.meter is not None else {}
        values["agreements"] = float(sum(scheme.agreements for scheme in self.schemes))
        values["steps"] = float(sum(scheme.steps for scheme in self.schemes))
        for scheme in reversed(self.schemes):
            values.update(scheme.scalars())
        if self.batches is not None:
            values.update(self.batches.scalars())
        return values

    def node_communication(self) -> dict[str, float]:
        """:meth:`communication` with the meter's counters summed over this node's ranks. Collective over the node."""
        assert self.topology is not None
        return self._summed_over(self.topology.intra)

    def total_communication(self) -> dict[str, float]:
        """:meth:`communication` with the meter's counters summed over all ranks. Collective over the world."""
        assert self.topology is not None
        return self._summed_over(self.topology.world)

    def _summed_over(self, group: Any) -> dict[str, float]:
        assert self.meter is not None
        values, counters = self.communication(), self.meter.snapshot()
        sums = torch.tensor(list(counters.values()), dtype=torch.float64, device=self.root_device)
        group.all_reduce(sums).wait()
        return {**values, **dict(zip(counters, sums.tolist(), strict=True))}

    def ddp_inter_bytes(self, steps: float) -> float:
        """Bytes that ring DDP would have sent out of all nodes together in ``steps`` optimizer steps.

        A ring all-reduce over R ranks in node order sends ``2 (R - 1) / R`` of the gradients over each of its M links
        between nodes.
        """
        assert self.topology is not None
        if self.topology.num_nodes == 1 or not self.schemes:
            return 0.0
        gradients = sum(p.numel() * p.element_size() for scheme in self.schemes for p in scheme.replica.parameters)
        ranks = self.topology.world_size
        return 2 * (ranks - 1) / ranks * gradients / len(self.schemes) * self.topology.num_nodes * steps

    # ---- means over ranks, barriers, errors ----------------------------------------------------------------------

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any | None = "mean") -> Tensor:
        if isinstance(tensor, Tensor) and str(reduce_op).lower() in ("mean", "avg"):
            if not tensor.is_floating_point():
                tensor = tensor.float()  # the mean of integers is seldom one
            if self._weighs_means and self.batches is not None and group is None:
                return super().reduce(tensor * self.batches.share, group, "sum")
        return super().reduce(tensor, group, reduce_op)

    @contextmanager
    def _reducing_means_of_a_step(self) -> Iterator[None]:
        """Inside, means over ranks are weighted by the sizes of the ranks' batches."""
        self._weighs_means = True
        try:
            yield
        finally:
            self._weighs_means = False

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._ranks_are_together:
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return super().broadcast(obj, src) if self._ranks_are_together else obj

    def note_progress(self, doing: str) -> None:
        """Remember what this rank does, such as "training batch 7", for the others, if they have to ask."""
        if self._control is not None:
            trainer = self._trainer_or_none
            where = f" of epoch {trainer.current_epoch}, after {trainer.global_step} steps" if trainer else ""
            self._control.note_progress(f"{doing}{where}")

    def note_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, or learn from them what happened. Called before the user's callbacks."""
        if isinstance(exception, SIGTERMException):
            # without a control plane Lightning's own broadcast stops all ranks at one batch
            self._is_stopping_together = self._control is None or self._control.stops_together
            if self._is_stopping_together:
                return
        if self._control is None or self._has_noted_exception or isinstance(exception, RankFailure):
            return
        self._has_noted_exception = True
        # a peer that is gone breaks our collective before the news of it arrives
        heard = self._control.wait_for_failure(2.0) if isinstance(exception, RuntimeError) else self._control.failure
        if heard is None:
            self._control.report_failure(exception)
            note = f"{self._control.place} failed: {type(exception).__name__}: {exception}"
        else:
            note = f"{self._control.place} ends because {heard}"
        log.error(note)
        if sys.version_info >= (3, 11):
            exception.add_note(f"lightning_hiercomm: {note}")

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.note_exception(exception)  # callbacks hear first, but ours is there only since `setup`
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        trainer = self._trainer_or_none
        if trainer is not None:
            _lightning.remove_callback(trainer, self._epoch_clock)
            _lightning.restore_sigterm_broadcast(trainer)
            _lightning.prepare_train_dataloaders_again(trainer)
            _lightning.unmark_means_of_a_step(trainer)
        for scheme in self.schemes:
            scheme.close(timeout=1.0)
        if self._control is not None:
            if self._control.stop_requested and trainer is not None:
                _lightning.mark_sigterm_received(trainer)
            self._control.close()
            self._control = None
        super().teardown()

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _trainer_or_none(self) -> pl.Trainer | None:
        module = self.lightning_module
        return None if module is None else module._trainer


class _EpochClock(pl.Callback):
    """Tells the strategy where an epoch begins and ends; it comes before the user's callbacks."""

    def __init__(self, strategy: HierarchicalStrategy) -> None:
        self._strategy = strategy
        self._epoch_has_ended = True

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_epoch()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # a run resumed at the very end of an epoch gets no `on_train_epoch_start` for the next, and one resumed in the
        # middle of an epoch is not to begin it again
        if self._epoch_has_ended and batch_idx == 0:
            self._begin_epoch()
        self._epoch_has_ended = False
        self._strategy.note_progress(f"training batch {batch_idx}")
        if self._strategy.batches is not None:
            self._strategy.batches.begin_step()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._strategy.note_progress(f"past training batch {batch_idx}")
        if self._strategy.batches is not None:
            self._strategy.batches.end_step()
        if trainer.is_last_batch:
            self._end_epoch()

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._strategy.note_progress(f"validating batch {batch_idx}")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_epoch()  # an epoch cut short by max_steps has no last batch

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._strategy.finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._strategy.note_exception(exception)

    def _begin_epoch(self) -> None:
        self._epoch_has_ended = False
        self._strategy.begin_epoch()

    def _end_epoch(self) -> None:
        if not self._epoch_has_ended:
            self._epoch_has_ended = True
            self._strategy.end_epoch()


def _trained_by(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's trainable parameters; which of them have a gradient right now does not matter."""
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel())
    return list(dict.fromkeys(trained))


def _buffers_by_optimizer(module: torch.nn.Module, optimizers: Sequence[Optimizer]) -> dict[int, list[Tensor]]:
    """Float buffers, each under the optimizer that trains the layer it belongs to (else the first)."""
    owner = {id(p): index for index, optimizer in enumerate(optimizers) for p in _trained_by(optimizer)}
    buffers: dict[int, list[Tensor]] = {}
    for layer in module.modules():
        index = next((owner[id(p)] for p in layer.parameters(recurse=False) if id(p) in owner), 0)
        buffers.setdefault(index, []).extend(b for b in layer.buffers(recurse=False) if b.is_floating_point())
    return buffers
