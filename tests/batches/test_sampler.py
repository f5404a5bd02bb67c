"""Every rank's part of each global batch, and the dataloaders that can give it."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.data import _set_sampler_epoch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_hiercomm.batches.sampler import Division, divide_dataloader


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def divided(loader, sizes):
    return [divide_dataloader(loader, Division(rank, sizes), seed=0) for rank in range(len(sizes))]


def batches(loader, epoch=0):
    loader.batch_sampler.sampler.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


sizes = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@given(sizes, st.integers(0, 60), st.booleans(), st.integers(0, 3))
def test_ranks_take_disjoint_parts_in_equally_many_steps(sizes, extra, shuffle, epoch):
    dataset = Numbers(sum(sizes) + extra)
    ranks = [batches(loader, epoch) for loader in divided(DataLoader(dataset, 7, shuffle), sizes)]
    steps = len(dataset) // sum(sizes)
    for rank, size in zip(ranks, sizes, strict=True):
        assert [len(batch) for batch in rank] == [size] * steps
    seen = [index for rank in ranks for batch in rank for index in batch]
    assert len(set(seen)) == len(seen) == steps * sum(sizes)
    assert set(seen) <= set(range(len(dataset)))


@given(sizes, st.randoms())
def test_the_global_batches_do_not_depend_on_the_division(sizes, random):
    loader = DataLoader(Numbers(40), shuffle=True)
    one = batches(divided(loader, [sum(sizes)])[0])
    ranks = [batches(rank) for rank in divided(loader, sizes)]
    assert [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)] == one


def test_every_epoch_is_shuffled_again_so_that_all_samples_are_seen():
    (loader,) = divided(DataLoader(Numbers(10), shuffle=True), [4])
    epochs = [batches(loader, epoch) for epoch in range(12)]
    assert epochs[0] != epochs[1]
    assert epochs[0] == batches(loader, 0)
    left_over = [set(range(10)) - set(itertools.chain(*epoch)) for epoch in epochs]
    assert all(len(indices) == 2 for indices in left_over)
    assert set.intersection(*left_over) == set()


def test_a_loader_that_does_not_shuffle_keeps_its_order():
    first, second = divided(DataLoader(Numbers(12)), [3, 1])
    assert batches(first) == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert batches(second) == [[3], [7], [11]]


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([0.1, 0.9] * 10, 24),
        SubsetRandomSampler(range(5, 20)),
        RandomSampler(range(20), replacement=True, num_samples=30),
    ],
)
def test_other_samplers_are_drawn_alike_on_all_ranks(sampler):
    loader = DataLoader(Numbers(20), sampler=sampler)
    together, apart = divided(loader, [4]), divided(loader, [1, 3])
    for epoch in (0, 1):
        torch.manual_seed(epoch)  # ranks' own generators are in any state
        expected = batches(together[0], epoch)
        torch.manual_seed(99)
        ranks = [batches(rank, epoch) for rank in apart]
        assert [a + b for a, b in zip(*ranks, strict=True)] == expected
    assert batches(together[0], 0) != batches(together[0], 1)


class EveryThird(RandomSampler):
    """A sampler of the user's own, by a class that would shuffle."""

    def __iter__(self):
        return iter(range(0, 3 * len(self), 3))


@pytest.mark.parametrize("as_batches", [False, True])
def test_samplers_like_torchs_own_are_accepted_in_a_batch_sampler(as_batches):
    sampler = EveryThird(range(10))
    given = {"batch_sampler": BatchSampler(sampler, 2, False)} if as_batches else {"sampler": sampler}
    first, second = divided(DataLoader(Numbers(30), **given), [1, 3])
    assert batches(first) == [[0], [12]]
    assert batches(second) == [[3, 6, 9], [15, 18, 21]]


