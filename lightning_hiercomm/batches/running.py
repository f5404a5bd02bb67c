"""Divides a global batch among ranks of unequal speed, so that all finish a step at the same time."""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from lightning_hiercomm.batches.heterogeneous import HeterogeneousBatches
from lightning_hiercomm.batches.partition import StepCost, divide, rank_weights
from lightning_hiercomm.batches.sampler import DividedBatchSampler, Division, StreamBatches, divide_dataloader
from lightning_hiercomm.batches.speed import SpeedMeasurement, StepClock
from lightning_hiercomm.batches.table import table
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.nodes.topology import Topology

log = logging.getLogger(__name__)

_WORTH_A_CHANGE = 0.05
"""Ranks keep their sizes if others would make a step faster by less than this part."""

_LEAST_PART = 0.25
"""A rank whose speed is measured takes at least this part of an equal share."""

_SCATTERS = 0.1
"""A warning is given if step times vary by more than this part."""


class RunningBatches:
    """The batches of a run on this rank: measures speeds, and divides the train dataloaders.

    A copy or a pickle has the configuration and what was loaded from a checkpoint, and nothing of a run.

    Args:
        config: What the user wrote.
        loaded: From a checkpoint, as for :meth:`load_state_dict`.

    Attributes:
        config: As above.
        division: Samples per batch of every rank; None before :meth:`bind`.
        clock: Times this rank's steps while that is needed.
    """

    def __init__(self, config: HeterogeneousBatches, loaded: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self._loaded = loaded
        self.division: Division | None = None
        self.clock: StepClock | None = None
        self._topology: Topology
        self._costs: list[StepCost] | None = None
        self._spreads: list[float] = []
        self._source: list[float] | Literal["measure"] = "measure"  # of the costs
        self._limits: list[int | None] = []
        self._least = 1
        self._seed = 0
        self._samplers: list[DividedBatchSampler | StreamBatches] = []
        self._batch_sizes: list[int | None] = []
        self._has_begun = False
        self._measurement: SpeedMeasurement | None = None
        self._print: Callable[[str], object] = print
        self._may_change_in_epoch = True
        self._first_batch: int | None = None  # of the loader's iteration, in the Trainer's count

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config, self._loaded)

    # ---- a run begins --------------------------------------------------------------------------------------------

    def bind(self, topology: Topology, meter: Meter, device: torch.device, least: int = 1) -> None:
        """Set the ranks and their weights, before dataloaders are made. Collective.

        Speeds that are to be measured count as equal until then.

        Args:
            topology: The ranks.
            meter: Measures how long a rank waits.
            device: The device on which this rank computes.
            least: The fewest samples that the module trains on.
        """
        self._topology = topology
        # torch seeds may differ between ranks, the order of the dataset must not, nor how it is divided
        of_ranks = topology.world.all_gather_object((int(os.environ.get("PL_GLOBAL_SEED", 0)), least))
        self._seed, self._least = of_ranks[0][0], max(fewest for _, fewest in of_ranks)
        self._limits = self.config.limits_of_ranks(topology.world_size)
        self._forget_loaders()
        self._costs, self._spreads, self._first_batch = None, [], None
        self._source = self.config.speeds_of_ranks(topology.world_size)
        sizes: list[int] | None = None
        if self._loaded is not None and len(self._loaded["sizes"]) == topology.world_size:
            self._costs = [StepCost(fixed, speed) for fixed, speed in zip(*self._loaded["costs"], strict=True)]
            sizes = list(self._loaded["sizes"])
            with_limits = zip(sizes, self._limits, strict=True)
            is_beyond = any(limit is not None and size > limit for size, limit in with_limits)
            if sum(sizes) != self.config.global_batch_size or is_beyond:
                sizes = None
            before = self._loaded["speeds"]
            if self._source in ("measure", before):
                self._source = before
            else:
                self._costs, sizes = [StepCost(0.0, float(speed)) for speed in self._source], None
        elif self._source != "measure":
            self._costs = [StepCost(0.0, float(speed)) for speed in self._source]
        elif topology.world_size == 1:
            self._costs = [StepCost(0.0, 1.0)]
        is_measured = self._costs is None
        self.clock = (
            StepClock(meter, device) if is_measured or self.config.rebalance_every_n_epochs is not None else None
        )
        self._measurement = SpeedMeasurement(self.clock) if is_measured and self.clock is not None else None
        equal = [StepCost(0.0, 1.0)] * topology.world_size
        self.division = Division(topology.rank, [])
        self._take(sizes or self._divided(self._costs or equal))

    def process_dataloader(self, loader: object) -> object:
        """Return a train dataloader that gives this rank its part. Collective.

        The first one of an epoch replaces those of the epoch before.
        """
        assert self.division is not None
        if self._has_begun:
            self._forget_loaders()
        batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        may_change = self._measurement is not None or self.config.rebalance_every_n_epochs is not None
        on_load = self.clock.load if self.clock is not None else None
        divided = divide_dataloader(loader, self.division, self._seed, may_change, on_load)
        sampler: Any = divided.batch_sampler
        lengths = self._topology.world.all_gather_object(
            len(sampler.sampler) if isinstance(sampler, DividedBatchSampler) else None
        )
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the ranks' train datasets have unequal lengths: {lengths} samples. HeterogeneousBatches divides one"
                " dataset among all ranks: give every rank the whole of it."
            )
        self._samplers.append(sampler)
        self._batch_sizes.append(batch_size)
        if len(set(self._batch_sizes)) > 1:
            raise ValueError(
                f"the train dataloaders have different batch sizes, {self._batch_sizes}, but there is one"
                " global_batch_size: give all of them the same, or join the datasets into one."
            )
        return divided

    def _forget_loaders(self) -> None:
        self._samplers, self._batch_sizes, self._has_begun = [], [], False

    def begin(self, print_: Callable[[str], object] = print, may_change_in_epoch: bool = True) -> None:
        """Begin training, and print the division unless it is to be measured.

        Args:
            print_: Prints on rank zero.
            may_change_in_epoch: Whether the Trainer counts batches, and sets how many of them an optimizer step takes.
        """
        self._print, self._may_change_in_epoch = print_, may_change_in_epoch
        if self._measurement is None:
            self._announce()

    def _announce(self) -> None:
        """Print the division on rank zero, and warn if the step times varied much."""
        if self._topology.rank != 0 or self._topology.world_size == 1:
            return
        assert self.division is not None
        assert self._costs is not None
        equal = self._divided([StepCost(0.0, 1.0)] * self._topology.world_size)
        is_measured = self._source == "measure"
        self._print(table(self._topology, self.division.sizes, equal, self._costs, is_measured, self._spreads))
        if self._spreads and max(self._spreads) > _SCATTERS:
            rank = self._spreads.index(max(self._spreads))
            warnings.warn(
                f"the step times of rank {rank} scattered by ±{self._spreads[rank]:.0%} while they were measured, so"
                " the division may be off by as much, and was not changed for less: something else keeps that machine"
                " busy. Measure when it is idle, give the speeds=[...] you know, or use rebalance_every_n_epochs=1.",
                stacklevel=2,
            )

    def go_to(self, epoch: int) -> bool:
        """Set the epoch with which training begins or resumes.

        Returns:
            Whether dataloader workers have loaded another epoch, or other sizes, and must begin again.
        """
        for sampler in self._samplers:
            sampler.sampler.set_epoch(epoch)
        return any(sampler.is_stale(epoch) for sampler in self._samplers)

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, and divide again if that is due and makes steps faster. Collective."""
        assert self.division is not None
        self._has_begun, self._first_batch = True, None
        if self.division.change is not None:
            self._change(self.division.change[1])
        orders = [
            sampler.sampler.fingerprint()
            for sampler in self._samplers
            if isinstance(sampler, DividedBatchSampler) and sampler.sampler.is_drawn
        ]
        if orders and len(set(map(tuple, self._topology.world.all_gather_object(orders)))) > 1:
            raise ValueError(
                "the train dataloader's sampler draws different samples on different ranks: it has a random generator"
                " of its own. Give it the same seed on all ranks, or let it use the global generators."
            )
        if self.clock is not None and self.config.rebalance_every_n_epochs is not None:
            self.pause()
            if epoch and epoch % self.config.rebalance_every_n_epochs == 0 and self._measurement is None:
                self._rebalance(epoch)

    def begin_step(self, batch: int, accumulated: int = 1) -> None:
        """Begin a training step, after its batch is loaded. Collective where speeds are measured.

        Args:
            batch: The number of the batch in the epoch, from 0.
            accumulated: Batches per optimizer step.
        """
        if self._first_batch is None:
            self._first_batch = batch  # not 0 in a run that is resumed in mid-epoch, whose loader begins again
        if self.clock is not None:
            self.clock.end_load()
        assert self.division is not None
        change = self.division.change
        if change is not None and change[0] == batch - self._first_batch:
            self._change(change[1])
        elif change is None and self._measurement is not None and self._measurement.is_due():
            self._measure(self._measurement, accumulated)
        if self.clock is not None:
            self.clock.start()

    def end_step(self) -> None:
        if self.clock is not None:
            self.clock.stop()

    def pause(self) -> None:
        """End the timing of steps before something else, such as a validation."""
        if self.clock is not None:
            self.clock.end_block()

    # ---- present values, and the checkpoint ----------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Samples per batch on this rank, B_i."""
        assert self.division is not None
        return self.division.own

    @property
    def share(self) -> float:
        """This rank's share of the global batch, B_i / G."""
        return self.batch_size / self.config.global_batch_size

    def scalars(self) -> dict[str, float]:
        """Return ``batch_size`` of this rank, and ``batch_size/<rank>`` of every rank."""
        if self.division is None:
            return {}
        every = {f"batch_size/{rank}": float(size) for rank, size in enumerate(self.division.sizes)}
        return {"batch_size": float(self.batch_size), **every}

    def state_dict(self) -> dict[str, Any]:
        """Return the division and the ranks' costs, as primitives; empty while these are being measured."""
        if self.division is None or self._costs is None:
            return {}
        sizes = self.division.sizes if self.division.change is None else self.division.change[1]
        costs = [[cost.fixed for cost in self._costs], [cost.speed for cost in self._costs]]
        return {"sizes": list(sizes), "costs": costs, "speeds": self._source}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` in the next :meth:`bind`, if the number of ranks is the same."""
        self._loaded = dict(state) if state else None

    # ---- dividing ------------------------------------------------------------------------------------------------

    def _divided(self, costs: Sequence[StepCost]) -> list[int]:
        least = self._least
        if self._source == "measure":  # a rank that was disturbed once is not left almost without samples
            least = max(least, math.ceil(_LEAST_PART * self.config.global_batch_size / len(costs)))
        return divide(self.config.global_batch_size, costs, self._limits, least)

    def _measure(self, measurement: SpeedMeasurement, accumulated: int) -> None:
        """Divide by the measured costs, if there are enough, from the first batch that no rank has begun to load."""
        assert self.division is not None
        assert self._first_batch is not None
        handed_out = sys.maxsize  # not in this epoch
        if self._may_change_in_epoch and len(self._samplers) == 1:
            (sampler,) = self._samplers
            if isinstance(sampler, DividedBatchSampler):
                handed_out = sampler.handed_out
        of_ranks = self._topology.world.all_gather_object((measurement.cost(self.batch_size), handed_out))
        found = [each for each, _ in of_ranks if each is not None]
        if len(found) < len(of_ranks):
            return
        self._costs, self._spreads = [cost for cost, _ in found], [spread for _, spread in found]
        sizes = self._divided(self._costs)
        if _gain(self._costs, self.division.sizes, sizes) < max(self._spreads):
            sizes = [*self.division.sizes]
        if measurement.end_round(self.batch_size) or sizes == self.division.sizes:
            self._measurement = None
        first = max(ahead for _, ahead in of_ranks)
        first += -(self._first_batch + first) % accumulated  # accumulated gradients need equal weights
        self.division.change = first, sizes

    def _change(self, sizes: Sequence[int]) -> None:
        self._take(sizes)
        if self.clock is not None:
            self.clock.reset()
        if self._measurement is None:
            self._announce()
            if self.config.rebalance_every_n_epochs is None:
                self.clock = None

    def _rebalance(self, epoch: int) -> None:
        assert self.clock is not None
        assert self.division is not None
        sizes, costs = list(self.division.sizes), self._costs
        times = self._topology.world.all_gather_object(self.clock.seconds)
        if costs is None or any(seconds is None for seconds in times):
            return
        costs = [cost.through(size, seconds) for cost, size, seconds in zip(costs, sizes, times, strict=True)]
        new = self._divided(costs)
        self._costs = costs
        if _gain(costs, sizes, new) < _WORTH_A_CHANGE:
            return
        self._take(new)
        self.clock.reset()
        if self._topology.rank == 0:
            changes = ", ".join(f"rank {rank}: {sizes[rank]} -> {new[rank]}" for rank in range(len(new)))
            log.warning("epoch %d: speeds changed, samples per step are now %s", epoch, changes)

    def _take(self, sizes: Sequence[int]) -> None:
        assert self.division is not None
        self.division.sizes[:], self.division.change = sizes, None
        costs = self._costs or [StepCost(0.0, 1.0)] * len(sizes)
        speeds = [size / cost.seconds(size) for size, cost in zip(sizes, costs, strict=True)]
        self._topology.set_weights(rank_weights(self.config.weighting, sizes, speeds))


def _gain(costs: Sequence[StepCost], before: Sequence[int], after: Sequence[int]) -> float:
    """Return the part of a step's time that other sizes save."""
    old, new = (max(map(StepCost.seconds, costs, sizes)) for sizes in (before, after))
    return 1 - new / old
