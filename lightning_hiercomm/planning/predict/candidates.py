"""Predict many configurations on a cluster, and recommend one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from lightning_hiercomm.planning.cluster import Cluster, Workload
from lightning_hiercomm.planning.predict.accuracy import WIRES, Accuracy, accuracy
from lightning_hiercomm.planning.predict.cost import Prediction, predict
from lightning_hiercomm.planning.predict.cycles import drift
from lightning_hiercomm.planning.predict.schemes import Payload
from lightning_hiercomm.planning.quantities import shown_bytes, shown_seconds
from lightning_hiercomm.schemes import (
    DASO,
    AllReduce,
    DiLoCo,
    Gossip,
    PeriodicAveraging,
    Scheme,
    StepsDelay,
)

DEFAULT_WIRES = (None, "bfloat16", "int8", "int4")
"""Default payload types between nodes; None: the parameters' own."""


@dataclass(frozen=True)
class Candidate:
    """A configuration.

    Attributes:
        kind: The scheme's class; None is Lightning's ``DDPStrategy``.
        arguments: Arguments of its constructor.
        wire_dtype: As for the strategy; None: the parameters' own type.
    """

    kind: type[Scheme] | None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    wire_dtype: str | None = None

    @property
    def scheme(self) -> Scheme | None:
        """The scheme; None is Lightning's ``DDPStrategy``."""
        return None if self.kind is None else self.kind(**self.arguments)

    @property
    def name(self) -> str:
        """The name of the class."""
        return "DDPStrategy" if self.kind is None else self.kind.__name__

    @property
    def title(self) -> str:
        """The constructor's call in Python."""
        if self.kind is None:
            return self.name
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


@dataclass(frozen=True)
class Row:
    """A configuration with its prediction.

    Attributes:
        candidate: The configuration.
        prediction: The predicted step.
        speedup: Speed relative to Lightning's ``DDPStrategy`` on the same cluster.
        overhead: Extra time of a step as a share of a step on one node alone, of the mean speed.
        drift: See :func:`lightning_hiercomm.planning.predict.cycles.drift`.
        fits: Whether a rank's memory is enough.
        accuracy: The measured accuracy.
    """

    candidate: Candidate
    prediction: Prediction
    speedup: float
    overhead: float
    drift: float
    fits: bool
    accuracy: Accuracy


@dataclass(frozen=True)
class Plan:
    """All configurations on one cluster.

    Attributes:
        cluster: The cluster.
        workload: The training of a rank.
        rows: All configurations, DDP first.
        alone: Seconds of a step on one node alone.
        target: Accepted overhead.
        speeds: Of the nodes; a node of speed 1 takes the time of the workload.
        chosen: The recommended row.
        reason: The reason for the recommendation, in a few sentences.
    """

    cluster: Cluster
    workload: Workload
    rows: Sequence[Row]
    alone: float
    target: float
    speeds: Sequence[float]
    chosen: Row
    reason: str

    def best_of_each(self) -> list[Row]:
        """Return the row of each scheme that :func:`plan` would recommend."""
        names = dict.fromkeys(row.candidate.name for row in self.rows)
        return [_best(self.rows, name, self.target) for name in names]

    def left_out(self) -> dict[str, str]:
        """Return the schemes without a row, with the reasons."""
        found = {row.candidate.kind for row in self.rows}
        if StepsDelay in found:
            return {}
        return {StepsDelay.__name__: _MADE_FOR_SGD if _keeps_more(self.workload) else _NEEDS_SUMS}


def candidates(
    cluster: Cluster,
    workload: Workload,
    wires: Iterable[str | None] = DEFAULT_WIRES,
) -> Iterator[Candidate]:
    """Generate settings in the range of papers and users; DDP first.

    Args:
        cluster: The cluster.
        workload: The training of a rank. ``StepsDelay`` needs an optimizer with no more state than momentum, because
            its local rule is made for SGD.
        wires: Payload types between nodes.
    """
    refused = {*((StepsDelay, wire) for wire in ("int8", "int4", "top4")), (Gossip, "top4")}
    yield Candidate(None)
    # a type that is no narrower than the parameters' equals their own
    for wire in dict.fromkeys(wire if Payload.named(wire, workload).narrows else None for wire in wires):
        for kind, arguments in _settings(cluster, workload):
            if (kind, wire) not in refused:
                yield Candidate(kind, arguments, wire)


def _settings(cluster: Cluster, workload: Workload) -> Iterator[tuple[type[Scheme], dict[str, Any]]]:
    yield AllReduce, {}
    for sync_every in (1, 2, 4, 8, 16, 32, 64):
        yield PeriodicAveraging, {"sync_every": sync_every}
    reducers = ("leader", "sharded") if cluster.ranks_per_node > 1 else ("leader",)
    for reducer in reducers:
        # (1, 1) is no faster than (2, 1), and loses accuracy: `stale-8` in docs/explanation/papers.md
        for sync_every, staleness in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)):
            arguments: dict[str, Any] = {"sync_every": sync_every, "staleness": staleness}
            yield DASO, arguments if reducer == "leader" else {**arguments, "reducer": reducer}
    if not _keeps_more(workload):
        for delay in (1, 2, 4, 5):
            yield StepsDelay, {"delay": delay, "warmup_steps": 100 * delay}
    yield Gossip, {}
    yield Gossip, {"overlap": True}
    for sync_every in (32, 64, 100, 200, 500):
        yield DiLoCo, {"sync_every": sync_every}
        for staleness in (1, 4):
            yield DiLoCo, {"sync_every": sync_every, "fragments": 4, "staleness": staleness}


