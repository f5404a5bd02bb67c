"""Divisions that HeterogeneousBatches makes, and changes, on ranks that are threads."""

from __future__ import annotations

import json
from itertools import cycle, pairwise

import pytest
from batches.conftest import bound, four_times_as_slow, on_ranks, steps, train
from problems import warnings_with
from torch.utils.data import DataLoader

from lightning_hiercomm.batches.partition import StepCost, divide


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [("samples", [73 / 128, 37 / 128, 18 / 128]), ("speed", [4 / 7, 2 / 7, 1 / 7]), ("none", [1 / 3] * 3)],
)
def test_given_speeds_make_batches_and_weights(weighting, expected):
    def work(rank, topology):
        batches = bound(topology, 128, [1, 0.5, 0.25], weighting)
        assert batches.scalars() == {
            "batch_size": [73, 37, 18][rank],
            "batch_size/0": 73,
            "batch_size/1": 37,
            "batch_size/2": 18,
        }
        assert len(batches.process_dataloader(DataLoader(range(50000)))) == 390
        return topology.weights

    assert on_ranks([[0, 1], [2]], work) == [tuple(pytest.approx(w) for w in expected)] * 3


COSTS = [StepCost(0.01, 4000), StepCost(0.0, 1000), StepCost(0.002, 2000)]


@pytest.mark.usefixtures("device")  # cpu, and cuda where there is one
def test_measured_costs_give_nearly_the_division_of_the_true_ones(clock, capsys):
    def work(rank, topology):
        batches = bound(topology, 96)
        assert batches.division.sizes == [32, 32, 32]
        train(clock, batches, COSTS[rank].seconds)
        return batches.division.sizes, topology.weights

    (sizes, weights), *others = on_ranks([[0, 1], [2]], work)
    assert others == [(sizes, weights)] * 2
    assert weights == tuple(pytest.approx(size / 96) for size in sizes)
    slowest, best = (max(map(StepCost.seconds, COSTS, each)) for each in (sizes, divide(96, COSTS)))
    assert slowest < 1.03 * best
    table = capsys.readouterr().out
    assert table.count("A global batch of 96 samples on 3 ranks") == 1
    rows = [line.split() for line in table.splitlines()[2:5]]
    assert [(int(row[0]), int(row[1]), int(row[6])) for row in rows] == [
        (rank, [0, 0, 1][rank], size) for rank, size in enumerate(sizes)
    ]


def test_a_division_within_an_epoch_uses_every_sample_once(clock):
    first, second = on_ranks(
        [[0], [1]], lambda rank, topology: train(clock, bound(topology, 32), four_times_as_slow(rank))
    )
    fast, slow = ([len(batch) for batch in each] for each in (first, second))
    assert (fast[0], slow[0]) == (16, 16)
    assert (fast[-1], slow[-1]) == (26, 6)
    assert {a + b for a, b in zip(fast, slow, strict=True)} == {32}
    assert [a + b for a, b in zip(first, second, strict=True)] == [[*range(32 * k, 32 * k + 32)] for k in range(400)]


@pytest.mark.parametrize(("first", "accumulated"), [(0, 1), (0, 8), (3, 8)])
def test_batches_that_are_accumulated_are_of_one_size(clock, first, accumulated):
    """Also in a run that is resumed in mid-epoch, whose loader begins again."""

    def work(rank, topology):
        batches = bound(topology, 32)
        sampler = batches.process_dataloader(DataLoader(range(32 * 400))).batch_sampler
        batches.announce()
        sizes = [*map(len, steps(clock, batches, sampler, four_times_as_slow(rank), first, accumulated))]
        return [batch for batch, (a, b) in enumerate(pairwise(sizes), first + 1) if a != b]

    changes, same = on_ranks([[0], [1]], work)
    assert changes == same
    assert [batch % accumulated for batch in changes] == [0] * len(changes) != []


def test_batches_that_are_loaded_ahead_keep_their_sizes(clock):
    """As many as each rank's workers have begun to load."""

    def work(rank, topology):
        batches = bound(topology, 32)
        sampler = batches.process_dataloader(DataLoader(range(32 * 400))).batch_sampler
        batches.announce()

        def loaded(indices, ahead=()):
            ahead = [*ahead]
            for _ in range(400):
                while len(ahead) < 3 + 4 * rank and (more := next(indices, None)) is not None:
                    ahead.append(more)
                yield ahead.pop(0)

        return [*map(len, steps(clock, batches, loaded(iter(sampler)), four_times_as_slow(rank)))]

    fast, slow = on_ranks([[0], [1]], work)
    assert {a + b for a, b in zip(fast, slow, strict=True)} == {32}
    assert (fast[-1], slow[-1]) == (26, 6)


