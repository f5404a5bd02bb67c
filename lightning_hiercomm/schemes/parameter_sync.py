"""Periodic parameter synchronization, composed of a schedule, fragments, a reducer, a codec and a merge."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, Literal, TypeVar

from torch.optim import Optimizer

from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes.base import Gradients, RunningScheme, Scheme
from lightning_hiercomm.schemes.components.merges import MERGES, Merge
from lightning_hiercomm.schemes.components.schedules import Every, Schedule
from lightning_hiercomm.schemes.context import Context
from lightning_hiercomm.schemes.exchange import ALL_REDUCERS, Exchanger, SyncState
from lightning_hiercomm.schemes.phases import check_length, steps_of_phase
from lightning_hiercomm.schemes.reducers.graphs import Graph
from lightning_hiercomm.schemes.requirements import Requirements

log = logging.getLogger(__name__)

T = TypeVar("T")
A = TypeVar("A", bound="ParameterSync", covariant=True)

ReducerName = Literal["sharded", "leader"]
MergeName = Literal["replace", "eq1", "delta"]


class ParameterSync(Scheme):
    """Train nodes independently and synchronize their parameters periodically, by five components.

    Streaming fragments, each sent 5 steps before it is merged::

        ParameterSync(schedule=Staggered(100), fragments=4, staleness=5)

    DiLoCo by gossip (NoLoCo: Kolehmainen et al. 2025, Algorithm 1; its alpha is the momentum here, and its beta = gamma
    the learning rate)::

        ParameterSync(schedule=50, reducer=RandomPermutation(), merge=OuterOptimizer())

    - *schedule* (``schedule``, ``staleness``): which fragments are sent, and merged, after a step?
    - *fragments* (``fragments``): how is the model divided?
    - *reducer* (``reducer``): between which ranks are they averaged?
    - *codec* (the strategy's ``wire_dtype``): how are they encoded?
    - *merge* (``merge``): what does a node do with the average?

    ``PeriodicAveraging``, ``DASO`` and ``DiLoCo`` are such compositions. With x the parameters of a fragment that is
    due after step t, and y the average of those sent after step t - staleness::

        x := merge(x, y)

    **The averaged model** is the mean of the nodes' current parameters, with any merge. A plain checkpoint holds it as
    its model. With an outer optimizer the checkpoint also holds the reference parameters, from which a run resumes.

    Float buffers (BatchNorm statistics) are averaged when all fragments are due at once and training waits for them.

    Args:
        schedule: When fragments are merged, or a number of optimizer steps between two merges.
        fragments: Number of equal fragments of the model, or a list of module names: the parameters of each are one
            fragment, and all others the last one. Fragments that are due together are exchanged together.
        reducer: ``"sharded"``: average over all nodes, where each rank of a node sends its shard. ``"leader"``: the
            same mean, but one rank of each node sends everything, in turns. A ``Graph``: average with the nodes that
            the graph selects.
        merge: ``"replace"`` by the average, ``"eq1"`` (DASO's), ``"delta"`` (keeps local progress), an
            ``OuterOptimizer``, or another ``Merge``.
        staleness: Optimizer steps between sending and merging, while training continues. Default: 0, wait.

    Attributes:
        merging: The merge, also if it was given by its name.
        is_exact_overlapped: Whether exchanges that overlap with training are sent unencoded.
        first_phase: Optimizer steps, or the fraction of the run, in which gradients are averaged over all nodes and
            parameters are not exchanged.

    Raises:
        ValueError: If an argument is out of range, or arguments contradict each other.
    """

    is_exact_overlapped = False
    first_phase: int | float = 0

    def __init__(
        self,
        schedule: Schedule | int = 100,
        fragments: int | list[str] = 1,
        reducer: ReducerName | Graph = "sharded",
        merge: Merge | MergeName = "replace",
        staleness: int = 0,
    ) -> None:
        if isinstance(schedule, int) and schedule < 1:
            raise ValueError(
                f"schedule={schedule} must be a positive number of optimizer steps, or a schedule such as Every(50)"
            )
        if isinstance(fragments, str) or (isinstance(fragments, int) and fragments < 1) or not fragments:
            raise ValueError(f"fragments={fragments!r} must be a positive number, or a list of module names")
        if isinstance(reducer, str) and reducer not in ALL_REDUCERS:
            raise ValueError(f"reducer={reducer!r} must be 'sharded', 'leader' or a Graph such as RandomPermutation()")
        if isinstance(merge, str) and merge not in MERGES:
            raise ValueError(f"merge={merge!r} must be one of {', '.join(map(repr, MERGES))}, or a Merge")
        if staleness < 0:
            raise ValueError(f"staleness={staleness} must not be negative; 0 waits for the exchange")
        self.schedule = Every(schedule) if isinstance(schedule, int) else schedule
        self.fragments = fragments
        self.reducer = reducer
        self.merge = merge
        self.merging = MERGES[merge]() if isinstance(merge, str) else merge
        self.staleness = staleness
        if self.merging.keeps_reference and reducer == "leader":
            raise ValueError(
                f"reducer='leader' does not support {type(self.merging).__name__}, whose state is sharded over the"
                " ranks of a node: use reducer='sharded'"
            )

    def build(self, context: Context) -> RunningParameterSync[ParameterSync]:
        return RunningParameterSync(self, context)

    def _begin_synchronously(self, warmup_steps: int | float) -> None:
        """Set the first phase, for the constructors of schemes that have one."""
        check_length("warmup_steps", warmup_steps)
        self.first_phase = warmup_steps
        if warmup_steps:
            self.first_gradients = "world"

    @property
    def period(self) -> int | None:
        """Optimizer steps between two synchronizations of a fragment; None if the schedule has no such number."""
        return self.schedule.period

    @property
    def averages_all_nodes(self) -> bool:
        """Whether all nodes take part in every exchange."""
        return isinstance(self.reducer, str)

    def next_period(self, state: SyncState, optimizer: Optimizer) -> int | None:
        """Return the optimizer steps until the next synchronization of all fragments; None: use the schedule.

        A scheme whose period changes during a run overrides this. It is called when a round begins, and must return the
        same number on all ranks.

        Args:
            state: The counters of the run.
            optimizer: The user's.
        """
        return None

    @property
    def requirements(self) -> Requirements:
        kind = type(self).__name__
        fixed = whole = None
        if self.first_phase:
            fixed = (
                f"warmup_steps={self.first_phase} averages gradients over all nodes at every step, so none may leave or"
                " join meanwhile: leave it out"
            )
            whole = f"warmup_steps={self.first_phase} needs HierarchicalStrategy: leave it out here"
        elif self.reducer == "leader":
            fixed = f"{kind} with reducer='leader' sends from the ranks of a node in turn: use reducer='sharded'"
            whole = (
                f"{kind} with reducer='leader' sends the whole model from one rank, but every rank holds a shard of it:"
                " use reducer='sharded'"
            )
        elif self.staleness:
            fixed = f"staleness={self.staleness} merges averages of nodes that may have left since: use staleness=0"
        return Requirements(
            needs_whole_parameters=whole,
            needs_fixed_nodes=fixed,
            needs_equal_data=self._needs_equal_data,
            begins_with_copy=self.begins_with_copy,
            can_average_optimizer_state=self.staleness == 0
            and self.fragments == 1
            and self.merging.makes_equal
            and self.averages_all_nodes,
        )

    @property
    def _needs_equal_data(self) -> str | None:
        kind = type(self).__name__
        if not self.averages_all_nodes:
            return f"{kind} with a graph averages with neighbors, which do not know all weights: use reducer='sharded'"
        if self.staleness:
            return f"staleness={self.staleness} merges parameters whose weights are of an earlier step: use staleness=0"
        if self.first_phase:
            return f"warmup_steps={self.first_phase} begins with another scheme: use AllReduce, or leave it out"
        return None

    @property
    def begins_with_copy(self) -> bool:
        """Whether a joining node copies another node's parameters, because nodes are never equal."""
        makes_equal = self.merging.makes_equal and self.averages_all_nodes
        return self.fragments != 1 or not makes_equal

    def check_run(self, nodes: int, steps_of_epoch: float, steps: float) -> Iterator[str]:
        yield from self._check_first_phase(steps)
        if self.period is not None and 0 < steps < self.period:
            yield (
                f"{self!r} synchronizes nodes every {self.period} optimizer steps, but the run ends after {steps:.0f}:"
                " they synchronize at its end only. Choose a shorter period."
            )

    def _check_first_phase(self, steps: float) -> Iterator[str]:
        if 0 < steps <= self.first_phase:
            yield (
                f"{type(self).__name__}(warmup_steps={self.first_phase}) averages gradients over all nodes that long,"
                f" but the run ends after {steps:.0f} optimizer steps: nodes never train alone. Choose a smaller"
                " warmup_steps."
            )


class RunningParameterSync(RunningScheme[A]):
    """Runs a parameter synchronization: decides which fragments are sent and merged after each step.

    Attributes:
        exchanger: Sends fragments and merges the averages.
        reference: The reference parameters, with the outer optimizer.
    """

    state: SyncState
    state_type = SyncState

    def __init__(self, config: A, context: Context) -> None:
        super().__init__(config, context)
        self.state.begins_at = None if config.first_phase else 0
        self._average_gradients_over(self.gradients)
        self.exchanger = Exchanger(config, context, self.state, self.guard, self._new_background())
        self.reference = self.exchanger.reference
        self._cut()

    @property
    def schedule(self) -> Schedule:
        """The current schedule of the merges."""
        return self.config.schedule

    @property
    def period(self) -> int | None:
        """Current optimizer steps between two merges of a fragment; None if the schedule has no such number."""
        return self.schedule.period if self.state.round_period is None else self.state.round_period

    @property
    def staleness(self) -> int:
        """Current optimizer steps between sending and merging."""
        return self.config.staleness

    # ---- a run ---------------------------------------------------------------------------------------------------

    def follow(self, replica: Replica) -> None:
        super().follow(replica)
        self.state.pending.drop()
        self._cut()

    def _cut(self) -> None:
        self.exchanger.cut(self.replica)
        fragments = self.exchanger.fragments
        if fragments and self.staleness > (longest := self.schedule.longest_staleness(len(fragments))):
            raise ValueError(
                f"staleness={self.staleness} must be at most {longest} for {self.schedule} with {len(fragments)}"
                " fragments, because one exchange is pending at a time"
            )

    def begin_run(self, epochs: int | None, steps: int | None) -> None:
        super().begin_run(epochs, steps)
        given, state = self.config.first_phase, self.state
        if self._in_first_phase:
            if state.begins_at is None:
                state.begins_at = steps_of_phase("warmup_steps", given, steps)
            if state.steps >= state.begins_at:
                self._end_first_phase()
            return
        is_known = given and (steps is not None or isinstance(given, Integral))
        if is_known and self.topology.rank == 0 and state.steps < steps_of_phase("warmup_steps", given, steps):
            log.warning(
                "%s: the resumed run skips warmup_steps=%s, because its nodes have already trained independently",
                type(self.config).__name__,
                given,
            )

    def step(self, run: Callable[[], T], last: bool = False) -> T:
        if not self._in_first_phase:
            self._begin_round()
        return super().step(run, last)

    def _begin_round(self) -> None:
        state = self.state
        if state.round_period is None or state.steps == state.round_begins + state.round_period:
            state.round_begins = state.steps
            state.round_period = self.config.next_period(state, self.optimizer)

    def after_step(self, last: bool) -> None:
        if self.is_alone:
            return
        outgoing = self._due_after(self.staleness)
        if not self.staleness:
            if outgoing:
                self.average(outgoing)
            return
        # if the last epoch ended with a pending exchange, that is merged before another one starts
        due = self.state.pending.take(self.state.steps, at_once=bool(outgoing))
        if due is not None or outgoing:
            self.exchanger.overlap(due, outgoing, self.staleness)

    def _due_after(self, staleness: int) -> Sequence[int]:
        """Return the fragments that are due ``staleness`` steps after the present one."""
        state = self.state
        if state.round_period is not None:
            ends_round = state.steps + staleness == state.round_begins + state.round_period
            return self.exchanger.all_fragments if ends_round else ()
        step = state.steps - (state.begins_at or 0) + staleness
        return self.schedule.due(step, state.step_in_epoch + staleness, len(self.exchanger.fragments))

    def finish(self) -> None:
        super().finish()
        self.state.pending.drop()
        if self.exchanger.optimizer_mean is not None:
            self.exchanger.optimizer_mean.forget()

    # ---- exchanges -----------------------------------------------------------------------------------------------

    def average(self, fragments: Sequence[int] | None = None) -> None:
        """Synchronize fragments and wait for them; default: all, with float buffers, and pending ones are dropped."""
        if self.is_alone:
            self.state.unsynchronized_steps = 0
            self.state.synchronizations += 1
            return
        fragments = self.exchanger.all_fragments if fragments is None else fragments
        admits = self.config.begins_with_copy or len(fragments) == len(self.exchanger.fragments)
        self.topology.synchronize(partial(self.exchanger.run, fragments), admits)

    # ---- the first phase -----------------------------------------------------------------------------------------

    def _after_synchronous_step(self) -> None:
        super()._after_synchronous_step()
        if self.state.begins_at is not None and self.state.steps >= self.state.begins_at:
            self._end_first_phase()

    def _average_gradients_over(self, gradients: Gradients) -> None:
        self.gradients = gradients
        if self.config.first_phase:
            self.phase = "warm-up" if self._in_first_phase else "training"

    def _end_first_phase(self) -> None:
        """Start the schedule from the nodes' parameters, which are equal. Collective."""
        self._average_gradients_over(self.config.gradients)
        self.state.begins_at = self.state.steps
        if self.replica.buffers:
            self.guard.average(self.replica.buckets_of_buffers)
        self.state.unsynchronized_steps = 0
        self.reference.restart()

    # ---- state ---------------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """``sync_every``, ``staleness`` and ``disagreement``.

        With a synchronous first phase also ``phase``: 0 in it, 1 after it. The disagreement is this node's distance
        from the mean over all nodes before the last merge, relative to the mean. It is estimated on up to 4096 elements
        of every bucket that this rank reduces, without further communication.
        """
        values = {"sync_every": float(self.period or 0), "staleness": float(self.staleness)}
        if self.config.first_phase:
            values["phase"] = float(not self._in_first_phase)
            if self._in_first_phase:
                values |= {"sync_every": 1.0, "staleness": 0.0}
        relative = self.exchanger.reducer.disagreement.relative()
        return values | ({} if relative is None else {"disagreement": relative})

    def state_dict(self, shared: bool = False, can_communicate: bool = True) -> dict[str, Any]:
        state = super().state_dict(shared, can_communicate)
        if self.config.first_phase:
            state["first_phase"] = [self.config.first_phase, self.state.begins_at, self._in_first_phase]
        if self._in_first_phase:  # the reference parameters of a run that resumes without this phase
            self.reference.restart()
        if not shared:
            state |= self.reference.state_dict()
            mean = self.exchanger.optimizer_mean
            if mean is not None and (of_optimizer := mean.state_dict()):
                state["optimizer_average"] = of_optimizer
        if not shared or not can_communicate:
            return state
        if self.reference.merge.keeps_reference:
            self.state.settle()
            state["outer"] = self.reference.by_parameter(self.replica.parameters)
        elif self.reference.is_copied:
            self.state.settle()
            state["reference"] = self.reference.by_tensor(self.replica)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`. Shared state has no pending exchanges: nodes resume with averaged parameters."""
        own = self.state
        own.pending.drop()
        own.pending.device = self.replica.device
        super().load_state_dict(state)
        if self.exchanger.optimizer_mean is not None:
            self.exchanger.optimizer_mean.load_state_dict(state.get("optimizer_average", {}))
        self._load_first_phase(state)
        if not self.is_alone:
            self.reference.load_state_dict(state, self.replica)

    def _load_first_phase(self, state: Mapping[str, Any]) -> None:
        """Resume the phase in which a state was saved. Nodes that have trained independently skip a first phase."""
        given, begins_at, is_first = state.get("first_phase", [0, 0, not state["steps"]])
        first_gradients = self.config.first_gradients if is_first else None
        is_first = first_gradients is not None
        self._average_gradients_over(first_gradients or self.config.gradients)
        if not is_first:
            self.state.begins_at = state["steps"] if begins_at is None else min(begins_at, state["steps"])
        elif given == self.config.first_phase:
            self.state.begins_at = begins_at
        else:
            self.state.begins_at = None  # the length of the phase has changed

    def before_nodes_change(self) -> Callable[[], None]:
        resume = super().before_nodes_change()
        resume_reference = self.reference.before_nodes_change(self.replica.parameters)

        def resume_with_reference() -> None:
            self.reference.outer = None
            resume()
            resume_reference()

        return resume_with_reference
