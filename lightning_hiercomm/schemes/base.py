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
from lightning_hiercomm.schemes.profile import Profile

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
    def profile(self) -> Profile:
        """What it needs of a run, and costs; another scheme says what differs, by :func:`dataclasses.replace`."""
        kind = type(self).__name__
        alone = (
            f"{kind}(gradients='none') lets every rank train a whole model by itself, but the ranks of a node hold"
            " parts of one: use gradients='node'"
        )
        return Profile(
            needs_whole_parameters=alone if self.gradients == "none" else None,
            needs_nodes_that_stay=f"{kind} is not made for nodes that come and go: take PeriodicAveraging or DiLoCo",
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

    def next_step(self, steps_of_epoch: int) -> Scheme:
        """A scheme that takes nothing but steps as the first of this one's, for whoever asks what that costs.

        Args:
            steps_of_epoch: Optimizer steps of an epoch.
        """
        return self


class RunningScheme(Generic[S]):
    """A scheme at work on the replica of one optimizer, from the first step of a run to its end.

    The constructor opens the links, and is called by :meth:`Scheme.build`. Then, on every rank and in the same order,
    since all of it is collective:

    1. :meth:`begin_run`; for every epoch :meth:`begin_epoch`, :meth:`step` for every attempt of the optimizer to step,
       :meth:`end_epoch`; and :meth:`finish`.
    2. Between any two of these: :meth:`synchronize`, and :meth:`follow` when other parameters are to be trained, which
       opens links only for parameters of a type that needs more of them.
    3. :meth:`close`, once, the only call that is not collective.

    A new scheme overrides :meth:`after_step` and, where it needs more, the other hooks named below "for schemes". What
    changes while it runs is its own; what the user has chosen stays in :attr:`config`.

    Args:
        config: What the user has written.
        context: What is trained, and by whom.

    Attributes:
        config: As above.
        gradients: Over whom gradients are averaged in the present phase.
        phase: The name of what the scheme is doing, for progress bars.
        replica: The parameters (and float buffers) that agree.
        topology: The nodes, their communicators and weights.
        optimizer: The user's optimizer.
        wire: What parameters look like between nodes.
        is_alone: Whether there is nobody to agree with: one node, of one rank or of ranks that share their gradients.
        care: Averages; finds what is not finite, or differs inside a node, and heals it or says so.
        steps: Optimizer-step attempts in this run, resumed runs included.
        step_in_epoch: The same, since the epoch began.
        epoch: Epochs begun before this one.
        unsynchronized_steps: Steps since the nodes last held the same parameters.
        agreements: How often they came to do so.
        may_ask: Whether :meth:`shared_state` may ask other ranks.
    """

    phase: str = "training"

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
        self.steps = 0
        self.step_in_epoch = 0
        self.epoch = 0
        self.unsynchronized_steps = 0
        self.synchronizations = 0
        self.may_ask = True
        self.backgrounds: list[Background] = []

    # ---- life of a run -------------------------------------------------------------------------------------------

    def follow(self, replica: Replica) -> None:
        """From now on other parameters are trained (some were unfrozen), or the same from other values.

        Args:
            replica: All of them; their values are equal on all ranks, so the nodes begin anew from them.
        """
        self.replica = _held_by_ranks(replica, self.config)
        self.unsynchronized_steps = 0
        self.guard.follow(self.replica)

    def begin_run(self, epochs: int | None, steps: int | None) -> None:
        """Training starts or resumes.

        Args:
            epochs: The number of epochs the run will have, or None if that is not known.
            steps: The number of optimizer steps after which the run ends, or None if that is not known.
        """

    def begin_epoch(self, epoch: int, metrics: Mapping[str, Tensor]) -> None:
        """An epoch starts.

        Args:
            epoch: Its number, from 0.
            metrics: What the user logged so far.
        """
        self.epoch = epoch
        self.step_in_epoch = 0

    def step(self, run: Callable[[], T], last: bool = False) -> T:
        """One attempt of the optimizer to step.

        It counts also if a gradient scaler skips the optimizer, so that ranks cannot fall out of step.

        Args:
            run: The user's own step: forward, backward, clipping, ``optimizer.step()``.
            last: Whether it is known to be the last one of the epoch.

        Returns:
            What ``run`` returns.
        """
        is_synchronous = self.in_first_phase
        update = None if is_synchronous else self.before_step(last)
        with nullcontext() if update is None else in_place_of_step(self.required_optimizer, update):
            result = run()
        self.steps += 1
        self.step_in_epoch += 1
        self.unsynchronized_steps += 1
        if is_synchronous:
            self.after_synchronous_step()
        else:
            self.after_step(last)
        return result

    def end_epoch(self, loss: Tensor | None) -> None:
        """The epoch's last batch is done; validation and checkpoints come next.

        Args:
            loss: This rank's mean training loss of the epoch (scalar), if :attr:`Scheme.watches_loss`.
        """

    def hear_metrics(self, logged: Callable[[], Mapping[str, Tensor]]) -> None:
        """A file is about to be saved, or the run to end, and nobody will know of the metrics later. Collective.

        Args:
            logged: What the user has logged so far.
        """

    def finish(self) -> None:
        """The run is over: nothing stays in flight, and every rank holds the agreed parameters."""
        self.synchronize()
        if not (self.is_alone or self.topology.may_grow):  # outside of an agreement elastic nodes do not communicate
            Preflight(self.topology, self.steps, torch.zeros((), dtype=torch.int64, device=self.replica.device))
        self.unsynchronized_steps = 0
        self.guard.follow(self.replica)
        self.close()

    def close(self, timeout: float = 10.0) -> None:
        """End background threads, also after an error; the only call that is not collective.

        Args:
            timeout: Seconds to wait for each; a thread that is stuck in a move is left behind.
        """
        for background in self.backgrounds:
            background.close(timeout)

    # ---- the agreed model ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for what is in flight, keeping what arrived for its scheduled merge."""

    def synchronize(self) -> None:
        """Write the agreed parameters to the replica: here, the weighted mean over all ranks.

        The caller keeps a snapshot if training is to go on from where it was.
        """
        self.settle()
        if self.unsynchronized_steps:
            self.topology.synchronize(self.exact_mean)

    @property
    def is_synchronized(self) -> bool:
        """Whether :meth:`synchronize` would change nothing."""
        return self.unsynchronized_steps == 0

    @property
    def may_be_copied(self) -> bool:
        """Whether another node may begin with a copy of what this one has become, whatever its own steps."""
        return self.config.profile.begins_with_copy

    # ---- state and what a person may watch -----------------------------------------------------------------------

    def next_step(self, steps_of_epoch: int) -> Scheme:
        """As :meth:`Scheme.next_step`, of the step that comes next."""
        return self.config.next_step(steps_of_epoch)

    def scalars(self) -> dict[str, float]:
        """Current values to log, such as ``sync_every`` and ``staleness``."""
        return {}

    def shared_state(self) -> dict[str, Any]:
        """The state that all replicas share, as primitives and tensors: what a plain checkpoint holds. Collective.

        Not :attr:`may_ask`: without what only others know; a rank that is alone with an error saves the rest.
        """
        return {
            "scheme": type(self.config).__name__,
            "steps": self.steps,
            "step_in_epoch": self.step_in_epoch,
            "epoch": self.epoch,
            "synchronizations": self.synchronizations,
        }

    def state_dict(self) -> dict[str, Any]:
        """All state: :meth:`shared_state`, and this rank's own. The replica's values are not part of it. Collective."""
        state = {**self.shared_state(), "unsynchronized_steps": self.unsynchronized_steps}
        of_optimizer = self.guard.state_dict()
        return {**state, "optimizer_average": of_optimizer} if of_optimizer else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, or :meth:`shared_state`.

        A plain checkpoint has no ``"unsynchronized_steps"``: its parameters are the averaged ones.
        """
        self.steps = state["steps"]
        self.step_in_epoch = state["step_in_epoch"]
        self.epoch = state["epoch"]
        self.synchronizations = state["synchronizations"]
        self.unsynchronized_steps = state.get("unsynchronized_steps", 0)
        self.guard.load_state_dict(state.get("optimizer_average", {}))

    def undo_point(self) -> Callable[[], None]:
        """Remember all that an agreement changes; what is returned takes it back, to the bit. Not collective."""
        undo_values = self.replica.undo_point()
        unsynchronized_steps, agreements, nonfinite = (
            self.unsynchronized_steps,
            self.synchronizations,
            self.guard.nonfinite,
        )

        def undo() -> None:
            undo_values()
            self.unsynchronized_steps, self.synchronizations, self.guard.nonfinite = (
                unsynchronized_steps,
                agreements,
                nonfinite,
            )

        return undo

    def before_nodes_change(self) -> Callable[[], None]:
        """The topology is about to hold other nodes; call what is returned when it does. Collective over the node."""
        unagreed = self.unsynchronized_steps

        def go_on() -> None:
            self.follow(self.replica)
            self.unsynchronized_steps = unagreed

        return go_on

    def optimizer_state(self, only_on: int | None = None) -> dict[str, Any]:
        """The optimizer's state for a checkpoint, as ``Optimizer.state_dict`` lays it out. Collective.

        A scheme that keeps the state elsewhere gathers it here; what a checkpoint put into the optimizer it collects
        in :meth:`begin_run`.

        Args:
            only_on: The one rank that will use it: where it has to be gathered, the others' ``"state"`` is empty.
                None: all of them.
        """
        return self.required_optimizer.state_dict()

    # ---- for schemes ---------------------------------------------------------------------------------------------

    def before_step(self, last: bool) -> Update | None:
        """Called before the user's step.

        Args:
            last: As :meth:`step` gets it.

        Returns:
            What takes the place of the optimizer's step in this attempt, called once, when the gradients are there;
            None if nothing does.
        """
        return None

    def after_step(self, last: bool) -> None:
        """Called after the user's step was counted: launch, collect or merge, as the schedule says."""

    @property
    def in_first_phase(self) -> bool:
        """Whether gradients are averaged over more ranks than later."""
        return self.gradients != self.config.gradients

    def after_synchronous_step(self) -> None:
        """Count a step whose gradients were averaged over all ranks, so that only float buffers differ.

        In a first phase it is called instead of :meth:`after_step`.
        """
        self.synchronizations += 1
        if not self.replica.buffers:
            self.unsynchronized_steps = 0
        if self.steps % _CHECK_EVERY == 0:
            self._check_parameters()

    def end_synchronous_epoch(self) -> None:
        """Check parameters at the end of an epoch in which gradients were averaged over all ranks."""
        self.guard.verify(self.steps)
        self._check_parameters()

    def synchronous_mean(self) -> bool:
        """Write the weighted mean of the float buffers over all ranks, where parameters are equal; blocks."""
        return self.guard.average(self.replica.buckets_of_buffers, self.steps)

    def _check_parameters(self) -> None:
        if not self.is_alone:
            self.guard.look(self.replica.buckets_of_parameters, self.steps)

    def background(self, waits_for_nodes: bool = True) -> Background:
        """A new thread (or stream) beside training, which :meth:`close` ends; for constructors.

        Args:
            waits_for_nodes: Whether its jobs wait for moves between nodes.
        """
        puts_off = waits_for_nodes and self.topology.waits_on_host
        background = Background(self.replica.device, self.topology.meter, puts_off=puts_off)
        self.backgrounds.append(background)
        return background

    @property
    def required_optimizer(self) -> Optimizer:
        """The user's optimizer, for a scheme that cannot do without."""
        if self.optimizer is None:
            raise ValueError(f"{type(self.config).__name__} needs the optimizer that trains the replica")
        return self.optimizer

    def average(self) -> None:
        """Replace the replica by the weighted mean over all ranks, and go on from there; blocks."""
        if self.exact_mean():
            self.guard.begin_optimizer_anew()
        self.guard.average_optimizer_state()
        self.unsynchronized_steps = 0
        self.synchronizations += 1

    def exact_mean(self) -> bool:
        """Write the weighted mean over all ranks to the replica, in the parameters' own type; blocks.

        Returns:
            Whether this rank was sick, and has got the others' mean: see :meth:`NonFiniteGuard.repair`.
        """
        if self.in_first_phase:
            return self.synchronous_mean()
        return self.guard.average(self.replica.buckets, self.steps)


def _held_by_ranks(replica: Replica, config: Scheme) -> Replica:
    """The same, where ranks of a node that do not share gradients hold values that differ."""
    is_equal = config.gradients != "none"
    return replica if replica.equal_in_node == is_equal else replica.of_ranks_that_differ()


_OF_WHAT_RUNS = {
    *(name for name in vars(RunningScheme) if not name.startswith("_") and name not in vars(Scheme)),
    *("attach", "open", "has_update", "update"),  # when a scheme and what runs by it were one class
}
"""What nobody looks for in a scheme."""
