"""Base classes of schemes: the configuration, and the object that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from lightning_hiercomm.arguments import Value
from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes.context import Context
from lightning_hiercomm.schemes.guard import NonFiniteGuard
from lightning_hiercomm.schemes.in_place_of_step import Update, in_place_of_step
from lightning_hiercomm.schemes.preflight import launch
from lightning_hiercomm.schemes.requirements import Requirements
from lightning_hiercomm.schemes.scheme_state import SchemeState, Scope

_CHECK_EVERY = 10
"""Steps between two checks for non-finite parameters, where every step synchronizes gradients."""

T = TypeVar("T")
S = TypeVar("S", bound="Scheme", covariant=True)

Gradients = Literal["node", "world"]


class Scheme(Value):
    """An immutable configuration of when and how the replicas of one optimizer synchronize.

    :meth:`build` makes a :class:`RunningScheme` for each optimizer, which runs the scheme. A new scheme subclasses both
    classes: the constructor of the :class:`Scheme` takes plain values and raises an error that names a bad argument;
    the :class:`RunningScheme` has the algorithm.

    Attributes:
        gradients: The ranks over which gradients are averaged: ``"node"`` or ``"world"``.
        first_gradients: The same in a first phase of the run; None if the scheme has no such phase.
        watches_loss: Whether :meth:`RunningScheme.end_epoch` needs the training loss.
    """

    gradients: Gradients = "node"
    first_gradients: Gradients | None = None
    watches_loss: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if name in _MEMBERS_OF_RUNNING_SCHEME:
                kind = "RunningScheme" if cls.__bases__ == (Scheme,) else f"Running{cls.__bases__[0].__name__}"
                raise TypeError(
                    f"{cls.__name__}.{name} would never be called: define it in a {kind}, and return that from"
                    f" {cls.__name__}.build"
                )

    def build(self, context: Context) -> RunningScheme[Scheme]:
        """Make the object that runs the scheme. Collective, and in the same order on all ranks.

        Args:
            context: The replica, its optimizer and the nodes.

        Raises:
            ValueError: If this scheme cannot train the replica.
        """
        return RunningScheme(self, context)

    @property
    def requirements(self) -> Requirements:
        """The scheme's requirements of a run; subclasses change them by :func:`dataclasses.replace`."""
        kind = type(self).__name__
        return Requirements(
            needs_fixed_nodes=f"{kind} does not support nodes that leave and join: use PeriodicAveraging or DiLoCo",
            needs_equal_data=f"{kind} needs equal numbers of steps on all nodes: use AllReduce, PeriodicAveraging or"
            " DiLoCo",
        )

    def check_run(self, nodes: int, steps_of_epoch: float, steps: float) -> Iterator[str]:
        """Yield warnings if a run is too short for the scheme.

        Args:
            nodes: The number of nodes.
            steps_of_epoch: Optimizer steps of an epoch; fractional if the last step accumulates fewer batches.
            steps: Optimizer steps of the run; infinite if that is not known.

        Raises:
            ValueError: If the scheme cannot train in such a run.
        """
        return iter(())


