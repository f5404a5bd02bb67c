"""Recommend a strategy for a cluster, by the rule of ``docs/howto/choose_a_scheme.md`` and a simple model of a step."""

from __future__ import annotations

import csv
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch

from lightning_hiercomm.comm.wire import codec_named
from lightning_hiercomm.planning.quantities import shown_bytes, shown_count, shown_number, shown_rate, shown_seconds

BACKWARD = 2 / 3
"""The share of a step in which gradients can be sent: the backward pass."""

_BYTES = 4  # of a parameter and of a gradient, float32
OPTIMIZERS = {"adamw": "AdamW", "sgd": "momentum SGD"}
_MARGINS = {"points": 1.0, "nats": 0.03}  # "no loss" is not said of an interval that reaches further to the bad side
_SLOWER = 1.2  # how much slower a row without a loss may be than one with a loss


@dataclass(frozen=True)
class Choice:
    """A row of the rule.

    Attributes:
        below: The row holds below this ratio of T, one synchronization in float32, to c, a step on one node.
        arguments: What to write: arguments of ``HierarchicalStrategy``, or of the Trainer for DDP.
        wire_dtype: Type of the values between nodes; None: float32.
        period: Steps between two synchronizations; 1: gradients are averaged at every step, during the backward pass.
        why: The reason, for the page.
        measured: The method whose accuracy was measured; None: accuracy is that of DDP.
        steps: Steps of the measured run; None: those of the short runs.
        only_where_kept: Whether the row holds on two nodes with AdamW only: on eight, short runs of a small CNN
            ended more than a point below DDP, or may have.
    """

    below: float
    arguments: str
    wire_dtype: str | None
    period: int
    why: str
    measured: str | None
    steps: int | None = None
    only_where_kept: bool = False

    def applies(self, nodes: int, optimizer: str) -> bool:
        """Return whether the row may be recommended."""
        return not self.only_where_kept or (nodes == 2 and optimizer == "adamw")

    @property
    def is_ddp(self) -> bool:
        """Whether this is Lightning's ``DDPStrategy``."""
        return self.measured is None

    @property
    def line(self) -> str:
        """The line to write."""
        return f"Trainer({self.arguments})" if self.is_ddp else f"HierarchicalStrategy({self.arguments})"

    @property
    def share(self) -> float:
        """Bytes of a value between nodes divided by those of float32, with the codec's scales."""
        numel = 2**20
        return codec_named(self.wire_dtype).payload_bytes(numel, torch.float32) / (_BYTES * numel)


LONG = 20_000
"""The fewest steps of a run for the last row of `RULE`."""

