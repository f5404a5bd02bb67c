"""The configuration of HeterogeneousBatches, and what does not fit it."""

from __future__ import annotations

import harness
import pytest
import torch
from batches.conftest import bound, on_ranks
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_hiercomm import HeterogeneousBatches
from lightning_hiercomm.batches.running import RunningBatches


def test_a_run_leaves_its_configuration_as_it_was_written():
    batches = HeterogeneousBatches(12, [2, 1])

    harness.on_ranks(lambda own: RunningBatches(batches, own, harness.place.device), [[0], [1]])
    assert repr(batches) == "HeterogeneousBatches(global_batch_size=12, speeds=[2, 1])"
    assert batches == HeterogeneousBatches(12, [2, 1]) != HeterogeneousBatches(12, [1, 1])
    with pytest.raises(AttributeError, match="does not change"):
        batches.speeds = [1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0 must be positive"),
        ({"speeds": [1, 0]}, "speeds=\\[1, 0\\] must be 'measure', or one positive number per rank"),
        ({"speeds": []}, "one positive number per rank"),
        ({"speeds": [1, float("nan")]}, "one positive number per rank"),
        ({"weighting": "mass"}, "weighting='mass' must be"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        HeterogeneousBatches(**{"global_batch_size": 8, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speeds": [1, 2, 3]}, "speeds gives 3 numbers, but there are 2 ranks"),
        ({"global_batch_size": 1}, "less than one sample for each of the 2 ranks"),
    ],
)
def test_arguments_that_do_not_fit_the_ranks_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        on_ranks([[0, 1]], lambda rank, topology: bound(topology, **{"global_batch_size": 8, **arguments}))


def test_datasets_that_differ_in_length_are_refused():
    def work(rank, topology):
        bound(topology, 4, [1, 1]).process_dataloader(DataLoader(range(20 + rank)))

    with pytest.raises(ValueError, match="unequal lengths: \\[20, 21\\]"):
        on_ranks([[0, 1]], work)


def test_dataloaders_of_different_batch_sizes_are_refused():
    def work(rank, topology):
        batches = bound(topology, 4, [1])
        batches.process_dataloader(DataLoader(range(20), 4))
        batches.process_dataloader(DataLoader(range(20), 8))

    with pytest.raises(ValueError, match="different batch sizes, \\[4, 8\\]"):
        on_ranks([[0]], work)


def test_dataloaders_of_another_epoch_may_have_another_batch_size():
    """With ``reload_dataloaders_every_n_epochs``; those of before are given up."""

    def work(rank, topology):
        batches = bound(topology, 4, [1])
        lengths = []
        for epoch, length in enumerate([20, 40]):
            lengths.append(len(batches.process_dataloader(DataLoader(range(length), 4 + epoch))))
            batches.begin_epoch(epoch)
        assert not batches.go_to(1)
        return lengths

    assert on_ranks([[0]], work) == [[5, 10]]


def test_samplers_with_generators_of_their_own_that_differ_are_refused():
    def work(rank, topology):
        sampler = WeightedRandomSampler([1.0] * 20, 20, generator=torch.Generator().manual_seed(rank))
        batches = bound(topology, 4, [1, 1])
        batches.process_dataloader(DataLoader(range(20), sampler=sampler))
        batches.begin_epoch(0)

    with pytest.raises(ValueError, match="Give it the same seed on all ranks"):
        on_ranks([[0, 1]], work)
