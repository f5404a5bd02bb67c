"""HierarchicalStrategy: DDP inside the node, a scheme between nodes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hiercomm._lightning.ddp import (
    Unshared,
    in_ddp,
    keep_sync_batchnorm_in_group,
    register_bucket_hook,
    time_buffer_broadcasts,
)
from lightning_hiercomm._lightning.launcher import RankLauncher
from lightning_hiercomm._lightning.trainer import raw_optimizer
from lightning_hiercomm._lightning.tree import pl
from lightning_hiercomm.batches import HeterogeneousBatches
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.elastic.configuration import Elastic
from lightning_hiercomm.nodes.connect import process_group
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import trained_by
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import SCHEMES, Scheme, SchemeName
from lightning_hiercomm.schemes.base import Gradients
from lightning_hiercomm.schemes.gradient_path import GradientPath
from lightning_hiercomm.trainer.hooks import HierarchicalHooks
from lightning_hiercomm.trainer.options import Health, Transport
from lightning_hiercomm.trainer.settings import (
    Settings,
    WireDtype,
    check_ddp_arguments,
    check_keywords,
)


class HierarchicalStrategy(HierarchicalHooks, pl.strategies.DDPStrategy):
    """Train any LightningModule on nodes joined by a network much slower than the links inside them.

    Nodes of eight GPUs that average their parameters every 50 steps, and stop after 10 minutes without progress::

        from lightning_hiercomm import Health, HierarchicalStrategy, PeriodicAveraging

        strategy = HierarchicalStrategy(
            PeriodicAveraging(sync_every=50),
            wire_dtype="bfloat16",
            health=Health(hang_timeout=600),
        )
        trainer = Trainer(strategy=strategy, devices=8, num_nodes=2)
        trainer.fit(module)

    The ranks of a node average gradients at every step, through DDP over the node's own process group. The scheme
    decides when and how the nodes synchronize. Between synchronizations the nodes hold different parameters. Validation
    runs on the *averaged* model, a checkpoint holds it (a plain Lightning checkpoint that any strategy loads), and
    ``fit`` ends with it.
    """

    strategy_name = "hierarchical"

    def __init__(
        self,
        scheme: Scheme | SchemeName = "all_reduce",
        ranks_per_node: int | list[int] | None = None,
        wire_dtype: WireDtype | None = None,
        batches: HeterogeneousBatches | None = None,
        average_buffers: bool | list[str] = True,
        average_optimizer_state: bool = False,
        checkpoint_replicas: bool = False,
        health: Health = Health(),
        transport: Transport = Transport(),
        elastic: Elastic | str | None = None,
        unequal_data: bool | str = False,
        **kwargs: Any,
    ) -> None:
        """Check the arguments, and pass all others to Lightning's strategy.

        Args:
            scheme: When and how nodes synchronize: a ``Scheme``, or the name of one with its default arguments.
                Default: gradients are averaged over all nodes at every step, as DDP does; add ``wire_dtype="int8"`` to
                send a quarter of the bytes.
            ranks_per_node: The size of every node, or a list of sizes for unequal nodes, in rank order. Default: as the
                cluster environment reports it on every rank, or by host names if these contradict it, after a warning.
            wire_dtype: Payload type of inter-node traffic: ``"bfloat16"``, ``"float16"``, or ``"int8"`` and ``"int4"``,
                quantized in blocks, whose rounding errors are sent later; or ``"sparse2"``, a sixteenth of the bytes,
                which sends the largest of every 4 elements and the others later. None is the tensors' own. Parameters
                then travel as differences from the last averaged ones; with ``"raw_bfloat16"`` they are cast themselves
                (DASO's paper). That saves a copy of this rank's shard of the model, but loses updates below half a unit
                in the last place.
            batches: Gives ranks of unequal speed batches of unequal size. None: every
                rank uses the dataloader's batch size.
            average_buffers: Average float buffers (BatchNorm statistics) together with the parameters; or the names of
                those that are averaged, in which ``*`` is a wildcard, as in ``["*running_mean", "*running_var"]``. Each
                rank keeps its own of the others, such as queues of samples, which may differ in shape between ranks,
                and of buffers with ``persistent=False``.
            average_optimizer_state: Also average the optimizer's state (momentum, Adam's moments) in the
                synchronizations of ``PeriodicAveraging``. It travels as parameters do, in the form of ``wire_dtype``;
                once in full. Not for sharded modules.
            checkpoint_replicas: Also store every rank's own parameters, optimizer and scheme state with each
                checkpoint, for a bit-exact resume. Without it a run resumes from the averaged parameters. Only with a
                Trainer.
            health: How the run reacts to ranks that are frozen; see ``lightning_hiercomm.Health``.
            transport: How parameters travel between nodes; see ``lightning_hiercomm.Transport``.
            elastic: Nodes may leave and join; see ``lightning_hiercomm.Elastic``. A
                string is the lighthouse's ``"host:port"``. Every node is then a world of its own. None: all nodes stay.
            unequal_data: Nodes may have unequal numbers of batches: a node without batches waits in the
                synchronizations with weight 0, and the others are weighted by their samples. These are the batch size,
                read as ``LightningModule.log`` does, or a number that ``training_step`` logs at every step under the
                given name, such as ``"tokens"``.
            **kwargs: Arguments of Lightning's ``DDPStrategy``, and of ``DistributedDataParallel``, such as
                ``find_unused_parameters`` and ``gradient_as_bucket_view``.

        Raises:
            ValueError: If an argument has no possible value, or contradicts another one.
            TypeError: If an argument has a wrong type or is unknown.
        """
        check_keywords(type(self), kwargs, check_ddp_arguments(kwargs, type(self).__name__))
        self._settings = Settings.of(SCHEMES, locals())
        super().__init__(
            # these are set here so that the command line's help leaves them out
            ddp_comm_state=None,
            ddp_comm_hook=None,
            ddp_comm_wrapper=None,
            model_averaging_period=None,
            process_group=None,
            device_mesh=None,
            output_device=None,
            dim=0,
            **kwargs,
        )
        self._configure()
        self._averaged: dict[int, Tensor] = {}  # those whose gradients DDP averages
        self._gradients_over = self.scheme.gradients

    @override
    def _configure_launcher(self) -> None:
        if self._environment.creates_processes_externally:
            self._start_method = "popen"  # its launcher starts no processes if the cluster environment does
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = RankLauncher(self, start_method=self._start_method)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._elastic_node is not None:
            return self._elastic_node.sampler_arguments(self.world_size, self.global_rank)
        elastic = self._settings.elastic
        if elastic is not None and self._is_fitting:
            # the quorum is not known yet, but `configure_optimizers` asks for the length of the run
            return {"num_replicas": elastic.min_nodes * self.world_size, "rank": self.global_rank}
        return {"num_replicas": self.world_size, "rank": self.global_rank}  # nodes may have unequal numbers of ranks

    # ---- DDP over the ranks that share gradients -----------------------------------------------------------------

    @override
    def configure_ddp(self) -> None:
        module, intra = self._module, self._topology.intra
        self._begin_equal()  # DDP over the node would leave the nodes with different initial values
        keep_sync_batchnorm_in_group(module, process_group(intra))
        self._gradients_over = self.scheme.first_gradients or self.scheme.gradients
        self._averaged = {}  # frozen since the last fit does not mean: for the turn of another optimizer
        self._wrap_in_ddp()

    def _wrap_in_ddp(self) -> None:
        group = self._group_of_gradients
        parameters: list[Tensor] = list(self._module.parameters())
        # programs with unused parameters toggle them: one that is frozen for another optimizer's turn returns
        toggles = self._ddp_kwargs.get("find_unused_parameters")
        toggled = [p for p in parameters if toggles and not p.requires_grad and id(p) in self._averaged]
        self._averaged = {id(p): p for p in parameters if p.requires_grad} | {id(p): p for p in toggled}
        if group.size > 1 and self._averaged:
            with _requiring_gradients(toggled):
                super().configure_ddp()
        else:  # DDP has nothing to do
            self.model = Unshared(self._module)

    @property
    def _group_of_gradients(self) -> Communicator:
        """The ranks whose gradients are averaged in the present phase."""
        return gradient_group(self._topology, self._gradients_over)

    @override
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        # with a process group of its own, DDP finds the parameters that no rank used: they get no gradient
        arguments = {**self._ddp_kwargs, "process_group": process_group(self._group_of_gradients)}
        settled = self._topology.num_nodes > 1 or self._settings.elastic is not None
        return in_ddp(model, self.determine_ddp_device_ids(), arguments, settled, self._own_tensors)

    @override
    def _new_run(self, mesh: Mapping[str, int] | None = None, gradients: GradientPath | None = None) -> TrainingRun:
        run = super()._new_run(mesh, gradients)
        run.misuse.gradient_group = self._group_of_manual_gradients
        return run

    @property
    def _group_of_manual_gradients(self) -> Communicator | None:
        return None if self._module.automatic_optimization else self._group_of_gradients

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        has_new_phase = self._gradients_over != self._run.gradients_over
        if has_new_phase:
            self._gradients_over = self._run.gradients_over
            self._run.misuse.gradient_group = self._group_of_manual_gradients
        # DDP ignores parameters that were frozen, or did not exist, when it was made
        trained = [p for optimizer in self.optimizers for p in trained_by(raw_optimizer(optimizer))]
        if has_new_phase or any(id(p) not in self._averaged for p in trained):
            self.model = self._module
            gc.collect()  # the old DDP's hooks die with it
            self._wrap_in_ddp()
            self._averaged |= {id(p): p for p in trained}  # once for those outside of the module, too

    # ---- gradients -----------------------------------------------------------------------------------------------

    @override
    def _register_ddp_hooks(self) -> None:
        # DDPStrategy registers hooks on CUDA only and drops them in silence elsewhere
        assert isinstance(self.model, DistributedDataParallel)
        register_bucket_hook(self.model, lambda bucket: self._run.gradients.reduce_bucket(bucket))
        meter = self._topology.meter
        time_buffer_broadcasts(self.model, lambda: meter.waiting(self._run.gradients.level, self.root_device))

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        step, run, nodes = super().optimizer_step, self._run, self._unequal
        if nodes is None:
            return step(optimizer, closure, model, **kwargs)
        last = self._module.trainer.is_last_batch
        return nodes.optimizer_step(
            run,
            lambda: step(optimizer, closure, model, **kwargs),
            lambda: run.step(raw_optimizer(optimizer), closure, last=last),
        )

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        trainer, nodes = self._module.trainer, self._unequal
        if nodes is not None and nodes.replaces_backward(trainer, self._run, self.model, self._end_backward):
            return closure_loss
        return super().backward(closure_loss, *args, **kwargs)

    @override
    def teardown(self) -> None:
        if isinstance(self.model, Unshared):  # Lightning unwraps a DDP only
            self.model = self.lightning_module
        super().teardown()

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if self._unequal is not None:
            self._unequal.check_outside_step("self.all_gather", group)
        return super().all_gather(tensor, group, sync_grads)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._end_backward()

    def _end_backward(self) -> None:
        self._run.gradients.end_backward(self._topology.meter, self.root_device)


def gradient_group(topology: Topology, gradients: Gradients) -> Communicator:
    """Return the ranks that average their gradients."""
    return {"node": topology.intra, "world": topology.world}[gradients]


@contextmanager
def _requiring_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let parameters require gradients inside, because DDP's constructor ignores those that do not."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
