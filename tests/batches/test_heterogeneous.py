"""HeterogeneousBatches on ranks that are threads: divisions, weights, gradients."""

from __future__ import annotations

import json
from itertools import cycle, pairwise

import harness
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Stream, warnings_with
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_hiercomm import AllReduce, HeterogeneousBatches, PeriodicAveraging
from lightning_hiercomm.batches.partition import StepCost, divide
from lightning_hiercomm.batches.running import RunningBatches
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import Context
from lightning_hiercomm.schemes.gradient_path import NodeMean, gradient_path

on_both = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


def on_ranks(nodes, work):
    return harness.on_ranks(lambda topology: work(topology.rank, topology), nodes)


def bound(topology, *arguments, state=None, least=1, may_change=True, **named):
    config = HeterogeneousBatches(*arguments, **named)
    return RunningBatches(config, topology, harness.place.device, least, state, may_change)


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


def train(clock, batches, seconds, steps=400, epochs=1):
    """Train epochs of so many steps, which take ``seconds(size)``; return the batch sizes, and the indices."""
    sampler = batches.process_dataloader(DataLoader(range(steps * batches.config.global_batch_size))).batch_sampler
    batches.announce()
    sizes, indices = [], []
    for epoch in range(epochs):
        sampler.sampler.set_epoch(epoch)
        batches.begin_epoch(epoch)
        for step, batch in enumerate(sampler):
            batches.begin_step(step)
            assert len(batch) == batches.batch_size
            clock.advance(seconds(len(batch)))
            batches.end_step()
            sizes.append(len(batch))
            indices.append(batch)
    return sizes, indices


COSTS = [StepCost(0.01, 4000), StepCost(0.0, 1000), StepCost(0.002, 2000)]


@on_both
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
    def work(rank, topology):
        return train(clock, bound(topology, 32), lambda size: size * 1e-3 * (1 + 3 * rank))

    (fast, first), (slow, second) = on_ranks([[0], [1]], work)
    assert (fast[0], slow[0]) == (16, 16)
    assert (fast[-1], slow[-1]) == (26, 6)
    assert {a + b for a, b in zip(fast, slow, strict=True)} == {32}
    assert [a + b for a, b in zip(first, second, strict=True)] == [[*range(32 * k, 32 * k + 32)] for k in range(400)]


def test_two_batch_sizes_give_the_fixed_cost_of_a_step(clock):
    """With equal batches of 16 rank 1 is half as fast; what rank 0 loses at every step cannot be shared."""

    def work(rank, topology):
        cost = [StepCost(0.004, 4000), StepCost(0.0, 1000)][rank]
        batches = bound(topology, 32)
        train(clock, batches, cost.seconds, steps=600)
        return batches.division.sizes

    assert on_ranks([[0], [1]], work) == [divide(32, [StepCost(0.004, 4000), StepCost(0.0, 1000)])] * 2


@pytest.mark.parametrize(("first", "accumulated"), [(0, 1), (0, 8), (3, 8)])
def test_batches_that_are_accumulated_are_of_one_size(clock, first, accumulated):
    """Also in a run that is resumed in mid-epoch, whose loader begins again."""

    def work(rank, topology):
        batches = bound(topology, 32)
        sampler = batches.process_dataloader(DataLoader(range(32 * 400))).batch_sampler
        batches.announce()
        sizes = []
        for batch, indices in enumerate(sampler, first):
            batches.begin_step(batch, accumulated)
            clock.advance(len(indices) * 1e-3 * (1 + 3 * rank))
            batches.end_step()
            sizes.append(batches.batch_size)
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
        indices, ahead, sizes = iter(sampler), [], []
        for batch in range(400):
            while len(ahead) < 3 + 4 * rank and (more := next(indices, None)) is not None:
                ahead.append(more)
            batches.begin_step(batch)
            assert len(ahead.pop(0)) == batches.batch_size
            clock.advance(batches.batch_size * 1e-3 * (1 + 3 * rank))
            batches.end_step()
            sizes.append(batches.batch_size)
        return sizes

    fast, slow = on_ranks([[0], [1]], work)
    assert {a + b for a, b in zip(fast, slow, strict=True)} == {32}
    assert (fast[-1], slow[-1]) == (26, 6)


