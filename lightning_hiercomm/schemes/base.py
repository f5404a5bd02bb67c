"""What every scheme is: configuration, and what runs by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.arguments import Value
from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.guard import NonFiniteGuard, Policy
from lightning_hiercomm.schemes.health.preflight import Preflight
from lightning_hiercomm.schemes.in_place_of_step import Update, in_place_of_step
from lightning_hiercomm.schemes.requirements import Requirements
from lightning_hiercomm.schemes.state import SchemeState, Scope

_CHECK_EVERY = 10
"""Steps between two checks for non-finite parameters, where every step synchronizes gradients."""

T = TypeVar("T")
S = TypeVar("S", bound="Scheme", covariant=True)

Gradients = Literal["node", "world", "none"]


@dataclass(frozen=True)
class Context:
    """Where a scheme is to run: what is trained, and by whom.

    Attributes:
        replica: The parameters and buffers; their values are equal on all ranks.
        topology: The nodes, as long as the scheme runs.
        optimizer: The user's optimizer of these parameters.
        wire: What they look like between nodes. Default: as they are.
        policy: What the user has chosen for all agreements. Default: nobody looks at what is sent.
    """

    replica: Replica
    topology: Topology
    optimizer: Optimizer | None = None
    wire: Wire = field(default_factory=Wire)
    policy: Policy = field(default_factory=Policy)


class Scheme(Value):
    """When and how the replicas of one optimizer agree: configuration, which runs nothing and does not change.

    :meth:`build` makes what runs, a :class:`RunningScheme`: one for every optimizer, all of the same scheme. A new
    scheme is a subclass of each: this one's constructor takes plain values and refuses bad ones by name, and its
    :meth:`build` names the other, which has the algorithm.

    Attributes:
        gradients: Over whom gradients are averaged: the ranks of the ``"node"``, the ``"world"``, or ``"none"`` other.
        first_gradients: The same in a first phase of the run; None if the scheme has no such phase.
        watches_loss: Whether :meth:`RunningScheme.end_epoch` needs the training loss.
    """

    gradients: Gradients = "node"
    first_gradients: Gradients | None = None
    watches_loss: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if name in _OF_WHAT_RUNS:
                kind = "RunningScheme" if cls.__bases__ == (Scheme,) else f"Running{cls.__bases__[0].__name__}"
                raise TypeError(
                    f"{cls.__name__}.{name} is of what runs, and would never be called: put it into a {kind}, and let"
                    f" {cls.__name__}.build return that"
                )

    def build(self, context: Context) -> RunningScheme[Scheme]:
        """Make what runs. Collective, and in the same order on all ranks.

        Args:
            context: What is trained, and by whom.

        Raises:
            ValueError: For what this scheme cannot train.
        """
        return RunningScheme(self, context)

    @property
    def requirements(self) -> Requirements:
        """What it requires of a run; another scheme changes this by :func:`dataclasses.replace`."""
        kind = type(self).__name__
        alone = (
            f"{kind}(gradients='none') lets every rank train a whole model by itself, but the ranks of a node hold"
            " parts of one: use gradients='node'"
        )
        return Requirements(
            needs_whole_parameters=alone if self.gradients == "none" else None,
            needs_fixed_nodes=f"{kind} is not made for nodes that come and go: take PeriodicAveraging or DiLoCo",
        )

    def check_run(self, nodes: int, steps_of_epoch: float, steps: float) -> Iterator[str]:
        """What the user should know before a run that is too short for what the scheme is for.

        Args:
            nodes: How many.
            steps_of_epoch: Optimizer steps of an epoch; where the last accumulates fewer batches, a fraction of one.
            steps: Of the run; infinite if that is not known.

        Yields:
            Warnings.

        Raises:
            ValueError: If it cannot work.
        """
        return iter(())


class RunningScheme(Generic[S]):
    """A scheme at work on the replica of one optimizer, from the first step of a run to its end.

    :meth:`Scheme.build` calls the constructor, which opens process groups. Everything else is collective, except
    :meth:`close`, and happens on all ranks in the same order:

    1. :meth:`begin_run`; for every epoch :meth:`begin_epoch`, :meth:`step` for every attempt of the optimizer to step,
       :meth:`end_epoch`; and :meth:`finish`.
    2. Between any two of these: :meth:`synchronize`, and :meth:`follow` when other parameters are to be trained.
    3. :meth:`close`, once.

    A new scheme overrides :meth:`after_step`, or another hook that is named below "for schemes". What changes while it
    runs is in :attr:`state`; what the user has chosen stays in :attr:`config`.

    Args:
        config: The configuration.
        context: What is trained, and by which ranks.

    Attributes:
        config: As above.
        state: All that changes: counters, phases, pending exchanges.
        state_type: Its dataclass.
        gradients: The ranks over which gradients are averaged in the present phase.
        phase: The name of the present phase, for progress bars.
        replica: The parameters (and float buffers) that are synchronized.
        topology: The nodes, their communicators and weights.
        optimizer: The user's optimizer.
        wire: What parameters look like between nodes.
        is_alone: Whether there is no other replica: one node, of one rank or of ranks that share their gradients.
        guard: Averages, and finds and repairs values that are non-finite or differ inside a node.
    """

    phase: str = "training"
    state: SchemeState
    state_type: type[SchemeState] = SchemeState

    def __init__(self, config: S, context: Context) -> None:
        topology = context.topology
        self.config = config
        self.gradients: Gradients = config.first_gradients or config.gradients
        self.replica = _held_by_ranks(context.replica, config)
        self.topology = topology
        self.optimizer = context.optimizer
        self.wire = context.wire
        self.is_alone = topology.is_one_node and (config.gradients != "none" or topology.ranks_on_node == 1)
        can_skip = config.gradients != "world"
        self.guard = NonFiniteGuard(
            self.replica, topology, context.optimizer, context.policy, can_skip, self.is_alone, self.wire
        )
        self.guard.follow(self.replica)
        self.state = self._new_state()
        self.backgrounds: list[Background] = []

    # ---- a run ---------------------------------------------------------------------------------------------------

    def follow(self, replica: Replica) -> None:
        """Train other parameters from now on (some were unfrozen), or the same from other values.

        Args:
            replica: All of them; their values are equal on all ranks.
        """
        self.replica = _held_by_ranks(replica, self.config)
        self.state.unsynchronized_steps = 0
        self.guard.follow(self.replica)

    def begin_run(self, epochs: int | None, steps: int | None) -> None:
        """Start or resume training.

        Args:
            epochs: The number of epochs the run will have, or None if that is not known.
            steps: The number of optimizer steps after which the run ends, or None if that is not known.
        """

    def begin_epoch(self, epoch: int, metrics: Mapping[str, Tensor]) -> None:
        """Start an epoch.

        Args:
            epoch: Its number, from 0.
            metrics: What the user logged so far.
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
        state, is_synchronous = self.state, self.in_first_phase
        update = None if is_synchronous else self.before_step(last)
        with nullcontext() if update is None else in_place_of_step(self._required_optimizer, update):
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

    def record_metrics(self, logged: Callable[[], Mapping[str, Tensor]]) -> None:
        """Take what the scheme needs of the logged metrics, which will be lost after a save. Collective.

        Args:
            logged: Returns what the user has logged so far.
        """

    def finish(self) -> None:
        """End the run: nothing stays pending, and every rank holds the averaged parameters."""
        self.synchronize()
        if not (self.is_alone or self.topology.may_grow):  # elastic nodes communicate in synchronizations only
            Preflight(self.topology, self.state.steps, torch.zeros((), dtype=torch.int64, device=self.replica.device))
        self.state.unsynchronized_steps = 0
        self.guard.follow(self.replica)
        self.close()

    def close(self, timeout: float = 10.0) -> None:
        """End background threads, also after an error; the only call that is not collective.

        Args:
            timeout: Seconds to wait for each; a thread that is stuck in a collective is left behind.
        """
        for background in self.backgrounds:
            background.close(timeout)

    # ---- the averaged model --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for pending exchanges, and keep what they bring for its scheduled merge."""
        self.state.settle()

    def synchronize(self) -> None:
        """Write the averaged parameters to the replica: the weighted mean over all ranks.

        The caller keeps a snapshot if training is to continue from each rank's own values.
        """
        self.settle()
        if self.state.unsynchronized_steps:
            self.topology.synchronize(self._write_mean)

    @property
    def is_synchronized(self) -> bool:
        """Whether :meth:`synchronize` would change nothing."""
        return self.state.unsynchronized_steps == 0

    # ---- state ---------------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """Return current values to log, such as ``sync_every`` and ``staleness``."""
        return {}

    def shared_state(self, can_communicate: bool = True) -> dict[str, Any]:
        """Return the state that all replicas share, as primitives and tensors: what a plain checkpoint holds.

        Args:
            can_communicate: Whether all ranks call this. Otherwise what only other ranks hold is left out.
        """
        return {"scheme": type(self.config).__name__, **self.state.saved(Scope.SHARED)}

    def state_dict(self) -> dict[str, Any]:
        """Return all state, except for the replica's values. Collective; call :meth:`settle` first."""
        state = {**self.shared_state(), **self.state.saved(Scope.LOCAL)}
        of_optimizer = self.guard.state_dict()
        return {**state, "optimizer_average": of_optimizer} if of_optimizer else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, or :meth:`shared_state`: then all ranks resume from the averaged parameters."""
        self.state.load(state)
        self.guard.load_state_dict(state.get("optimizer_average", {}))

    def undo_point(self) -> Callable[[], None]:
        """Remember all that a synchronization changes; return a callback that restores it. Not collective."""
        undo_values, undo_state, nonfinite = self.replica.undo_point(), self.state.undo_point(), self.guard.nonfinite

        def undo() -> None:
            undo_values()
            undo_state()
            self.guard.nonfinite = nonfinite

        return undo

    def before_nodes_change(self) -> Callable[[], None]:
        """Prepare for a change of nodes; return what to call after it. Collective over the node."""
        unsynchronized_steps = self.state.unsynchronized_steps

        def resume() -> None:
            self.follow(self.replica)
            self.state.unsynchronized_steps = unsynchronized_steps

        return resume

    def optimizer_state(self, only_on: int | None = None) -> dict[str, Any]:
        """Return the optimizer's state for a checkpoint, as ``Optimizer.state_dict`` lays it out. Collective.

        A scheme that keeps the state elsewhere gathers it here; what a checkpoint put into the optimizer it collects
        in :meth:`begin_run`.

        Args:
            only_on: The one rank that will use it: where it has to be gathered, the others' ``"state"`` is empty.
                None: all of them.
        """
        return self._required_optimizer.state_dict()

    # ---- for schemes ---------------------------------------------------------------------------------------------

    def _new_state(self) -> SchemeState:
        return self.state_type()

    def before_step(self, last: bool) -> Update | None:
        """Prepare the user's step.

        Args:
            last: As :meth:`step` gets it.

        Returns:
            What replaces the optimizer's step in this attempt, called once, when the gradients are there; or None.
        """
        return None

    def after_step(self, last: bool) -> None:
        """Launch, collect or merge, as the schedule says; called after the user's step was counted."""

    def average(self) -> None:
        """Replace the replica by the weighted mean over all ranks, and train on from there; blocks."""
        if self._write_mean():
            self.guard.begin_optimizer_anew()
        self.guard.average_optimizer_state()
        self.state.unsynchronized_steps = 0
        self.state.synchronizations += 1

    def _write_mean(self) -> bool:
        """Write the weighted mean over all ranks to the replica, in the parameters' own type; blocks.

        Returns:
            Whether this rank was non-finite, and has got the others' mean: see :meth:`NonFiniteGuard.repair`.
        """
        if self.in_first_phase:
            return self._write_mean_of_buffers()
        return self.guard.average(self.replica.buckets, self.state.steps)

    @property
    def in_first_phase(self) -> bool:
        """Whether gradients are averaged over more ranks than later."""
        return self.gradients != self.config.gradients

    def _after_synchronous_step(self) -> None:
        """Count a step whose gradients were averaged over all ranks, so that only float buffers differ."""
        self.state.synchronizations += 1
        if not self.replica.buffers:
            self.state.unsynchronized_steps = 0
        if self.state.steps % _CHECK_EVERY == 0:
            self._check_parameters()

    def _write_mean_of_buffers(self) -> bool:
        return self.guard.average(self.replica.buckets_of_buffers, self.state.steps)

    def _check_parameters(self) -> None:
        if not self.is_alone:
            self.guard.look(self.replica.buckets_of_parameters, self.state.steps)

    def _new_background(self, waits_for_nodes: bool = True) -> Background:
        """Make a thread (or stream) that overlaps with training, which :meth:`close` ends; for constructors.

        Args:
            waits_for_nodes: Whether its jobs wait for collectives between nodes.
        """
        puts_off = waits_for_nodes and self.topology.waits_on_host
        background = Background(self.replica.device, self.topology.meter, puts_off=puts_off)
        self.backgrounds.append(background)
        return background

    @property
    def _required_optimizer(self) -> Optimizer:
        if self.optimizer is None:
            raise ValueError(f"{type(self.config).__name__} needs the optimizer that trains the replica")
        return self.optimizer


def _held_by_ranks(replica: Replica, config: Scheme) -> Replica:
    """The same, where ranks of a node that do not share gradients hold values that differ."""
    is_equal = config.gradients != "none"
    return replica if replica.equal_in_node == is_equal else replica.of_ranks_that_differ()


_OF_WHAT_RUNS = {
    *(name for name in vars(RunningScheme) if not name.startswith("_") and name not in vars(Scheme)),
    *("attach", "open", "has_update", "update"),  # when a scheme and what runs by it were one class
}
"""What nobody looks for in a scheme."""