class RunningScheme(Generic[S]):
    """Base class of objects that run a scheme on the replica of one optimizer, from the first step of a run to its end.

    :meth:`Scheme.build` calls the constructor, which opens process groups. All other methods except :meth:`close` are
    collective, and all ranks call them in the same order:

    1. :meth:`begin_run`; for every epoch :meth:`begin_epoch`, :meth:`step` for every attempt of the optimizer to step,
       :meth:`end_epoch`; and :meth:`finish`.
    2. Between any two of these: :meth:`synchronize`, :meth:`state_dict`, and :meth:`follow` when other parameters are
       trained.
    3. :meth:`close`, once.

    A new scheme overrides :meth:`after_step`, or another hook in the section "for schemes" below. Everything that
    changes during a run is in :attr:`state`; the user's settings stay in :attr:`config`.

    Args:
        config: The configuration.
        context: The replica, its optimizer and the nodes.

    Attributes:
        config: The configuration.
        state: Everything that changes during a run: counters, phases, pending exchanges.
        state_type: The dataclass of :attr:`state`.
        gradients: The ranks over which gradients are averaged in the present phase.
        phase: The name of the present phase.
        replica: The parameters (and float buffers) that are synchronized.
        topology: The nodes, their communicators and weights.
        optimizer: The user's optimizer.
        wire: The encoding of parameters between nodes.
        samples: Weighs nodes with unequal data in synchronizations; None if all ranks keep their weights.
        is_alone: Whether there is no other replica: one node, of one rank or of ranks that share their gradients.
        guard: Averages, and reports values that are non-finite or differ inside a node.
    """

    phase: str = "training"
    state: SchemeState
    state_type: type[SchemeState] = SchemeState

    def __init__(self, config: S, context: Context) -> None:
        topology = context.topology
        self.config = config
        self.gradients: Gradients = config.first_gradients or config.gradients
        self.replica = context.replica
        self.topology = topology
        self.optimizer = context.optimizer
        self.wire = context.wire
        self.samples = context.samples
        self.is_alone = topology.is_one_node
        self.state = self._new_state()
        self.guard = NonFiniteGuard(context, self.state)
        self.backgrounds: list[Background] = []

    # ---- a run ---------------------------------------------------------------------------------------------------

    def follow(self, replica: Replica) -> None:
        """Train other parameters from now on (some were unfrozen), or the same from other values.

        Args:
            replica: All of them; their values are equal on all ranks.
        """
        self.replica = replica
        self.state.unsynchronized_steps = 0
        self.guard.replica = replica
        if self.samples is not None:
            self.samples.end()

    def begin_run(self, epochs: int | None, steps: int | None) -> None:
        """Start or resume training.

        Args:
            epochs: The number of epochs the run will have, or None if that is not known.
            steps: The number of optimizer steps after which the run ends, or None if that is not known.
        """

    def begin_epoch(self, epoch: int) -> None:
        """Start an epoch.

        Args:
            epoch: Its number, from 0.
        """
        self.state.epoch = epoch
        self.state.step_in_epoch = 0

    def step(self, run: Callable[[], T], last: bool = False) -> T:
        """Run one attempt of the optimizer to step.

        It counts also if a gradient scaler skips the optimizer, so all ranks count the same.

        Args:
            run: The user's own step: forward, backward, clipping, ``optimizer.step()``.
            last: Whether it is known to be the last one of the epoch.

        Returns:
            What ``run`` returns.
        """
        state, is_synchronous = self.state, self._in_first_phase
        update = None if is_synchronous else self.before_step(last)
        with nullcontext() if update is None else in_place_of_step(self.optimizer, update):
            result = run()
        state.steps += 1
        state.step_in_epoch += 1
        state.unsynchronized_steps += 1
        if is_synchronous:
            self._after_synchronous_step()
        else:
            self.after_step(last)
        return result

    def end_epoch(self, loss: Tensor | None) -> None:
        """End an epoch, before its validation and checkpoints.

        Args:
            loss: This rank's mean training loss of the epoch (scalar), if :attr:`Scheme.watches_loss`.
        """

    def finish(self) -> None:
        """End the run: no exchange is pending, and every rank holds the averaged parameters."""
        self.synchronize()
        if not (self.is_alone or self.topology.may_grow):  # elastic nodes communicate in synchronizations only
            launch(self.topology, self.state.steps, torch.zeros((), dtype=torch.int64, device=self.replica.device))
        self.state.unsynchronized_steps = 0
        self.close()

    def close(self, timeout: float = 10.0) -> None:
        """End background threads, also after an error; the only call that is not collective.

        Args:
            timeout: Seconds to wait for each; a thread that is stuck in a collective is left behind.
        """
        for background in self.backgrounds:
            background.close(timeout)

    # ---- the averaged model --------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Write the averaged parameters to the replica: the weighted mean over all ranks.

        The caller keeps a snapshot if training is to continue from each rank's own values.
        """
        self.state.settle()
        if not self.state.is_synchronized:
            self.topology.synchronize(self._write_mean)

    # ---- state ---------------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """Return current values to log, such as ``sync_every`` and ``staleness``."""
        return {}

    def state_dict(self, shared: bool = False, can_communicate: bool = True) -> dict[str, Any]:
        """Return the state as primitives and tensors, except for the replica's values. Call ``state.settle()`` first.

        Args:
            shared: Whether to return only state that all replicas share: the content of a plain checkpoint.
            can_communicate: Whether all ranks call this. Otherwise state that only other ranks hold is left out.
        """
        state = {"scheme": type(self.config).__name__, **self.state.saved(Scope.SHARED)}
        if shared:
            return state
        state |= self.state.saved(Scope.LOCAL)
        if self.samples is not None:
            state["samples"] = self.samples.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`. From shared state, all ranks resume with the averaged parameters."""
        self.state.load(state)
        if self.samples is not None:
            self.samples.end()
            if "samples" in state:
                self.samples.load_state_dict(state["samples"])

    def before_nodes_change(self) -> Callable[[], None]:
        """Prepare for a change of nodes; return a function to call after it. Collective over the node."""
        unsynchronized_steps = self.state.unsynchronized_steps

        def resume() -> None:
            self.follow(self.replica)
            self.state.unsynchronized_steps = unsynchronized_steps

        return resume

    def optimizer_state(self, only_on: int | None = None) -> dict[str, Any]:
        """Return the optimizer's state for a checkpoint, as ``Optimizer.state_dict`` lays it out. Collective.

        A scheme that keeps the state elsewhere gathers it here, and takes restored state from the optimizer in
        :meth:`begin_run`.

        Args:
            only_on: The one rank that will use it: where it has to be gathered, the others' ``"state"`` is empty.
                None: all of them.
        """
        return self.optimizer.state_dict()

    # ---- for schemes ---------------------------------------------------------------------------------------------

    def _new_state(self) -> SchemeState:
        return self.state_type()

    def before_step(self, last: bool) -> Update | None:
        """Prepare the user's step.

        Args:
            last: As in :meth:`step`.

        Returns:
            A function that replaces the optimizer step, called once when gradients are ready; or None.
        """
        return None

    def after_step(self, last: bool) -> None:
        """Launch, collect or merge exchanges by the schedule; called after the user's step is counted."""

    def _write_mean(self) -> None:
        """Write the weighted mean over all ranks to the replica, in the parameters' own type; blocks."""
        if self._in_first_phase:
            self.guard.average(self.replica.buckets_of_buffers)
        else:
            self.guard.average(self.replica.buckets)

    @property
    def _in_first_phase(self) -> bool:
        """Whether gradients are averaged over more ranks than later."""
        return self.gradients != self.config.gradients

    def _after_synchronous_step(self) -> None:
        """Count a step whose gradients were averaged over all ranks, so that only float buffers differ."""
        self.state.synchronizations += 1
        if not self.replica.buffers:
            self.state.unsynchronized_steps = 0
        if self.state.steps % _CHECK_EVERY == 0:
            self._check_parameters()

    def _check_parameters(self) -> None:
        if not self.is_alone:
            self.guard.check(self.replica.buckets_of_parameters)

    def _new_background(self) -> Background:
        """Make a thread (or stream) that overlaps with training, which :meth:`close` ends; for constructors."""
        background = Background(self.replica.device, self.topology.meter, defers=self.topology.waits_on_host)
        self.backgrounds.append(background)
        return background


_MEMBERS_OF_RUNNING_SCHEME = {
    name for name in vars(RunningScheme) if not name.startswith("_") and name not in vars(Scheme)
}
