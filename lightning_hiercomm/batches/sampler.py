"""Samplers and dataloaders that give each rank its own part of every global batch."""

from __future__ import annotations

import copy
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)


class Division:
    """The samples of each rank in a global batch: rank 0 takes the first ``sizes[0]``, and so on.

    ``sizes`` may change between epochs, and ``change`` may set other sizes for the rest of an epoch.

    Attributes:
        sizes: Samples per rank; their sum G never changes.
        change: The batch of the iteration, from 0, from which ranks take other sizes, and these sizes.
    """

    def __init__(self, rank: int, sizes: Sequence[int]) -> None:
        self.rank = rank
        self.sizes = list(sizes)
        self.change: tuple[int, Sequence[int]] | None = None

    def place(self, batch: int) -> slice:
        """Return where this rank's samples of one batch of the iteration are in the order of the epoch."""
        sizes = self.sizes if self.change is None or batch < self.change[0] else self.change[1]
        start = batch * self.total + sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])

    @property
    def total(self) -> int:
        """Samples of the global batch, G."""
        return sum(self.sizes)

    @property
    def own(self) -> int:
        """Samples of this rank in each batch, B_i."""
        return self.sizes[self.rank]


class EpochOrder:
    """The order of a dataset's indices in an epoch; the same on every rank.

    It is that of the dataloader's own sampler: shuffled again in every epoch, or in sequence. Any other sampler
    (weighted, subset, yours) is iterated once per epoch, with the global random generators seeded equally on all ranks.
    """

    def __init__(self, sampler: Sampler[Any], seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0
        self._drawn: tuple[int, Sequence[Any]] | None = None

    @property
    def is_drawn(self) -> bool:
        """Whether the order comes from the user's own sampler, so that it might differ between ranks."""
        if type(self.sampler) is RandomSampler:
            return self.sampler.replacement or len(self.sampler) != len(self.sampler.data_source)
        return type(self.sampler) is not SequentialSampler

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. Lightning calls it before each."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):  # Lightning does not find a sampler within a batch sampler
            self.sampler.set_epoch(epoch)

    def indices(self) -> Sequence[Any]:
        if self._drawn is None or self._drawn[0] != self.epoch:
            self._drawn = (self.epoch, self._draw())
        return self._drawn[1]

    def fingerprint(self) -> int:
        return zlib.crc32(repr(self.indices()).encode())

    def _draw(self) -> Sequence[Any]:
        seed = (self.seed + self.epoch) % 2**63
        if self.is_drawn:
            with _seeded(seed):
                return list(self.sampler)
        if type(self.sampler) is RandomSampler:
            return torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).tolist()
        return range(len(self))


class DividedBatchSampler(Sampler[list[Any]]):
    """Yields this rank's part of every global batch.

    Global batch k is ``order[k G : (k + 1) G]`` for every division, so training uses the same global batches for all
    speeds. There are ``floor(N / G)`` of them; the samples left over change with every epoch's shuffle.

    Attributes:
        sampler: The order; Lightning calls ``set_epoch`` of the attribute with this name.
        handed_out: The number of batches of the iteration that were yielded; workers load some ahead of training.
    """

    def __init__(self, order: EpochOrder, division: Division, on_load: Callable[[], object] | None = None) -> None:
        self.sampler = order
        self.division = division
        self.handed_out = 0
        self._on_load = on_load
        self._began: tuple[int, list[int]] | None = None

    def __len__(self) -> int:
        return len(self.sampler) // self.division.total

    def is_stale(self, epoch: int) -> bool:
        """Return whether workers have begun an iteration with another epoch's order or other sizes."""
        return self._began is not None and self._began != (epoch, self.division.sizes)

    def __iter__(self) -> Iterator[list[Any]]:
        order, total = self.sampler.indices(), self.division.total
        self._began = (self.sampler.epoch, list(self.division.sizes))
        if len(order) < len(self) * total:
            raise ValueError(
                f"{type(self.sampler.sampler).__name__} has the length {len(self.sampler)} but yields {len(order)}"
                " indices, so ranks would take unequal numbers of steps. Correct its __len__."
            )
        for batch in range(len(self)):
            if self._on_load is not None:
                self._on_load()
            self.handed_out = batch + 1
            yield list(order[self.division.place(batch)])


def divide_dataloader(
    loader: Any, division: Division, seed: int, on_load: Callable[[], object] | None = None
) -> DataLoader[Any]:
    """Return a copy of a dataloader that yields this rank's part of every global batch.

    Everything except the batch size stays: dataset, workers, collate function, generator, subclass.

    Args:
        loader: The user's dataloader, without a distributed sampler.
        division: The samples of each rank.
        seed: The seed of the shuffle; the same on every rank.
        on_load: Called when this process begins to load a batch; not if workers load.

    Raises:
        ValueError: If the loader makes its batches in a way that cannot be divided, with the reason.
    """
    refuse = f"HeterogeneousBatches cannot divide the batches of {type(loader).__name__}: "
    if not isinstance(loader, DataLoader):
        raise ValueError(refuse + "it is not a torch DataLoader. Return one from train_dataloader().")
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            refuse + "its IterableDataset has no samples to choose by index. Use a map-style dataset, or a stream and a"
            " batch size of each rank's own with unequal_data=True."
        )
    # if the user gives a batch sampler, `loader.sampler` is another one
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler):
        raise ValueError(
            refuse + "its DistributedSampler divides the dataset equally. Use shuffle=True or an ordinary sampler."
        )
    if loader.batch_sampler is None:
        raise ValueError(
            refuse + "with batch_size=None the dataset makes the batches. Let it yield samples and give the loader"
            " a batch_size (any; global_batch_size replaces it)."
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            refuse + f"its batch sampler is a {type(loader.batch_sampler).__name__}. Use a `sampler` with a batch_size"
            " instead."
        )
    if not isinstance(sampler, Sampler) or not isinstance(sampler, Sized):
        raise ValueError(refuse + f"its sampler, {type(sampler).__name__}, must be a torch Sampler with a length.")
    order = EpochOrder(sampler, seed)
    if len(order) < division.total:
        raise ValueError(
            f"global_batch_size={division.total} is more than the {len(order)} samples of an epoch: lower it"
        )
    batches = DividedBatchSampler(order, division, on_load if loader.num_workers == 0 else None)
    divided = copy.copy(loader)
    # DataLoader refuses to set these, because an iterator may use them; a copy has no iterator
    divided.__dict__.update(batch_sampler=batches, batch_size=None, drop_last=False, _iterator=None)
    return divided


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Inside, the global random generators (torch's on the CPU, Python's, NumPy's) start from ``seed``."""
    numpy = sys.modules.get("numpy.random")  # if it is not imported, no sampler uses it
    before = torch.get_rng_state(), random.getstate(), numpy and numpy.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy:
        numpy.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy:
            numpy.set_state(before[2])
