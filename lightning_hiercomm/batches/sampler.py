"""Every rank its own part of each global batch: samplers, streams, and the dataloaders around them."""

from __future__ import annotations

import copy
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol, runtime_checkable

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
    """Who takes what of a global batch: of its G samples in order, rank 0 takes the first ``sizes[0]``, and so on.

    ``sizes`` may change between epochs. Samplers of indices ask for every batch, so that ``change`` may announce other
    sizes for the rest of an epoch; a stream keeps the sizes with which its iteration has begun.

    Args:
        rank: This rank.
        sizes: Samples per rank; their sum G never changes.

    Attributes:
        change: From which batch of the iteration on, counted from 0, ranks take other sizes, and which.
    """

    def __init__(self, rank: int, sizes: Sequence[int]) -> None:
        self.rank = rank
        self.sizes = list(sizes)
        self.change: tuple[int, Sequence[int]] | None = None

    def place(self, batch: int) -> slice:
        """This rank's samples in the order of the epoch, for one batch of the iteration."""
        sizes = self.sizes if self.change is None or batch < self.change[0] else self.change[1]
        start = batch * self.total + sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])

    @property
    def total(self) -> int:
        """Samples of the global batch, G."""
        return sum(self.sizes)

    @property
    def own(self) -> int:
        """Samples of this rank, B_i."""
        return self.sizes[self.rank]

    @property
    def start(self) -> int:
        """Where this rank's samples begin in the global batch."""
        return sum(self.sizes[: self.rank])