@pytest.mark.parametrize(
    ("datasets", "may_change"),
    [([range(32 * 400)] * 2, True), ([range(32 * 400)], False)],
    ids=["two loaders", "manual optimization"],
)
def test_changes_are_deferred_to_the_next_epoch(clock, datasets, may_change):
    def work(rank, topology):
        batches = bound(topology, 32, may_change=may_change)
        loaders = [batches.process_dataloader(DataLoader(dataset)) for dataset in datasets]
        batches.announce()
        sizes = []
        for epoch in range(3):
            batches.begin_epoch(epoch)
            sizes.append({*map(len, steps(clock, batches, loaders[0], four_times_as_slow(rank)))})
        return sizes

    assert on_ranks([[0], [1]], work) == [[{16}, {26}, {26}], [{16}, {6}, {6}]]


def test_the_step_that_is_predicted_is_that_of_the_slowest_rank(clock, capsys):
    def work(rank, topology):
        train(clock, batches := bound(topology, 32), four_times_as_slow(rank))
        return batches.division.sizes

    assert on_ranks([[0], [1]], work) == [[26, 6]] * 2
    assert capsys.readouterr().out.splitlines()[4:] == [
        "  predicted step: 26 ms instead of 64 ms, 2.46 times as fast as with equal batches",
        "  the measured step times scattered by up to ±0.0%",
    ]


def announced(capsys, nodes, begin):
    on_ranks(nodes, lambda rank, topology: begin(topology).announce())
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("resumed", [False, True])
def test_given_speeds_are_announced_without_seconds(capsys, resumed):
    def begin(topology):
        given = bound(topology, 70, [4, 2, 1])
        return bound(topology, 70, state=given.state_dict()) if resumed else given

    said = announced(capsys, [[0, 1], [2]], begin)
    assert said[0] == "A global batch of 70 samples on 3 ranks, by given speeds"
    assert [line.split() for line in said[2:5]] == [
        ["0", "0", "4.00", "40", "0.5714"],
        ["1", "0", "2.00", "20", "0.2857"],
        ["2", "1", "1.00", "10", "0.1429"],
    ]
    assert said[5:] == ["  predicted step: 2.30 times as fast as with equal batches"]  # 23 samples at speed 1, or 10


def test_one_rank_has_nothing_to_announce(capsys):
    assert announced(capsys, [[0]], lambda topology: bound(topology, 8)) == []


@pytest.mark.parametrize(("jitter", "warned"), [(0.05, False), (0.5, True)])
def test_measurements_that_scatter_are_warned_of(clock, jitter, warned):
    def work(rank, topology):
        factors = cycle([1 - jitter * rank, 1, 1 + jitter * rank])
        train(clock, bound(topology, 32), lambda size: size * 0.1 * next(factors))  # every step is a block

    with warnings_with("") as said:
        on_ranks([[0, 1]], work)
    assert ["step times of rank 1 scattered" in text for text in said] == [True] * warned


@pytest.mark.parametrize(("slower", "sizes"), [(1.1, {16}), (4.0, {16, 26, 6})])
def test_a_division_that_gains_less_than_the_scatter_is_not_made(clock, slower, sizes):
    """Rank 1 takes 10 % or 300 % longer, and its steps scatter by 50 %."""

    def work(rank, topology):
        factors = cycle([0.5, 1, 1.5] if rank else [1])
        seconds = (0.1 * slower if rank else 0.1) / 16
        return {*map(len, train(clock, bound(topology, 32), lambda size: size * seconds * next(factors)))}

    with warnings_with("scattered"):
        used = set.union(*on_ranks([[0, 1]], work))
    assert used == sizes


@pytest.mark.parametrize(("speeds", "least"), [("measure", 4), ([1, 0.01], 1)])
def test_a_rank_whose_speed_is_measured_keeps_a_quarter_of_an_equal_share(clock, speeds, least):
    def work(rank, topology):
        return len(train(clock, bound(topology, 32, speeds), lambda size: size * (0.2 if rank else 0.002))[-1])

    assert on_ranks([[0, 1]], work)[1] == least


