"""Runs the schemes from the start of a ``fit`` to its end."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm.autocast import Autocast, outside_autocast
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.dtensor import gathered, local
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.averaged_model import AveragedModel
from lightning_hiercomm.run.checksums import Checksums
from lightning_hiercomm.run.optimizer_steps import Collectives, OptimizerSteps
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.shapes import are_equal
from lightning_hiercomm.run.uncounted import UncountedChanges
from lightning_hiercomm.run.unreduced import GradientCheck
from lightning_hiercomm.schemes import Context, RunningScheme, Scheme
from lightning_hiercomm.schemes.base import Gradients
from lightning_hiercomm.schemes.gradients import GradientPath, PhasedGradients, gradient_path
from lightning_hiercomm.schemes.guard import Policy
from lightning_hiercomm.schemes.health.nonfinite import OnNonfinite
from lightning_hiercomm.schemes.health.verification import VerifyReplicas

T = TypeVar("T")

_COUNTERS = ("steps", "step_in_epoch", "epoch")
"""The entries of a schedule that mean the same in every scheme."""


class TrainingRun:
    """Runs one scheme per optimizer for the length of a ``fit``.

    It does not depend on a Trainer: its owner calls it where a run, an epoch and a step begin and end.

    Args:
        scheme: As the user configured it.
        replicas: The tensors that each optimizer's scheme synchronizes; equal on all ranks.
        topology: The nodes.
        wire: Payload type between nodes.
        average_optimizer_state: Whether synchronizations also average the optimizers' state.
        gradients: Averages the module's gradients. Default: as the scheme asks for.
        on_nonfinite: What happens when values that are NaN or infinite are about to be sent.
        verify_replicas: What happens when ranks of a node hold different parameters.
        collectives: The program's own collectives between nodes that differ. None if there cannot be any.

    Attributes:
        schemes: One per optimizer, in their order.
        gradients: Averages the module's gradients, whichever optimizer uses them.
        averaged_model: Writes the averaged model to the module.
        after_healing: Called when this rank has replaced parameters that may have been non-finite. Returns other
            non-finite tensors that it replaced, each with its previous values.
        optimizer_steps: Watches the optimizers' steps.
        gradient_check: Compares gradients of ranks that share them.
        knows_batches: Whether :meth:`end_batch` is called where batches end, or before every forward pass.
        has_begun: Whether training has begun in this process.
        has_finished: Whether the last step has been taken.
        is_closed: Whether the run is over, and nothing of it may communicate.
        has_saved_own_values: Whether ranks have stored their own parameters since the last validation began.
    """

    def __init__(
        self,
        scheme: Scheme,
        replicas: Replicas,
        topology: Topology,
        wire: Wire | None = None,
        average_optimizer_state: bool = False,
        gradients: GradientPath | None = None,
        on_nonfinite: OnNonfinite = "raise",
        verify_replicas: VerifyReplicas = "off",
        collectives: Collectives | None = None,
    ) -> None:
        self.replicas = replicas
        self.topology = topology
        self.wire = wire or Wire()
        self.gradients = gradients or gradient_path(
            scheme.gradients,
            topology,
            replicas.device,
            self.wire,
            chunk_bytes=replicas.bucket_bytes,
            parameters=replicas.module.parameters(),
            first=scheme.first_gradients,
        )
        policy = Policy(on_nonfinite, verify_replicas, average_optimizer_state)
        if topology.may_grow:
            replicas.fix_slots()  # joining nodes build their buckets alone
        held = [replicas.of(optimizer) for optimizer in replicas.optimizers]
        check_equal_layouts(held, topology.world, replicas.device)
        contexts = (Context(r, topology, o, self.wire, policy) for r, o in zip(held, replicas.optimizers, strict=True))
        self.schemes = [scheme.build(context) for context in contexts]
        self._scheme = scheme
        if isinstance(self.gradients, PhasedGradients):
            self.gradients.is_first = lambda: self.gradients_over != scheme.gradients
        self.averaged_model = AveragedModel(self.schemes, replicas, topology)
        self._loss_sum: Tensor | None = None
        self._loss_count = 0
        self._last_schedules: list[dict[str, Any]] | None = None
        self.after_healing: Callable[[], Sequence[tuple[Tensor, Tensor]]] = lambda: ()
        self.has_begun = False
        self.has_finished = False
        self.is_closed = False
        self.has_saved_own_values = False
        self.knows_batches = True
        self.gradient_check: GradientCheck | None = None
        self.optimizer_steps = OptimizerSteps(self.schemes, self.optimizers, self.step, collectives)
        self.optimizer_steps.before_inner_step = lambda: self.has_begun
        self._knows_means = topology.may_grow  # a joining node would decide alone
        differs = any(not running.is_alone and running.config.gradients != "world" for running in self.schemes)
        self._uncounted = UncountedChanges(self.schemes, replicas) if differs else None
        self.remember_values()

    @property
    def module(self) -> torch.nn.Module:
        """The module that trains."""
        return self.replicas.module

    @property
    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers, without Lightning's wrapper."""
        return self.replicas.optimizers

    @property
    def gradients_over(self) -> Gradients:
        """The ranks over which gradients are averaged now. The first phase lasts until all optimizers have left it."""
        phases = (scheme.gradients for scheme in self.schemes if scheme.gradients != scheme.config.gradients)
        return next(phases, self._scheme.gradients)

    def scheme_of(self, optimizer: Optimizer) -> RunningScheme[Scheme]:
        """Return the scheme of an optimizer.

        Raises:
            RuntimeError: If the optimizer is none of those with which the run began.
        """
        for scheme, known in zip(self.schemes, self.optimizers, strict=True):
            if known is optimizer:
                return scheme
        raise RuntimeError(
            f"this {type(optimizer).__name__} is none of the optimizers with which the run began, so nodes do not"
            " synchronize its parameters (it was set by `trainer.optimizers = ...` or"
            " `trainer.strategy.setup_optimizers(trainer)`). Change the param_groups of the existing optimizers"
            " (`optimizer.add_param_group(...)`), or call `fit` again"
        )

    def begin_validation(self) -> None:
        """Write the averaged parameters to the module. Collective."""
        self.has_saved_own_values = False
        self.averaged_model.enter()
        self.averaged_model.watch()

    def end_validation(self, share: Callable[[Sequence[Tensor]], None]) -> None:
        """Put this rank's own parameters back, unless a hook has written to the averaged ones. Collective.

        Args:
            share: Gives all ranks the first rank's values of parameters. Collective.
        """
        names = self._end_watching(share, "a validation hook")
        if names and self.has_saved_own_values and self.topology.rank == 0:
            warnings.warn(
                f"parameters were written in a validation hook ({names}) during which a checkpoint was saved with"
                " checkpoint_replicas=True: what each rank stored with it are its parameters of before. Save after the"
                " validation: ModelCheckpoint(save_on_train_epoch_end=True)",
                stacklevel=2,
            )

    @contextmanager
    def saving(self, share: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
        """Inside, a checkpoint is made of the averaged parameters, which hooks may write to. Collective.

        Args:
            share: As in :meth:`end_validation`.
        """
        self.averaged_model.enter()
        self.averaged_model.watch()
        try:
            yield
        except BaseException:
            self.averaged_model.leave()
            raise
        self._end_watching(share, "on_save_checkpoint")

    @outside_autocast()
    def _end_watching(self, share: Callable[[Sequence[Tensor]], None], hook: str) -> str:
        """Put this rank's own parameters back, unless a hook has written to the averaged ones. Collective.

        Then all ranks continue from the averaged model with what was written, as with DDP.

        Returns:
            The names of trained parameters that keep what was written.
        """
        model = self.averaged_model
        written, kept = model.written(), ""
        if self.topology.may_grow:
            self._warn_of_undone(written, hook)
            written = {}
        elif self._are_trained(written.values()):
            kept = _in_words(written)
            with torch.inference_mode(False):  # training writes to tensors that schemes create now
                self._keep_written(written, share, hook)
        model.leave(kept=[*written.values()])
        return kept

    def _are_trained(self, written: Iterable[Tensor]) -> bool:
        trained = {id(parameter) for scheme in self.schemes for parameter in scheme.replica.with_empty}
        return any(id(local(parameter)) in trained for parameter in written)

    def _keep_written(
        self, written: Mapping[str, Tensor], share: Callable[[Sequence[Tensor]], None], hook: str
    ) -> None:
        before = Checksums(written)
        share([*written.values()])
        self.replicas.have_written()
        changes = bool(Checksums(written).changed_since(before))
        differs = torch.tensor([int(changes)], device=self.replicas.device)
        self.topology.world.all_reduce(differs, op="max").wait()
        if bool(differs) and self.topology.rank == 0:
            warnings.warn(
                f"ranks wrote different values to parameters in {hook} ({_in_words(written)}). All ranks continue"
                " with those of rank 0: write the same values on all ranks",
                stacklevel=2,
            )
        self.averaged_model.drop_own()
        self.begin_from_module()
        self.remember_values()
        if self._uncounted is not None:
            self._uncounted.begin(self._known)

    def _warn_of_undone(self, written: Mapping[str, Tensor], hook: str) -> None:
        if written and self.topology.local_rank == 0:
            warnings.warn(
                f"elastic nodes: what was written to parameters in {hook} ({_in_words(written)}) is undone, because"
                " other nodes do not receive it. Write them in a training hook, on all nodes",
                stacklevel=2,
            )

    def remember_values(self) -> None:
        """Store the module's present values as those that the schemes have seen."""
        self._known = self.replicas.checksums()

    def values_have_changed(self, of_trained: bool = False) -> bool:
        """Return whether parameters have changed, on any rank, since :meth:`remember_values`. Collective.

        Args:
            of_trained: Whether to compare only parameters that the schemes train at the moment.
        """
        names = set(self.trained()) if of_trained else None
        differs = bool(self.replicas.checksums().changed_since(self._known, names))
        changed = torch.tensor(int(differs), device=self.replicas.device)
        self.topology.world.all_reduce(changed.view(1), op="max").wait()
        return bool(changed)

    def fingerprint(self) -> str:
        """Return a text that is equal for runs with the same shapes of parameters, scheme and wire."""
        shapes = [(name, tuple(value.shape), str(value.dtype)) for name, value in self.module.named_parameters()]
        what = re.sub(r" at 0x[0-9a-f]+", "", repr([[scheme.config for scheme in self.schemes], shapes, self.wire]))
        return hashlib.blake2b(what.encode(), digest_size=6).hexdigest()

    def begin_from_module(self) -> None:
        """Restart the schemes from what the module holds, which is equal on all nodes."""
        held = [self.replicas.of(optimizer) for optimizer in self.optimizers]
        check_equal_layouts(held, self.topology.world, self.replicas.device)
        for scheme, replica in zip(self.schemes, held, strict=True):
            scheme.follow(replica)

    def leave_to_ranks(self, names: Collection[str]) -> None:
        """Restore from a checkpoint which tensors stay each rank's own, because their shapes differ between ranks."""
        if not self.replicas.per_rank.issuperset(names):
            self.replicas.per_rank.update(names)
            self.averaged_model.has_found_unequal(self.replicas.per_rank)
            self.begin_from_module()

    def exclude_without_mean(self, names: Collection[str] | None) -> None:
        """Restore from a checkpoint which buffers had no mean when its run began, after loading them.

        Args:
            names: Names of the buffers, or None if the file does not hold them.
        """
        if names is None:
            return
        self._knows_means = True
        if self.replicas.without_mean != {*names}:
            self.replicas.without_mean = {*names}
            self.begin_from_module()

    def _find_means(self) -> None:
        """Find again the buffers that have no mean, because programs fill them in ``on_fit_start``. Collective."""
        self.averaged_model.compare_shapes()
        lack = self.replicas.lack_mean()
        if lack:
            lacks = torch.tensor([*map(int, lack.values())], device=self.replicas.device)
            self.topology.world.all_reduce(lacks, op="max").wait()
            self.exclude_without_mean(
                [name for name, is_lacking in zip(lack, lacks.tolist(), strict=True) if is_lacking]
            )

    def trained(self) -> list[str]:
        """Return the names of the parameters that the schemes train at the moment."""
        known = {id(tensor) for scheme in self.schemes for tensor in scheme.replica.parameters}
        return [
            name
            for name, parameter in self.module.named_parameters()
            if id(local(parameter)) in known or (parameter.requires_grad and not local(parameter).numel())
        ]

    @contextmanager
    def training(self, names: Collection[str] | None) -> Iterator[None]:
        """Inside, the schemes hold the parameters that were :meth:`trained` when a checkpoint was saved.

        Their saved state belongs to these parameters. A resumed program may freeze or unfreeze others, which the next
        step detects.

        Args:
            names: Names of the parameters, or None if they are not known.
        """
        parameters = dict(self.module.named_parameters())
        before = {name: parameter.requires_grad for name, parameter in parameters.items()}
        if names is not None:
            for name, parameter in parameters.items():
                if before[name] != (name in names):
                    parameter.requires_grad_(name in names)
            for scheme, optimizer in zip(self.schemes, self.optimizers, strict=True):
                if self.replicas.has_changed(scheme.replica, optimizer):
                    scheme.follow(self.replicas.of(optimizer))
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                if parameter.requires_grad != before[name]:
                    parameter.requires_grad_(before[name])

    def begin(self, epochs: int | None, steps: int | None) -> None:
        """Start or resume training.

        Args:
            epochs: The number of epochs the run will have, or None if that is not known.
            steps: The number of optimizer steps after which the run ends, or None if that is not known.
        """
        self.has_begun, self.has_finished = True, False
        if not self._knows_means:
            self._find_means()
        for scheme in self.schemes:
            scheme.begin_run(epochs, steps)
        if self._uncounted is not None:
            self._uncounted.begin(self._known)

    def begin_epoch(self, epoch: int, logged: Callable[[], Mapping[str, Tensor]]) -> None:
        """Start an epoch.

        Args:
            epoch: Its number, from 0.
            logged: Returns the metrics that the user has logged, also later in the epoch.
        """
        self._loss_sum, self._loss_count = None, 0
        for scheme in self.schemes:
            scheme.begin_epoch(epoch, logged)
        if self.gradient_check is not None:
            self.gradient_check.begin_epoch()

    def watch_loss(self, output: Any) -> None:
        """Add the loss that a training step returned, if its output is a loss or a mapping with one."""
        if self.schemes and self.schemes[0].config.watches_loss:
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if isinstance(loss, Tensor):
                loss = gathered(loss.detach()).float().mean()
                self._loss_sum = loss if self._loss_sum is None else self._loss_sum + loss
                self._loss_count += 1

    def loss_so_far(self) -> dict[str, Any]:
        """Return the sum and the number of this rank's losses in the present epoch; empty if there are none."""
        return {} if self._loss_sum is None else {"sum": self._loss_sum.clone(), "count": self._loss_count}

    @outside_autocast()
    def mean_loss_so_far(self) -> dict[str, Any]:
        """Return the mean of all ranks' :meth:`loss_so_far`, so that all resume with the same mean. Collective."""
        if not (self.schemes and self.schemes[0].config.watches_loss):
            return {}
        sums = torch.zeros(2, device=self.replicas.device)
        if self._loss_sum is not None:
            sums[0], sums[1] = self._loss_sum, self._loss_count
        self.topology.world.all_reduce(sums.mul_(self.topology.rank_weight)).wait()
        count = round(sums[1].item())
        return {"sum": sums[0].clone(), "count": count} if count else {}

    def common_loss(self, loss: Any) -> Any:
        """Return the mean of a loss over the ranks that average their gradients. Collective over these.

        Optimizers like LBFGS evaluate the loss until it no longer changes. These ranks must evaluate it equally often,
        because their backward passes communicate.
        """
        topology, gradients = self.topology, self.gradients_over
        if gradients == "none" or not isinstance(loss, Tensor):
            return loss
        # in the loss's own dtype: a rounded loss would stop changing too early
        common = gathered(loss.detach()).clone().view(1)
        if gradients == "node":
            topology.intra.all_reduce(common, weight=topology.weight_in_node).wait()
        else:
            topology.world.all_reduce(common, weight=topology.rank_weight).wait()
        return common.view(())

    def load_loss(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`loss_so_far`."""
        if state:
            self._loss_sum, self._loss_count = state["sum"].to(self.replicas.device), state["count"]

    def note_loss_scale(self, precision: object) -> None:
        """Store the loss scale of the precision's gradient scaler, if it has one, before a backward pass."""
        scaler = getattr(precision, "scaler", None)
        if scaler is not None and self.gradients.has_residuals:  # reading the scale makes the host wait
            self.gradients.set_scale(float(scaler.get_scale()))

    def step(self, optimizer: Optimizer, run: Callable[[], T], last: bool = False) -> T:
        """Attempt an optimizer step.

        Args:
            optimizer: The optimizer.
            run: The user's own step: forward, backward, clipping, ``optimizer.step()``.
            last: Whether it is known to be the last step of the epoch.

        Returns:
            The result of ``run``.
        """
        self._last_schedules = None
        scheme = self.scheme_of(optimizer)
        self._follow(scheme, optimizer)

        autocast = Autocast()

        def run_and_check() -> T:
            with self.optimizer_steps.stepping():
                with autocast.entered():
                    result = run()
                if self.gradient_check is not None:
                    self.gradient_check.after_step(optimizer)
            scheme.replica.find_buffers()
            return result

        with autocast.left(), self.optimizer_steps.excused():
            result = scheme.step(run_and_check, last=last)
            self._report_healing()
        return result

    def backward(self) -> AbstractContextManager[None]:
        """Enclose a backward pass of the run."""
        return nullcontext() if self._uncounted is None else self._uncounted.backward()

    def note_reduction(self) -> None:
        """Note that a backward pass has averaged the present gradients."""
        if self.gradient_check is not None:
            self.gradient_check.note_reduction()

    def end_batch(self) -> None:
        """End a batch in which a step was expected.

        Raises:
            RuntimeError: If parameters change in several batches without a counted step.
        """
        if self._uncounted is not None and not self.optimizer_steps.is_stepping:  # in a closure of LBFGS, for instance
            self._uncounted.after_batch(self.knows_batches)

    @outside_autocast()
    def end_epoch(self) -> None:
        """End an epoch after its last batch, before validation and checkpoints."""
        loss = self._loss_sum / self._loss_count if self._loss_sum is not None else None
        self._loss_sum, self._loss_count = None, 0
        for scheme in self.schemes:
            scheme.replica.find_buffers()
            scheme.end_epoch(loss)
        if self._uncounted is not None:
            self._uncounted.end_epoch()

    @outside_autocast()
    def finish(self) -> None:
        """End the run: every rank holds the averaged parameters, and saving no longer needs other ranks."""
        self.averaged_model.compare_shapes()
        if self._uncounted is not None:
            self._uncounted.end_epoch()
        for scheme in self.schemes:
            scheme.replica.find_buffers()
            scheme.finish()
        self.averaged_model.is_left_out = bool(self._report_healing())
        self.has_finished = True
        self._last_schedules = self.schedules()
        self.replicas.have_written()
        self.remember_values()

    def follow_unfrozen(self) -> None:
        """Synchronize before a forward pass if parameters were unfrozen, so that their gradients are averaged.

        The next :meth:`step` detects frozen parameters: programs freeze and unfreeze layers between two steps of a
        batch.
        """
        for scheme, optimizer in zip(self.schemes, self.optimizers, strict=True):
            if self.replicas.has_grown(scheme.replica, optimizer):
                self._follow(scheme, optimizer)

    @outside_autocast()
    def _follow(self, scheme: RunningScheme[Scheme], optimizer: Optimizer) -> None:
        """Synchronize and restart the scheme, if other parameters are trained now. Collective."""
        scheme.replica.find_buffers()
        if self.replicas.has_changed(scheme.replica, optimizer):
            self.averaged_model.compare_shapes()
            scheme.synchronize()
            # forward passes since the last step have changed buffers, and new parameters may differ between ranks
            self.averaged_model.average_differing(
                [*scheme.replica.buffers, *self.replicas.grown(scheme.replica, optimizer)]
            )
            replica = self.replicas.of(optimizer)
            check_equal_layouts([replica], self.topology.world, self.replicas.device)
            scheme.follow(replica)

    def _report_healing(self) -> Sequence[tuple[Tensor, Tensor]]:
        if not any(scheme.guard.has_healed for scheme in self.schemes):
            return ()
        for scheme in self.schemes:
            scheme.guard.has_healed = False
        return self.after_healing()

    @outside_autocast()
    def restart_from_average(self) -> None:
        """Average the module after the program has written to it during training, and restart the schemes from it."""
        self.averaged_model.average_module()
        self.begin_from_module()

    @outside_autocast()
    def schedules(self, together: bool = True) -> list[dict[str, Any]]:
        """Return each scheme's state that all replicas share, for whole parameters if the module is sharded.

        Args:
            together: Whether all ranks call this, which makes it collective. Otherwise return what this rank holds.
        """
        if self._last_schedules is not None:
            return self._last_schedules
        schedules = [scheme.state_dict(shared=True, can_communicate=together) for scheme in self.schemes]
        for scheme, optimizer, schedule in zip(self.schemes, self.optimizers, schedules, strict=True):
            if "outer" in schedule:
                held, node = schedule["outer"]["state"], self.topology.intra
                state = self.replicas.whole_state(optimizer, scheme.replica, held, node)
                schedule["outer"] = {**schedule["outer"], "state": state}
        return schedules

    def load_schedules(self, schedules: Sequence[Mapping[str, Any]]) -> None:
        """Restore :meth:`schedules`; all ranks continue from the parameters that the module holds. Collective.

        Raises:
            ValueError: If they come from a run with another number of optimizers.
        """
        if len(schedules) != len(self.schemes):
            raise ValueError(
                f"the checkpoint holds {len(schedules)} schemes, but this run has {len(self.schemes)} optimizers"
            )
        for scheme, optimizer, schedule in zip(self.schemes, self.optimizers, schedules, strict=True):
            outer = schedule.get("outer")
            if outer is not None:
                outer = {**outer, "state": self.replicas.held_state(optimizer, outer["state"])}
                schedule = {**schedule, "outer": outer}
            scheme.load_state_dict(_schedule_of(scheme, schedule))

    def close(self, timeout: float) -> None:
        """End background threads, also after an error. Not collective.

        Args:
            timeout: Seconds to wait for each thread.
        """
        self.is_closed = True
        self.averaged_model.forget()
        self.optimizer_steps.close()
        if self._uncounted is not None:
            self._uncounted.close()
        for scheme in self.schemes:
            scheme.close(timeout)
        self.gradients.close(timeout)


def check_equal_layouts(replicas: Sequence[Replica], group: Communicator, device: torch.device) -> None:
    """Compare the layouts of replicas between ranks, because exchanging unequal sizes ends a process. Collective.

    Args:
        replicas: One per optimizer.
        group: All ranks.
        device: The device of the tensors that are exchanged.

    Raises:
        ValueError: On all ranks, if the layouts differ.
    """
    own = [each.layout for each in replicas]
    if are_equal(own, group, device):
        return
    for rank, other in zip(group.ranks, everyone := group.all_gather_object(own), strict=True):
        if other != everyone[0]:
            raise ValueError(f"ranks train different parameters: {_first_difference(everyone[0], other, rank)}")


def _first_difference(first: list[list[str]], other: list[list[str]], rank: int) -> str:
    if len(first) != len(other):
        return f"rank 0 has {len(first)} optimizers, rank {rank} has {len(other)}"
    for which, (one, two) in enumerate(zip(first, other, strict=True)):
        for a, b in zip_longest(one, two, fillvalue="nothing more"):
            if a != b:
                return f"optimizer {which} has {a} on rank 0, {b} on rank {rank}"
    raise AssertionError("there is a difference")


def _in_words(names: Collection[str]) -> str:
    return ", ".join([*names][:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _schedule_of(scheme: RunningScheme[Scheme], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved schedule, or only its counted steps if another scheme saved it.

    Warns:
        UserWarning: If another scheme saved it.
    """
    name = type(scheme.config).__name__
    if saved["scheme"] == name:
        return saved
    if scheme.topology.rank == 0:
        warnings.warn(
            f"the checkpoint was saved with {saved['scheme']}: {name} continues from its parameters and its number of"
            " steps, and starts a schedule of its own",
            stacklevel=2,
        )
    return {**scheme.state_dict(shared=True), **{counter: saved[counter] for counter in _COUNTERS}}
