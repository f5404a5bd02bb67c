"""DASO: asynchronous averaging of parameters that are a few batches old."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_hiercomm.schemes.components.schedules import Every, Schedule
from lightning_hiercomm.schemes.context import Context
from lightning_hiercomm.schemes.exchange import RunningParameterSync, SyncState
from lightning_hiercomm.schemes.in_place_of_step import Update
from lightning_hiercomm.schemes.parameter_sync import ParameterSync
from lightning_hiercomm.schemes.phases import (
    Epochs,
    before_end,
    check_length,
    fraction_of_run,
    has_come,
    steps_of_phase,
)
from lightning_hiercomm.schemes.plateau import Plateau, PlateauDetector
from lightning_hiercomm.schemes.requirements import Requirements

log = logging.getLogger(__name__)

_PHASES = ("warm-up", "cycling", "cool-down")
_DEFAULT_LENGTH = 4  # epochs of warm-up and of cool-down
_LARGEST_FRACTION = 1 / 4  # of a short run, so that some steps remain for the cycling phase


class DASO(ParameterSync):
    """Average parameters between nodes asynchronously, and merge the mean a few batches later.

    Every batch, gradients are averaged inside the node and the optimizer steps. A run has three phases.

    - **Warm-up** and **cool-down**: after every step the nodes average their parameters and wait for the mean.
    - **Cycling**, between them: after batch ``t = 0, B, 2B, ...`` of an epoch the nodes start to sum their parameters
      and continue training; after batch ``t + S`` each merges the sum into its current parameters (Eq. 1, with P
      nodes)::

          x := (2 S x_local + sum of sent x) / (2 S + P)

      After the last batch of an epoch the nodes average and wait; a pending sum is dropped. When the loss stops
      falling, B and S halve (at least 1); if it stops at B = S = 1, they return to their first values.

    Eq. 1 gives the progress made in the S batches only the weight ``2 S / (2 S + P)``: half with 2 nodes, 3 % with 64
    (S = 1). ``merge="delta"`` keeps all local progress, and preserves the mean over the nodes::

          x := x_local + mean of sent x - own sent x

    For nodes of unequal weight W_m (unequal numbers of ranks or samples), ``P sum_m W_m x_m`` replaces the sum.
    Local progress keeps the weight 2 S on every node, so a merge moves all nodes by the same fraction towards the mean.

    Float buffers (BatchNorm statistics) are averaged only in blocking synchronizations, because no training step reads
    them.

    Source: DASO, Section 3, Eq. 1. Paper settings: ``sync_every=4, staleness=1``; the paper sends parameters as
    bfloat16 in the blocking phases, which is not the default here: set ``wire_dtype="raw_bfloat16"`` and
    ``compressed_phases="blocking"``. The paper gives no lengths of warm-up and cool-down, no threshold and no patience;
    those defaults are specific to this package.

    Args:
        sync_every: B, batches between the starts of two exchanges in the cycling phase.
        staleness: S, batches between the start of an exchange and its merge, up to ``sync_every``. 0: nodes average and
            wait every ``sync_every`` batches (6 of the 20 rows of the paper's Table 2).
        warmup: Length of the warm-up: ``Epochs(4)``, an integer number of optimizer steps, or a fraction of the run (a
            float below 1). Default: 4 epochs, or in runs of fewer than 16 epochs a quarter of the epochs, rounded down;
            if that is 0, a quarter of the run's optimizer steps.
        cooldown: Length of the cool-down, given in the same ways; it needs a known end of the run
            (``Trainer(max_epochs=...)`` for epochs; for steps ``max_steps``, or epochs of known length). Default: as
            for ``warmup``, or no cool-down if the end is unknown.
        merge: ``"eq1"`` as in the paper, or ``"delta"``, see above.
        reducer: How parameters are averaged between nodes. ``"leader"``: one rank per node sends all parameters, in
            turns (the paper). ``"sharded"``: every rank sends an equal shard, which is faster if every rank has its own
            network link. Both give the same result.
        plateau: When the loss counts as no longer falling, so that B and S change as above; only epochs of the cycling
            phase count. None: B and S are constant.
        compressed_phases: Phases in which ``wire_dtype`` applies: ``"all"``, or ``"blocking"``, where asynchronous
            exchanges send full precision (the paper's section 3).

    Raises:
        ValueError: If an argument is out of range; when the run begins, if the cool-down needs the end of the run and
            it is unknown.
    """

    def __init__(
        self,
        sync_every: int = 4,
        staleness: int = 1,
        warmup: int | float | Epochs | None = None,
        cooldown: int | float | Epochs | None = None,
        merge: Literal["eq1", "delta"] = "eq1",
        reducer: Literal["leader", "sharded"] = "leader",
        plateau: Plateau | None = Plateau(),
        compressed_phases: Literal["all", "blocking"] = "all",
    ) -> None:
        if sync_every < 1:
            raise ValueError(f"sync_every={sync_every} must be a positive number of batches")
        if not 0 <= staleness <= sync_every:
            raise ValueError(
                f"staleness={staleness} must be from 0 to sync_every={sync_every}: one exchange is pending at a time"
            )
        for name, length in {"warmup": warmup, "cooldown": cooldown}.items():
            if length is not None and not isinstance(length, Epochs):
                check_length(name, length)
        super().__init__(
            schedule=Every(sync_every, of="epoch"),
            reducer=reducer,
            merge=merge,
            staleness=staleness,
        )
        self.sync_every = sync_every
        self.warmup, self.cooldown = warmup, cooldown
        self.plateau = plateau
        self.compressed_phases: Literal["all", "blocking"] = compressed_phases
        self.is_exact_overlapped = compressed_phases == "blocking" and staleness > 0
        self.watches_loss = plateau is not None

    def build(self, context: Context) -> RunningDASO:
        return RunningDASO(self, context)

    @property
    def requirements(self) -> Requirements:
        return replace(
            super().requirements,
            needs_equal_data="DASO changes its period by steps that a node without batches does not take: use"
            " PeriodicAveraging or DiLoCo",
            can_average_optimizer_state=True,  # in the blocking phases
        )

    def check_run(self, nodes: int, steps_of_epoch: float, steps: float) -> Iterator[str]:
        return iter(())  # it counts from the start of an epoch


@dataclass
class DASOState(SyncState):
    """The state of DASO.

    Attributes:
        given: ``sync_every`` and ``staleness`` as passed by the user.
        cycle: The current B and S; None: as given.
        plateau: Detects that the loss has stopped falling.
    """

    given: list[Any] = field(default_factory=list)
    cycle: list[int] | None = None
    plateau: PlateauDetector = field(default_factory=PlateauDetector)


class RunningDASO(RunningParameterSync[DASO]):
    """Run DASO's phases, and adapt B and S to the loss.

    Attributes:
        phase: ``"warm-up"``, ``"cycling"`` or ``"cool-down"``; empty before the first epoch.
    """

    state: DASOState

    def __init__(self, config: DASO, context: Context) -> None:
        super().__init__(config, context)
        self.phase = ""
        self._warmup_ends: int | Epochs = 0
        self._cooldown_begins: int | Epochs | None = None
        self._has_missed_a_loss = False

    def _new_state(self) -> DASOState:
        given = [self.config.sync_every, self.config.staleness]
        return DASOState(given=given, plateau=PlateauDetector(self.config.plateau or Plateau()))

    @property
    def schedule(self) -> Schedule:
        return Every(self._period, of="epoch")

    @property
    def staleness(self) -> int:
        """Steps between sending and merging, S."""
        return self.config.staleness if self.state.cycle is None else self.state.cycle[1]

    @property
    def _period(self) -> int:
        """Batches between the starts of two exchanges, B."""
        return self.config.sync_every if self.state.cycle is None else self.state.cycle[0]

    # ---- the algorithm -------------------------------------------------------------------------------------------

    def before_step(self, last: bool) -> Update | None:
        self._enter_phase()
        return super().before_step(last)

    def after_step(self, last: bool) -> None:
        if self.phase != "cycling":
            self.average()
            return
        if last or self.is_alone:
            return  # the epoch's end averages
        starts = (self.state.step_in_epoch - 1) % self._period == 0  # after batch 0, B, 2B, ... of the epoch
        # of an epoch without its end, as in the trial of a learning rate finder, an exchange may be overdue
        due = self.state.pending.take(self.state.steps, at_once=starts)
        if starts and self.staleness == 0:
            self.average()
        else:
            self.overlap(due, range(len(self.fragments)) if starts else ())

    def end_epoch(self, loss: Tensor | None) -> None:
        adapts, sums = self.phase == "cycling" and self.config.plateau is not None, list[tuple[float, float]]()

        def synchronize() -> None:
            if self.state.unsynchronized_steps:
                self.average()
            if adapts:
                sums.append(self._summed(loss))

        if self.state.unsynchronized_steps or adapts:
            self.topology.synchronize(synchronize, admits=True)
        if adapts:
            self._adapt(*sums[-1])  # the last attempt, where nodes have left

    def _adapt(self, weighted: float, total: float) -> None:
        """Halve B and S if the loss has stopped falling; from 1 they return to their first values."""
        state = self.state
        if total == 0.0:
            if not self._has_missed_a_loss:
                self._has_missed_a_loss = True
                self._log(
                    logging.WARNING,
                    f"epoch {state.epoch} had no training loss, so sync_every and staleness do not change. Return the"
                    " loss from training_step, or set plateau=None.",
                )
            return
        if not state.plateau.reached(weighted / total):
            return
        before = self._period, self.staleness
        least = min(1, self.config.staleness)  # a blocking scheme stays blocking
        state.cycle = None if before == (1, least) else [max(1, before[0] // 2), max(least, before[1] // 2)]
        if (self._period, self.staleness) != before:
            self._log(logging.INFO, f"the training loss stopped falling: {self._cycle}")

    def _summed(self, loss: Tensor | None) -> tuple[float, float]:
        """Return the weighted sum of all ranks' losses and the sum of the weights of ranks with a loss. Collective."""
        weight, value = (0.0, 0.0) if loss is None else (self.topology.rank_weight, float(loss))
        sums = torch.tensor([weight * value, weight], device=self.replica.device)
        self.topology.world.all_reduce(sums).wait()
        weighted, total = sums.tolist()
        return weighted, total

    # ---- phases --------------------------------------------------------------------------------------------------

    def begin_run(self, epochs: int | None, steps: int | None) -> None:
        super().begin_run(epochs, steps)
        self._warmup_ends = _length_of_phase("warmup", self.config.warmup, epochs, steps)
        self._cooldown_begins = self._begin_of_cooldown(epochs, steps)
        self._warn_if_nothing_cycles(epochs, steps)

    def _begin_of_cooldown(self, epochs: int | None, steps: int | None) -> int | Epochs | None:
        given = self.config.cooldown
        end, limit = (epochs, "max_epochs") if isinstance(given, Epochs) else (steps, "max_steps")
        if given not in (None, 0, Epochs(0)) and end is None:
            raise ValueError(
                f"cooldown={given!r} needs to know when the run ends: set Trainer({limit}=...), or cooldown=0 to leave"
                " the cool-down out"
            )
        return before_end(_length_of_phase("cooldown", given, epochs, steps), epochs, steps)

    def _warn_if_nothing_cycles(self, epochs: int | None, steps: int | None) -> None:
        first, begins = fraction_of_run(self._warmup_ends, epochs, steps), self._cooldown_begins
        end = 1.0 if begins is None else fraction_of_run(begins, epochs, steps)
        if first is None or end is None or first < end:
            return
        lengths = {"warmup": self.config.warmup, "cooldown": self.config.cooldown}
        given = " and ".join(f"{name}={length!r}" for name, length in lengths.items() if length is not None)
        run = f"{epochs} epochs" if epochs is not None else f"{steps} steps"
        self._log(
            logging.WARNING,
            f"{given} leave no step for asynchronous training in a run of {run}: every step will average all nodes and"
            " wait. Shorten them, or leave them out.",
        )

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        self._enter_phase()

    def _enter_phase(self) -> None:
        epoch, step = self.state.epoch, self.state.steps
        if not has_come(self._warmup_ends, epoch, step):
            phase = "warm-up"
        elif self._cooldown_begins is not None and has_come(self._cooldown_begins, epoch, step):
            phase = "cool-down"
        else:
            phase = "cycling"
        if phase != self.phase:
            self.phase = phase
            how = self._cycle if phase == "cycling" else "nodes average after every step and wait for it"
            self._log(logging.INFO, f"{phase} from epoch {epoch}, step {step}: {how}")

    @property
    def _cycle(self) -> str:
        return f"nodes exchange every {self._period} steps and merge {self.staleness} later"

    def _log(self, level: int, message: str) -> None:
        if self.topology.rank == 0:
            log.log(level, "DASO: %s", message)

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


def _length_of_phase(
    name: str, given: int | float | Epochs | None, epochs: int | None, steps: int | None
) -> int | Epochs:
    """Return the length of the warm-up or cool-down, as given or by default."""
    if given is not None:
        return given if isinstance(given, Epochs) else steps_of_phase(name, given, steps)
    if steps is not None and (epochs is None or epochs * _LARGEST_FRACTION < 1):
        return int(steps * _LARGEST_FRACTION)
    return Epochs(_DEFAULT_LENGTH if epochs is None else min(_DEFAULT_LENGTH, int(epochs * _LARGEST_FRACTION)))
