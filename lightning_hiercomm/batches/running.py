"""Divides a global batch among ranks of unequal speed, so that all finish a step at the same time."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_hiercomm.batches.heterogeneous import HeterogeneousBatches
from lightning_hiercomm.batches.partition import Speeds, StepCost, divide, rank_weights
from lightning_hiercomm.batches.sampler import DividedBatchSampler, Division, divide_dataloader
from lightning_hiercomm.batches.speed import SpeedMeasurement, StepClock
from lightning_hiercomm.batches.table import table
from lightning_hiercomm.nodes.topology import Topology

_LEAST_PART = 0.25
"""A rank whose speed is measured takes at least this part of an equal share."""

_SCATTERS = 0.1
"""A warning is given if step times vary by more than this part."""


class RunningBatches:
    """The batches of a fit on this rank: measures speeds, and divides the train dataloaders.

    Made before dataloaders are; collective. Speeds that are to be measured count as equal until then.

    Args:
        config: What the user wrote.
        topology: The ranks.
        device: The device on which this rank computes.
        least: The fewest samples that the module trains on.
        state: The :meth:`state_dict` of a checkpoint, which applies if the number of ranks is the same.
        may_change_in_epoch: Whether the Trainer counts batches, and sets how many of them an optimizer step takes.
        print_: Prints on rank zero.

    Attributes:
        config: As above.
        division: Samples per batch of every rank.
    """

    def __init__(
        self,
        config: HeterogeneousBatches,
        topology: Topology,
        device: torch.device,
        least: int = 1,
        state: Mapping[str, Any] | None = None,
        may_change_in_epoch: bool = True,
        print_: Callable[[str], object] = print,
    ) -> None:
        self.config = config
        self._topology = topology
        self._may_change_in_epoch = may_change_in_epoch
        self._print = print_
        # torch seeds may differ between ranks, the order of the dataset must not, nor how it is divided
        of_ranks = topology.world.all_gather_object((int(os.environ.get("PL_GLOBAL_SEED", 0)), least))
        self._seed, self._least = of_ranks[0][0], max(fewest for _, fewest in of_ranks)
        self._speeds, sizes = self._known_speeds(state or {})
        is_known = bool(self._speeds.costs)
        self._measurement = None if is_known else SpeedMeasurement(StepClock(topology.meter, device))
        self._loaders: list[tuple[DividedBatchSampler, int | None]] = []  # with the user's batch size
        self._has_begun = False
        self._first_batch: int | None = None  # of the loader's iteration, in the Trainer's count
        self.division = Division(topology.rank, sizes or self._divided())
        self._take(self.division.sizes)

    def _known_speeds(self, state: Mapping[str, Any]) -> tuple[Speeds, list[int] | None]:
        """Return the speeds that are given or were saved, without costs if there are none, and the saved division."""
        ranks, total = self._topology.world_size, self.config.global_batch_size
        given = self.config.speeds_of_ranks(ranks)
        if state and len(state["sizes"]) == ranks and given in ("measure", state["speeds"]):
            costs = [StepCost(fixed, speed) for fixed, speed in zip(*state["costs"], strict=True)]
            return Speeds(costs, state["speeds"]), [*state["sizes"]] if sum(state["sizes"]) == total else None
        if given == "measure":
            return Speeds([StepCost(0.0, 1.0)] if ranks == 1 else [], given), None
        return Speeds([StepCost(0.0, speed) for speed in given], given), None

    def process_dataloader(self, loader: object) -> object:
        """Return a train dataloader that gives this rank its part. Collective.

        The first one of an epoch replaces those of the epoch before.
        """
        if self._has_begun:
            self._loaders, self._has_begun = [], False
        batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        on_load = None if self._measurement is None else self._measurement.clock.load
        divided = divide_dataloader(loader, self.division, self._seed, on_load)
        sampler: Any = divided.batch_sampler
        lengths = self._topology.world.all_gather_object(len(sampler.sampler))
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the ranks' train datasets have unequal lengths: {lengths} samples. HeterogeneousBatches divides one"
                " dataset among all ranks: give every rank the whole of it."
            )
        self._loaders.append((sampler, batch_size))
        batch_sizes = [size for _, size in self._loaders]
        if len(set(batch_sizes)) > 1:
            raise ValueError(
                f"the train dataloaders have different batch sizes, {batch_sizes}, but there is one"
                " global_batch_size: give all of them the same, or join the datasets into one."
            )
        return divided

    def announce(self) -> None:
        """Print the division on rank zero, unless it is to be measured; warn if the step times varied much."""
        if self._measurement is not None or self._topology.rank != 0 or self._topology.world_size == 1:
            return
        equal, spreads = self._divided(replace(self._speeds, costs=[])), self._speeds.spreads
        self._print(table(self._topology, self.division.sizes, equal, self._speeds))
        if spreads and max(spreads) > _SCATTERS:
            rank = spreads.index(max(spreads))
            warnings.warn(
                f"the step times of rank {rank} scattered by ±{spreads[rank]:.0%} while they were measured, so"
                " the division may be off by as much, and was not changed for less: something else keeps that machine"
                " busy. Measure when it is idle, or give the speeds=[...] you know.",
                stacklevel=2,
            )

    def go_to(self, epoch: int) -> bool:
        """Set the epoch with which training begins or resumes.

        Returns:
            Whether dataloader workers have loaded another epoch, or other sizes, and must begin again.
        """
        for sampler, _ in self._loaders:
            sampler.sampler.set_epoch(epoch)
        return any(sampler.is_stale(epoch) for sampler, _ in self._loaders)

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, with new sizes if they were measured in the one before. Collective."""
        self._has_begun, self._first_batch = True, None
        if self.division.change is not None:
            self._change(self.division.change[1])
        orders = [sampler.sampler.fingerprint() for sampler, _ in self._loaders if sampler.sampler.is_drawn]
        if orders and len(set(map(tuple, self._topology.world.all_gather_object(orders)))) > 1:
            raise ValueError(
                "the train dataloader's sampler draws different samples on different ranks: it has a random generator"
                " of its own. Give it the same seed on all ranks, or let it use the global generators."
            )

    def begin_step(self, batch: int, accumulated: int = 1) -> None:
        """Begin a training step, after its batch is loaded. Collective where speeds are measured.

        Args:
            batch: The number of the batch in the epoch, from 0.
            accumulated: Batches per optimizer step.
        """
        if self._first_batch is None:
            self._first_batch = batch  # not 0 in a run that is resumed in mid-epoch, whose loader begins again
        if self._measurement is not None:
            self._measurement.clock.end_load()
        change = self.division.change
        if change is not None and change[0] == batch - self._first_batch:
            self._change(change[1])
        elif change is None and self._measurement is not None and self._measurement.is_due():
            self._measure(self._measurement, accumulated)
        if self._measurement is not None:
            self._measurement.clock.start()

    def end_step(self) -> None:
        if self._measurement is not None:
            self._measurement.clock.stop()

    def pause(self) -> None:
        """End the timing of steps before something else, such as a validation."""
        if self._measurement is not None:
            self._measurement.clock.end_block()

    # ---- present values, and the checkpoint ----------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Samples per batch on this rank, B_i."""
        return self.division.own

    @property
    def share(self) -> float:
        """This rank's share of the global batch, B_i / G."""
        return self.batch_size / self.config.global_batch_size

    def scalars(self) -> dict[str, float]:
        """Return ``batch_size`` of this rank, and ``batch_size/<rank>`` of every rank."""
        every = {f"batch_size/{rank}": float(size) for rank, size in enumerate(self.division.sizes)}
        return {"batch_size": float(self.batch_size), **every}

    def state_dict(self) -> dict[str, Any]:
        """Return the division and the ranks' costs, as primitives; empty while these are being measured."""
        if not self._speeds.costs:
            return {}
        sizes = self.division.sizes if self.division.change is None else self.division.change[1]
        costs = [[cost.fixed for cost in self._speeds.costs], [cost.speed for cost in self._speeds.costs]]
        return {"sizes": list(sizes), "costs": costs, "speeds": self._speeds.given}

    # ---- dividing ------------------------------------------------------------------------------------------------

    def _divided(self, speeds: Speeds | None = None) -> list[int]:
        speeds, ranks, least = speeds or self._speeds, self._topology.world_size, self._least
        if speeds.is_measured:  # a rank that was disturbed once is not left almost without samples
            least = max(least, math.ceil(_LEAST_PART * self.config.global_batch_size / ranks))
        costs = speeds.costs or [StepCost(0.0, 1.0)] * ranks
        return divide(self.config.global_batch_size, costs, least)

    def _measure(self, measurement: SpeedMeasurement, accumulated: int) -> None:
        """Divide by the measured costs, if there are enough, from the first batch that no rank has begun to load."""
        assert self._first_batch is not None
        handed_out = sys.maxsize  # not in this epoch
        if self._may_change_in_epoch and len(self._loaders) == 1:
            handed_out = self._loaders[0][0].handed_out
        of_ranks = self._topology.world.all_gather_object((measurement.cost(self.batch_size), handed_out))
        found = [each for each, _ in of_ranks if each is not None]
        if len(found) < len(of_ranks):
            return
        costs, spreads = [cost for cost, _ in found], [spread for _, spread in found]
        self._speeds = replace(self._speeds, costs=costs, spreads=spreads)
        sizes = self._divided()
        if _gain(costs, self.division.sizes, sizes) < max(spreads):
            sizes = [*self.division.sizes]
        if measurement.end_round(self.batch_size) or sizes == self.division.sizes:
            self._measurement = None
        first = max(ahead for _, ahead in of_ranks)
        first += -(self._first_batch + first) % accumulated  # accumulated gradients need equal weights
        self.division.change = first, sizes

    def _change(self, sizes: Sequence[int]) -> None:
        self._take(sizes)
        if self._measurement is not None:
            self._measurement.clock.reset()
        self.announce()

    def _take(self, sizes: Sequence[int]) -> None:
        self.division.sizes[:], self.division.change = sizes, None
        costs = self._speeds.costs or [StepCost(0.0, 1.0)] * len(sizes)
        speeds = [size / cost.seconds(size) for size, cost in zip(sizes, costs, strict=True)]
        self._topology.set_weights(rank_weights(self.config.weighting, sizes, speeds))


def _gain(costs: Sequence[StepCost], before: Sequence[int], after: Sequence[int]) -> float:
    """Return the part of a step's time that other sizes save."""
    old, new = (max(map(StepCost.seconds, costs, sizes)) for sizes in (before, after))
    return 1 - new / old
