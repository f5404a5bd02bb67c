"""Look up the measured accuracy of a scheme against float32 all-reduce."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from lightning_hiercomm.schemes import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, Scheme

WIRES = ("float32", "bfloat16", "int8", "int4", "top4")
"""Payload types between nodes, the most exact first."""

Kind = Literal["as DDP", "no loss over 1 point seen", "lost", "not measured"]

_MARGIN = 1.0
"""Points of accuracy that a run may lose; with enough seeds even the smallest difference is seen."""


@dataclass(frozen=True)
class Measured:
    """A row of the tables in ``docs/explanation/front.md``: one method in one setting.

    Attributes:
        nodes: Number of nodes.
        scheme: Name of the scheme's class.
        sync_every: Its period; 1 of schemes that have none.
        wire_dtype: Payload type between nodes.
        low: Lower end of the 95 % interval of the difference from float32 all-reduce, in points of accuracy.
        high: Its upper end.
    """

    nodes: int
    scheme: str
    sync_every: int
    wire_dtype: str
    low: float
    high: float

    @property
    def wire_rank(self) -> int:
        """Place of the payload type, the most exact first."""
        return WIRES.index(self.wire_dtype)

    @property
    def is_lost(self) -> bool:
        """Whether a loss was seen that may exceed one point: the interval lies below 0 and reaches below -1."""
        return self.high < 0 and self.low < -_MARGIN


@dataclass(frozen=True)
class Accuracy:
    """The measured accuracy of a configuration.

    Attributes:
        kind: ``"as DDP"``: the training is DDP's. ``"lost"``: a loss was seen that may exceed one
            point. ``"no loss over 1 point seen"``: none was. ``"not measured"``: no measured configuration decides.
        measured: The deciding row with the lowest interval; None without any.
    """

    kind: Kind
    measured: Measured | None = None

    @property
    def is_kept(self) -> bool:
        """Whether no loss was seen that may exceed one point."""
        return self.kind not in ("lost", "not measured")

    def __str__(self) -> str:
        if self.measured is None:
            return self.kind
        return f"{self.kind} ({self.measured.low:.1f} to {self.measured.high:.1f})"


@cache
def measured() -> tuple[Measured, ...]:
    """Return all measured rows of the package."""
    with (files(__package__) / "accuracy.csv").open() as file:
        return tuple(
            Measured(
                int(row["nodes"]),
                row["scheme"],
                int(row["sync_every"]),
                row["wire_dtype"],
                float(row["low"]),
                float(row["high"]),
            )
            for row in csv.DictReader(file)
        )


def accuracy(
    kind: type[Scheme] | None,
    arguments: Mapping[str, Any],
    wire_dtype: str | None,
    nodes: int,
    rows: Sequence[Measured] | None = None,
) -> Accuracy:
    """Look up the accuracy of a configuration.

    Other rows of the same scheme decide for a configuration without a row: no loss with a longer period and a narrower
    type, or a loss with a shorter period and a wider type.

    Args:
        kind: The scheme's class; None is DDP.
        arguments: Of its constructor.
        wire_dtype: Payload type between nodes; None: that of the parameters.
        nodes: Number of nodes. The rows of the next larger measured number decide, or those of the largest.
        rows: Measured rows. Default: :func:`measured`.
    """
    if kind is None or (kind is AllReduce and wire_dtype in (None, "float32")):
        return Accuracy("as DDP")
    rows = measured() if rows is None else rows
    sync_every, wire_rank = _period(kind, arguments), WIRES.index(wire_dtype or "float32")
    same = [row for row in rows if row.scheme == kind.__name__]
    if sync_every is None or not same:
        return Accuracy("not measured")
    counts = sorted({row.nodes for row in same})
    count = next((count for count in counts if count >= nodes), counts[-1])
    same = [row for row in same if row.nodes == count]
    lost = [row for row in same if row.is_lost and row.sync_every <= sync_every and row.wire_rank <= wire_rank]
    if lost:
        return Accuracy("lost", min(lost, key=lambda row: row.low))
    with_loss = {(row.sync_every, row.wire_rank) for row in same if row.is_lost}
    kept = [
        row
        for row in same
        if row.sync_every >= sync_every
        and row.wire_rank >= wire_rank
        and (row.sync_every, row.wire_rank) not in with_loss
    ]
    exact = [row for row in kept if (row.sync_every, row.wire_rank) == (sync_every, wire_rank)]
    if kept:
        return Accuracy("no loss over 1 point seen", min(exact or kept, key=lambda row: row.low))
    return Accuracy("not measured")


def _period(kind: type[Scheme], arguments: Mapping[str, Any]) -> int | None:
    """Return the period of a configuration of a measured kind; None for other kinds."""
    others = {name: value for name, value in arguments.items() if name != "sync_every"}
    if kind is DASO:
        return 4 if arguments == {"sync_every": 4, "staleness": 1, "merge": "delta"} else None
    if others or kind not in (AllReduce, PeriodicAveraging, DiLoCo, Gossip):
        return None
    period = arguments.get("sync_every", 1)
    return period if isinstance(period, int) else None
