"""Everything that is compared: one :class:`Row` per line of the table, one module per peer.

A contender's module has one function, ``train(recorder, options)``, see :data:`benchmarks.job.Contender`. This file
imports none of them, since each may need packages of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Bound = Literal["compute", "blocking", "overlapped"]
Traffic = Literal["none", "average", "gossip", "steps_delay"]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        title: What the line is called.
        module: Module in :mod:`benchmarks.contenders`.
        options: Passed to the module's ``train``.
        bound: ``"compute"``: the step alone; ``"blocking"``: compute, then network; ``"overlapped"``: network during
            the compute of ``overlap`` steps of each period, then the compute of the others.
        traffic: What has to cross the network in each period.
        period: Steps between two synchronizations.
        overlap: Steps of a period during which its traffic may be under way, for ``"overlapped"``.
        wire_bytes: Bytes of one element on the network.
        averages_in_node: Whether gradients are averaged inside a node, which then belongs to the compute bound.
        venv: Name of the virtual environment it runs in, see :mod:`benchmarks.peers`.
    """

    title: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    bound: Bound = "blocking"
    traffic: Traffic = "average"
    period: int = 1
    overlap: int = 1
    wire_bytes: float = 4
    averages_in_node: bool = True
    venv: str = "main"


PERIOD = 16
"""Steps between synchronizations of every row that has a period, by default."""


def _bounds() -> dict[str, Row]:
    return {
        "local": Row(
            title="computing alone, no communication",
            module="plain",
            options={"kind": "local"},
            bound="compute",
            traffic="none",
            averages_in_node=False,
        ),
        "node": Row(
            title="computing, gradients averaged inside nodes over gloo",
            module="plain",
            options={"kind": "node"},
            bound="compute",
            traffic="none",
        ),
        "node_shared": Row(
            title="computing, gradients averaged inside nodes over shared memory",
            module="ours",
            options={
                "scheme": "PeriodicAveraging",
                "arguments": {"sync_every": 1_000_000, "at_epoch_end": False},
                "strategy": {},
            },
            bound="compute",
            traffic="none",
        ),
        "link": Row(
            title="the network alone: what one averaging must send",
            module="plain",
            options={"kind": "link"},
            averages_in_node=False,
        ),
    }


def _every_step() -> dict[str, Row]:
    return {
        "loop": Row(
            title="Lightning's loop, no communication",
            module="lightning",
            options={"kind": "single"},
            bound="compute",
            traffic="none",
            averages_in_node=False,
        ),
        "ddp": Row("Lightning DDPStrategy", "lightning", {"kind": "ddp"}, bound="overlapped"),
        "ddp_bf16_hook": Row(
            "Lightning DDPStrategy, bf16_compress_hook registered by hand",
            "lightning",
            {"kind": "ddp_bf16_hook"},
            bound="overlapped",
            wire_bytes=2,
        ),
    }


def _flat(period: int) -> dict[str, Row]:
    """Local SGD of single ranks: whatever the peer, nodes do not matter to it."""

    def row(title: str, module: str, kind: str, venv: str = "main") -> Row:
        options = {"kind": kind, "sync_every": period}
        return Row(f"{title}({period})", module, options, period=period, averages_in_node=False, venv=venv)

    # two fragments, each sent half a period before it is needed, less a step
    streaming = row("torchft streaming DiLoCo", "torchft_local_sgd", "streaming", "torchft")

    return {
        "hand": row("hand-written local SGD", "plain", "flat"),
        "accelerate": row("accelerate LocalSGD", "accelerate_local_sgd", "", "accelerate"),
        "torchft_local_sgd": row("torchft LocalSGD", "torchft_local_sgd", "local_sgd", "torchft"),
        "torchft_diloco": row("torchft DiLoCo", "torchft_local_sgd", "diloco", "torchft"),
        "torchft_streaming": replace(streaming, bound="overlapped", overlap=max(1, period - 2)),
    }


def _post_local(period: int) -> dict[str, Row]:
    """Gradients averaged inside the node, parameters over all ranks."""

    def row(title: str, module: str, kind: str) -> Row:
        return Row(title, module, {"kind": kind, "sync_every": period}, period=period)

    return {
        "post_local": row(f"Lightning post-local SGD({period}), hook dropped on CPUs", "lightning", "post_local"),
        "post_local_hook": row(
            f"Lightning post-local SGD({period}), hook registered by hand", "lightning", "post_local_hook"
        ),
        "torch_hierarchical": row(f"torch HierarchicalModelAverager({period})", "torch_hierarchical", ""),
    }