@pytest.mark.parametrize(
    ("datasets", "may_change"),
    [([Stream(range(32 * 400))], True), ([range(32 * 400)] * 2, True), ([range(32 * 400)], False)],
    ids=["stream", "two loaders", "manual optimization"],
)
def test_changes_are_deferred_to_the_next_epoch(clock, datasets, may_change):
    def work(rank, topology):
        batches = bound(topology, 32, may_change=may_change)
        loaders = [batches.process_dataloader(DataLoader(dataset)) for dataset in datasets]
        batches.announce()
        sizes = []
        for epoch in range(3):
            batches.begin_epoch(epoch)
            seen = set()
            for batch, samples in enumerate(loaders[0]):
                batches.begin_step(batch)
                clock.advance(len(samples) * 1e-3 * (1 + 3 * rank))
                batches.end_step()
                seen.add(len(samples))
            sizes.append(seen)
        return sizes

    assert on_ranks([[0], [1]], work) == [[{16}, {26}, {26}], [{16}, {6}, {6}]]


def test_the_step_that_is_predicted_is_that_of_the_slowest_rank(clock, capsys):
    def work(rank, topology):
        train(clock, batches := bound(topology, 32), lambda size: size * 1e-3 * (1 + 3 * rank))
        return batches.division.sizes

    assert on_ranks([[0], [1]], work) == [[26, 6]] * 2
    assert capsys.readouterr().out.splitlines()[4:] == [
        "  predicted step: 26 ms instead of 64 ms, 2.46 times as fast as with equal batches",
        "  the measured step times scattered by up to ±0.0%",
    ]


def test_given_speeds_are_announced_without_seconds(capsys):
    on_ranks([[0, 1], [2]], lambda rank, topology: bound(topology, 70, [4, 2, 1]).announce())
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "A global batch of 70 samples on 3 ranks, by given speeds"
    assert [line.split() for line in said[2:5]] == [
        ["0", "0", "4.00", "40", "0.5714"],
        ["1", "0", "2.00", "20", "0.2857"],
        ["2", "1", "1.00", "10", "0.1429"],
    ]
    assert said[5:] == ["  predicted step: 2.30 times as fast as with equal batches"]  # 23 samples at speed 1, or 10


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
        return train(clock, bound(topology, 32), lambda size: size * seconds * next(factors))[0]

    with warnings_with("scattered"):
        used = set.union(*map(set, on_ranks([[0, 1]], work)))
    assert used == sizes


@pytest.mark.parametrize(("speeds", "least"), [("measure", 4), ([1, 0.01], 1)])
def test_a_rank_whose_speed_is_measured_keeps_a_quarter_of_an_equal_share(clock, speeds, least):
    def work(rank, topology):
        return train(clock, bound(topology, 32, speeds), lambda size: size * (0.2 if rank else 0.002))[0]

    assert on_ranks([[0, 1]], work)[1][-1] == least


def test_one_rank_has_nothing_to_announce(capsys):
    on_ranks([[0]], lambda rank, topology: bound(topology, 8).announce())
    assert capsys.readouterr().out == ""


def test_the_speed_that_counts_is_that_at_the_real_size(clock):
    # past 20 samples rank 0 thrashes, which equal batches do not show
    def work(rank, topology):
        batches = bound(topology, 32)
        train(clock, batches, lambda size: size * 2e-3 if rank else size * 1e-3 + max(0, size - 20) * 9e-3)
        return batches.division.sizes

    sizes, _ = on_ranks([[0, 1]], work)
    assert 19 <= sizes[0] <= 20  # by a line through 16 samples alone it would be 21


def test_memory_limits_hold_during_measurement_and_after(clock):
    def work(rank, topology):
        batches = bound(topology, 32, max_batch_size=[20, 10, 20])
        return train(clock, batches, lambda size: size * 1e-3 / (rank + 1))[0]

    for sizes, limit in zip(on_ranks([[0, 1, 2]], work), (20, 10, 20), strict=True):
        assert max(sizes) <= limit


@pytest.mark.parametrize("limits", [1, [1, 7]])
def test_a_rank_may_be_limited_to_a_single_sample(limits):
    total = 2 if limits == 1 else 8
    sizes = on_ranks([[0, 1]], lambda rank, topology: bound(topology, total, [1, 1], max_batch_size=limits).batch_size)
    assert sizes == [1, total - 1]


def test_ranks_whose_modules_need_unequally_many_samples_divide_alike():
    sizes = on_ranks([[0], [1]], lambda rank, topology: bound(topology, 12, [100, 1], least=2 - rank).division.sizes)
    assert sizes == [[10, 2]] * 2


class Trained:
    """A rank's steps and epochs, on a manual clock."""

    def __init__(self, clock, topology, **arguments):
        self.clock = clock
        self.batches = bound(topology, 32, [1, 1], rebalance_every_n_epochs=1, **arguments)
        self.epoch = 0

    def epoch_at(self, per_sample, steps=40):
        self.batches.begin_epoch(self.epoch)
        for step in range(steps):
            self.batches.begin_step(step)
            self.clock.advance(per_sample * self.batches.batch_size)
            self.batches.end_step()
        self.epoch += 1
        return list(self.batches.division.sizes)