class EpochOrder:
    """The order in which an epoch takes a dataset's indices; the same on every rank.

    Follows the dataloader's own sampler: shuffled again in every epoch, in sequence, or, for any other sampler
    (weighted, subset, yours), drawn from it once per epoch, with the global random generators seeded alike everywhere.

    Args:
        sampler: The dataloader's.
        seed: The same on every rank.
    """

    def __init__(self, sampler: Sampler[Any], seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0
        self._drawn: tuple[int, Sequence[Any]] | None = None

    @property
    def is_drawn(self) -> bool:
        """Whether the order comes from the user's own sampler, so that ranks might disagree."""
        if type(self.sampler) is RandomSampler:
            return self.sampler.replacement or len(self.sampler) != len(self.sampler.data_source)
        return type(self.sampler) is not SequentialSampler

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. Lightning calls it before each."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):  # within a batch sampler, nobody else would tell it
            self.sampler.set_epoch(epoch)

    def indices(self) -> Sequence[Any]:
        """All of the epoch's indices."""
        if self._drawn is None or self._drawn[0] != self.epoch:
            self._drawn = (self.epoch, self._draw())
        return self._drawn[1]

    def fingerprint(self) -> int:
        """Equal for equal orders."""
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
    """This rank's part of every global batch.

    Global batch k is ``order[k G : (k + 1) G]`` whatever the division, so training sees the same global batches for any
    speeds. There are ``floor(N / G)`` of them on every rank; the samples left over change with every epoch's shuffle.

    Args:
        order: Of the whole dataset.
        division: Who takes what.
        on_load: Called just before a batch's indices are handed out.

    Attributes:
        sampler: The order; under this name Lightning looks for ``set_epoch``.
        handed_out: How many batches of the iteration have their indices; workers load some ahead of training.
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
        """Whether an iteration has begun, ahead of time, with another epoch's order or other sizes."""
        return self._began is not None and self._began != (epoch, self.division.sizes)

    def __iter__(self) -> Iterator[list[Any]]:
        order, total = self.sampler.indices(), self.division.total
        self._began = (self.sampler.epoch, list(self.division.sizes))
        if len(order) < len(self) * total:
            raise ValueError(
                f"{type(self.sampler.sampler).__name__} promised {len(self.sampler)} indices by its length but gave"
                f" {len(order)}: the ranks would not take the same number of steps. Correct its __len__."
            )
        for batch in range(len(self)):
            if self._on_load is not None:
                self._on_load()
            self.handed_out = batch + 1
            yield list(order[self.division.place(batch)])


@runtime_checkable
class DividesItself(Protocol):
    """An ``IterableDataset`` that can skip what other ranks take."""

    def iterate_share(self, rank: int, batch_sizes: Sequence[int]) -> Iterator[Any]:
        """Yield only this rank's samples.

        Args:
            rank: This rank.
            batch_sizes: Samples per step of every rank. All ranks must yield whole batches, equally many.
        """


class DividedStream(IterableDataset[Any]):
    """This rank's part of a stream of samples.

    **Contract.** The dataset yields the same samples in the same order on every rank (as a dataset that knows nothing
    of ranks does; dataloader workers may share its stream among them as usual), and may be iterated again. Of every G
    consecutive samples each rank takes its own, so all ranks take equally many steps and no sample twice. Every rank
    reads the whole stream; a dataset for which that is too slow defines ``iterate_share`` (:class:`DividesItself`).

    Args:
        dataset: The stream.
        division: Who takes what.
    """

    def __init__(self, dataset: IterableDataset[Any], division: Division) -> None:
        self.dataset = dataset
        self.division = division

    def __iter__(self) -> Iterator[Any]:
        start, own, total = self.division.start, self.division.own, self.division.total
        if isinstance(self.dataset, DividesItself):
            yield from self.dataset.iterate_share(self.division.rank, list(self.division.sizes))
            return
        stream = iter(self.dataset)
        while len(batch := list(islice(stream, total))) == total:
            yield from batch[start : start + own]

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the dataset, if it wants to know."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class _SizedDividedStream(DividedStream):
    def __len__(self) -> int:
        assert isinstance(self.dataset, Sized)
        return len(self.dataset) // self.division.total


class StreamBatches(Sampler[list[None]]):
    """How many samples a stream's dataloader takes for each batch; endless.

    Attributes:
        sampler: The stream; under this name Lightning looks for ``set_epoch``.
    """

    def __init__(self, stream: DividedStream) -> None:
        self.sampler = stream
        self._began: list[int] | None = None

    def is_stale(self, epoch: int) -> bool:
        """Whether an iteration has begun, ahead of time, with other sizes."""
        return self._began is not None and self._began != self.sampler.division.sizes

    def __iter__(self) -> Iterator[list[None]]:
        division = self.sampler.division
        self._began = list(division.sizes)
        while True:
            yield [None] * division.own


def divide_dataloader(
    loader: Any, division: Division, seed: int, sizes_may_change: bool, on_load: Callable[[], object] | None = None
) -> DataLoader[Any]:
    """A copy of a dataloader that gives this rank's part of every global batch.

    Everything but the batch size stays: dataset, workers, collate function, generator, subclass.

    Args:
        loader: The user's, before any distributed sampler was put in.
        division: Who takes what.
        seed: Of the shuffle; the same on every rank.
        sizes_may_change: Whether sizes are yet to be measured, or re-divided between epochs.
        on_load: Called when this process begins to load a batch; not if workers load.

    Raises:
        ValueError: If the loader makes its batches in a way that cannot be divided, with the reason.
    """
    refuse = f"HeterogeneousBatches cannot divide the batches of {type(loader).__name__}: "
    if not isinstance(loader, DataLoader):
        raise ValueError(refuse + "it is not a torch DataLoader. Return one from train_dataloader().")
    # of a batch sampler that the user gives DataLoader does not know the sampler, and names another
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler):
        raise ValueError(
            refuse + "its DistributedSampler has divided the dataset equally already. Give it shuffle=True or an"
            " ordinary sampler."
        )
    if loader.batch_sampler is None:
        raise ValueError(
            refuse
            + "batch_size=None means that the dataset makes the batches. Let it yield samples and give the loader"
            " a batch_size (any; global_batch_size replaces it)."
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            refuse + f"only its batch sampler, {type(loader.batch_sampler).__name__}, knows which samples go together."
            " Use a `sampler` with a batch_size instead."
        )
    divided = copy.copy(loader)
    if isinstance(loader.dataset, IterableDataset):
        if loader.persistent_workers and sizes_may_change:
            raise ValueError(
                refuse + "its persistent workers would keep their copy of the IterableDataset when batch sizes change."
                " Set persistent_workers=False, or give speeds and leave rebalance_every_n_epochs out."
            )
        # with several workers nobody knows how many whole batches each one's part of the stream has
        is_sized = isinstance(loader.dataset, Sized) and loader.num_workers <= 1
        stream = (_SizedDividedStream if is_sized else DividedStream)(loader.dataset, division)
        _replace(divided, dataset=stream, batch_sampler=StreamBatches(stream), batch_size=None, drop_last=True)
        return divided
    if not isinstance(sampler, Sampler) or not isinstance(sampler, Sized):
        raise ValueError(
            refuse + f"its sampler, {type(sampler).__name__}, is no torch Sampler with a length. Make it one."
        )
    order = EpochOrder(sampler, seed)
    if len(order) < division.total:
        raise ValueError(
            f"global_batch_size={division.total} is more than the {len(order)} samples of an epoch: lower it"
        )
    batches = DividedBatchSampler(order, division, on_load if loader.num_workers == 0 else None)
    _replace(divided, batch_sampler=batches, batch_size=None, drop_last=False)
    return divided


def _replace(loader: DataLoader[Any], **attributes: Any) -> None:
    # DataLoader forbids to set these: they must not change under an iterator, and a copy has none yet
    loader.__dict__.update(attributes, _iterator=None)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Inside, the global random generators (torch's on the CPU, Python's, NumPy's) start from ``seed``."""
    numpy = sys.modules.get("numpy.random")  # nobody draws from what nobody has imported
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