def _ours(period: int) -> dict[str, Row]:
    """lightning-hiercomm, each scheme with float32 and with narrower types between the nodes."""

    def row(scheme: str, title: str, arguments: dict[str, Any], bound: Bound = "overlapped", **fields: Any) -> Row:
        return Row(title, "ours", {"scheme": scheme, "arguments": arguments, "strategy": {}}, bound, **fields)

    def daso(staleness: int) -> Row:
        arguments = {"sync_every": 4, "staleness": staleness, "warmup": 0, "cooldown": 0}
        later = "a step" if staleness == 1 else f"{staleness} steps"
        return row("DASO", f"DASO(4), merged {later} later", arguments, period=4, overlap=staleness)

    def periodic(every: int) -> Row:
        return row("PeriodicAveraging", f"PeriodicAveraging({every})", {"sync_every": every}, "blocking", period=every)

    rows = {
        "all_reduce": row("AllReduce", "AllReduce", {}),
        "periodic1": periodic(1),
        "periodic2": periodic(2),
        "periodic4": periodic(4),
        "periodic": periodic(period),
        "daso": daso(1),
        "daso_stale": daso(4),
        "diloco": row("DiLoCo", f"DiLoCo({period})", {"sync_every": period}, "blocking", period=period),
        # as torchft's: two fragments, each sent half a period before it is needed, less a step; nothing own is kept
        "diloco_streaming": row(
            "DiLoCo",
            f"streaming DiLoCo({period})",
            {"sync_every": period, "fragments": 2, "staleness": period // 2 - 1, "keep_local": 0.0},
            period=period,
            overlap=max(1, period - 2),
        ),
        "steps_delay": row(
            "StepsDelay",
            "StepsDelay(4)",
            {"delay": 4, "warmup_steps": 4},
            traffic="steps_delay",
            period=4,
            overlap=4,
        ),
        "gossip_blocking": row("Gossip", "Gossip, waited for", {}, "blocking", traffic="gossip"),
        "gossip": row("Gossip", "Gossip, overlapped", {"overlap": True}, traffic="gossip"),
    }
    small = {**rows["all_reduce"].options, "strategy": {"bucket_cap_mb": 4}}
    rows["all_reduce_small"] = replace(rows["all_reduce"], title="AllReduce in buckets of 4 MB", options=small)
    for key in ("periodic", "diloco", "diloco_streaming"):  # as the peers' flat loops
        options = rows[key].options
        options = {**options, "strategy": {**options["strategy"], "ranks_per_node": 1}}
        title = f"{rows[key].title}, no averaging inside nodes"
        rows[f"{key}_alone"] = replace(rows[key], title=title, options=options, averages_in_node=False)
    quantised = ("all_reduce", "periodic2", "periodic4", "periodic", "diloco", "diloco_streaming")
    return (
        rows
        | {f"{key}_bf16": _on_wire(row, "bfloat16", "bf16", 2) for key, row in rows.items()}
        | {f"{key}_int8": _on_wire(rows[key], "int8", "int8", 1 + 2 / 256) for key in quantised}
        | {f"{key}_int4": _on_wire(rows[key], "int4", "int4", 1 / 2 + 2 / 256) for key in quantised}
        | {"all_reduce_sparse2": _on_wire(rows["all_reduce"], "sparse2", "sparse2", 1 / 4 + 2 / 512)}
    )


def _on_wire(row: Row, wire_dtype: str, name: str, wire_bytes: float) -> Row:
    options = {**row.options, "strategy": {**row.options["strategy"], "wire_dtype": wire_dtype}}
    return replace(row, title=f"{row.title}, sent as {name}", options=options, wire_bytes=wire_bytes)


def _rows(period: int) -> dict[str, Row]:
    return _bounds() | {"hand1": _flat(1)["hand"]} | _every_step() | _flat(period) | _post_local(period) | _ours(period)


ROWS: dict[str, Row] = _rows(PERIOD) | {f"{key}@8": row for key, row in _rows(8).items() if row.period == 8}
"""All rows by key. ``...@8`` are the rows with a period, with 8 steps instead of 16."""

_SAME_METHOD = {
    "all_reduce": ("ddp",),
    "periodic1_alone": ("hand1",),
    "periodic": ("post_local_hook", "torch_hierarchical"),
    "periodic_alone": ("hand", "accelerate", "torchft_local_sgd"),
    "diloco_alone": ("torchft_diloco",),
    "diloco_streaming_alone": ("torchft_streaming",),
}


def same_method(key: str, ranks_per_node: int) -> tuple[str, ...]:
    """The peers' rows that do what one of ours does.

    Peers whose every rank trains alone do what our rows without averaging inside nodes do; on nodes of one rank there
    is nothing to average, and then they do what our plain rows do, too.
    """
    name, at, period = key.partition("@")
    peers = _SAME_METHOD.get(name, ())
    if ranks_per_node == 1:
        peers += _SAME_METHOD.get(f"{name}_alone", ())
    return tuple(row for peer in peers if (row := f"{peer}{at}{period}") in ROWS)


def is_ours(key: str) -> bool:
    """Whether a row is one of lightning-hiercomm's."""
    return key not in BOUNDS and ROWS[key].module == "ours"


def is_peer(key: str) -> bool:
    """Whether a row trains the model on all nodes with something else."""
    return key not in BOUNDS and ROWS[key].traffic != "none" and not is_ours(key)


IN_NODE = ("node", "node_shared")
"""Computing with gradients averaged inside the nodes: the faster one is the compute bound of rows that do so."""

BOUNDS = ("local", *IN_NODE, "link")
"""Not contenders: what the bounds are made of. The compute bounds are measured in every session."""