_SPARSE2, _INT4 = 'wire_dtype="sparse2"', 'wire_dtype="int4"'
RULE = (
    Choice(0.1, 'strategy="ddp"', None, 1, "The network is no limit", None),
    Choice(2, 'wire_dtype="int8"', "int8", 1, "T / 4 hides behind the backward pass", "AllReduce, int8"),
    Choice(12, _INT4, "int4", 1, "T / 8 hides for the most part", "AllReduce, int4"),
    Choice(22, _SPARSE2, "sparse2", 1, "T / 16 hides for a large part", "AllReduce, sparse2"),
    *(
        Choice(
            16 * period,
            f"PeriodicAveraging({period}), {_SPARSE2}",
            "sparse2",
            period,
            f"A step waits T / {16 * period}",
            f"PeriodicAveraging({period}), sparse2",
            only_where_kept=True,
        )
        for period in (2, 4)
    ),
    Choice(
        math.inf,
        f"DiLoCo(100), {_INT4}",
        "int4",
        100,
        f"A step waits T / 800. In runs of {LONG:,} steps or more: 200 synchronizations",
        "DiLoCo(16), int4",
        steps=2976,
    ),
)
"""The rule, in the order of increasing risk; the first row that holds is the recommendation."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes that train a model.

    Attributes:
        nodes: Number of nodes, M.
        rate: Bytes per second of a node's link to the others, r.
        latency: Seconds of the shortest message between nodes.
        parameters: Number of trained parameters.
        step: Seconds of a training step on one node, c.
        ranks_per_node: Number of ranks on each; DDP alone depends on it.

    Raises:
        ValueError: If there are fewer than two nodes, or no ranks.
    """

    nodes: int
    rate: float
    latency: float
    parameters: float
    step: float
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise ValueError(f"nodes={self.nodes}: give at least 2; on one node every scheme trains as DDP does")
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={self.ranks_per_node} must be positive")

    @property
    def synchronization(self) -> float:
        """T: the seconds of one synchronization of all parameters in float32, without latency."""
        return self._bytes(self.nodes) / self.rate

    @property
    def ratio(self) -> float:
        """T / c, which the rule asks for."""
        return self.synchronization / self.step

    def bytes_per_step(self, choice: Choice) -> float:
        """Return the bytes that a node sends to others per step."""
        # DDP's ring passes all ranks, in the order of the nodes
        members = self.nodes * self.ranks_per_node if choice.is_ddp else self.nodes
        return self._bytes(members) * choice.share / choice.period

    def seconds(self, choice: Choice) -> float:
        """Return the modeled time of a step: a synchronization hides behind the backward pass, or nowhere."""
        exchange = self.bytes_per_step(choice) * choice.period / self.rate + 2 * (self.nodes - 1) * self.latency
        exposed = max(0.0, exchange - BACKWARD * self.step) if choice.period == 1 else exchange / choice.period
        return self.step + exposed

    def speed(self, choice: Choice) -> float:
        """Return how many times as many samples per second all nodes train as one node alone."""
        return self.nodes * self.step / self.seconds(choice)

    def _bytes(self, members: int) -> float:
        return 2 * (members - 1) / members * _BYTES * self.parameters


# ---- accuracy --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accuracy:
    """A measured difference from float32 all-reduce, each at its best learning rate.

    Attributes:
        method: The method.
        nodes: Number of nodes.
        optimizer: ``"adamw"`` or ``"sgd"``.
        steps: Steps of the runs.
        unit: ``"nats"`` per byte that a language model loses more, or ``"points"`` of accuracy that a small CNN gains.
        mean: The mean difference.
        low: The lower end of its 95 % interval.
        high: The upper end.
    """

    method: str
    nodes: int
    optimizer: str
    steps: int
    unit: str
    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """The result in two words."""
        worst, best = (self.low, self.high) if self.unit == "points" else (-self.high, -self.low)
        if best < 0:
            return "loss seen"
        return "no loss seen" if worst >= -_MARGINS[self.unit] else "not clear"

    def __str__(self) -> str:
        digits = 1 if self.unit == "points" else 3
        half = (self.high - self.low) / 2
        return f"{self.mean:+.{digits}f} ± {half:.{digits}f} {self.unit}: {self.verdict}"

    @property
    def setting(self) -> str:
        """What was trained."""
        return f"{self.unit}, {self.nodes} nodes, {OPTIMIZERS[self.optimizer]}, {self.steps:,} steps"


@cache
def stored() -> tuple[Accuracy, ...]:
    """Return the measured differences: a byte language model before a small CNN on MNIST-1D."""
    with (files(__package__) / "accuracy.csv").open() as file:
        return tuple(
            Accuracy(
                row["method"],
                int(row["nodes"]),
                row["optimizer"],
                int(row["steps"]),
                row["unit"],
                *(float(row[name]) for name in ("mean", "low", "high")),
            )
            for row in csv.DictReader(file)
        )


def nearest(choice: Choice, nodes: int, optimizer: str) -> Accuracy | None:
    """Return the nearest measurement of a row of the rule; None for DDP.

    Args:
        choice: The row.
        nodes: On as many nodes or more, if there is one; from eight on, the language model counts before more nodes.
        optimizer: Counts before all else.
    """

    def distance(row: Accuracy) -> tuple[bool, bool, bool, bool, int]:
        is_small = row.nodes < min(nodes, 8)
        return row.optimizer != optimizer, is_small, row.unit != "nats", row.nodes < nodes, abs(row.nodes - nodes)

    rows = (row for row in stored() if row.method == choice.measured and choice.steps in (None, row.steps))
    return min(rows, key=distance, default=None)


