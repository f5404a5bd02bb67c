"""What every scheme is."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.replica import Replica
from lightning_hiercomm.schemes.averaging import Average, average_optimizer_state, same_step
from lightning_hiercomm.topology import Topology

T = TypeVar("T")

Gradients = Literal["node", "world", "none"]


class Scheme(ABC):
    """When and how the replicas of one optimizer agree.

    A scheme is configured by its constructor, which holds plain values only. The strategy makes one deep copy of the
    configured scheme per optimizer, and then calls, on every rank and in the same order, since all of it is collective:

    1. :meth:`attach`, once: here are the replica, the nodes and the optimizer. Links are opened here, and nowhere else.
    2. :meth:`begin_run`; for every epoch :meth:`begin_epoch`, :meth:`step` for every attempt of the optimizer to step,
       :meth:`end_epoch`; and :meth:`finish`.
    3. Between any two of these: :meth:`agree`, and :meth:`follow` when other parameters are to be trained.
    4. :meth:`close`, once, the only call that is not collective.

    A new scheme overrides :meth:`after_step` and, where it needs more, the other hooks named below "for schemes".

    Attributes:
        gradients: Over whom gradients are averaged: the ranks of the ``"node"``, the ``"world"``, or ``"none"`` other.
        watches_loss: Whether :meth:`end_epoch` needs the training loss.
        averages_optimizer_state: Whether :meth:`average` also averages the optimizer's state. The strategy sets it.
        replica: The parameters (and float buffers) that agree.
        topology: The nodes, their communicators and weights.
        optimizer: The user's optimizer.
        wire: What parameters look like between nodes.
        steps: Optimizer-step attempts in this run, resumed runs included.
        step_in_epoch: The same, since the epoch began.
        epoch: Epochs begun before this one.
        unagreed_steps: Steps since the nodes last held the same parameters.
        agreements: How often they came to do so.
    """

    gradients: Gradients = "node"
    watches_loss: bool = False
    replica: Replica
    topology: Topology
    optimizer: Optimizer | None
    wire: Wire

    def __init__(self) -> None:
        self.averages_optimizer_state = False
        self.steps = 0
        self.step_in_epoch = 0
        self.epoch = 0
        self.unagreed_steps = 0
        self.agreements = 0
        self._backgrounds: list[Background] = []

    def __repr__(self) -> str:
        """The scheme as one would write it: its first argument, and those that are not the default."""
        parameters = list(inspect.signature(type(self)).parameters.values())
        values = {parameter.name: getattr(self, parameter.name, parameter.default) for parameter in parameters}
        said = [
            f"{parameter.name}={values[parameter.name]!r}"
            for index, parameter in enumerate(parameters)
            if index == 0 or values[parameter.name] != parameter.default
        ]
        return f"{type(self).__name__}({', '.join(said)})"

    @property
    def can_average_optimizer_state(self) -> bool:
        """Whether the nodes ever wait for each other with an optimizer's state that could be averaged."""
        return False

    # ---- life of a run -------------------------------------------------------------------------------------------

    def attach(
        self, replica: Replica, topology: Topology, optimizer: Optimizer | None = None, wire: Wire | None = None
    ) -> None:
        """Meet what is trained, and open what the scheme needs; to be called once.

        Args:
            replica: The parameters and buffers; their values are equal on all ranks.
            topology: The nodes, as long as the scheme lives.
            optimizer: The user's optimizer of these parameters.
            wire: What they look like between nodes. Default: as they are.
        """
        self.replica = replica
        self.topology = topology
        self.optimizer = optimizer
        self.wire = wire or Wire()
        self.open()
        self.follow(replica)

    def follow(self, replica: Replica) -> None:
        """From now on other parameters are trained (some were thawed), or the same from other values.

        Args:
            replica: All of them; their values are equal on all ranks, so the nodes begin anew from them.
        """
        self.replica = replica
        self.unagreed_steps = 0

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
        self.before_step(last)
        result = self._run_with_update(run) if self.has_update() else run()
        self.steps += 1
        self.step_in_epoch += 1
        self.unagreed_steps += 1
        self.after_step(last)
        return result

    def end_epoch(self, loss: Tensor | None) -> None:
        """The epoch's last batch is done; validation and checkpoints come next.

        Args:
            loss: This rank's mean training loss of the epoch (scalar), if :attr:`watches_loss`.
        """

    def finish(self) -> None:
        """The run is over: nothing stays in flight, and every rank holds the agreed parameters."""
        self.agree()
        same_step(self.topology, self.steps, self.replica.device).wait()
        self.unagreed_steps = 0
        self.close()

    def close(self, timeout: float = 10.0) -> None:
        """End background threads, also after an error; the only call that is not collective.

        Args:
            timeout: Seconds to wait for each; a thread that is stuck in a move is left behind.
        """
        for background in self._backgrounds:
            background.close(timeout)

    # ---- the agreed model ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for what is in flight, keeping what arrived for its scheduled merge."""

    def agree(self) -> None:
        """Write the agreed parameters to the replica: here, the weighted mean over all ranks.

        The caller keeps a snapshot if training is to go on from where it was.
        """
        self.settle()
        if self.unagreed_steps:
            self.exact_mean()

    @property
    def is_agreed(self) -> bool:
        """Whether :meth:`agree` would change nothing."""
        return self.unagreed_steps == 0

    # ---- state and what a person may watch -----------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """The name of what the scheme is doing, for progress bars."""
        return "training"

    def scalars(self) -> dict[str, float]:
        """Current values to log, such as ``sync_every`` and ``staleness``."""
        return {}

    def schedule(self) -> dict[str, Any]:
        """The state that all replicas share, as primitives and tensors: what a plain checkpoint holds. Collective."""
        return {
            "steps": self.steps,
            "step_in_epoch": self.step_in_epoch,
            "epoch": self.epoch,
            "agreements": self.agreements,
        }

    def state_dict(self) -> dict[str, Any]:
        """All state: :meth:`schedule`, and this rank's own. The replica's values are not part of it. Collective."""
        return {**self.schedule(), "unagreed_steps": self.unagreed_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, or :meth:`schedule`.

        A plain checkpoint has no ``"unagreed_steps"``: its parameters are the agreed ones, from which all ranks go on.
        """
        self.steps = state["steps"]
        self.step_in_epoch = state["step_in_epoch"]
        self.epoch = state["epoch"]
        self.agreements = state["agreements"]
        self.unagreed_steps = state.get("unagreed_steps", 0)

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state for a checkpoint, as ``Optimizer.state_dict`` lays it out. Collective.

        A scheme that keeps the state elsewhere gathers it here; what a checkpoint put into the optimizer it collects
        in :meth:`begin_run`.
        """
        return self.required_optimizer.state_dict()

    # ---- for schemes ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open communicators and background threads, and refuse what cannot work; called once, by :meth:`attach`."""

    def before_step(self, last: bool) -> None:
        """Called before the user's step."""

    def has_update(self) -> bool:
        """Whether :meth:`update` takes the place of the optimizer's step in this attempt."""
        return False

    def update(self, optimizer_step: Callable[[], object] | None) -> None:
        """In place of the optimizer's step, once per attempt, when the gradients are there.

        Args:
            optimizer_step: The user's own; None where a gradient scaler skipped it, on this rank or on its node.
        """

    def after_step(self, last: bool) -> None:
        """Called after the user's step was counted: launch, collect or merge, as the schedule says."""

    def background(self, tier: str = "inter") -> Background:
        """A new thread (or stream) beside training, which :meth:`close` ends."""
        background = Background(self.device, self.topology.meter, tier)
        self._backgrounds.append(background)
        return background

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.replica.device

    @property
    def required_optimizer(self) -> Optimizer:
        """The user's optimizer, for a scheme that cannot do without."""
        if self.optimizer is None:
            raise ValueError(f"{type(self).__name__} needs the optimizer that trains the replica")
        return self.optimizer

    @property
    def equal_in_node(self) -> bool:
        """Whether the ranks of a node hold the same parameters at every step."""
        return self.gradients != "none"

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with: one node, whose ranks share their gradients."""
        return self.topology.num_nodes == 1 and self.equal_in_node

    def average(self) -> None:
        """Replace the replica by the weighted mean over all ranks, and go on from there; blocks."""
        self.exact_mean()
        self.nodes_agree()

    def exact_mean(self) -> None:
        """Write the weighted mean over all ranks to the replica, in the parameters' own type; blocks."""
        Average(self.replica, self.topology, equal_in_node=self.equal_in_node)(self.steps)

    def nodes_agree(self) -> None:
        """Say that the nodes hold the same parameters; averages the optimizer's state as well, if it is asked for."""
        if self.averages_optimizer_state:
            average_optimizer_state(self.required_optimizer, self.replica, self.topology)
        self.unagreed_steps = 0
        self.agreements += 1

    def _run_with_update(self, run: Callable[[], T]) -> T:
        """Run the user's step with :meth:`update` in place of the optimizer's own.

        Whoever calls ``optimizer.step`` inside it (Lightning, a precision plugin after unscaling and clipping) calls
        :meth:`update` once the gradients are there; if nobody does, it is called afterwards.
        """
        optimizer = self.required_optimizer
        patched_by_others = vars(optimizer).get("step")  # a learning-rate scheduler counts calls this way
        original = optimizer.step
        was_called = False

        def step(closure: Callable[[], Any] | None = None) -> Any:
            nonlocal was_called
            was_called = True
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.update(original)
            return loss

        optimizer.step = step  # type: ignore[method-assign]
        try:
            result = run()
        finally:
            if patched_by_others is None:
                del optimizer.step
            else:
                optimizer.step = patched_by_others  # type: ignore[method-assign]
        if not was_called:
            self.update(None)
        return result
