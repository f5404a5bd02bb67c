"""Traffic statistics: a rank's counters, their sums over ranks, and the bytes that plain DDP would have sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_hiercomm.batches.running import RunningBatches
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes import RunningScheme, Scheme


def communication(
    meter: Meter | None, schemes: Sequence[RunningScheme[Scheme]], batches: RunningBatches | None
) -> dict[str, float]:
    """Return a rank's counters and the schemes' present values, without communication."""
    values = meter.snapshot() if meter is not None else {}
    values["synchronizations"] = float(sum(scheme.state.synchronizations for scheme in schemes))
    values["steps"] = float(sum(scheme.state.steps for scheme in schemes))
    for scheme in reversed(schemes):
        values.update(scheme.scalars())
    if batches is not None:
        values.update(batches.scalars())
    return values


def summed_over(group: Communicator, meter: Meter, values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Return ``values`` with the meter's counters summed over a group's ranks. Collective over the group."""
    counters = meter.snapshot()
    sums = torch.tensor(list(counters.values()), dtype=torch.float64, device=device)
    group.all_reduce(sums).wait()
    return {**values, **dict(zip(counters, sums.tolist(), strict=True))}


def ddp_inter_bytes(topology: Topology, schemes: Sequence[RunningScheme[Scheme]], steps: float) -> float:
    """Return the bytes that DDP with a ring all-reduce would have sent between nodes in ``steps`` optimizer steps.

    A ring all-reduce over R ranks in node order sends ``2 (R - 1) / R`` of the gradients over each of its M links
    between nodes. The result is the sum over all nodes; with elastic nodes it is that of one node.
    """
    if topology.num_nodes == 1 or not schemes:
        return 0.0
    gradients = sum(scheme.replica.whole_bytes for scheme in schemes)
    ranks = topology.world_size
    return 2 * (ranks - 1) / ranks * gradients / len(schemes) * topology.nodes_in_world * steps
