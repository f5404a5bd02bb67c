"""Synchronize parameters every now and then: a schedule, fragments, a reducer, a codec and a merge."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lightning_hiercomm.comm.wide_sum import is_short
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.all_reduce import AllReduce
from lightning_hiercomm.schemes.base import Context, Gradients, RunningScheme, Scheme
from lightning_hiercomm.schemes.components.merges import MERGES, Merge
from lightning_hiercomm.schemes.components.outer import OuterOptimizer, RunningOuterOptimizer
from lightning_hiercomm.schemes.components.schedules import Every, Schedule, Staggered
from lightning_hiercomm.schemes.health.preflight import Verdict
from lightning_hiercomm.schemes.phases import check_length, steps_of_phase
from lightning_hiercomm.schemes.profile import Profile
from lightning_hiercomm.schemes.reducers.all_reduce import LeaderAllReduce, ShardedAllReduce
from lightning_hiercomm.schemes.reducers.base import Reducer, UpdateReference
from lightning_hiercomm.schemes.reducers.graphs import Graph
from lightning_hiercomm.schemes.reducers.in_flight import Exchange, InFlight
from lightning_hiercomm.schemes.reducers.neighbors import NeighborExchange
from lightning_hiercomm.schemes.tuning import AutoPeriod, PeriodTuner

log = logging.getLogger(__name__)

T = TypeVar("T")
A = TypeVar("A", bound="ParameterSync", covariant=True)

ReducerName = Literal["sharded", "leader"]
MergeName = Literal["replace", "eq1", "delta"]


class ParameterSync(Scheme):
    """Nodes train alone and agree on parameters every now and then; what that means is five choices.

    ============  ====================================================  =========================================
    word          question                                              argument
    ============  ====================================================  =========================================
    when          which parts leave, which are due, after this step?    ``when``, ``staleness``
    what          which part of the model?                              ``what``
    through whom  who carries it between nodes?                         ``through``
    as what       what travels?                                         the strategy's ``wire_dtype``
    merged how    what does the node make of what arrives?              ``merge``
    ============  ====================================================  =========================================

    ``PeriodicAveraging``, ``DASO`` and ``DiLoCo`` are such sentences under the names of their papers; any other is
    written with this class. Streaming fragments with plain replacing::

        ParameterSync(schedule=Staggered(100), fragments=4, staleness=5)

    DiLoCo by gossip (NoLoCo: Kolehmainen et al. 2025, Algorithm 1; its alpha is the momentum here, and its beta = gamma
    the learning rate)::

        ParameterSync(schedule=50, reducer=RandomPermutation(), merge=OuterOptimizer())

    After step t, with x the parameters of a part that is due::

        sent after step t - staleness;  x := merge(x, what arrived)

    **The averaged model** is the mean of the nodes' present parameters, whatever the merge. An outer optimizer keeps
    reference parameters in addition: a plain checkpoint holds the former as its model, and the latter for the run that
    resumes from it.

    Float buffers (BatchNorm statistics) agree when all parts do at once and training waits for it.

    Args:
        schedule: When fragments are merged, or a number of optimizer steps between two merges.
        fragments: Into how many equal parts the model is cut, or a list of module names: the parameters below each are
            one part, all others the last one. All parts are exchanged in one go where the schedule says so.
        reducer: ``"sharded"``: over all nodes, each rank of a node carrying its part. ``"leader"``: the same mean, but
            one rank of each node carries everything, the next rank the next time. A ``Graph``: the
            mean with those nodes that the graph names.
        merge: ``"replace"`` by what arrived, ``"eq1"`` (DASO's), ``"delta"`` (keeps local progress), an
            ``OuterOptimizer``, or another ``Merge``.
        staleness: Optimizer steps between sending and merging, in which training goes on. 0 waits.
        gradients: ``"node"``: gradients are averaged inside the node at every step. ``"none"``: every rank trains
            alone between agreements, which then average inside the node as well.

    Attributes:
        merging: The merge itself, also where it was given by its name.
        auto: How the period is chosen, with ``sync_every="auto"``; otherwise None.
        is_exact_beside_training: Whether what training does not wait for travels as it is, whatever the wire.
        first_phase: Optimizer steps, or the share of the run, in which gradients are averaged over all nodes and
            parameters are not exchanged.

    Raises:
        ValueError: For arguments out of range, or that contradict each other.
    """

    auto: AutoPeriod | None = None
    is_exact_beside_training = False
    first_phase: int | float = 0

    def __init__(
        self,
        schedule: Schedule | int = 100,
        fragments: int | list[str] = 1,
        reducer: ReducerName | Graph = "sharded",
        merge: Merge | MergeName = "replace",
        staleness: int = 0,
        gradients: Literal["node", "none"] = "node",
    ) -> None:
        if isinstance(schedule, int) and schedule < 1:
            raise ValueError(
                f"schedule={schedule} must be a positive number of optimizer steps, or a schedule such as Every(50)"
            )
        if isinstance(fragments, str) or (isinstance(fragments, int) and fragments < 1) or not fragments:
            raise ValueError(f"fragments={fragments!r} must be a positive number, or a list of module names")
        if not isinstance(reducer, Graph) and reducer not in ("sharded", "leader"):
            raise ValueError(f"reducer={reducer!r} must be 'sharded', 'leader' or a Graph such as RandomPermutation()")
        if not isinstance(merge, Merge) and merge not in MERGES:
            raise ValueError(f"merge={merge!r} must be one of {', '.join(map(repr, MERGES))}, or a Merge")
        if staleness < 0:
            raise ValueError(f"staleness={staleness} must not be negative; 0 waits for the exchange")
        if gradients not in ("node", "none"):
            raise ValueError(f"gradients={gradients!r} must be 'node' or 'none'")
        self.gradients = gradients
        self.schedule = Every(schedule) if isinstance(schedule, int) else schedule
        self.fragments = fragments
        self.reducer = reducer
        self.merge = merge
        self.merging = merge if isinstance(merge, Merge) else MERGES[merge]()
        self.staleness = staleness
        if self.merging.keeps_reference and reducer == "leader":
            raise ValueError(
                f"reducer='leader' does not go with {type(self.merging).__name__}, whose state lies with the rank"
                " that carries a part: use reducer='sharded'"
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
        """Optimizer steps between two agreements on the same part; None if the schedule has no such number."""
        return getattr(self.schedule, "period", None)

    _sharded = "reducer='sharded'"

    _ends_epochs_in_agreement = False
    """Whether nothing is in flight, and all nodes are equal, when an epoch ends."""

    @property
    def profile(self) -> Profile:
        kind, general, no_period = type(self).__name__, super().profile, None
        stay = whole = first_phase = None
        if self.first_phase:
            stay = (
                f"warmup_steps={self.first_phase} averages gradients over all nodes at every step, so none may leave or"
                " join meanwhile: leave it out"
            )
            whole = f"warmup_steps={self.first_phase} needs HierarchicalStrategy: leave it out here"
            first_phase = (
                f"Before, in warmup_steps={self.first_phase}, a step takes {{seconds}}: gradients are averaged over all"
                " nodes."
            )
        elif self.reducer == "leader":
            stay = f"{kind} lets ranks of a node carry the model in turn: take {self._sharded}"
            whole = (
                f"{kind} lets one rank of a node carry the whole model in turn, but every rank holds a part of it: use"
                f" {self._sharded}"
            )
        elif self.staleness and self.staleness == self.period and not self._ends_epochs_in_agreement:
            stay = (
                f"staleness={self.staleness} lets the next exchange leave with the step that merges the last, so a node"
                " that comes would always find one in flight: take less than the period"
            )
        elif self.gradients == "none":
            stay = "ranks of a node that train alone cannot be healed from one state: take gradients='node'"
        elif self.auto is not None:
            stay = "sync_every='auto' times exchanges while nodes come and go: give sync_every a number"
        if self.auto is not None:
            no_period = "sync_every='auto' is chosen when a run begins: give a number"
        elif self.period is None:
            no_period = "sync_every=None agrees at the end of epochs, whose length is not known: give a number"
        parts = self.fragments if isinstance(self.fragments, int) else len(self.fragments) + 1
        return replace(
            general,
            needs_whole_parameters=general.needs_whole_parameters or whole,
            needs_nodes_that_stay=stay,
            first_phase=first_phase,
            begins_with_copy=self.begins_with_copy,
            can_average_optimizer_state=self.staleness == 0
            and self.fragments == 1
            and self.merging.makes_equal
            and not isinstance(self.reducer, Graph),
            drift=(self.period or math.inf) + self.staleness,
            period=no_period or self.period or 1,
            leaves=lambda step: bool(self.leaving(step, parts)),
        )

    @property
    def begins_with_copy(self) -> bool:
        """Whether nodes are never equal, so that one that comes begins with what another has become by itself."""
        makes_equal = self.merging.makes_equal and not isinstance(self.reducer, Graph)
        return self.fragments != 1 or self.staleness > 0 or not makes_equal

    def next_step(self, steps_of_epoch: int) -> Scheme:
        return AllReduce() if self.first_phase else self

    def check_run(self, nodes: int, steps_of_epoch: float, steps: float) -> Iterator[str]:
        self._check_epoch(nodes, steps_of_epoch)
        yield from self._check_first_phase(steps)
        if self.period is not None and 0 < steps < self.period:
            yield (
                f"nodes that train by {self!r} agree every {self.period} optimizer steps, but the run ends after"
                f" {steps:.0f}: they agree at its end only. Choose a shorter period."
            )

    def _check_first_phase(self, steps: float) -> Iterator[str]:
        if 0 < steps <= self.first_phase:
            yield (
                f"{type(self).__name__}(warmup_steps={self.first_phase}) averages gradients over all nodes that long,"
                f" but the run ends after {steps:.0f} optimizer steps: nodes never train alone. Choose a smaller"
                " warmup_steps."
            )

    def _check_epoch(self, nodes: int, steps: float) -> None:
        """Refuse to choose a period that is counted from the start of each epoch, where no exchange fits into one."""
        counts_in_epoch = isinstance(self.schedule, Every) and self.schedule.of == "epoch"
        if nodes > 1 and counts_in_epoch and self.auto is not None and steps < self.auto.provisional_period:
            raise ValueError(
                f"sync_every='auto' times exchanges that are {self.auto.provisional_period} optimizer steps apart, but"
                f" an epoch has {math.ceil(steps)}: give sync_every a number"
            )

    def leaving(self, step: int, parts: int) -> Sequence[int]:
        """The parts that are sent after a step, counted from 1, of a very long epoch."""
        due = step + self.staleness
        return self.schedule.due(due, due, parts)


class RunningParameterSync(RunningScheme[A]):
    """An agreement at work: exchanges are launched, collected when they are due, and merged; some are in flight.

    Attributes:
        schedule: When fragments are merged, as of now.
        staleness: Optimizer steps between sending and merging by now.
        tuner: Chooses the period of a scheme with ``sync_every="auto"``; None once that is done, and without it.
        outer: The outer optimizer, where the merge is one and there is somebody to agree with.
        synchronizations: How often something has left for the other nodes.
    """

    def __init__(self, config: A, context: Context) -> None:
        super().__init__(config, context)
        self.schedule = config.schedule
        self.staleness = config.staleness
        self.tuner = None if config.auto is None else PeriodTuner(config.auto)
        self.exchanges_started = 0
        self._begins_at = None if config.first_phase else 0  # optimizer steps before the schedule; None: not known yet
        self._average_gradients_over(self.gradients)
        self._parts_sent = 0
        self._merge = config.merging
        self._was_nonfinite = False
        self._tuned_period: int | None = None
        self._in_flight = InFlight()
        # every move between nodes, waited for or not, takes the same communicators, in the order of the program
        shares_communicators = self.is_alone or (self.topology.may_grow and not self.staleness)
        self._beside = self.topology if shares_communicators else self.topology.duplicate()
        self._second = self._opened_second(None)
        self._inbound = self.background()
        self._outbound = None if config.gradients == "node" else self.background(waits_for_nodes=False)
        self._parts, self._reducer = self._cut()
        self.outer = self._built_outer(None)

    @property
    def period(self) -> int | None:
        """Optimizer steps between two agreements on the same part by now; None if the schedule has no such number."""
        return getattr(self.schedule, "period", None)

    # ---- life of a run -------------------------------------------------------------------------------------------

    def follow(self, replica: Replica) -> None:
        super().follow(replica)
        self._in_flight.settle()
        for dropped in self._in_flight.exchanges:  # whose outer steps count all the same
            self._end_round(dropped.parts)
        self._in_flight.drop()
        self._second = self._opened_second(self._second)
        self._parts, self._reducer = self._cut()
        self.outer = self._built_outer(self.outer)

    def _opened_second(self, second: Topology | None) -> Topology | None:
        """Another twin, if there is none yet and what does not add needs a second round."""
        is_in_rounds = not self.wire.codec.adds or any(map(is_short, self.replica.dtypes))
        is_in_rounds |= self.staleness > 0 and bool(self._buffers_with_parameters)
        # where nodes come and go, and all of it is waited for, it takes one lane
        needs_second = self.staleness > 0 if self.topology.may_grow else self.topology.num_nodes > 2
        if second is None and is_in_rounds and needs_second and not self.is_alone:
            return self.topology.duplicate()
        return second

    def _cut(self) -> tuple[list[range], Reducer]:
        """The parts of the model, by the indexes of their buckets, and who carries them."""
        if self.is_alone:
            return [], ShardedAllReduce(self.replica, self.topology, buckets=[])
        replica, fragments = self.replica, self.config.fragments
        cut = [replica.buckets_of_parameters] if fragments == 1 else replica.cut(fragments, replica.bucket_bytes)
        ends = list(accumulate(map(len, cut)))
        self._check_staleness(len(cut))
        parts = [range(end - len(part), end) for part, end in zip(cut, ends, strict=True)]
        return parts, self._reducer_of([bucket for part in cut for bucket in part], self.wire)

    def _reducer_of(self, buckets: list[Bucket], wire: Wire) -> Reducer:
        between = self.config.reducer
        if isinstance(between, Graph):
            return NeighborExchange(
                buckets,
                between,
                self.topology,
                self._beside,
                self._inbound,
                wire,
                # by steps, a graph that goes round might come by the same of its turns at every agreement
                turn=lambda: 1 + self._parts_sent // max(1, len(self._parts)),
                average_in_node=lambda leaving: self.guard.average_in_node(leaving, self.steps),
                update_reference=self._update_reference,
                look=lambda leaving: self.guard.look(leaving, self.steps),
            )
        reducer = LeaderAllReduce if between == "leader" else ShardedAllReduce
        return reducer(
            self.replica,
            self.topology,
            wire,
            self._beside,
            self._second,
            buckets=buckets + self._buffers_with_parameters,
            update_reference=self._update_reference,
            on_nonfinite=self.guard.policy.on_nonfinite,
            checks_buffers=True,
        )

    @property
    def _update_reference(self) -> UpdateReference | None:
        """Moves the last agreed values, where the merge keeps them."""
        if not self._merge.keeps_reference:
            return None
        # asked for anew each time: an outer optimizer is made of a reducer
        return lambda *landing: (self._merge if self.outer is None else self.outer).update_reference(*landing)

    def _built_outer(self, before: RunningOuterOptimizer | None) -> RunningOuterOptimizer | None:
        """The outer optimizer of what the reducer holds, if the merge is one; it goes on from the one before."""
        if self.is_alone or not isinstance(self._merge, OuterOptimizer):
            return None
        return self._merge.build(self._reducer, before)

    @property
    def _overlapped_reducer(self) -> Reducer:
        """Who carries what training does not wait for: here, the same as ever."""
        return self._reducer

    @property
    def _buffers_with_parameters(self) -> list[Bucket]:
        """Float buffers that go the way of the parameters whenever training waits for all of them."""
        stay = self._merge.keeps_reference or isinstance(self.config.reducer, Graph)
        return [] if stay else self.replica.buckets_of_buffers

    def after_step(self, last: bool) -> None:
        if self.is_alone:
            return
        parts = len(self._parts)
        ahead = self.staleness
        steps = self.steps - (self._begins_at or 0)
        leaving = self.schedule.due(steps + ahead, self.step_in_epoch + ahead, parts)
        if not ahead:
            if leaving:
                self._agree_now(leaving)
            return
        arrived = self._in_flight.take(self.steps)
        if leaving and arrived is None:  # of the last epoch, whose end nobody knew: one exchange is in flight at a time
            arrived = self._in_flight.take_first(self.steps)
        if arrived is not None or leaving:
            self._turn(arrived, leaving)

    # ---- the first phase -----------------------------------------------------------------------------------------

    def begin_run(self, epochs: int | None, steps: int | None) -> None:
        super().begin_run(epochs, steps)
        given = self.config.first_phase
        if self.in_first_phase:
            if self._begins_at is None:
                self._begins_at = steps_of_phase("warmup_steps", given, steps)
            if self.steps >= self._begins_at:
                self._end_first_phase()
        elif given and self.topology.rank == 0:
            self._warn_of_skipped_phase(given, steps)
        self._check_tuning(steps)

    def _warn_of_skipped_phase(self, given: int | float, steps: int | None) -> None:
        is_known = steps is not None or not isinstance(given, float)
        if is_known and self.steps < steps_of_phase("warmup_steps", given, steps):
            log.warning(
                "%s: the run goes on without warmup_steps=%s, because nodes have trained alone before",
                type(self.config).__name__,
                given,
            )

    def after_synchronous_step(self) -> None:
        super().after_synchronous_step()
        if self._begins_at is not None and self.steps >= self._begins_at:
            self._end_first_phase()

    def _average_gradients_over(self, gradients: Gradients) -> None:
        """Begin a phase, by the ranks over which it averages gradients."""
        self.gradients = gradients
        if self.config.first_phase:
            self.phase = "warm-up" if self.in_first_phase else "training"

    def _end_first_phase(self) -> None:
        """Let nodes, whose parameters are equal, train by the schedule from now on; collective."""
        self._average_gradients_over(self.config.gradients)
        self._begins_at = self.steps
        self._average_buffers()
        self.unsynchronized_steps = 0
        self._begin_from_present()
        if self.tuner is not None:
            self.tuner.begin_epoch(self.replica.device)

    def _begin_from_present(self) -> None:
        """Take the present parameters as the reference parameters, with a new outer optimizer."""
        if not self.is_alone:
            self._reducer.set_references()
            self.outer = self._built_outer(None)

    # ---- sync_every="auto" ---------------------------------------------------------------------------------------

    def _check_tuning(self, steps: int | None) -> None:
        needed = 0 if self.tuner is None or self.is_alone else self.tuner.auto.steps
        left = 0 if steps is None else steps - max(self.steps, self._begins_at or 0)
        if steps is not None and needed and left < needed:
            raise ValueError(
                f"sync_every='auto' times exchanges for the first {needed} optimizer steps, but the run ends"
                f" after {left}: give sync_every a number, or train for longer"
            )

    def begin_epoch(self, epoch: int, metrics: Mapping[str, Tensor]) -> None:
        super().begin_epoch(epoch, metrics)
        if self.tuner is not None:
            self.tuner.begin_epoch(self.replica.device)

    def step(self, run: Callable[[], T], last: bool = False) -> T:
        result = super().step(run, last)
        can_tune = not self.is_alone and not self.in_first_phase
        if self.tuner is not None and can_tune and self.tuner.end_step():
            choice = self.tuner.choose(self.topology.world)
            self._set_period(choice.period)
            self.tuner = None
            if self.topology.rank == 0:
                log.info(
                    "%s: sync_every=%d: a step takes %.3g ms, and training waits %.3g ms for the exchanges of a period,"
                    " which is %.1f %% of it",
                    type(self.config).__name__,
                    choice.period,
                    1e3 * choice.step_seconds,
                    1e3 * choice.exchange_seconds,
                    1e2 * choice.overhead,
                )
        return result

    def _set_period(self, period: int) -> None:
        """Agree every ``period`` steps from now on; nothing may be in flight."""
        if isinstance(self.schedule, Every | Staggered):
            self.schedule = replace(self.schedule, period=period)
        self._tuned_period = period

    def _exchanging(self, starts: bool, ends: bool) -> AbstractContextManager[None]:
        """Inside, training waits for an exchange of the schedule."""
        return nullcontext() if self.tuner is None else self.tuner.exchanging(starts, ends)

    # ---- exchanges -----------------------------------------------------------------------------------------------

    def average(self) -> None:
        """Agree on everything and wait for it; what is in flight is dropped."""
        if self.tuner is not None:
            self.tuner.drop()
        if self.is_alone:
            super().average()
        else:
            self._agree_now(self.all_parts)

    @property
    def all_parts(self) -> Sequence[int]:
        """The parts of the model."""
        return range(len(self._parts))

    def _agree_now(self, parts: Sequence[int]) -> None:
        """Agree on parts, and wait for it; on float buffers, too, if that is all of them."""
        self.guard.verify(self.steps)
        waits = not self.staleness
        admits = self.config.begins_with_copy or len(parts) == len(self._parts)
        with self._exchanging(starts=waits, ends=waits):
            self.topology.synchronize(lambda: self._agree_and_wait(parts), admits)

    def _agree_and_wait(self, parts: Sequence[int]) -> None:
        is_all = len(parts) == len(self._parts)
        if is_all:
            self._in_flight.drop()
        indexes = range(len(self._reducer.buckets)) if is_all else self._buckets_of(parts)
        verdict = self._reducer(self.steps, self._take_turn(), indexes, self._take)
        self._parts_sent += len(parts)
        if is_all and not self._buffers_with_parameters:
            self._average_buffers()
        self._recover(self._reducer, verdict, indexes)  # who is healthy of those who agree: the last
        self._end_round(parts)
        self.synchronizations += 1
        if is_all and self._merge.makes_equal and not isinstance(self.config.reducer, Graph):
            self.unsynchronized_steps = 0
            self.guard.average_optimizer_state()

    def _take(self, bucket: Bucket, arrived: Tensor) -> None:
        if any(bucket is of_buffers for of_buffers in self.replica.buckets_of_buffers):
            bucket.unpack(arrived)
        else:
            self._merge.at_once(bucket, arrived, self.topology.num_nodes)

    def _turn(self, arrived: Exchange | None, leaving: Sequence[int]) -> None:
        """Merge what was sent a while ago, and send the next."""
        with self._exchanging(starts=bool(leaving), ends=arrived is not None):
            if self.topology.may_grow:
                self._merge_then_send(arrived, leaving)
            else:
                self._merge_and_send(arrived, leaving)

    def _merge_then_send(self, arrived: Exchange | None, leaving: Sequence[int]) -> None:
        """The same where nodes come and go, who meet when something leaves, and when it is merged.

        If others meet then than those who sent it, or it has not arrived everywhere, it is lost: what it has moved
        beside training is taken back, and the nodes that are there agree on what they hold by now, and wait for it.
        """
        if arrived is not None:
            self._in_flight.keep(arrived)
            is_last_to_leave = self.staleness < (self.period or math.inf)  # a node may come when nothing is in flight
            self.topology.synchronize(lambda: self._merge_or_agree(arrived), admits=is_last_to_leave)
            self._in_flight.forget(arrived)
        if leaving:
            self.topology.synchronize(lambda: self._merge_and_send(None, leaving), brings=False)

    def _merge_or_agree(self, arrived: Exchange) -> None:
        if arrived.is_lost:
            self._agree_and_wait(arrived.parts)
        else:
            self._merge_and_send(arrived, ())

    def _merge_and_send(self, arrived: Exchange | None, leaving: Sequence[int]) -> None:
        """Merge what was sent a while ago, and send the next.

        Bucket by bucket, and the first successors leave when the last bucket is still on the link. Not before: they may
        have another reducer, and would take their share of the link from those that training waits for.
        """
        self.guard.verify(self.steps)
        if arrived is not None and arrived.verdict.is_nonfinite:  # what leaves now is what it is healed to
            self._merge_up_to(None, arrived)
        sent: Exchange | None = None
        if leaving:
            reducer = self._overlapped_reducer
            verdict = reducer.begin(
                self.steps, self._take_turn(), self._buckets_of(leaving), self._inbound, self._outbound
            )
            self._parts_sent += len(leaving)
            sent = self._in_flight.start(self.steps, self.steps + self.staleness, leaving, verdict)
            if self.topology.may_grow:
                sent.undo = self._remember_agreed()
        indexes = [] if arrived is None else [move.index for move in arrived.moves]
        if arrived is not None:
            arrived.verdict.wait()
            self._end_round(arrived.parts, arrived)  # before what leaves now arrives, and is stepped
        waiting: deque[int] = deque()
        for index in self._buckets_of(leaving):
            if arrived is not None and arrived.holds(index):
                self._merge_up_to(index, arrived)
            waiting.append(index)
            if arrived is None or arrived.is_nearly_done():
                self._send(waiting, sent)
        if arrived is not None:
            self._merge_up_to(None, arrived)
            self.synchronizations += 1
        self._send(waiting, sent)
        if arrived is not None:
            self._recover(self._overlapped_reducer, arrived.verdict, indexes)

    def _send(self, waiting: deque[int], exchange: Exchange | None) -> None:
        while waiting and exchange is not None:
            exchange.moves.append(
                self._overlapped_reducer.start(waiting.popleft(), self._inbound, self._merge.needs_sent, self._outbound)
            )

    def _merge_up_to(self, last: int | None, arrived: Exchange) -> None:
        """Merge the buckets that are left of an exchange, in their order, up to one of them, or all."""
        while arrived.moves:
            move = arrived.moves.popleft()
            move.arrived.wait()
            self._inbound.hands_out(move.flat)
            bucket = self._reducer.buckets[move.index]
            if arrived.verdict.is_nonfinite:
                bucket.unpack(move.flat)
            elif not arrived.verdict.is_flagged():
                self._merge(bucket, move, arrived.staleness, move.nodes)
            if move.index == last:
                return

    def _recover(self, reducer: Reducer, verdict: Verdict, indexes: Sequence[int]) -> None:
        """Repeat a flagged exchange without the ranks that cannot send, on present values; wait for it.

        Args:
            reducer: Of the exchange.
            verdict: Likewise.
            indexes: Its buckets.
        """
        self._was_nonfinite = verdict.is_nonfinite  # and healed by its peers
        if verdict.is_flagged() and isinstance(reducer, ShardedAllReduce):
            self._in_flight.settle()  # what follows takes the communicators of what has just left
            if not self._merge.keeps_reference:
                self._in_flight.drop()  # it left from values that the nodes are about to lose
            self._was_nonfinite = self.guard.repair(reducer, indexes, self.steps, self._take, self._update_reference)
        if self._was_nonfinite:
            self.guard.begin_optimizer_anew()

    def _end_round(self, parts: Sequence[int], arriving: Exchange | None = None) -> None:
        """Let the outer optimizer know when all parts have arrived once more."""
        if self.outer is not None and self._ends_round(parts):
            if arriving is not None:
                arriving.wait()
            self.outer.end_round()

    def _ends_round(self, parts: Sequence[int]) -> bool:
        return bool(parts) and parts[-1] == len(self._parts) - 1

    def _take_turn(self) -> int:
        self.exchanges_started += 1
        return self.exchanges_started - 1

    def _buckets_of(self, parts: Sequence[int]) -> list[int]:
        return [index for part in parts for index in self._parts[part]]

    def _check_staleness(self, parts: int) -> None:
        if not parts:  # all parameters are frozen for a while
            return
        longest = self.schedule.longest_staleness(parts)
        if self.staleness > longest:
            raise ValueError(
                f"staleness={self.staleness} is too long for {self.schedule} with {parts} parts: one exchange is in"
                f" flight at a time, so at most {longest} steps"
            )

    # ---- the agreed model ----------------------------------------------------------------------------------------

    @property
    def may_be_copied(self) -> bool:
        """The same, while nothing is in flight: there is no copy of that."""
        return super().may_be_copied and not self._in_flight

    def settle(self) -> None:
        self._in_flight.settle()

    def finish(self) -> None:
        super().finish()
        self._in_flight.drop()
        if self.tuner is not None and not self.is_alone and self.topology.rank == 0:
            log.warning(
                "%s: the run ended before sync_every='auto' had timed %d exchanges, so the period was %d to the end",
                type(self.config).__name__,
                self.tuner.auto.exchanges,
                self.period,
            )

    def _average_buffers(self) -> None:
        if self.replica.buffers and self.guard.average(self.replica.buckets_of_buffers, self.steps):
            self.guard.begin_optimizer_anew()

    # ---- state and what a person may watch -----------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """``sync_every``, ``staleness``, ``outer_lr`` with an outer optimizer, and ``disagreement``.

        With a synchronous first phase also ``phase``: 0 in it, 1 after it. The disagreement is how far this node was
        from the mean of all when they last agreed, relative to the mean: before the merge, and estimated, for free, on
        up to 4096 elements of every bucket that this rank carries.
        """
        values = {"sync_every": float(self.period or 0), "staleness": float(self.staleness)}
        if self.config.first_phase:
            values["phase"] = float(not self.in_first_phase)
            if self.in_first_phase:
                values |= {"sync_every": 1.0, "staleness": 0.0}
        if isinstance(self._merge, OuterOptimizer):
            values["outer_lr"] = 0.0 if self.outer is None else self.outer.learning_rate
        relative = self._reducer.disagreement.relative()
        return values if relative is None else {**values, "disagreement": relative}

    def shared_state(self) -> dict[str, Any]:
        state = {
            **super().shared_state(),
            "exchanges_started": self.exchanges_started,
            "parts_sent": self._parts_sent,
            "tuned_period": self._tuned_period,
        }
        if self.config.first_phase:
            state["first_phase"] = [self.config.first_phase, self._begins_at, self.in_first_phase]
        if self.in_first_phase:  # the reference parameters of a run that goes on without this phase
            self._begin_from_present()
        if not self.may_ask:
            return state
        if self._merge.keeps_reference:
            self.settle()
            state["outer"] = self._outer_state()
            # whoever drops what is in flight has got its outer steps all the same
            state["rounds_in_flight"] = sum(self._ends_round(each.parts) for each in self._in_flight.exchanges)
        elif self._is_copied_with_agreed:
            self.settle()
            kept = self._kept_values()
            state["last_agreed"] = [kept[id(tensor)] for tensor in self._carried]
        return state

    @property
    def _carried(self) -> list[Tensor]:
        """The tensors of which the reducer keeps the last agreed values, in the order of the replica."""
        buckets = self._reducer.buckets[: len(self._reducer.references)]
        carried = {id(piece.tensor) for bucket in buckets for piece in bucket.slices}
        return [tensor for tensor in self.replica.tensors if id(tensor) in carried]

    @property
    def _is_copied_with_agreed(self) -> bool:
        """Whether a node that comes has to know more than what the one has become that it begins from."""
        return self.topology.may_grow and self.config.begins_with_copy and bool(self._reducer.references)

    def _outer_state(self) -> dict[str, Any]:
        """What lies beside the parameters, for each of them: the outer optimizer's state, and values kept. Collective.

        The latter are ``"agreed"``, where they are equal on all nodes.
        """
        parameters = self.replica.parameters
        state = {"state": [{} for _ in parameters]} if self.outer is None else self.outer.state_dict(parameters)
        if self._keeps_common_values:
            kept = self._kept_values()
            for of_parameter, parameter in zip(state["state"], parameters, strict=True):
                of_parameter["agreed"] = kept[id(parameter)]
        return state

    def _load_outer_state(self, outer: Mapping[str, Any], with_values: bool) -> None:
        if self.outer is not None:
            state = [{name: v for name, v in own.items() if name != "agreed"} for own in outer["state"]]
            self.outer.load_state_dict({**outer, "state": state}, self.replica.parameters)
        if with_values and self._keeps_common_values and all("agreed" in own for own in outer["state"]):
            kept = (own["agreed"] for own in outer["state"])
            self._keep_values(dict(zip(map(id, self.replica.parameters), kept, strict=True)))

    @property
    def _keeps_common_values(self) -> bool:
        """Whether there are values beside the nodes' own that are equal on all nodes."""
        return self._merge.keeps_reference and not isinstance(self.config.reducer, Graph) and not self.is_alone

    @torch.no_grad()
    def _kept_values(self) -> dict[int, Tensor]:
        """The last agreed values of every tensor that is carried, by its ``id``. Collective over the node."""
        kept: dict[int, Tensor] = {}
        for index, reference in enumerate(self._reducer.references):
            for piece, values in self._reducer.buckets[index].split(self._reducer.whole(index, reference)):
                if id(piece.tensor) not in kept:
                    kept[id(piece.tensor)] = torch.empty_like(piece.tensor, memory_format=torch.contiguous_format)
                kept[id(piece.tensor)].view(-1)[piece.start :][: piece.length] = values
        return kept

    @torch.no_grad()
    def _keep_values(self, kept: Mapping[int, Tensor]) -> None:
        """Undo :meth:`_kept_values`, on any number of nodes and ranks."""
        for index, reference in enumerate(self._reducer.references):
            bucket = self._reducer.buckets[index]
            flat = bucket.empty(self._reducer.parts_of(index))
            for piece, values in bucket.split(flat):
                values.copy_(kept[id(piece.tensor)].reshape(-1)[piece.start :][: piece.length])
            reference.copy_(self._reducer.carried(flat, index))

    def state_dict(self) -> dict[str, Any]:
        """All state. What is still in flight is not in it: call :meth:`settle` first."""
        state = super().state_dict()
        if not self.is_alone:
            state["reducer"] = self._reducer.state_dict()
            state["in_flight"] = self._in_flight.state_dict()
            if self.outer is not None:  # fragments cut tensors, so the state by tensor has one step where parts differ
                state["outer_parts"] = self.outer.part_states()
        return state

    def undo_point(self) -> Callable[[], None]:
        undo_values, was_nonfinite = super().undo_point(), self._was_nonfinite
        synchronizations, parts_sent = self.exchanges_started, self._parts_sent
        exchanges = list(self._in_flight.exchanges)
        moves_beside = any(not exchange.is_lost for exchange in exchanges)
        undo_agreed = None if moves_beside else self._remember_agreed()

        def undo() -> None:
            self._in_flight.settle()
            undo_values()
            self.exchanges_started, self._parts_sent, self._was_nonfinite = synchronizations, parts_sent, was_nonfinite
            self._in_flight.exchanges = exchanges
            self._in_flight.lose()
            if undo_agreed is not None:
                undo_agreed()

        return undo

    def _remember_agreed(self) -> Callable[[], None]:
        """Remember the last agreed values, and all that goes with them; what is returned goes back to them."""
        carried = self._reducer.state_dict()
        undo_outer = self.outer.undo_point() if self.outer is not None else None

        def undo() -> None:
            self._reducer.load_state_dict(carried)
            if undo_outer is not None:
                undo_outer()

        return undo

    def before_nodes_change(self) -> Callable[[], None]:
        self._in_flight.lose()
        exchanges = self._in_flight.exchanges
        # what lies beside the parameters is cut by the lanes, of which there may be others
        go_on = super().before_nodes_change()
        kept = self._kept_values() if self._reducer.references else None
        parameters = self.replica.parameters
        state = None if self.outer is None else self.outer.state_dict(parameters)

        def go_on_with_state() -> None:
            self.outer = None
            go_on()
            self._in_flight.exchanges = exchanges
            if self.outer is not None and state is not None:
                self.outer.load_state_dict(state, parameters)
            if kept is not None:
                self._keep_values(kept)

        return go_on_with_state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, or :meth:`shared_state`.

        With the latter, what was in flight is dropped, and the nodes go on from the agreed parameters.
        """
        super().load_state_dict(state)
        self._load_first_phase(state)
        self.exchanges_started = state["exchanges_started"]
        self._parts_sent = state["parts_sent"]
        self._in_flight.drop()
        if self.tuner is not None and state["tuned_period"] is not None:
            self._set_period(state["tuned_period"])
            self.tuner = None
        if self.is_alone:
            return
        if "reducer" in state:
            self._reducer.load_state_dict(state["reducer"])
            self._in_flight.load_state_dict(state["in_flight"], self.replica.device)
        else:
            self._reducer.set_references()
            self.outer = self._built_outer(self.outer)
            if "last_agreed" in state and self._is_copied_with_agreed:
                self._keep_values(dict(zip(map(id, self._carried), state["last_agreed"], strict=True)))
        if "outer" in state:
            self._load_outer_state(state["outer"], with_values="reducer" not in state)
            if self.outer is not None and "reducer" not in state:
                for _ in range(state["rounds_in_flight"]):
                    self.outer.end_round()
        if self.outer is not None and "outer_parts" in state:
            self.outer.load_part_states(state["outer_parts"])

    def _load_first_phase(self, state: Mapping[str, Any]) -> None:
        """Go on in the phase in which a state was saved: nodes that have trained alone do not begin a first phase."""
        given, begins_at, is_first = state.get("first_phase", [0, 0, not state["steps"]])
        first_gradients = self.config.first_gradients if is_first else None
        is_first = first_gradients is not None
        self._average_gradients_over(first_gradients or self.config.gradients)
        if not is_first:
            self._begins_at = state["steps"] if begins_at is None else min(begins_at, state["steps"])
        elif given == self.config.first_phase:
            self._begins_at = begins_at
        else:
            self._begins_at = None  # the length of the phase has changed
