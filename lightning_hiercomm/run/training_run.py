"""Runs the schemes from the start of a ``fit`` to its end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import TypeVar

import torch
from torch.optim import Optimizer

from lightning_hiercomm.comm.autocast import Autocast, outside_autocast
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.round import Round
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.averaged_model import AveragedModel
from lightning_hiercomm.run.losses import EpochLoss
from lightning_hiercomm.run.misuse import Misuse
from lightning_hiercomm.run.replicas import Replicas, trained_by
from lightning_hiercomm.run.scheme_states import SchemeStates
from lightning_hiercomm.run.shapes import are_equal
from lightning_hiercomm.schemes import Context, RunningScheme, Scheme
from lightning_hiercomm.schemes.base import Gradients
from lightning_hiercomm.schemes.gradient_path import GradientPath, gradient_path
from lightning_hiercomm.schemes.samples import SampleWeights

T = TypeVar("T")


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
        collectives: Returns how many collectives this rank has begun in the default process group.
        samples: Weighs nodes with unequal data in synchronizations. None: all ranks keep their weights.

    Attributes:
        schemes: One per optimizer, in their order.
        averaged_model: Writes the averaged model to the module.
        scheme_states: Saves and restores the schemes.
        loss: The mean loss of the epoch, which some schemes follow.
        misuse: Checks the first steps.
        has_begun: Whether training has begun in this process; ``has_finished``: whether the last step has been taken.
        is_closed: Whether the run is over, and nothing of it may communicate.
    """

    def __init__(
        self,
        scheme: Scheme,
        replicas: Replicas,
        topology: Topology,
        wire: Wire | None = None,
        average_optimizer_state: bool = False,
        gradients: GradientPath | None = None,
        collectives: Callable[[], int] = lambda: 0,
        samples: SampleWeights | None = None,
    ) -> None:
        self.replicas = replicas
        self.topology = topology
        self.wire = wire or Wire()
        phases = dict.fromkeys([scheme.first_gradients or scheme.gradients, scheme.gradients])
        self._paths = {over: gradients or self._new_path(over) for over in phases}
        held = [replicas.of(optimizer) for optimizer in replicas.optimizers]
        check_equal_layouts(held, topology.world, replicas.device)
        self.samples = samples
        if reason := scheme.requirements.needs_own_parameters:
            check_own_parameters(replicas, reason)
        self.schemes = [
            scheme.build(Context(replica, topology, optimizer, self.wire, samples, average_optimizer_state))
            for replica, optimizer in zip(held, replicas.optimizers, strict=True)
        ]
        self._scheme = scheme
        self.averaged_model = AveragedModel(self.schemes, replicas, topology, samples)
        self.scheme_states = SchemeStates(self.schemes, replicas)
        follows_loss = bool(self.schemes) and self.schemes[0].config.watches_loss
        self.loss = EpochLoss(follows_loss, topology, replicas.device)
        self.has_begun = False
        self.has_finished = False
        self.is_closed = False
        self.misuse = Misuse(self.schemes, replicas, collectives)
        self._knows_means = replicas.slots is not None  # a joining node would decide alone
        self.remember_values()

    def _new_path(self, gradients: Gradients) -> GradientPath:
        replicas = self.replicas
        parameters = replicas.module.parameters()
        return gradient_path(gradients, self.topology, replicas.device, self.wire, replicas.bucket_bytes, parameters)

    @property
    def gradients(self) -> GradientPath:
        """Averages the module's gradients in the present phase."""
        return self._paths[self.gradients_over]

    @property
    def module(self) -> torch.nn.Module:
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
        for scheme in self.schemes:
            if scheme.optimizer is optimizer:
                return scheme
        raise RuntimeError(
            f"this {type(optimizer).__name__} is none of the optimizers with which the run began, so nodes do not"
            " synchronize its parameters (it was set by `trainer.optimizers = ...` or"
            " `trainer.strategy.setup_optimizers(trainer)`). Change the param_groups of the existing optimizers"
            " (`optimizer.add_param_group(...)`), or call `fit` again"
        )

    def remember_values(self) -> None:
        """Store the module's present values as those that the schemes have seen."""
        self._known = self.replicas.checksums()

    def values_have_changed(self, of_trained: bool = False) -> bool:
        """Return whether parameters have changed, on any rank, since :meth:`remember_values`. Collective.

        Args:
            of_trained: Whether to compare only parameters that the schemes train at the moment.
        """
        now = self.replicas.checksums()
        names = self.scheme_states.trained() if of_trained else [*now, *self._known]
        differs = any(now.get(name) != self._known.get(name) for name in names)
        changed = torch.tensor(int(differs), device=self.replicas.device)
        self.topology.world.all_reduce(changed.view(1), op="max").wait()
        return bool(changed)

    def begin_from_module(self, schemes: Sequence[RunningScheme[Scheme]] | None = None) -> None:
        """Restart schemes (default: all) from what the module holds, which is equal on all nodes. Collective."""
        schemes = self.schemes if schemes is None else schemes
        held = [self.replicas.of(scheme.optimizer) for scheme in schemes]
        check_equal_layouts(held, self.topology.world, self.replicas.device)
        for scheme, replica in zip(schemes, held, strict=True):
            scheme.follow(replica)

    def exclude(self, without_mean: Collection[str] | None) -> None:
        """Restore from a checkpoint, after loading its tensors, which of them are not exchanged.

        Args:
            without_mean: Names of buffers that had no mean when the run began, or None if the file does not hold them.
        """
        if without_mean is None:
            return
        self._knows_means = True
        if self.replicas.without_mean != {*without_mean}:
            self.replicas.without_mean = {*without_mean}
            self.begin_from_module()

    def _find_means(self) -> None:
        """Find again the buffers that have no mean, because programs fill them in ``on_fit_start``. Collective."""
        self.averaged_model.check_shapes()
        lack = self.replicas.lack_mean()
        if lack:
            lacks = torch.tensor([*map(int, lack.values())], device=self.replicas.device)
            self.topology.world.all_reduce(lacks, op="max").wait()
            self.exclude([name for name, is_lacking in zip(lack, lacks.tolist(), strict=True) if is_lacking])

    def begin(self, epochs: int | None, steps: int | None) -> None:
        """Start or resume training; see :meth:`RunningScheme.begin_run`."""
        self.has_begun, self.has_finished = True, False
        if not self._knows_means:
            self._find_means()
        for scheme in self.schemes:
            scheme.begin_run(epochs, steps)
        self.misuse.begin()

    def begin_epoch(self, epoch: int) -> None:
        """Start an epoch; see :meth:`RunningScheme.begin_epoch`."""
        self.loss.take_mean()
        for scheme in self.schemes:
            scheme.begin_epoch(epoch)

    def note_loss_scale(self, precision: object) -> None:
        """Store the loss scale of the precision's gradient scaler, if it has one, before a backward pass."""
        scaler = getattr(precision, "scaler", None)
        residuals = self.gradients.residuals
        if scaler is not None and residuals is not None:  # reading the scale makes the host wait
            residuals.set_scale(float(scaler.get_scale()))

    def weigh_gradients(self, round_: Round) -> None:
        """Average the next gradients with the weights of a round, with unequal data."""
        assert self.samples is not None
        self.samples.round = self.gradients.round = round_

    def step(self, optimizer: Optimizer, run: Callable[[], T], last: bool = False) -> T:
        """Attempt a step of an optimizer; see :meth:`RunningScheme.step`."""
        self.scheme_states.forget_last()
        scheme, path = self.scheme_of(optimizer), self.gradients
        self._follow(scheme)

        autocast = Autocast()

        def run_and_check() -> T:
            with self.misuse.stepping(optimizer), autocast.entered():
                result = run()
            scheme.replica.find_buffers()
            return result

        with autocast.left():
            result = scheme.step(run_and_check, last=last)
        if self.gradients is not path:  # the first phase has ended, and its residuals with it
            path.load_state_dict({})
        return result

    @outside_autocast()
    def end_epoch(self) -> None:
        """End an epoch after its last batch, before validation and checkpoints."""
        loss = self.loss.take_mean()
        for scheme in self.schemes:
            scheme.replica.find_buffers()
            scheme.end_epoch(loss)

    @outside_autocast()
    def finish(self) -> None:
        """End the run: every rank holds the averaged parameters, and saving no longer needs other ranks."""
        self.averaged_model.check_shapes()
        for scheme in self.schemes:
            scheme.replica.find_buffers()
            scheme.finish()
        self.has_finished = True
        self.scheme_states.keep_last()
        self.replicas.have_written()
        self.remember_values()

    def follow_unfrozen(self) -> None:
        """Synchronize before a forward pass if parameters were unfrozen, so that their gradients are averaged.

        The next :meth:`step` detects frozen parameters: programs freeze and unfreeze layers between two steps of a
        batch.
        """
        for scheme in self.schemes:
            if self.replicas.has_grown(scheme.replica, scheme.optimizer):
                self._follow(scheme)

    @outside_autocast()
    def _follow(self, scheme: RunningScheme[Scheme]) -> None:
        """Synchronize and restart the scheme, if other parameters are trained now. Collective."""
        scheme.replica.find_buffers()
        if self.replicas.has_changed(scheme.replica, scheme.optimizer):
            self.averaged_model.check_shapes()
            scheme.synchronize()
            # forward passes since the last step have changed buffers, and new parameters may differ between ranks
            self.averaged_model.average_differing(
                [*scheme.replica.buffers, *self.replicas.grown(scheme.replica, scheme.optimizer)]
            )
            self.begin_from_module([scheme])

    def close(self, timeout: float) -> None:
        """End background threads, also after an error. Not collective."""
        self.is_closed = True
        self.averaged_model.forget()
        for scheme in self.schemes:
            scheme.close(timeout)
        for path in self._paths.values():
            path.close(timeout)


def check_own_parameters(replicas: Replicas, reason: str) -> None:
    """Raise a ``ValueError`` with the reason if two optimizers train the same parameter."""
    trained: dict[int, int] = {}
    for number, optimizer in enumerate(replicas.optimizers):
        for parameter in trained_by(optimizer):
            first = trained.setdefault(id(parameter), number)
            if first != number:
                names = (name for name, each in replicas.module.named_parameters() if each is parameter)
                raise ValueError(f"optimizers {first} and {number} train {next(names, 'a parameter')}. {reason}")


def check_equal_layouts(replicas: Sequence[Replica], group: Communicator, device: torch.device) -> None:
    """Compare the layouts of replicas between ranks, because exchanging unequal sizes ends a process. Collective."""
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
