"""What every scheme is."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm.base import Handle
from lightning_hiercomm.comm.lane import Lane
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.replica import Replica
from lightning_hiercomm.schemes.averaging import Average, average_optimizer_state, same_step
from lightning_hiercomm.topology import Topology

T = TypeVar("T")


class Scheme(ABC):
    """When and how the replicas of one optimizer agree.

    A scheme is configured by its constructor, which holds plain values only, and works once :meth:`bind` gave it a
    replica. The strategy makes one deep copy of the configured scheme per optimizer.

    The order of calls is ``bind``, ``begin_run``, then for every epoch ``begin_epoch``, ``step`` for every attempt of
    the optimizer to step, ``end_epoch``; and ``finish`` at the end. ``agree`` may come between any two of them. All of
    them are collective: every rank makes the same calls in the same order.

    Attributes:
        gradients: Over whom gradients are averaged: ``"intra"`` (the node), ``"world"``, or ``"none"``.
        watches_loss: Whether :meth:`end_epoch` needs the training loss.
        replica: The parameters (and float buffers) that agree.
        topology: The nodes, their communicators and weights.
        optimizer: The user's optimizer.
        wire: Payload type between nodes.
        steps: Optimizer-step attempts in this run, resumed runs included.
        step_in_epoch: The same, since the epoch began.
        epoch: Epochs begun before this one.
        unagreed_steps: Steps since the nodes last held the same parameters.
        agreements: How often they came to do so.
        averages_optimizer_state: Whether :meth:`average` also averages the optimizer's state.
        lanes: The lanes that the scheme opened; :meth:`close` closes them.
    """

    gradients: Literal["intra", "world", "none"] = "intra"
    watches_loss: bool = False

    replica: Replica
    topology: Topology
    optimizer: Optimizer | None
    wire: Wire

    def __init__(self) -> None:
        self.steps = 0
        self.step_in_epoch = 0
        self.epoch = 0
        self.unagreed_steps = 0
        self.agreements = 0
        self.averages_optimizer_state = False
        self.lanes: list[Lane] = []

    # ---- life of a run -------------------------------------------------------------------------------------------

    def bind(
        self, replica: Replica, topology: Topology, optimizer: Optimizer | None = None, wire: Wire | None = None
    ) -> None:
        """Meet the replica. Its values are equal on all ranks; may be called again when the parameters change."""
        self.replica = replica
        self.topology = topology
        self.optimizer = optimizer
        self.wire = wire or Wire()
        self._average = Average(replica, topology, self.wire)

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

        Args:
            run: The user's own step: forward, backward, clipping, ``optimizer.step()``.
            last: Whether it is known to be the last one of the epoch.

        Returns:
            What ``run`` returns.
        """
        result = run()
        self.count_step()
        self.after_step()
        return result

    def after_step(self) -> None:
        """Called after the user's step: launch, collect or merge, as the schedule says."""

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
        for lane in self.lanes:
            lane.close(timeout)

    # ---- the agreed model ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for what is in flight, keeping what arrived for its scheduled merge."""

    def agree(self) -> None:
        """Write the agreed parameters to the replica: here, the weighted mean over all ranks.

        The caller keeps a snapshot if training is to go on from where it was.
        """
        self.settle()
        if self.unagreed_steps:
            self._average(self.steps, exact=True)

    @property
    def is_agreed(self) -> bool:
        """Whether :meth:`agree` would change nothing."""
        return self.unagreed_steps == 0

    # ---- gradients -----------------------------------------------------------------------------------------------

    def reduce_gradients(self, bucket: Tensor) -> Handle:
        """Average a 1-D bucket of gradients in place while the backward pass goes on: here, over the node.

        Each rank contributes with its share of the node, ``w_r / W_m``.
        """
        topology = self.topology
        if topology.intra.size > 1:
            bucket.mul_(topology.weight_in_node)
        return topology.intra.all_reduce(bucket)

    # ---- state and what a person may watch -----------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """The name of what the scheme is doing, for progress bars."""
        return "training"

    def scalars(self) -> dict[str, float]:
        """Current values to log, such as ``sync_every`` and ``staleness``."""
        return {}

    def schedule(self) -> dict[str, Any]:
        """The state that all replicas share, as primitives: what a plain checkpoint holds."""
        return {
            "steps": self.steps,
            "step_in_epoch": self.step_in_epoch,
            "epoch": self.epoch,
            "unagreed_steps": self.unagreed_steps,
            "agreements": self.agreements,
        }

    def state_dict(self) -> dict[str, Any]:
        """All state: :meth:`schedule`, and this rank's own tensors. The replica's values are not part of it."""
        return {**self.schedule(), "average": self._average.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, or :meth:`schedule`.

        A plain checkpoint has no ``"average"``: its parameters are the agreed ones, from which all ranks go on.
        """
        self.steps = state["steps"]
        self.step_in_epoch = state["step_in_epoch"]
        self.epoch = state["epoch"]
        self.agreements = state["agreements"]
        self.unagreed_steps = state["unagreed_steps"]
        if "average" in state:
            self._average.load_state_dict(state["average"])

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state for a checkpoint, as ``Optimizer.state_dict`` lays it out. Collective.

        A scheme that keeps the state elsewhere gathers it here; what a checkpoint put into the optimizer it collects
        in :meth:`begin_run`.
        """
        assert self.optimizer is not None
        return self.optimizer.state_dict()

    # ---- for schemes ---------------------------------------------------------------------------------------------

    def count_step(self) -> None:
        """Count an attempt; also one that a gradient scaler skipped, so that ranks cannot fall out of step."""
        self.steps += 1
        self.step_in_epoch += 1
        self.unagreed_steps += 1

    def run_with_update(self, run: Callable[[], T], update: Callable[[Callable[[], object]], object]) -> T:
        """Run the user's step with ``update`` in place of the optimizer's own.

        Args:
            run: The user's step. Inside it, whoever calls ``optimizer.step`` (Lightning, a precision plugin after
                unscaling and clipping) calls ``update`` once the gradients are there.
            update: Gets the original ``optimizer.step`` as a function without arguments.
        """
        optimizer = self.optimizer
        assert optimizer is not None
        patched_by_others = vars(optimizer).get("step")  # a learning-rate scheduler counts calls this way
        original = optimizer.step

        def step(closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            update(original)
            return loss

        optimizer.step = step  # type: ignore[method-assign]
        try:
            return run()
        finally:
            if patched_by_others is None:
                del optimizer.step
            else:
                optimizer.step = patched_by_others  # type: ignore[method-assign]

    def average(self) -> None:
        """Replace the replica by the weighted mean over all ranks, and go on from there; blocks."""
        self._average(self.steps)
        if self.averages_optimizer_state and self.optimizer is not None:
            average_optimizer_state(self.optimizer, self.replica, self.topology)
        self.unagreed_steps = 0
        self.agreements += 1
