"""What no method can beat: arithmetic, no measurement."""

from __future__ import annotations

from benchmarks.contenders import Row


def averaging_bytes(model_bytes: float, nodes: int) -> float:
    """Bytes each node must send, and receive, to average one model over ``nodes`` nodes: ``2 (n - 1) / n`` models."""
    return 2 * (nodes - 1) / nodes * model_bytes


def transfer_seconds(transferred: float, mbit: float | None) -> float:
    """Seconds that bytes take on a link of ``mbit`` Mbit/s; an unlimited link takes none."""
    return 0.0 if mbit is None else transferred * 8 / (mbit * 1e6)


def bytes_per_step(row: Row, parameters: int, nodes: int) -> float:
    """Bytes that the row's method has to send from each node, per step."""
    model_bytes = parameters * row.wire_bytes
    if nodes == 1 or row.traffic == "none":
        return 0.0
    if row.traffic == "gossip":  # every segment goes to one other node
        return model_bytes / row.period
    if row.traffic == "steps_delay":  # the gradient every step, half of an all-reduce; the weights every period
        return averaging_bytes(model_bytes, nodes) / 2 * (1 + 1 / row.period)
    return averaging_bytes(model_bytes, nodes) / row.period


def step_seconds(row: Row, parameters: int, nodes: int, mbit: float | None, compute: float) -> float:
    """The least time of one step, given the time ``compute`` of a step that needs no other node."""
    network = transfer_seconds(bytes_per_step(row, parameters, nodes), mbit)
    if row.bound != "overlapped":
        return compute + network
    beside = row.overlap * compute
    return (max(beside, network * row.period) + (row.period - row.overlap) * compute) / row.period