def test_the_speed_that_counts_is_that_at_the_real_size(clock):
    # past 20 samples rank 0 thrashes, which equal batches do not show
    def work(rank, topology):
        batches = bound(topology, 32)
        train(clock, batches, lambda size: size * 2e-3 if rank else size * 1e-3 + max(0, size - 20) * 9e-3)
        return batches.division.sizes

    sizes, _ = on_ranks([[0, 1]], work)
    assert 19 <= sizes[0] <= 20  # by a line through 16 samples alone it would be 21


def test_ranks_whose_modules_need_unequally_many_samples_divide_alike():
    sizes = on_ranks([[0], [1]], lambda rank, topology: bound(topology, 12, [100, 1], least=2 - rank).division.sizes)
    assert sizes == [[10, 2]] * 2


def test_a_rank_that_loads_slowly_in_its_own_process_gets_less(clock):
    def work(rank, topology):
        def load(samples):
            clock.advance(3e-3 * rank * len(samples))
            return samples

        batches = bound(topology, 32)
        loader = batches.process_dataloader(DataLoader(range(32 * 400), 32, collate_fn=load))
        for _ in steps(clock, batches, loader, lambda size: 1e-3 * size):
            pass
        return list(batches.division.sizes)

    for sizes in on_ranks([[0], [1]], work):
        assert sizes[1] in (6, 7)  # four times the seconds for a sample


def test_waiting_for_slower_ranks_to_compare_is_no_loading(clock, monkeypatch):
    def work(rank, topology):
        def slowly(value, gather=topology.world.all_gather_object):
            clock.advance(5.0 if rank == 0 else 0.0)  # rank 0 arrives early
            return gather(value)

        batches = bound(topology, 32)
        loader = batches.process_dataloader(DataLoader(range(32 * 400), 32))
        batches.announce()
        batches.begin_epoch(0)
        monkeypatch.setattr(topology.world, "all_gather_object", slowly)
        for _ in steps(clock, batches, loader, lambda size: (0.001 if rank == 0 else 0.003) * size):
            pass
        return list(batches.division.sizes)

    assert on_ranks([[0], [1]], work) == [[24, 8]] * 2


def test_a_resumed_run_keeps_its_division_and_measures_nothing(clock):
    def work(rank, topology):
        first = bound(topology, 96)
        assert first.state_dict() == {}
        train(clock, first, COSTS[rank].seconds)
        second = bound(topology, 96, state=first.state_dict())
        sizes = [*map(len, train(clock, second, lambda size: size * 1.0))]
        assert sizes == [first.batch_size] * 400
        larger = bound(topology, 192, state=(state := first.state_dict()))
        costs = [StepCost(fixed, speed) for fixed, speed in zip(*state["costs"], strict=True)]
        return larger.division.sizes == divide(192, costs)

    assert on_ranks([[0, 1, 2]], work) == [True] * 3


@pytest.mark.parametrize(
    ("before", "now", "sizes"),
    [
        ({"speeds": [3, 1]}, {"speeds": [3, 1]}, [72, 24]),
        ({"speeds": [3, 1]}, {}, [72, 24]),
        ({"speeds": [3, 1]}, {"speeds": [1, 1]}, [48, 48]),
    ],
)
def test_a_resumed_run_keeps_to_the_speeds_that_it_is_given(before, now, sizes):
    def work(rank, topology):
        return bound(topology, 96, state=bound(topology, 96, **before).state_dict(), **now).division.sizes

    assert on_ranks([[0], [1]], work) == [sizes] * 2


def test_another_number_of_ranks_measures_again():
    def work(rank, topology):
        batches = bound(topology, 96, state={"sizes": [90, 6], "costs": [[0.0, 0.0], [15.0, 1.0]]})
        return batches.division.sizes, batches.state_dict()

    assert on_ranks([[0, 1, 2]], work) == [([32, 32, 32], {})] * 3


def test_state_is_made_of_primitives():
    state = on_ranks([[0], [1]], lambda rank, topology: bound(topology, 8, [3, 1]).state_dict())[0]
    assert json.loads(json.dumps(state)) == state
    assert state == {"sizes": [6, 2], "costs": [[0.0, 0.0], [3.0, 1.0]], "speeds": [3, 1]}
