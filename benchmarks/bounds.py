"""What no method can beat: arithmetic, no measurement."""

from __future__ import annotations

from benchmarks.contenders import Row
from lightning_hiercomm.comm import costs


def transfer_seconds(transferred: float, mbit: float | None) -> float:
    """Seconds that bytes take on a link of ``mbit`` Mbit/s; an unlimited link takes none."""
    return 0.0 if mbit is None else transferred * 8 / (mbit * 1e6)


def bytes_per_step(row: Row, parameters: int, nodes: int) -> float:
    """Bytes that the row's method has to send from each node, per step."""
    model_bytes = parameters * row.wire_bytes
    if row.traffic == "none":
        return 0.0
    if row.traffic == "gossip":  # every fragment goes to one other node
        return costs.exchange(nodes, model_bytes) / row.period
    if row.traffic == "steps_delay":  # gradients to the servers every step; weights from them every period
        return costs.reduce_scatter(nodes, model_bytes) + costs.all_gather(nodes, model_bytes) / row.period
    return costs.all_reduce(nodes, model_bytes) / row.period


def formula(row: Row) -> str:
    """What :func:`bytes_per_step` comes to, in models, for n nodes."""
    if row.traffic == "none":
        return "0"
    narrower = "" if row.wire_bytes == 4 else f"{row.wire_bytes / 4:.4g} x "
    if row.traffic == "gossip":
        return f"{narrower}1" if row.period == 1 else f"{narrower}1 / {row.period}"
    if row.traffic == "steps_delay":
        return f"{narrower}(n-1)/n (1 + 1/{row.period})"
    return f"{narrower}2(n-1)/n" + (f" / {row.period}" if row.period > 1 else "")


def step_seconds(row: Row, parameters: int, nodes: int, mbit: float | None, compute: float) -> float:
    """The least time of one step, given the time ``compute`` of a step that needs no other node."""
    return _together(row, transfer_seconds(bytes_per_step(row, parameters, nodes), mbit), compute)


def limit(row: Row, network: float, least: float) -> str:
    """Which takes longer, ``"link"`` or ``"compute"``, given the network's part and the bound of a whole step."""
    return "link" if network and least <= _together(row, network, compute=network) * (1 + 1e-9) else "compute"


def _together(row: Row, network: float, compute: float) -> float:
    if row.bound != "overlapped":
        return compute + network
    overlapped = row.overlap * compute
    return (max(overlapped, network * row.period) + (row.period - row.overlap) * compute) / row.period
