"""What a run keeps, and costs, where nodes die: if they come and go, and if all restart from checkpoints.

Nodes die independently of each other, and at any moment alike: a life lasts an exponentially distributed time X of mean
M, the node's ``mtbf``. Nothing else is supposed of faults, and none happen while a node is away or waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hiercomm.planning.cluster import Cluster, Workload
from lightning_hiercomm.planning.predict.candidates import Plan, Row
from lightning_hiercomm.planning.predict.cycles import cycle, exchanges_per_cycle
from lightning_hiercomm.planning.predict.schemes import outer_copies
from lightning_hiercomm.planning.quantities import shown_price
from lightning_hiercomm.schemes import Scheme

RESTART_SECONDS = 600.0
"""Until a program trains again that has died. Daly's in all of his examples; with what Llama 3 reports (466
interruptions in 54 days, of which 90 % were training) at most 17 minutes went with each, all that was done anew
included."""

CHECKPOINT_BYTES_PER_SECOND = 1e9
"""At which one process writes a checkpoint; an assumption."""


@dataclass(frozen=True)
class Faults:
    """How often nodes die, what that takes, and what is paid.

    Attributes:
        mtbf: Seconds that one node trains until it dies, on average.
        restart: Seconds from then until it, or another in its place, has started the program.
        checkpoint: Seconds that training waits for a checkpoint. None: its bytes at
            :data:`CHECKPOINT_BYTES_PER_SECOND`.
        heal: Seconds in which a newcomer takes up the state of the run. None: its bytes between two nodes.
        dead_after: Seconds of silence after which elastic nodes count one as gone.
        price: Of a node for an hour, in any currency.
        egress: Of a gigabyte that a node sends to others, in the same.
    """

    mtbf: float
    restart: float = RESTART_SECONDS
    checkpoint: float | None = None
    heal: float | None = None
    dead_after: float = 5.0
    price: float = 0.0
    egress: float = 0.0


@dataclass(frozen=True)
class Survival:
    """Of one configuration.

    Attributes:
        elastic_goodput: The share of the undisturbed throughput that nodes keep which come and go; None: the scheme
            cannot.
        elastic_cost: Of as many samples as 1,000 undisturbed steps see.
        restarts_goodput: The same share, if all nodes start again from the last checkpoint.
        restarts_cost: As above.
        checkpoint_every: Seconds of training between two checkpoints, then.
    """

    elastic_goodput: float | None
    elastic_cost: float | None
    restarts_goodput: float
    restarts_cost: float
    checkpoint_every: float


# ---- nodes that come and go ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lives:
    """The lives of one node, one after the other, counted in periods.

    What a node has trained since its last agreement is lost with it, so of a life X it keeps ``floor(X / P)`` periods.
    The node's next life asks for the others R after the end of this one, and begins with the next period, ``ceil((X +
    R) / P)`` periods after the last one began. With ``p = exp(-P / M)``, the probability to outlive a period, and
    ``R / P = whole + part``::

        E[floor(X / P)]      = sum over j = 1, 2, ... of p**j  =  p / (1 - p)
        E[ceil((X + R) / P)] = whole + 1 + sum over j = 1, 2, ... of p**(j - part)
                             = whole + 1 + p**(1 - part) / (1 - p)

    Args:
        period: Seconds between two agreements after which all that was trained is safe, P.
        mtbf: Seconds, M.
        restart: Seconds, R.

    Attributes:
        kept: Periods of a life that are not lost, on average.
        passed: Periods from the beginning of one life to that of the next.
    """

    period: float
    mtbf: float
    restart: float

    @property
    def kept(self) -> float:
        return self._outlived / self._not_outlived

    @property
    def passed(self) -> float:
        part, whole = math.modf(self.restart / self.period)
        return whole + 1 + math.pow(self._outlived, 1 - part) / self._not_outlived

    @property
    def _outlived(self) -> float:
        return math.exp(-self.period / self.mtbf)

    @property
    def _not_outlived(self) -> float:
        return -math.expm1(-self.period / self.mtbf)


def elastic_goodput(
    nodes: int,
    period: float,
    mtbf: float,
    restart: float,
    dead_after: float,
    heal: float = 0.0,
    between: float | None = None,
) -> float:
    """The share of the undisturbed throughput that nodes keep which come and go.

    Each contributes the periods that it keeps of those that pass (:class:`Lives`), and all wait at agreements: for who
    has died in the last ``dead_after`` seconds before one, and for who was healed since, and is so much later there.

    Args:
        nodes: How many take part while all live.
        period: Seconds between two agreements after which all that was trained is safe.
        mtbf: Seconds that a node lives, on average.
        restart: Seconds from its end until its next life asks for the others.
        dead_after: Seconds of silence after which it counts as gone.
        heal: Seconds in which that takes up the state of the run.
        between: Seconds between two agreements of any kind. Default: ``period``.
    """
    lives, between = Lives(period, mtbf, restart), between or period
    deaths = nodes / (lives.passed * period)  # per second
    waits = waits_for_dead(deaths, between, dead_after) + heal * -math.expm1(-deaths * between)
    return lives.kept / lives.passed * between / (between + waits)


def waits_for_dead(deaths: float, between: float, dead_after: float) -> float:
    """Seconds that the others wait at an agreement, on average, until all are gone who have died since the last.

    They wait longer than t if anybody has died in the last ``dead_after - t`` seconds, of ``between`` at most. With D
    the deaths per second, d for ``dead_after`` and B for ``between``, that is the integral::

        over t from 0 to d of 1 - exp(-D * min(d - t, B))

    Args:
        deaths: Per second, at any moment alike.
        between: Seconds between two agreements.
        dead_after: Seconds of silence after which a node counts as gone.
    """
    near = min(dead_after, between)
    anybody = -math.expm1(-deaths * near)
    return near - anybody / deaths + (dead_after - near) * anybody


# ---- restarts from checkpoints ---------------------------------------------------------------------------------------


def checkpoint_interval(mtbf: float, checkpoint: float) -> float:
    """Seconds of training between two checkpoints with which least is lost.

    Young ("A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974) has ``sqrt(2 * C * M)``.
    This is Daly's estimate of higher order ("A higher order estimate of the optimum checkpoint interval for restart
    dumps", Future Generation Computer Systems 22(3), 2006).

    Args:
        mtbf: Seconds between two faults of anybody, M.
        checkpoint: Seconds that one takes, C.
    """
    ratio = checkpoint / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    return math.sqrt(2 * checkpoint * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint


def restarts_goodput(interval: float, mtbf: float, restart: float, checkpoint: float) -> float:
    """The share of the undisturbed throughput that is kept, if all nodes start again from the last checkpoint.

    A segment of tau seconds and its checkpoint take ``M * exp(R / M) * (exp((tau + C) / M) - 1)`` seconds, restarts in
    which another fault comes included (Daly 2006, its complete cost function).

    Args:
        interval: Seconds of training between two checkpoints, tau.
        mtbf: Seconds between two faults of anybody, M.
        restart: Seconds from a fault until all train again, R.
        checkpoint: Seconds that one takes, C.
    """
    segment = interval + checkpoint  # what follows divides by the exponentials, none of which can overflow then
    return interval / mtbf * math.exp(-(restart + segment) / mtbf) / -math.expm1(-segment / mtbf)


# ---- of a plan -------------------------------------------------------------------------------------------------------


def survive(row: Row, cluster: Cluster, workload: Workload, faults: Faults) -> Survival:
    """What becomes of a configuration where nodes die.

    Args:
        row: Of a plan.
        cluster: Of the plan.
        workload: Of the plan.
        faults: How often, and what is paid.
    """
    scheme, nodes, seconds = row.candidate.scheme, cluster.nodes, row.prediction.seconds
    state = state_bytes(scheme, workload)
    checkpoint = state / CHECKPOINT_BYTES_PER_SECOND if faults.checkpoint is None else faults.checkpoint
    heal = state / cluster.inter.bandwidth if faults.heal is None else faults.heal

    def cost(goodput: float, sent: float) -> float:
        """Of 1,000 steps: the nodes' time, and bytes that all of them send per step."""
        time = nodes * faults.price * seconds / 3600 / goodput if goodput else math.inf
        return 1000 * (time + faults.egress * sent / 1e9)

    of_all = faults.mtbf / nodes
    every = checkpoint_interval(of_all, checkpoint)
    restarts = restarts_goodput(every, of_all, faults.restart, checkpoint)
    # a step is made, and sent, as often as the training of a segment is begun
    anew = restarts_goodput(every, of_all, 0.0, checkpoint) * (1 + checkpoint / every)
    resent = nodes * row.prediction.inter_bytes / anew if anew else math.inf
    restarts_cost = cost(restarts, resent if faults.egress else 0.0)
    if scheme is None or scheme.requirements.needs_fixed_nodes is not None:
        return Survival(None, None, restarts, restarts_cost, every)
    steps_of_cycle = cycle(scheme)
    period = steps_of_cycle * seconds
    between = period / exchanges_per_cycle(scheme)
    elastic = elastic_goodput(nodes, period, faults.mtbf, faults.restart, faults.dead_after, heal, between)
    steps = Lives(period, faults.mtbf, faults.restart).kept * steps_of_cycle  # of a life, which begins with a heal
    sent = nodes * (row.prediction.inter_bytes + (state / steps if steps else 0.0))
    return Survival(elastic, cost(elastic, sent), restarts, restarts_cost, every)


def state_bytes(scheme: Scheme | None, workload: Workload) -> float:
    """Bytes of what a newcomer gets, and of a checkpoint: the model, the optimizer's state, and the outer optimizer's.

    Args:
        scheme: With its arguments; None is Lightning's ``DDPStrategy``.
        workload: What is trained.
    """
    return workload.model_bytes * (1 + workload.state_per_parameter + outer_copies(scheme))


def most_useful(rows: Sequence[tuple[Row, Survival]]) -> tuple[Row, Survival] | None:
    """Of configurations that nodes which come and go can train by, the one that sees most samples per second."""
    able = [(row, survival) for row, survival in rows if survival.elastic_goodput]
    return max(able, key=lambda each: (each[1].elastic_goodput or 0) / each[0].prediction.seconds, default=None)


def advice(plan: Plan, faults: Faults) -> str:
    """Whether nodes should come and go, or restart from checkpoints; some sentences.

    The plan's own choice is compared with itself, where it can be elastic; where not, with the configuration that sees
    most samples per second among the best of each scheme.

    Args:
        plan: Of the cluster.
        faults: How often nodes die there.
    """
    best = [(row, survive(row, plan.cluster, plan.workload, faults)) for row in plan.best_of_each() if row.fits]
    stays = survive(plan.chosen, plan.cluster, plan.workload, faults)
    row, elastic = plan.chosen, stays
    if not stays.elastic_goodput:
        other = most_useful(best)
        if other is None:
            return f"{_how_often(plan, faults)}; no setting here can be elastic. {_by_restarts(plan.chosen, stays)}."
        row, elastic = other
    kept = f"elastic nodes keep {elastic.elastic_goodput:.1%} of what {_name(row)} would do undisturbed"
    said = f"{_how_often(plan, faults)}. By this model {kept}; {_by_restarts(plan.chosen, stays)}."
    assert elastic.elastic_goodput is not None
    seconds = 1000 * row.prediction.seconds / elastic.elastic_goodput
    slower = 1000 * plan.chosen.prediction.seconds / stays.restarts_goodput if stays.restarts_goodput else math.inf
    ways = [(seconds, elastic.elastic_cost or 0.0), (slower, stays.restarts_cost)]
    is_elastic = seconds <= slower
    (least, its_cost), (most, other_cost) = ways if is_elastic else ways[::-1]
    both = f"{_shown(least)} instead of {_shown(most)}"
    paid = f", and cost {shown_price(its_cost)} instead of {shown_price(other_cost)}"
    if not (faults.price or faults.egress):
        paid = ""
    take = f"Take elastic nodes with {_name(row)}" if is_elastic else f"Take {_name(plan.chosen)} and restarts"
    return f"{said} {take}: the samples of 1,000 undisturbed steps take {both}{paid}."


def _name(row: Row) -> str:
    wire = row.candidate.wire_dtype
    return f"{row.candidate.title}{f' with wire_dtype={wire!r}' if wire else ''}"


def _how_often(plan: Plan, faults: Faults) -> str:
    nodes = plan.cluster.nodes
    return f"Of {nodes} nodes that each live {_shown(faults.mtbf)}, one dies every {_shown(faults.mtbf / nodes)}"


def _by_restarts(row: Row, survival: Survival) -> str:
    kept = f"keeps {survival.restarts_goodput:.1%} with a checkpoint every {_shown(survival.checkpoint_every)}"
    return f"{_name(row)}, all of it restarted, {kept}"


def _shown(seconds: float) -> str:
    """For people: ``"2.8 min"``."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.3g} {unit}" if math.isfinite(seconds) else "for ever"
    return f"{seconds:.3g} s"