def test_a_rank_that_slows_down_gets_less_within_two_epochs(clock, caplog):
    def work(rank, topology):
        run = Trained(clock, topology)
        before = [run.epoch_at(1e-3) for _ in range(3)]
        after = [run.epoch_at(4e-3 if rank == 1 else 1e-3) for _ in range(3)]
        return before, after[2], [round(weight * 32) for weight in topology.weights]

    for before, after, weights in on_ranks([[0], [1]], work):
        assert before == [[16, 16]] * 3
        assert after[1] in (6, 7)
        assert sum(after) == 32
        assert weights == after
    assert "rank 1: 16 -> " in caplog.text


def test_the_others_get_no_more_than_fits_when_a_rank_slows_down(clock):
    def work(rank, topology):
        run = Trained(clock, topology, max_batch_size=20)
        return [run.epoch_at(4e-3 if rank == 1 else 1e-3) for _ in range(3)][-1]

    assert on_ranks([[0], [1]], work) == [[20, 12]] * 2


def test_a_rank_that_loads_slowly_in_its_own_process_gets_less(clock):
    def work(rank, topology):
        def load(samples):
            clock.advance(3e-3 * rank * len(samples))
            return samples

        run = Trained(clock, topology)
        loader = run.batches.process_dataloader(DataLoader(range(32 * 40), 32, collate_fn=load))
        for epoch in range(2):
            run.batches.begin_epoch(epoch)
            for step, samples in enumerate(loader):
                run.batches.begin_step(step)
                clock.advance(1e-3 * len(samples))
                run.batches.end_step()
        return list(run.batches.division.sizes)

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
        for step, samples in enumerate(loader):
            batches.begin_step(step)
            clock.advance((0.001 if rank == 0 else 0.003) * len(samples))
            batches.end_step()
        return list(batches.division.sizes)

    assert on_ranks([[0], [1]], work) == [[24, 8]] * 2


def test_a_change_that_is_not_worth_it_is_not_made(clock):
    def work(rank, topology):
        run = Trained(clock, topology)
        return [run.epoch_at(1.04e-3 if rank == 1 else 1e-3) for _ in range(4)]

    assert on_ranks([[0, 1]], work) == [[[16, 16]] * 4] * 2


def test_a_resumed_run_keeps_its_division_and_measures_nothing(clock):
    def work(rank, topology):
        first = bound(topology, 96)
        assert first.state_dict() == {}
        train(clock, first, COSTS[rank].seconds)
        second = bound(topology, 96, state=first.state_dict())
        sizes, _ = train(clock, second, lambda size: size * 1.0)
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
        ({"speeds": [3, 1]}, {"speeds": [3, 1], "max_batch_size": [48, 96]}, [48, 48]),
    ],
)
def test_a_resumed_run_keeps_to_the_limits_and_speeds_that_it_is_given(before, now, sizes):
    def work(rank, topology):
        return bound(topology, 96, state=bound(topology, 96, **before).state_dict(), **now).division.sizes

    assert on_ranks([[0], [1]], work) == [sizes] * 2


def test_speeds_that_a_resumed_run_keeps_are_announced_as_given(capsys):
    def work(rank, topology):
        bound(topology, 70, state=bound(topology, 70, [4, 2, 1]).state_dict()).announce()

    on_ranks([[0, 1], [2]], work)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "A global batch of 70 samples on 3 ranks, by given speeds"
    assert said[5:] == ["  predicted step: 2.30 times as fast as with equal batches"]


def test_another_number_of_ranks_measures_again():
    def work(rank, topology):
        batches = bound(topology, 96, state={"sizes": [90, 6], "costs": [[0.0, 0.0], [15.0, 1.0]]})
        return batches.division.sizes, batches.state_dict()

    assert on_ranks([[0, 1, 2]], work) == [([32, 32, 32], {})] * 3


def test_state_is_made_of_primitives():
    state = on_ranks([[0], [1]], lambda rank, topology: bound(topology, 8, [3, 1]).state_dict())[0]
    assert json.loads(json.dumps(state)) == state
    assert state == {"sizes": [6, 2], "costs": [[0.0, 0.0], [3.0, 1.0]], "speeds": [3, 1]}


# ---- gradients ---------------------------------------------------------------------------------------------------


def model_and_data(samples):
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 3, generator=generator)
    y = torch.randn(samples, generator=generator)
    weight = torch.randn(3, generator=generator)
    return weight, x, y


