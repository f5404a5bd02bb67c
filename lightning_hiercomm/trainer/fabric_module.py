"""One module of a program on Fabric: its optimizers, its DDP, and its averaged parameters."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hiercomm._lightning.ddp import (
    in_ddp,
    keep_sync_batchnorm_in_group,
    register_bucket_hook,
    warn_of_unused_parameters,
)
from lightning_hiercomm.comm.autocast import outside_autocast
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.nodes.connect import process_group
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.averaged_model import AveragedModel
from lightning_hiercomm.run.replicas import (
    Replicas,
    broadcast_values,
    check_initialized,
    own_tensors,
    tensors_without,
)
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.trainer.settings import Settings
from lightning_hiercomm.trainer.strategy import gradient_group


class FabricModule:
    """A module that ``fabric.setup`` has prepared. The constructor gives all ranks rank 0's values. Collective.

    Attributes:
        run: Runs the scheme for each of the module's optimizers; None until there is one.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        topology: Topology,
        device: torch.device,
    ) -> None:
        check_initialized(module)
        self.module = module
        self.run: TrainingRun | None = None
        self._settings = settings
        self._topology = topology
        self._wrapped: DistributedDataParallel | None = None
        self._reduced: dict[int, nn.Parameter] | None = None  # None: ranks do not share gradients
        self._expects_all_used = False
        self._own_tensors = own_tensors(module, topology.world, device, settings.average_buffers)
        broadcast_values(tensors_without(module, self._own_tensors), topology.world)

    @property
    def group(self) -> Communicator | None:
        """The ranks that average the module's gradients; None if every rank keeps its own."""
        return gradient_group(self._topology, self._settings.scheme.gradients)

    @property
    def required_run(self) -> TrainingRun:
        if self.run is None:
            raise RuntimeError(
                f"{type(self.module).__name__} has no optimizer yet: call fabric.setup(module, optimizer), or"
                " fabric.setup_optimizers(optimizer) before the first backward pass; or freeze its parameters"
                " (requires_grad_(False)) if nothing is to train them"
            )
        return self.run

    @property
    def averaged_model(self) -> AveragedModel:
        """The averaged model; also without an optimizer, because programs write to such modules (teachers)."""
        if self.run is not None:
            return self.run.averaged_model
        return AveragedModel([], self._replicas([]), self._topology)

    def start_run(self, optimizers: Sequence[Optimizer]) -> TrainingRun:
        """Build the schemes of the module's optimizers. Collective."""
        self.run = run = self._settings.new_run(self._replicas(optimizers), self._topology)
        self.module.register_forward_pre_hook(_BeforeForward(run))
        return run

    def _replicas(self, optimizers: Sequence[Optimizer]) -> Replicas:
        settings = self._settings
        return Replicas(self.module, optimizers, settings.bucket_bytes, settings.average_buffers)

    def wrap(self, ddp_arguments: Mapping[str, Any], device_ids: list[int] | None) -> nn.Module:
        """Wrap the module in DDP over the ranks that share gradients, if there are several."""
        keep_sync_batchnorm_in_group(self.module, process_group(self._topology.intra))
        if self.group is None:
            return self.module
        if self.group.size == 1:
            finds_unused = any(ddp_arguments.get(name) for name in ("find_unused_parameters", "static_graph"))
            self._expects_all_used = not finds_unused
            return self.module
        self._reduced = {id(p): p for p in self.module.parameters() if p.requires_grad}
        if not self._reduced:  # DDP refuses such a module
            return self.module
        arguments = {**ddp_arguments, "process_group": process_group(self.group)}
        self._wrapped = in_ddp(self.module, device_ids, arguments, self._topology.num_nodes > 1, self._own_tensors)
        register_bucket_hook(self._wrapped, partial(_reduce_bucket, weakref.ref(self)))
        return self._wrapped

    def state_dict(self) -> dict[str, Any]:
        """The schemes' schedules, which are equal on all ranks, and which tensors they concern. Collective."""
        run = self.required_run
        return {
            "schedules": run.scheme_states.state(),
            "trained": run.scheme_states.trained(),
            "without_mean": sorted(run.replicas.without_mean),
            "loss": run.loss.common_state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, except the loss, which belongs to an epoch. Collective."""
        run = self.required_run
        run.exclude(state["without_mean"])
        with run.scheme_states.training(state["trained"]):
            run.scheme_states.load(state["schedules"])

    def load_inside_loop(self, state: Mapping[str, Any], epochs: int | None, steps: int | None) -> None:
        """Restore :meth:`state_dict`, except the epoch and the step in it. Collective."""
        run = self.required_run
        places = [(scheme.state.epoch, scheme.state.step_in_epoch) for scheme in run.schemes]
        self.load_state_dict(state)
        run.begin(epochs, steps)
        for scheme, (epoch, step_in_epoch) in zip(run.schemes, places, strict=True):
            scheme.state.epoch, scheme.state.step_in_epoch = epoch, step_in_epoch

    # ---- gradients -----------------------------------------------------------------------------------------------

    def late_parameters(self) -> list[Tensor]:
        """Trained parameters whose gradients DDP does not reduce: it was made before they were unfrozen or added."""
        if self.run is None or self._reduced is None:
            return []
        trained = dict.fromkeys(p for optimizer in self.run.optimizers for p in self.run.replicas.trained_by(optimizer))
        return [parameter for parameter in trained if id(parameter) not in self._reduced]

    @outside_autocast()
    def reduce_late(self) -> None:
        """Average the gradients of :meth:`late_parameters`. Collective over the ranks that share gradients."""
        late = self.late_parameters()
        if not late or not getattr(self._wrapped, "require_backward_grad_sync", True):
            return
        # a rank may have no gradient, so the layers determine which gradients are sparse
        embeddings = (layer for layer in self.module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag))
        sparse = {id(layer.weight) for layer in embeddings if layer.sparse}
        used = self._used_on_any_rank(late)
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if id(parameter) in sparse:
                own = parameter.grad if parameter.grad.is_sparse else parameter.grad.to_sparse(1)
                parameter.grad = self.required_run.gradients.reduce_sparse(own)
        self._reduce_dense([parameter for parameter in used if id(parameter) not in sparse])

    def _used_on_any_rank(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Leave out those without a gradient on all ranks: an optimizer would decay one whose gradient is zero."""
        assert self.group is not None
        device = parameters[0].device
        are_used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=device)
        self.group.all_reduce(are_used, op="max").wait()
        return [p for p, is_used in zip(parameters, are_used.tolist(), strict=True) if is_used]

    def _reduce_dense(self, parameters: Sequence[Tensor]) -> None:
        path = self.required_run.gradients
        owners = {id(parameter.grad): parameter for parameter in parameters}
        replica = Replica([parameter.grad for parameter in parameters if parameter.grad is not None])
        for index, bucket in enumerate(replica.buckets):
            flat = bucket.pack()
            path.reduce(flat, -2 - index, ((owners[id(each.tensor)], each.start) for each in bucket.slices)).wait()
            bucket.unpack(flat)

    def check_unused(self, strategy: type) -> None:
        """After the first backward pass on a node of one rank, warn of unused parameters."""
        if self._expects_all_used and any(p.grad is not None for p in self.module.parameters()):
            self._expects_all_used = False
            warn_of_unused_parameters(self.module, strategy, "the forward pass")


class _BeforeForward:
    """Synchronizes nodes before a forward pass if parameters were unfrozen; a copy of the module has no run."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def __call__(self, module: nn.Module, inputs: object) -> None:
        if torch.is_grad_enabled():
            if not torch.compiler.is_compiling():
                self._run.misuse.end_batch()
            self._run.follow_unfrozen()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_nothing,)


def _nothing(module: nn.Module, inputs: object) -> None:
    """Do nothing: the hook of a copied module."""


def _reduce_bucket(own: weakref.ref[FabricModule], bucket: Any) -> Future[Tensor]:
    """Reduce a bucket. A strong reference in DDP's reducer, in C++, would form a cycle that is never collected."""
    module = own()
    assert module is not None
    return module.required_run.gradients.reduce_bucket(bucket)