def test_drawing_leaves_the_global_generators_alone():
    (loader,) = divided(DataLoader(Numbers(20), sampler=WeightedRandomSampler([1.0] * 20, 20)), [4])

    def states():
        return [*torch.get_rng_state().tolist(), *random.getstate()[1], *numpy.random.get_state()[1]]

    before = states()
    loader.batch_sampler.sampler.indices()
    assert states() == before


def test_everything_but_the_batch_size_stays():
    class OwnLoader(DataLoader):
        pass

    generator = torch.Generator()
    loader = OwnLoader(Numbers(8), 2, True, num_workers=1, collate_fn=sum, generator=generator, prefetch_factor=3)
    loader.note = "mine"
    (copy,) = divided(loader, [4])
    assert type(copy) is OwnLoader
    assert (copy.num_workers, copy.prefetch_factor, copy.note) == (1, 3, "mine")
    assert copy.generator is generator
    assert sum(copy) == sum(range(8))
    assert len(copy) == 2
    assert len(loader) == 4


def test_sizes_may_change_between_epochs():
    division = Division(0, [3, 1])
    loader = divide_dataloader(DataLoader(Numbers(8)), division, seed=0)
    assert not loader.batch_sampler.is_stale(0)
    assert batches(loader) == [[0, 1, 2], [4, 5, 6]]
    division.sizes[:] = [1, 3]
    assert loader.batch_sampler.is_stale(0)
    assert batches(loader) == [[0], [4]]
    assert not loader.batch_sampler.is_stale(0)
    assert loader.batch_sampler.is_stale(1)


class Buckets(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ([1, 2], "list: it is not a torch DataLoader"),
        (
            DataLoader(Numbers(8), sampler=DistributedSampler(Numbers(8), 2, 0)),
            "DistributedSampler divides the dataset equally",
        ),
        (
            DataLoader(Numbers(8), batch_sampler=BatchSampler(DistributedSampler(Numbers(8), 2, 0), 2, False)),
            "DistributedSampler divides the dataset equally",
        ),
        (DataLoader(Numbers(8), batch_size=None), "with batch_size=None the dataset makes the batches"),
        (
            DataLoader(Numbers(8), batch_sampler=Buckets(SequentialSampler(range(8)), 2, False)),
            "batch sampler is a Buckets",
        ),
        (DataLoader(Numbers(8), sampler=iter(range(8))), "range_iterator, must be a torch Sampler"),
        (DataLoader(Numbers(3)), "global_batch_size=4 is more than the 3 samples"),
        (DataLoader(Stream()), "Use a map-style dataset, or a stream .* unequal_data=True"),
    ],
)
def test_indivisible_loaders_are_refused_with_the_reason(loader, reason):
    with pytest.raises(ValueError, match=reason):
        divide_dataloader(loader, Division(0, [3, 1]), seed=0)


def test_a_sampler_that_promises_too_much_is_named():
    class Boastful(SequentialSampler):
        def __len__(self):
            return 20

    (loader,) = divided(DataLoader(Numbers(8), sampler=Boastful(range(8))), [4])
    with pytest.raises(ValueError, match="Boastful has the length 20 but yields 8 indices"):
        list(loader)


@pytest.mark.parametrize("where", ["sampler", "batch_sampler"])
def test_a_sampler_with_set_epoch_gets_the_epoch(where):
    class Epochs(Sampler):
        epoch = 0

        def __len__(self):
            return 4

        def __iter__(self):
            return iter([(index + self.epoch) % 4 for index in range(4)])

        def set_epoch(self, epoch):
            self.epoch = epoch

    how = (
        {"sampler": Epochs(), "batch_size": 4}
        if where == "sampler"
        else {"batch_sampler": BatchSampler(Epochs(), 4, False)}
    )
    divided = divide_dataloader(DataLoader(range(4), **how), Division(0, [2, 2]), 0)
    seen = []
    for epoch in range(2):
        _set_sampler_epoch(divided, epoch)  # as Lightning does
        seen += [batch.tolist() for batch in divided]
    assert seen == [[0, 1], [1, 2]]