def _keeps_more(workload: Workload) -> bool:
    """Return whether the optimizer has more state than momentum."""
    return workload.state_per_parameter > 1.5


def plan(
    cluster: Cluster,
    workload: Workload,
    wires: Iterable[str | None] = DEFAULT_WIRES,
    memory: float | None = None,
    target: float = 0.05,
    speeds: Sequence[float] = (1.0,),
) -> Plan:
    """Predict all configurations, and recommend one.

    The recommended configuration has no measured loss of accuracy
    (:func:`~lightning_hiercomm.planning.predict.accuracy.accuracy`). Among those with an overhead of at most
    ``target``, it has the fewest steps between synchronizations, then the widest type between nodes. If none meets the
    target, the fastest is recommended.

    Args:
        cluster: The cluster.
        workload: The training of a rank.
        wires: Payload types between nodes.
        memory: Bytes of a rank's memory. None: enough.
        target: Accepted overhead.
        speeds: Of the nodes; a node of speed 1 takes the time of the workload. Default: all have that.

    Raises:
        ValueError: If no configuration fits into the memory.
    """
    alone = predict(None, replace(cluster, nodes=1), workload, speeds=[fmean(speeds)]).seconds
    rows: list[Row] = []
    for candidate in candidates(cluster, workload, wires):
        prediction = predict(candidate.scheme, cluster, workload, candidate.wire_dtype, speeds)
        rows.append(
            Row(
                candidate,
                prediction,
                rows[0].prediction.seconds / prediction.seconds if rows else 1.0,
                prediction.seconds / alone - 1,
                drift(candidate.scheme, cluster.nodes),
                memory is None or prediction.memory_bytes <= memory,
                accuracy(candidate.kind, candidate.arguments, candidate.wire_dtype, cluster.nodes),
            )
        )
    if not any(row.fits for row in rows):
        least = min(row.prediction.memory_bytes for row in rows)
        raise ValueError(
            f"a rank needs at least {shown_bytes(least)} for model, gradients and optimizer, more than"
            f" {shown_bytes(memory or 0)}: shard the model inside the node, or use a smaller one"
        )
    chosen = _choose([row for row in rows if row.fits and row.candidate.kind is not None] or rows[:1], target)
    return Plan(cluster, workload, rows, alone, target, speeds, chosen, _reason(chosen, rows, target))


def _choose(rows: Sequence[Row], target: float) -> Row:
    kept = [row for row in rows if row.accuracy.is_kept] or rows
    good = [row for row in kept if row.overhead <= target]
    if not good:
        return min(kept, key=lambda row: row.prediction.seconds)
    return min(good, key=lambda row: (row.drift, WIRES.index(row.candidate.wire_dtype or "float32"), row.overhead))


def _best(rows: Sequence[Row], name: str, target: float) -> Row:
    of_scheme = [row for row in rows if row.candidate.name == name]
    return _choose([row for row in of_scheme if row.fits] or of_scheme, target)


def _reason(chosen: Row, rows: Sequence[Row], target: float) -> str:
    more = f"{max(0.0, chosen.overhead):.1%} more than on one node alone"
    sentences = [f"a step takes {shown_seconds(chosen.prediction.seconds)}, {more}; accuracy: {chosen.accuracy}"]
    if chosen.candidate.kind is AllReduce:
        wire = chosen.candidate.wire_dtype
        sentences.append("This is DDP" + (f" with gradients sent as {wire}" if wire else ""))
    others = {"DDP": rows[0], "AllReduce": _best(rows, AllReduce.__name__, target)}
    slower = [
        f"{name}{_with_wire(row)} would take {shown_seconds(row.prediction.seconds)} ({row.overhead:+.0%})"
        for name, row in others.items()
        if row is not chosen and row.candidate.kind is not chosen.candidate.kind
    ]
    if slower:
        sentences.append(", ".join(slower))
    if chosen.overhead > target:
        fastest = min((row for row in rows if row.fits), key=lambda row: row.prediction.seconds)
        if fastest.prediction.seconds < chosen.prediction.seconds:
            sentences.append(
                f"{fastest.candidate.title}{_with_wire(fastest)} would take"
                f" {shown_seconds(fastest.prediction.seconds)} ({fastest.overhead:+.0%}); accuracy: {fastest.accuracy}"
            )
        sentences.append("Larger batches would lower the share of communication")
    return ". ".join(sentences) + "."


def _with_wire(row: Row) -> str:
    wire = row.candidate.wire_dtype
    return f" with wire_dtype={wire!r}" if wire else ""


_MADE_FOR_SGD = "its local rule is made for SGD, and this optimizer has more state than momentum"
_NEEDS_SUMS = "it supports float32 and bfloat16 only (--wires)"
