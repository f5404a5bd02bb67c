"""A program's own training loop on Fabric: its modules, its epochs, and the checkpoint that it resumes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from lightning_hiercomm._lightning.ddp import in_ddp, keep_sync_batchnorm_in_group, register_bucket_hook
from lightning_hiercomm.checkpoints import FORMAT, check_format
from lightning_hiercomm.nodes.connect import process_group
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.averaged_model import AveragedModel
from lightning_hiercomm.run.replicas import (
    Replicas,
    broadcast_values,
    check_initialized,
    own_tensors,
    tensors_without,
    trained_by,
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
        self._averaged: set[int] | None = None  # ids of the parameters that DDP averages; None: ranks share none
        self._own_tensors = own_tensors(module, topology.world, device, settings.average_buffers)
        broadcast_values(tensors_without(module, self._own_tensors), topology.world)

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
        group = gradient_group(self._topology, self._settings.scheme.gradients)
        if group.size == 1:
            return self.module
        self._averaged = {id(p) for p in self.module.parameters() if p.requires_grad}
        if not self._averaged:  # DDP refuses such a module
            return self.module
        arguments = {**ddp_arguments, "process_group": process_group(group)}
        wrapped = in_ddp(self.module, device_ids, arguments, self._topology.num_nodes > 1, self._own_tensors)
        register_bucket_hook(wrapped, partial(_reduce_bucket, weakref.ref(self)))
        return wrapped

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

    def check_trained(self) -> None:
        """Raise a ``RuntimeError`` if an optimizer trains parameters whose gradients DDP does not average."""
        if self.run is None or self._averaged is None:
            return
        trained = {id(p) for optimizer in self.run.optimizers for p in self.run.replicas.trained_by(optimizer)}
        if late := trained - self._averaged:
            names = [name for name, parameter in self.module.named_parameters() if id(parameter) in late]
            raise RuntimeError(
                f"{', '.join(names[:3]) or 'a parameter'} of {type(self.module).__name__} was added or unfrozen after"
                " fabric.setup, so ranks would not average its gradient. Let it require a gradient in fabric.setup with"
                f" HierarchicalFabricStrategy(find_unused_parameters=True), and freeze it afterwards; or use a Trainer"
            )


class _BeforeForward:
    """Synchronizes nodes before a forward pass if parameters were unfrozen; a copy of the module has no run."""

    def __init__(self, run: TrainingRun | None) -> None:
        self._run = run

    def __call__(self, module: nn.Module, inputs: object) -> None:
        if self._run is not None and torch.is_grad_enabled():
            if not torch.compiler.is_compiling():
                self._run.misuse.end_batch()
            self._run.follow_unfrozen()

    def __reduce__(self) -> tuple[Any, ...]:
        return _BeforeForward, (None,)


def _reduce_bucket(own: weakref.ref[FabricModule], bucket: Any) -> Future[Tensor]:
    """Reduce a bucket. A strong reference in DDP's reducer, in C++, would form a cycle that is never collected."""
    module = own()
    assert module is not None
    return module.required_run.gradients.reduce_bucket(bucket)


@dataclass
class _Saved:
    modules: list[dict[str, Any]] = field(default_factory=list)
    epoch: int = 0
    epoch_is_open: bool = False