# ---- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of the rule on a cluster."""

    choice: Choice
    seconds: float
    bytes: float
    speed: float
    accuracy: Accuracy | None
    applies: bool

    @property
    def loses_nothing(self) -> bool:
        """Whether no loss was seen."""
        return self.accuracy is None or self.accuracy.verdict == "no loss seen"


def rows_of(cluster: Cluster, optimizer: str = "adamw") -> list[Row]:
    """Return all rows of the rule on a cluster."""
    return [
        Row(
            choice,
            cluster.seconds(choice),
            cluster.bytes_per_step(choice),
            cluster.speed(choice),
            nearest(choice, cluster.nodes, optimizer),
            choice.applies(cluster.nodes, optimizer),
        )
        for choice in RULE
    ]


def recommended(cluster: Cluster, rows: Sequence[Row]) -> Row:
    """Return the first row that holds, or one without a loss that is faster, or hardly slower if that one loses."""
    applying = [row for row in rows if row.applies]
    own = next((row for row in applying if cluster.ratio < row.choice.below), applying[-1])
    fastest = min((row for row in applying if row.loses_nothing), key=lambda row: row.seconds)
    return fastest if fastest.seconds < own.seconds * (1 if own.loses_nothing else _SLOWER) else own


def _advice(cluster: Cluster, best: Row) -> str:
    if best.speed >= 1:
        return best.choice.line
    slower = f"{shown_number(1 / best.speed)} times slower"
    return f"one node alone. {cluster.nodes} nodes are {slower}, also with {best.choice.line}."


def report(cluster: Cluster, optimizer: str = "adamw") -> str:
    """Return the rows of the rule as a table, with the recommendation."""
    rows = rows_of(cluster, optimizer)
    best = recommended(cluster, rows)
    table = [("", "HierarchicalStrategy(...)", "step", "sent", "DDP", "one node", "against float32")]
    for row in rows:
        times = f"{shown_number(rows[0].seconds / row.seconds)}x", f"{shown_number(row.speed)}x"
        cells = row.choice.arguments, shown_seconds(row.seconds), shown_bytes(row.bytes), *times
        table.append((">" if row is best else "", *cells, str(row.accuracy or "as DDP")))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    measured: dict[str, list[str]] = {}
    for row in rows:
        if row.accuracy is not None:
            measured.setdefault(row.accuracy.setting, []).append(row.accuracy.method)
    lines = [
        f"{cluster.nodes} nodes, {shown_rate(cluster.rate)} each, {shown_seconds(cluster.latency)} latency,"
        f" {shown_count(cluster.parameters)} parameters, {shown_seconds(cluster.step)} per step on one node.",
        f"T, a synchronization in float32, takes {shown_seconds(cluster.synchronization)}:"
        f" {shown_number(cluster.ratio)} steps.",
        "",
        *("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table),
        "",
        "step: seconds by a simple model, not measured. Gradients hide behind two thirds of a step, averages of",
        "parameters do not. Nodes of unequal speed also need batches=HeterogeneousBatches(...).",
        "sent: bytes of a node per step. DDP, one node: samples per second, relative to these.",
        "against float32: measured points of accuracy of a small CNN, or nats per byte that a language model loses,",
        "with 95 % intervals. Yours may differ.",
        *(
            line
            for setting, methods in measured.items()
            for line in textwrap.wrap(
                f"{setting}: {'; '.join(methods)}", 116, initial_indent="  ", subsequent_indent="    "
            )
        ),
        "",
    ]
    lines.append(f"Recommended: {_advice(cluster, best)}")
    if best.choice is RULE[-1] and best.speed >= 1:
        lines += [
            f"That is for runs of {LONG:,} steps or more: 200 synchronizations. In a shorter run:",
            _advice(cluster, recommended(cluster, rows[:-1])),
        ]
    return "\n".join(lines)
