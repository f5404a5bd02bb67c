"""What a user writes to divide a global batch among ranks of unequal speed."""

from __future__ import annotations

import math
from typing import Literal

from lightning_hiercomm.arguments import Value
from lightning_hiercomm.batches.partition import Weighting


class HeterogeneousBatches(Value):
    """Give each rank as many samples per step as it can finish in the same time, out of one global batch.

    With global batch G and rank speeds ``s_i``, rank i takes ``B_i = G s_i / sum(s)`` samples per step, rounded by
    largest remainder. It takes at least 1, and 2 if the module has a BatchNorm layer, which refuses a single sample;
    with measured speeds a quarter of an equal share.
    All ranks take ``floor(N / G)`` steps per epoch on disjoint samples, in the order of the dataloader's own sampler.

    Gradients combine as ``sum_i w_i g_i`` with ``w_i = B_i / G``. If a rank's loss is the mean over its samples, that
    is exactly the gradient of the mean loss over the global batch, so training does not depend on the speeds. Every
    scheme uses these weights. Gradient accumulation multiplies the global batch.

    Works with any ``DataLoader`` that has a ``batch_size``, a map-style dataset and any sampler. Others are refused
    with the reason. Evaluation is divided equally.

    **Measuring.** With ``speeds="measure"`` a run begins with equal batches and times its own training steps, without
    the first two and without waiting for other ranks. After a second or so, at least four steps, it divides the batch.
    It times as many steps of the new sizes, which shows the fixed cost of a step, and divides again. Sizes stay as they
    are if others would save less than the step times scatter. No step is lost or repeated: global batches do not depend
    on the division. Batches that ``DataLoader`` workers have loaded ahead keep the old sizes. With several dataloaders,
    manual optimization or ``training_step(dataloader_iter)`` the sizes change when the next epoch begins. A resumed run
    keeps the division of its checkpoint.

    Source: "Heterogeneous gradient computing optimization for scalable deep neural networks" (HetGrad), Section 3. The
    paper rounds shard and batch sizes separately, which gives ranks unequal numbers of steps, and prints weights that
    do not sum to 1 (Eq. 2); here they do.

    Args:
        global_batch_size: Samples per batch over all ranks, G. Replaces the train dataloader's batch size (per rank).
        speeds: ``"measure"`` times the first training steps on every rank; or samples per second of every rank (any
            unit), by world rank. Give them if a fast rank has too little memory for the share that is measured.
        weighting: ``"samples"``: ``w_i = B_i / G``; ``"speed"``: in proportion to the speeds (the paper's);
            ``"none"``: all equal (the paper's baseline, biased towards the samples of slow ranks).

    Raises:
        ValueError: If an argument is out of range. Once the ranks are known: if there are fewer samples than ranks, or
            not one speed per rank.

    Example::

        HierarchicalStrategy(batches=HeterogeneousBatches(256))
    """

    def __init__(
        self,
        global_batch_size: int,
        speeds: Literal["measure"] | list[float] = "measure",
        weighting: Weighting = "samples",
    ) -> None:
        if global_batch_size < 1:
            raise ValueError(f"global_batch_size={global_batch_size} must be positive")
        if speeds != "measure":
            _check_speeds(speeds)
        self.global_batch_size = global_batch_size
        self.speeds = speeds
        self.weighting = weighting

    def speeds_of_ranks(self, ranks: int) -> list[float] | Literal["measure"]:
        """Return the speed of each of so many ranks, if they are given."""
        if self.speeds == "measure":
            return "measure"
        if len(self.speeds) != ranks:
            raise ValueError(f"speeds gives {len(self.speeds)} numbers, but there are {ranks} ranks: give one for each")
        return [float(speed) for speed in self.speeds]


def _check_speeds(speeds: list[float]) -> None:
    if not speeds or not all(isinstance(speed, int | float) and 0 < speed < math.inf for speed in speeds):
        raise ValueError(f"speeds={speeds!r} must be 'measure', or one positive number per rank")
