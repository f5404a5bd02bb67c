"""A program's own training loop: its modules, its epochs, and the checkpoint that it resumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.checkpoints.formats import FORMAT, check_format
from lightning_hiercomm.run.replicas import broadcast_values, tensors_without, trained_by
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.trainer.fabric_module import FabricModule


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
        self.has_gone_backward = False
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
        needs_backward = self._follows_loss or any(module.late_parameters() for module in self.modules)
        if needs_backward and not self.has_gone_backward:
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
