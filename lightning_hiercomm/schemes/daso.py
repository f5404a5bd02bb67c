"""DASO: nodes average without waiting, with parameters a few batches old."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_hiercomm.schemes.base import Context
from lightning_hiercomm.schemes.components.schedules import Auto, Every, Schedule
from lightning_hiercomm.schemes.parameter_sync import ParameterSync, RunningParameterSync, SyncState
from lightning_hiercomm.schemes.phases import Moment
from lightning_hiercomm.schemes.plateau import Plateau
from lightning_hiercomm.schemes.requirements import Requirements
from lightning_hiercomm.schemes.tuning import OVERHEAD_TARGET, tuned

log = logging.getLogger(__name__)

_PHASES = ("warm-up", "cycling", "cool-down")
_EPOCHS = 4
_LARGEST_SHARE = 1 / 4  # of a short run, or it would have nothing but warm-up and cool-down


def _length_of_phase(in_epochs: int | None, in_steps: int | None, epochs: int | None, steps: int | None) -> Moment:
    """How long warm-up, or cool-down, takes in a run, as the user has set it or by default."""
    if in_steps is not None:
        return Moment(step=in_steps)
    if in_epochs is not None:
        return Moment(epoch=in_epochs)
    if steps is not None and (epochs is None or epochs * _LARGEST_SHARE < 1):
        return Moment(step=int(steps * _LARGEST_SHARE))
    return Moment(epoch=_EPOCHS if epochs is None else min(_EPOCHS, int(epochs * _LARGEST_SHARE)))


class DASO(ParameterSync):
    """Average parameters between nodes every few batches without waiting, and merge what is a few batches old.

    Every batch, gradients are averaged inside the node and the optimizer steps. A run has three phases.

    - **Warm-up** and **cool-down**: after every step the nodes take the mean of their parameters, and wait for it.
    - **Cycling**, between them: after batch ``t = 0, B, 2B, ...`` of an epoch the nodes start to sum their parameters
      and go on training; after batch ``t + S`` each merges the sum with what it has become (Eq. 1, with P nodes)::

          x := (2 S x_local + sum of sent x) / (2 S + P)

      The last batch of an epoch ends in a mean that is waited for; a sum in flight is then dropped. When the loss stops
      falling, B and S halve (at least 1); if it stops at B = S = 1, they return to their first values.

    Eq. 1 leaves the progress made in the S batches only the weight ``2 S / (2 S + P)``: half with 2 nodes, 3 % with 64
    (S = 1). ``merge="delta"`` keeps all of it, and with it the mean over the nodes::

          x := x_local + mean of sent x - own sent x

    Nodes of unequal weight W_m (unequal numbers of ranks or samples): ``P sum_m W_m x_m`` takes the place of the sum.
    Local progress keeps the weight 2 S on every node, so a merge moves all nodes by the same fraction towards the mean.

    Float buffers (BatchNorm statistics), which no training step reads, take part only in the means that are waited for.

    Source: DASO, Section 3, Eq. 1. Paper settings: ``sync_every=4, staleness=1``; parameters are sent as bfloat16 in
    the blocking phases, by ``wire_dtype="bfloat16"``, ``Transport(wire_raw=True)`` and ``narrow_phases="blocking"``
    here, which is not the default. It names no lengths of warm-up and cool-down, no threshold and no patience: those
    defaults are ours.

    Args:
        sync_every: B, batches between the starts of two exchanges in the cycling phase. ``"auto"``: a few when it
            begins, which is timed; then as few as ``overhead_target`` allows.
        staleness: S, batches between the start of an exchange and its merge, up to ``sync_every``. 0: training waits
            for a mean every ``sync_every`` batches (6 of the 20 rows of the paper's Table 2).
        warmup_epochs: Epochs of warm-up. None: 4, or a quarter of a run of fewer than 16 epochs, rounded down; where
            that is less than one, a quarter of the run's optimizer steps.
        cooldown_epochs: Epochs of cool-down, for which the run's end must be known (``Trainer(max_epochs=...)``). None:
            as for ``warmup_epochs``, and none at all where the end is not known.
        merge: ``"eq1"`` as in the paper, or ``"delta"``, see above.
        threshold: How much, relative to the best so far, an epoch's loss must fall to count as falling.
        patience: How many epochs in a row it may fail to before B and S change. Only cycling epochs are judged.
        warmup_steps: Optimizer steps of warm-up, in place of ``warmup_epochs``.
        cooldown_steps: Optimizer steps of cool-down, in place of ``cooldown_epochs``, for which the run's end must be
            known, too (``Trainer(max_steps=...)``, or epochs whose length is known).
        reducer: How parameters are averaged between nodes. ``"leader"``: one rank per node carries all of them, the
            next rank the next time (the paper). ``"sharded"``: all ranks carry equal parts, which is faster where every
            rank has a network link of its own. The numbers are the same.
        monitor: The metric that is watched in place of the training loss, such as ``"val_loss"``: lower is better. It
            must be logged by the end of the first cycling epoch, and judges those that log it. Default: what
            ``training_step`` returns. Both are averaged over all ranks.
        adapt: Let B and S follow the loss, as above. False keeps them as they are.
        gradients: ``"node"``, as above. ``"none"``: gradients are not exchanged, so every rank trains alone between
            exchanges, which then average inside the node as well.
        narrow_phases: In which phases ``wire_dtype`` acts: in ``"all"``, or in the ``"blocking"`` ones only, while what
            is not waited for travels as it is (the paper's section 3).
        overhead_target: With ``sync_every="auto"``, the share of the time of training that it may wait for exchanges.

    Raises:
        ValueError: If an argument is out of range; when the run begins, if the cool-down has no end to count from.
    """

    def __init__(
        self,
        sync_every: int | Literal["auto"] = 4,
        staleness: int = 1,
        warmup_epochs: int | None = None,
        cooldown_epochs: int | None = None,
        merge: Literal["eq1", "delta"] = "eq1",
        threshold: float = 0.05,
        patience: int = 2,
        warmup_steps: int | None = None,
        cooldown_steps: int | None = None,
        reducer: Literal["leader", "sharded"] = "leader",
        monitor: str | None = None,
        adapt: bool = True,
        gradients: Literal["node", "none"] = "node",
        narrow_phases: Literal["all", "blocking"] = "all",
        overhead_target: float = OVERHEAD_TARGET,
    ) -> None:
        period, auto = tuned(sync_every, overhead_target, least=staleness)
        if period < 1:
            raise ValueError(f"sync_every={period} must be a positive number of batches")
        if not 0 <= staleness <= period:
            raise ValueError(
                f"staleness={staleness} must be from 0 to sync_every={period}: one exchange is in flight at a time"
            )
        lengths = {
            "warmup_epochs": warmup_epochs,
            "cooldown_epochs": cooldown_epochs,
            "warmup_steps": warmup_steps,
            "cooldown_steps": cooldown_steps,
        }
        for name, length in lengths.items():
            if length is not None and length < 0:
                raise ValueError(f"{name}={length} must not be negative; 0 leaves the phase out")
        if narrow_phases not in ("all", "blocking"):
            raise ValueError(f"narrow_phases={narrow_phases!r} must be 'all' or 'blocking'")
        if merge not in ("eq1", "delta"):
            raise ValueError(f"merge={merge!r} must be 'eq1' or 'delta'")
        if reducer not in ("leader", "sharded"):
            raise ValueError(f"reducer={reducer!r} must be 'leader' or 'sharded'")
        every = Every(period, of="epoch")
        super().__init__(
            schedule=every if auto is None else Auto(every, auto),
            reducer=reducer,
            merge=merge,
            staleness=staleness,
            gradients=gradients,
        )
        self.sync_every = sync_every
        self.overhead_target = overhead_target
        self.adapt = adapt
        self.narrow_phases: Literal["all", "blocking"] = narrow_phases
        self.is_exact_overlapped = narrow_phases == "blocking" and staleness > 0
        self.warmup_epochs, self.warmup_steps = warmup_epochs, warmup_steps
        self.cooldown_epochs, self.cooldown_steps = cooldown_epochs, cooldown_steps
        self.monitor = monitor
        self.make_plateau = partial(Plateau, threshold, patience)
        self.make_plateau()  # or what is wrong with these would be said when a run begins
        self.watches_loss = monitor is None and adapt

    def build(self, context: Context) -> RunningDASO:
        return RunningDASO(self, context)

    _synchronizes_at_epoch_end = True

    @property
    def requirements(self) -> Requirements:
        stay = super().requirements.needs_fixed_nodes
        if self.adapt and self.monitor is not None:
            stay = (
                f"monitor={self.monitor!r} is judged between an agreement and the next epoch, where no node could come:"
                " leave it out, which watches the training loss, or take adapt=False"
            )
        return replace(
            super().requirements,
            needs_fixed_nodes=stay,
            can_average_optimizer_state=True,  # in the phases in which nodes wait for each other
        )

    def check_run(self, nodes: int, steps_of_epoch: float, steps: float) -> Iterator[str]:
        self._check_epoch(nodes, steps_of_epoch)
        return iter(())  # it counts from the start of an epoch


@dataclass
class DASOState(SyncState):
    """The state of DASO.

    Attributes:
        given: ``sync_every`` and ``staleness`` as the user gave them.
        cycle: B and S by now; None: as given.
        plateau: Whether the loss still falls.
        awaits_metric: Whether the last epoch is judged when its metric is logged.
        recorded_metric: The weighted sum of that metric, and of the weights, if it was logged before a save.
    """

    given: list[Any] = field(default_factory=list)
    cycle: list[int] | None = None
    plateau: Plateau = field(default_factory=Plateau)
    awaits_metric: bool = False
    recorded_metric: tuple[float, float] | None = None


class RunningDASO(RunningParameterSync[DASO]):
    """DASO at work: in which phase it is, and how B and S follow the loss.

    Attributes:
        phase: ``"warm-up"``, ``"cycling"`` or ``"cool-down"``; empty before the first epoch.
    """

    state: DASOState

    def __init__(self, config: DASO, context: Context) -> None:
        super().__init__(config, context)
        self.phase = ""
        self._warmup_ends = Moment(epoch=0)
        self._cooldown_begins: Moment | None = None
        self._last_metric: Tensor | None = None  # as it was logged when the epoch began
        self._has_resumed = False
        self._has_missed_a_loss = False

    def _new_state(self) -> DASOState:
        given = [self.config.sync_every, self.config.staleness]
        return DASOState(given=given, plateau=self.config.make_plateau())

    @property
    def schedule(self) -> Schedule:
        initial = super().schedule
        return initial if self.state.cycle is None else initial.with_period(self.state.cycle[0])

    @property
    def staleness(self) -> int:
        return self.config.staleness if self.state.cycle is None else self.state.cycle[1]

    # ---- a run ---------------------------------------------------------------------------------------------------

    def begin_run(self, epochs: int | None, steps: int | None) -> None:
        super().begin_run(epochs, steps)
        config = self.config
        if config.cooldown_steps and steps is None:
            raise ValueError(
                f"cooldown_steps={config.cooldown_steps} needs to know when the run ends: set Trainer(max_steps=...),"
                " use cooldown_epochs with max_epochs, or cooldown_steps=0 to leave the cool-down out"
            )
        if config.cooldown_epochs and config.cooldown_steps is None and epochs is None:
            raise ValueError(
                f"cooldown_epochs={config.cooldown_epochs} needs to know when the run ends: set"
                " Trainer(max_epochs=...), use cooldown_steps with max_steps, or cooldown_epochs=0 to leave the"
                " cool-down out"
            )
        self._warmup_ends = _length_of_phase(config.warmup_epochs, config.warmup_steps, epochs, steps)
        cooldown = _length_of_phase(config.cooldown_epochs, config.cooldown_steps, epochs, steps)
        self._cooldown_begins = cooldown.before(epochs, steps)
        self._warn_if_nothing_cycles(epochs, steps)

    def _warn_if_nothing_cycles(self, epochs: int | None, steps: int | None) -> None:
        first = self._warmup_ends.share(epochs, steps)
        end = 1.0 if self._cooldown_begins is None else self._cooldown_begins.share(epochs, steps)
        if first is None or end is None or first < end:
            return
        config = self.config
        lengths = {
            "warmup_steps": config.warmup_steps,
            "warmup_epochs": config.warmup_epochs if config.warmup_steps is None else None,
            "cooldown_steps": config.cooldown_steps,
            "cooldown_epochs": config.cooldown_epochs if config.cooldown_steps is None else None,
        }
        given = " and ".join(f"{name}={length}" for name, length in lengths.items() if length is not None)
        run = f"{epochs} epochs" if epochs is not None else f"{steps} steps"
        self._announce(logging.WARNING, f"{given} leave nothing between them of a run of {run}: {_ALL_BLOCKING}")

    def begin_epoch(self, epoch: int, metrics: Mapping[str, Tensor]) -> None:
        super().begin_epoch(epoch, metrics)
        self._enter(self._phase_of_next_step())
        monitor = self.config.monitor
        if self.state.awaits_metric and monitor is not None:
            self.state.awaits_metric = False
            if (metric := self._new_metric(metrics)) is not None:
                self._judge(*self._summed(metric))
            elif self.state.recorded_metric is not None:  # Lightning forgets its metrics between runs
                self._judge(*self.state.recorded_metric)
            elif monitor not in metrics and not self._has_resumed:
                logged = ", ".join(metrics) or "nothing"
                raise ValueError(
                    f"monitor={monitor!r} was not logged in epoch {epoch - 1}; logged: {logged}."
                    " Log it in every epoch with self.log, or leave monitor out to watch the training loss."
                )
        self._last_metric = metrics.get(monitor or "")
        self.state.recorded_metric = None
        self._has_resumed = False

    def _new_metric(self, metrics: Mapping[str, Tensor]) -> Tensor | None:
        """What is monitored, if it has been logged since the epoch began: Lightning keeps what was logged before."""
        metric = metrics.get(self.config.monitor or "")
        return None if metric is self._last_metric else metric

    def record_metrics(self, logged: Callable[[], Mapping[str, Tensor]]) -> None:
        if self.state.awaits_metric:
            weighted, total = self._summed(self._new_metric(logged()))
            self.state.recorded_metric = (weighted, total) if total else None

    def before_step(self, last: bool) -> None:
        self._enter(self._phase_of_next_step())

    def after_step(self, last: bool) -> None:
        if self.phase != "cycling":
            self.average()
            return
        if last or self.is_alone:
            return
        arrived = self.state.pending.take(self.state.steps)
        leaves = (self.state.step_in_epoch - 1) % self._period == 0
        if leaves and self.staleness == 0:
            self.average()
        elif leaves or arrived is not None:
            self._overlap(arrived, self.exchanger.all_fragments if leaves else ())

    def end_epoch(self, loss: Tensor | None) -> None:
        adapts, losses = self.phase == "cycling" and self.config.adapt, list[tuple[float, float]]()
        judges = adapts and self.config.monitor is None

        def agree() -> None:
            if self.state.unsynchronized_steps:
                self.average()
            if judges:
                losses.append(self._summed(loss))

        if self.state.unsynchronized_steps or judges:
            self.topology.synchronize(agree, admits=True)
        if judges:
            self._judge(*losses[-1])
        elif adapts:
            self.state.awaits_metric = True  # it is logged by the validation that comes next

    # ---- phases --------------------------------------------------------------------------------------------------

    def _phase_of_next_step(self) -> str:
        if not self._warmup_ends.has_come(self.state.epoch, self.state.steps):
            return "warm-up"
        if self._cooldown_begins is not None and self._cooldown_begins.has_come(self.state.epoch, self.state.steps):
            return "cool-down"
        return "cycling"

    def _enter(self, phase: str) -> None:
        if phase == self.phase:
            return
        self.phase = phase
        how = self._cycle if phase == "cycling" else "nodes average after every step and wait for it"
        self._announce(logging.INFO, f"{phase} from epoch {self.state.epoch}, step {self.state.steps}: {how}")

    @property
    def _cycle(self) -> str:
        return f"nodes exchange every {self._period} steps and merge {self.staleness} later"

    @property
    def _period(self) -> int:
        """B: the number that ``sync_every`` says, or stands for."""
        return self.period or 1

    def _announce(self, level: int, message: str) -> None:
        if self.topology.rank == 0:
            log.log(level, "DASO: %s", message)

    # ---- plateau -------------------------------------------------------------------------------------------------

    def _summed(self, loss: Tensor | None) -> tuple[float, float]:
        """The weighted sum of all ranks' losses, and that of the weights of those that have one. Collective.

        Where the others go on without a sick rank, they are judged without it, too.
        """
        value = None if loss is None else float(loss)
        if value is not None and self.guard.policy.on_nonfinite == "skip" and not math.isfinite(value):
            value = None
        weight, value = (0.0, 0.0) if value is None else (self.topology.rank_weight, value)
        sums = torch.tensor([weight * value, weight], device=self.replica.device)
        self.topology.world.all_reduce(sums).wait()
        weighted, total = sums.tolist()
        return weighted, total

    def _judge(self, weighted: float, total: float) -> None:
        """Halve B and S if the loss, averaged over all ranks, has stopped falling; from 1 they return to the start.

        Args:
            weighted: See :meth:`_summed`.
            total: Likewise.
        """
        if total == 0.0:
            if not self._has_missed_a_loss:
                self._has_missed_a_loss = True
                self._announce(logging.WARNING, f"epoch {self.state.epoch} had no training loss: {_NO_LOSS}")
            return
        if not self.state.plateau.reached(weighted / total):
            return
        before = self._period, self.staleness
        least = min(1, self.config.staleness)  # a scheme that waits goes on waiting
        if before == (1, least):
            self.state.cycle = None
        else:
            self.state.cycle = [max(1, self._period // 2), max(least, self.staleness // 2)]
        if (self._period, self.staleness) != before:
            watched = self.config.monitor or "the training loss"
            self._announce(logging.INFO, f"{watched} stopped falling: {self._cycle}")

    # ---- state ---------------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """``phase`` (0 warm-up, 1 cycling, 2 cool-down), ``sync_every`` and ``staleness`` in it, ``disagreement``."""
        if self.phase not in _PHASES:
            return {}
        cycles = self.phase == "cycling"
        return {
            **super().scalars(),
            "phase": float(_PHASES.index(self.phase)),
            "sync_every": float(self._period) if cycles else 1.0,
            "staleness": float(self.staleness) if cycles else 0.0,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        given = self.state.given
        super().load_state_dict(state)
        if self.state.given != given:
            self.state.given, self.state.cycle = given, None
        self.state.awaits_metric &= self.config.monitor is not None
        self._has_resumed = True


_NO_LOSS = (
    "without one, sync_every and staleness stay as they are; return the loss from training_step, or set monitor to a"
    " metric that is logged in every epoch"
)
_ALL_BLOCKING = (
    "every step will average all nodes and wait for it; shorten them, or leave them out, to train asynchronously"
)