def gradient(weight, x, y):
    """Of the mean of a loss that is not quadratic, in float64: the reference."""
    weight = weight.double().requires_grad_()
    loss = torch.tanh(x.double() @ weight - y.double()).square().mean()
    return torch.autograd.grad(loss, weight)[0]


def parts(nodes, sizes):
    """Where each rank's samples lie in the global batch."""
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]


node_sizes = st.lists(st.integers(1, 3), min_size=1, max_size=3)


def nodes_of(counts):
    ranks = iter(range(sum(counts)))
    return [[next(ranks) for _ in range(count)] for count in counts]


@on_both
@settings(max_examples=30, deadline=None)
@given(node_sizes, st.data())
def test_weighted_gradients_are_the_gradient_of_the_global_mean_loss(counts, data):
    nodes = nodes_of(counts)
    sizes = [data.draw(st.integers(1, 9)) for _ in range(sum(counts))]
    weight, x, y = model_and_data(sum(sizes))

    def work(rank, topology):
        batches = bound(topology, sum(sizes), [float(size) for size in sizes])
        assert batches.division.sizes == sizes
        path = gradient_path(AllReduce.gradients, topology, harness.place.device, Wire(), chunk_bytes=2**22)
        own = parts(nodes, sizes)[rank]
        bucket = gradient(weight, x[own], y[own]).float().to(harness.place.device)
        path.reduce(bucket).wait()
        path.close()
        return bucket

    for bucket in on_ranks(nodes, work):
        torch.testing.assert_close(bucket, gradient(weight, x, y).float(), rtol=1e-5, atol=1e-6)


@on_both
@settings(max_examples=20, deadline=None)
@given(node_sizes, st.integers(1, 3), st.data())
def test_periodic_averaging_of_unequal_nodes_weighs_every_sample_alike(counts, sync_every, data):
    nodes = nodes_of(counts)
    sizes = [data.draw(st.integers(1, 9)) for _ in range(sum(counts))]
    total, steps, lr = sum(sizes), 4, 0.1
    initial, x, y = model_and_data(total * steps)

    def work(rank, topology):
        bound(topology, total, [float(size) for size in sizes])
        weight = torch.nn.Parameter(initial.to(harness.place.device, copy=True))
        context = Context(Replica([weight]), topology, torch.optim.SGD([weight], lr))
        scheme = PeriodicAveraging(sync_every).build(context)
        scheme.begin_epoch(0, dict)
        for step in range(steps):

            def user_step(step=step):
                own = parts(nodes, sizes)[rank]
                batch = slice(step * total + own.start, step * total + own.stop)
                weight.grad = gradient(weight.detach().cpu(), x[batch], y[batch]).float().to(harness.place.device)
                NodeMean(topology).reduce(weight.grad).wait()
                scheme.optimizer.step()

            scheme.step(user_step, last=step == steps - 1)
        scheme.end_epoch(None)
        return weight.detach()

    # the simplest simulation: each node trains on the samples of its ranks, nodes count by their samples
    replicas = [initial.double() for _ in nodes]
    node_samples = [[i for rank in ranks for i in range(*parts(nodes, sizes)[rank].indices(total))] for ranks in nodes]
    for step in range(1, steps + 1):
        for node, samples in enumerate(node_samples):
            chosen = torch.tensor(samples) + (step - 1) * total
            replicas[node] = replicas[node] - lr * gradient(replicas[node], x[chosen], y[chosen])
        if step % sync_every == 0 or step == steps:
            mean = sum(len(s) / total * replica for s, replica in zip(node_samples, replicas, strict=True))
            replicas = [mean] * len(nodes)
    for weight in on_ranks(nodes, work):
        torch.testing.assert_close(weight, replicas[0].float(), rtol=1e-5, atol=1e-6)


# ---- refusals ----------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_configuration_as_it_was_written():
    batches = HeterogeneousBatches(12, [2, 1])

    def work(rank, topology):
        RunningBatches(batches, topology, harness.place.device)

    on_ranks([[0], [1]], work)
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
        ({"max_batch_size": [3, 0]}, "max_batch_size=\\[3, 0\\] must be positive"),
        ({"rebalance_every_n_epochs": 0}, "rebalance_every_n_epochs=0 must be positive"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        HeterogeneousBatches(**{"global_batch_size": 8, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speeds": [1, 2, 3]}, "speeds gives 3 numbers, but there are 2 ranks"),
        ({"max_batch_size": [4]}, "has 1 entries, but there are 2 ranks"),
        ({"max_batch_size": 3}, "leaves room for 6 samples on 2 ranks"),
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