class FabricLoop:
    """Begins and ends the run and its epochs in the schemes of all modules."""

    def __init__(self) -> None:
        self.modules: list[FabricModule] = []
        self.epochs: int | None = None
        self.steps_of_epoch: int | None = None
        self._has_begun = False
        self._losses: list[Tensor] = []  # of the backward passes since the last step
        self._losses_have_stepped = False
        self._epoch = 0
        self._epoch_is_open = False
        self._loaded = _Saved()  # from load_state_dict until fabric.load has read the parameters
        self._resumed = _Saved()  # from then until a loop begins

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole run, if known."""
        return None if self.epochs is None or self.steps_of_epoch is None else self.epochs * self.steps_of_epoch

    @property
    def runs(self) -> list[TrainingRun]:
        return [module.run for module in self.modules if module.run is not None]

    def run_of(self, optimizer: Optimizer) -> TrainingRun:
        for run in self.runs:
            if any(own is optimizer for own in run.optimizers):
                return run
        raise RuntimeError("this optimizer is unknown: set it up together with its module, fabric.setup(module, it)")

    def module_of(self, optimizer: Optimizer) -> FabricModule:
        """Return the module without an optimizer that an optimizer trains."""
        trained = set(map(id, trained_by(optimizer)))
        for module in self.modules:
            if module.run is None and any(id(parameter) in trained for parameter in module.module.parameters()):
                return module
        raise TypeError(
            f"{type(optimizer).__name__} trains no module that was set up without an optimizer: call"
            " fabric.setup(module, optimizer), with all optimizers of a module that has several"
        )

    def start_run(self, module: FabricModule, optimizers: list[Optimizer]) -> None:
        """Start the run of a module; it joins a loop that has begun. Collective."""
        own = set(map(id, module.module.parameters()))
        others = {id(parameter) for other in self.modules for parameter in other.module.parameters()} - own
        for optimizer in optimizers:
            if any(id(parameter) in others for group in optimizer.param_groups for parameter in group["params"]):
                raise TypeError(
                    f"{type(optimizer).__name__} trains parameters of {type(module.module).__name__} and of another"
                    " module, which was set up apart: put both into one nn.ModuleList or nn.ModuleDict, and give"
                    " fabric.setup that and the optimizer"
                )
        run = module.start_run(optimizers)
        self.modules.remove(module)
        self.modules.append(module)
        if self._has_begun:
            run.begin(self.epochs, self.steps)
            run.begin_epoch(self._epoch)

    # ---- losses --------------------------------------------------------------------------------------------------

    @property
    def _follows_loss(self) -> bool:
        return any(scheme.config.watches_loss for run in self.runs for scheme in run.schemes)

    def keep_loss(self, loss: Tensor) -> None:
        """Store a loss for the optimizers that step before the next backward pass."""
        if self._follows_loss:
            if self._losses_have_stepped:
                self._losses, self._losses_have_stepped = [], False
            self._losses.append(loss.detach())

    def add_losses(self, run: TrainingRun, strategy: type) -> None:
        """Add the stored losses to those of a run whose optimizer steps."""
        if self._follows_loss and not self._losses:
            raise RuntimeError(
                f"{strategy.__name__} requires you to call `fabric.backward(loss)` instead of `loss.backward()`."
            )
        for loss in self._losses:
            run.loss.add(loss)
        self._losses_have_stepped = True

    # ---- epochs --------------------------------------------------------------------------------------------------

    def run(self, epochs: int, first: int, steps: int | None) -> Iterator[int]:
        resumed = self._begin(epochs, steps)
        if resumed.epoch_is_open and resumed.epoch == first - 1:
            self._begin_epoch(first - 1)
            self._load_losses(resumed)
            self._end_epoch()
        for epoch in range(first, epochs):
            self._begin_epoch(epoch)
            yield epoch
            self._end_epoch()
        self.finish()

    def begin_if_needed(self) -> None:
        """Begin a run of one epoch if a program steps without :meth:`run`."""
        if not self._has_begun:
            resumed = self._begin(None, None)
            if resumed.epoch_is_open:
                self._epoch, self._epoch_is_open = resumed.epoch, True
                self._load_losses(resumed)
            else:
                self._begin_epoch(0)

    def finish(self) -> None:
        """End the run, with the averaged parameters on every rank."""
        for run in self.runs:
            run.finish()
        for module in self.modules:
            module.averaged_model.average_module()
        for run in self.runs:
            run.remember_values()

    def _begin(self, epochs: int | None, steps_of_epoch: int | None) -> _Saved:
        """Begin a run; return the state of the run that it resumes."""
        has_begun, self._has_begun = self._has_begun, True
        self.epochs, self.steps_of_epoch = epochs, steps_of_epoch
        for run in self.runs:
            if has_begun and not run.has_finished:  # the program left the loop before, by `break`
                run.finish()
                run.averaged_model.average_module()
                run.remember_values()
            run.averaged_model.check_shapes()
            if run.values_have_changed():  # since `fabric.setup`: pretrained weights, say
                own = run.replicas.own_tensors(run.topology.world)
                broadcast_values(tensors_without(run.module, own), run.topology.world)
                run.begin_from_module()
            run.begin(self.epochs, self.steps)
        resumed, self._resumed = self._resumed, _Saved()
        return resumed

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._epoch_is_open = epoch, True
        for run in self.runs:
            run.begin_epoch(epoch)

    def _end_epoch(self) -> None:
        self._epoch_is_open = False
        for run in self.runs:
            run.end_epoch()

    def _load_losses(self, saved: _Saved) -> None:
        for run, state in zip(self.runs, saved.modules, strict=False):
            run.loss.load_state_dict(state["loss"])

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the schemes' schedules, which are equal on all ranks, and what they train."""
        return {
            "format": FORMAT,
            "modules": [module.state_dict() for module in self.modules if module.run is not None],
            "epoch": (self._epoch, self._epoch_is_open),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Store :meth:`state_dict` until :meth:`load_modules`."""
        check_format(
            state.get("format"),
            "the strategy's entry in the checkpoint",
            "Leave the strategy out of the state of fabric.load to continue from the parameters alone.",
        )
        self._loaded = _Saved(list(state["modules"]), *state["epoch"])

    def load_modules(self) -> None:
        """Restore the modules' states, if :meth:`load_state_dict` has taken any, after their parameters."""
        saved, self._loaded = self._loaded, _Saved()
        if not saved.modules:
            return
        modules = [module for module in self.modules if module.run is not None]
        if len(saved.modules) != len(modules):
            raise ValueError(
                f"the checkpoint holds the schedules of {len(saved.modules)} modules, but {len(modules)} are set up:"
                " call fabric.setup(module, optimizer) for the same ones before fabric.load"
            )
        # inside `epochs`, a program returns to an earlier state, and its loop continues at the present epoch
        self._has_begun = self._has_begun and self._epoch_is_open and self.epochs is not None
        for module, state in zip(modules, saved.modules, strict=True):
            if self._has_begun:
                module.load_inside_loop(state, self.epochs, self.steps)
            else:
                module.load_state_dict(state)
        self._resumed = _Saved() if self._has_begun else saved
