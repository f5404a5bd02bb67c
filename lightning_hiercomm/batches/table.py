"""The table of a division that rank zero prints."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hiercomm.batches.partition import Speeds, StepCost, relative_speeds
from lightning_hiercomm.nodes.topology import Topology


def table(topology: Topology, sizes: Sequence[int], equal: Sequence[int], ranks: Speeds) -> str:
    """Return the ranks' speeds, batch sizes and weights, and the time of a step that they predict.

    Args:
        topology: The ranks, with their weights.
        sizes: Samples per step of every rank.
        equal: The same, if all ranks were equally fast.
        ranks: Their speeds.
    """
    costs, is_measured, spreads = ranks.costs, ranks.is_measured, ranks.spreads
    speeds = relative_speeds([size / cost.seconds(size) for size, cost in zip(sizes, costs, strict=True)])
    columns = f"{'fixed ms':>9} {'ms/sample':>10} {'samples/s':>10} " if is_measured else ""
    lines = [
        f"A global batch of {sum(sizes)} samples on {len(sizes)} ranks,"
        f" by {'measured' if is_measured else 'given'} speeds",
        f"  {'rank':>4} {'node':>4} {columns}{'relative':>8} {'batch':>6} {'weight':>7}",
    ]
    node_of = {rank: node for node, ranks in enumerate(topology.nodes) for rank in ranks}
    for rank, (cost, size) in enumerate(zip(costs, sizes, strict=True)):
        columns = f"{1e3 * cost.fixed:>9.3f} {1e3 / cost.speed:>10.4f} {size / cost.seconds(size):>10.1f} "
        lines.append(
            f"  {rank:>4} {node_of[rank]:>4} {columns if is_measured else ''}{speeds[rank]:>8.2f} {size:>6}"
            f" {topology.weights[rank]:>7.4f}"
        )
    step, step_if_equal = (max(map(StepCost.seconds, costs, division)) for division in (sizes, equal))
    faster = f"{step_if_equal / step:.2f} times as fast as with equal batches"
    milliseconds = f"{1e3 * step:.3g} ms instead of {1e3 * step_if_equal:.3g} ms, " if is_measured else ""
    lines.append(f"  predicted step: {milliseconds}{faster}")
    if spreads:
        lines.append(f"  the measured step times scattered by up to ±{max(spreads):.1%}")
    return "\n".join(lines)
