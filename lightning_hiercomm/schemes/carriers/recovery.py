"""An agreement among the healthy, in place of one that a sick rank or the wire has spoilt: rare, exact, waited for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.carriers.base import Land
from lightning_hiercomm.schemes.carriers.mean import Average
from lightning_hiercomm.schemes.health.nonfinite import OnNonfinite, find_healthy


@torch.no_grad()
def agree_without_sick(
    replica: Replica,
    topology: Topology,
    spoilt: Average,
    void: Sequence[int],
    landed: Collection[int] = (),
    *,
    policy: OnNonfinite,
    step: int,
    take: Callable[[Bucket, Tensor], None] = Bucket.unpack,
    land: Land | None = None,
) -> frozenset[int]:
    """Let the healthy agree on their present values of some buckets, and the sick take what comes of it; collective.

    With H the ranks that are healthy::

        mean := sum over H of w_r x_r / sum over H of w_r

    Args:
        replica: What agrees.
        topology: The nodes.
        spoilt: What was to bring the mean, and knows the last agreed values. This time all travels as it is.
        void: The buckets for which it did not.
        landed: Those of them whose last agreed values, of this rank's part, have moved all the same.
        policy: What is to be done about values that are not finite.
        step: Optimizer steps that were taken.
        take: Gets every bucket and the mean.
        land: Lands the mean in the last agreed values, as for ``spoilt``.

    Returns:
        The ranks that are healthy.

    Raises:
        NonfiniteError: On all ranks, if that is the policy, or nobody is healthy.
    """
    healthy = find_healthy(replica, topology, policy, step, spoilt.wire)
    buckets = [spoilt.buckets[index] for index in void]
    for index, bucket in zip(void, buckets, strict=True):
        known = None if land is None else spoilt.whole(index, spoilt.anchors[index])
        if topology.rank not in healthy:  # counts as nothing or, where differences count, as having gone nowhere
            bucket.unpack(bucket.empty().zero_() if known is None else known[: bucket.numel])
    if not buckets:  # of a sharded model, whose other ranks have some
        return healthy

    def land_healthy(index: int, agreed: Tensor, difference: Tensor) -> Tensor:
        if land is None or void[index] in landed:  # on this lane all had arrived, or the wire was large enough
            return agreed
        return land(void[index], agreed, difference)

    def weights_of_healthy(index: int) -> list[float]:
        weights = spoilt.weights(void[index])
        total = sum(weights[rank] for rank in healthy)
        return [weight / total if rank in healthy else 0.0 for rank, weight in enumerate(weights)]

    mean = Average(
        replica,
        topology,
        buckets=buckets,
        land=None if land is None else land_healthy,
        weights=weights_of_healthy,
    )
    if land is not None:
        mean.anchors = [spoilt.anchors[index] for index in void]
    mean(step, take=take)
    spoilt.restart(void)
    return healthy
