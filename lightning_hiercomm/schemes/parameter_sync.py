"""Periodic parameter synchronization, composed of a schedule, fragments, a reducer, a codec and a merge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch.optim import Optimizer

from lightning_hiercomm.schemes.base import Scheme
from lightning_hiercomm.schemes.components.merges import MERGES, Merge
from lightning_hiercomm.schemes.components.schedules import Every, Schedule
from lightning_hiercomm.schemes.context import Context
from lightning_hiercomm.schemes.exchange import ALL_REDUCERS, RunningParameterSync, SyncState
from lightning_hiercomm.schemes.phases import check_length
from lightning_hiercomm.schemes.reducers.graphs import Graph
from lightning_hiercomm.schemes.requirements import Requirements

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
