"""HeterogeneousBatches on ranks that are threads: divisions, weights, gradients."""

from __future__ import annotations

import json
import warnings
from itertools import cycle

import harness
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_hiercomm import AllReduce, HeterogeneousBatches, PeriodicAveraging
from lightning_hiercomm.batches.partition import StepCost, divide
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import Context
from lightning_hiercomm.schemes.gradients import NodeMean, gradient_path

on_both = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


def on_ranks(nodes, work):
    """``work(rank, topology)`` on every rank."""
    return harness.on_ranks(lambda topology: work(topology.rank, topology), nodes)


def bound(topology, *arguments, **named):
    batches = HeterogeneousBatches(*arguments, **named)
    batches.bind(topology, topology.meter, harness.place.device)
    return batches


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


def test_speeds_may_come_from_a_file(tmp_path):
    (tmp_path / "speeds.json").write_text(json.dumps([4, 2, 1]))
    sizes = on_ranks([[0, 1, 2]], lambda rank, topology: bound(topology, 128, str(tmp_path / "speeds.json")).batch_size)
    assert sizes == [73, 37, 18]


def rehearse_with(clock, cost):
    """Training steps that take what ``cost`` says."""

    def rehearse(size):
        return lambda: clock.advance(cost.seconds(size))

    return rehearse


COSTS = [StepCost(0.01, 4000), StepCost(0.0, 1000), StepCost(0.002, 2000)]


@on_both
def test_measured_costs_give_the_division_of_the_true_ones(clock, capsys):
    def work(rank, topology):
        batches = bound(topology, 96)
        assert batches.needs_measuring
        assert batches.division.sizes == [32, 32, 32]
        batches.measure(rehearse_with(clock, COSTS[rank]))
        assert not batches.needs_measuring
        batches.announce()
        return batches.division.sizes

    assert on_ranks([[0, 1], [2]], work) == [divide(96, COSTS)] * 3
    table = capsys.readouterr().out
    assert table.count("A global batch of 96 samples on 3 ranks") == 1
    rows = [line.split() for line in table.splitlines()[2:5]]
    assert [(int(row[0]), int(row[1]), int(row[6])) for row in rows] == [
        (rank, [0, 0, 1][rank], size) for rank, size in enumerate(divide(96, COSTS))
    ]


def test_the_step_that_is_predicted_is_that_of_the_slowest_rank(clock, capsys):
    def work(rank, topology):
        batches = bound(topology, 96)
        batches.measure(rehearse_with(clock, COSTS[rank]))
        batches.announce()

    on_ranks([[0, 1], [2]], work)
    after = max(cost.seconds(size) for cost, size in zip(COSTS, divide(96, COSTS), strict=True))
    said = capsys.readouterr().out.splitlines()[5:]
    faster = f"{0.032 / after:.2f} times as fast as with equal batches"
    assert said == [
        f"  predicted step: {1e3 * after:.3g} ms in place of 32 ms, {faster}",
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


@pytest.mark.parametrize(("jitter", "warned"), [(0.1, False), (0.5, True)])
def test_measurements_that_scatter_are_warned_of(clock, jitter, warned):
    def work(rank, topology):
        def rehearse(size):
            factors = cycle([1 - jitter * rank, 1, 1 + jitter * rank])  # a step of 0.1 s or more is a block
            return lambda: clock.advance(size * 0.01 * next(factors))

        batches = bound(topology, 32)
        batches.measure(rehearse)
        batches.announce()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks([[0, 1]], work)
    assert ["step times of rank 1 scattered" in str(warning.message) for warning in caught] == [True] * warned


def test_one_rank_has_nothing_to_announce(capsys):
    on_ranks([[0]], lambda rank, topology: bound(topology, 8).announce())
    assert capsys.readouterr().out == ""


def test_the_speed_that_counts_is_that_at_the_real_size(clock):
    # past 16 samples this rank thrashes: a line through 8 and 32 samples misjudges the size it is going to have
    def seconds(rank, size):
        return size * 1e-3 if rank else size * 1e-3 + max(0, size - 16) * 8e-3

    def work(rank, topology):
        batches = bound(topology, 32)
        batches.measure(lambda size: lambda: clock.advance(seconds(rank, size)))
        return batches.division.sizes

    assert on_ranks([[0, 1]], work) == [[16, 16]] * 2


@on_both
def test_what_does_not_fit_into_memory_is_found_out(clock):
    def work(rank, topology):
        def rehearse(size):
            def step():
                if rank == 0 and size > 10:
                    raise torch.cuda.OutOfMemoryError
                clock.advance(size * 1e-3 / (4 - 3 * rank))  # rank 0 is 4 times as fast

            return step

        batches = bound(topology, 32)
        batches.measure(rehearse)
        return batches.division.sizes

    assert on_ranks([[0, 1]], work) == [[9, 23]] * 2  # 31, 23, 17 and 12 do not fit, 9 do


@on_both
def test_a_rank_without_memory_for_one_sample_says_so(clock):
    def work(rank, topology):
        def rehearse(size):
            def step():
                if rank == 0:
                    raise torch.cuda.OutOfMemoryError
                clock.advance(size * 1e-3)

            return step

        bound(topology, 32).measure(rehearse)

    with pytest.raises(torch.cuda.OutOfMemoryError, match="rank 0 has no memory for even 1 sample"):
        on_ranks([[0, 1]], work)


@on_both
def test_memory_limits_hold_during_measurement_and_after(clock):
    def work(rank, topology):
        tried = []

        def rehearse(size):
            tried.append(size)
            return lambda: clock.advance(size * 1e-3 / (rank + 1))

        batches = bound(topology, 32, max_batch_size=[20, 10, 20])
        batches.measure(rehearse)
        return max(tried), batches.batch_size

    for (tried, size), limit in zip(on_ranks([[0, 1, 2]], work), (20, 10, 20), strict=True):
        assert size <= tried <= limit


@pytest.mark.parametrize("limits", [1, [1, 7]])
def test_a_rank_may_be_limited_to_a_single_sample(limits):
    total = 2 if limits == 1 else 8
    sizes = on_ranks([[0, 1]], lambda rank, topology: bound(topology, total, [1, 1], max_batch_size=limits).batch_size)
    assert sizes == [1, total - 1]


def test_ranks_whose_modules_need_unequally_many_samples_divide_alike():
    def work(rank, topology):
        batches = HeterogeneousBatches(12, [100, 1])
        batches.bind(topology, topology.meter, harness.place.device, least=2 - rank)
        return batches.division.sizes

    assert on_ranks([[0], [1]], work) == [[10, 2]] * 2


class Trained:
    """A rank's steps and epochs, on a manual clock."""

    def __init__(self, clock, topology, **arguments):
        self.clock = clock
        self.batches = bound(topology, 32, [1, 1], rebalance_every_n_epochs=1, **arguments)
        self.epoch = 0

    def epoch_at(self, per_sample, steps=40):
        self.batches.begin_epoch(self.epoch)
        for _ in range(steps):
            self.batches.begin_step()
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
            for samples in loader:
                run.batches.begin_step()
                clock.advance(1e-3 * len(samples))
                run.batches.end_step()
        return list(run.batches.division.sizes)

    for sizes in on_ranks([[0], [1]], work):
        assert sizes[1] in (6, 7)  # four times the seconds for a sample


def test_a_change_that_is_not_worth_it_is_not_made(clock):
    def work(rank, topology):
        run = Trained(clock, topology)
        return [run.epoch_at(1.04e-3 if rank == 1 else 1e-3) for _ in range(4)]

    assert on_ranks([[0, 1]], work) == [[[16, 16]] * 4] * 2


def test_a_resumed_run_keeps_its_division_and_measures_nothing(clock):
    def work(rank, topology):
        first = bound(topology, 96)
        first.measure(rehearse_with(clock, COSTS[rank]))
        second = HeterogeneousBatches(96)
        second.load_state_dict(first.state_dict())
        second.bind(topology, topology.meter, harness.place.device)
        assert not second.needs_measuring
        assert second.division.sizes == first.division.sizes
        larger = HeterogeneousBatches(192)
        larger.load_state_dict(first.state_dict())
        larger.bind(topology, topology.meter, harness.place.device)
        return larger.division.sizes

    assert on_ranks([[0, 1, 2]], work) == [divide(192, COSTS)] * 3


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
        first, second = HeterogeneousBatches(96, **before), HeterogeneousBatches(96, **now)
        first.bind(topology, topology.meter, harness.place.device)
        second.load_state_dict(first.state_dict())
        second.bind(topology, topology.meter, harness.place.device)
        return second.division.sizes

    assert on_ranks([[0], [1]], work) == [sizes] * 2


def test_a_file_of_speeds_that_was_edited_counts_on_resume(tmp_path):
    file = tmp_path / "speeds.json"

    def work(rank, topology, state):
        batches = HeterogeneousBatches(96, str(file))
        batches.load_state_dict(state)
        batches.bind(topology, topology.meter, harness.place.device)
        return batches.division.sizes, batches.state_dict()

    file.write_text("[3, 1]")
    (sizes, state), _ = on_ranks([[0], [1]], lambda rank, topology: work(rank, topology, {}))
    file.write_text("[1, 1]")
    (now, _), _ = on_ranks([[0], [1]], lambda rank, topology: work(rank, topology, state))
    assert (sizes, now) == ([72, 24], [48, 48])


def test_speeds_that_a_resumed_run_keeps_are_announced_as_given(capsys):
    def work(rank, topology):
        first, second = HeterogeneousBatches(70, [4, 2, 1]), HeterogeneousBatches(70)
        first.bind(topology, topology.meter, harness.place.device)
        second.load_state_dict(first.state_dict())
        second.bind(topology, topology.meter, harness.place.device)
        second.announce()

    on_ranks([[0, 1], [2]], work)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "A global batch of 70 samples on 3 ranks, by given speeds"
    assert said[5:] == ["  predicted step: 2.30 times as fast as with equal batches"]


def test_another_number_of_ranks_measures_anew():
    def work(rank, topology):
        batches = HeterogeneousBatches(96)
        batches.load_state_dict({"sizes": [90, 6], "costs": [[0.0, 0.0], [15.0, 1.0]]})
        batches.bind(topology, topology.meter, harness.place.device)
        return batches.needs_measuring

    assert on_ranks([[0, 1, 2]], work) == [True] * 3


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
        path = gradient_path(AllReduce.gradients, topology, harness.place.device, Wire(), piece_bytes=2**22)
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
        scheme.begin_epoch(0, {})
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0 must be positive"),
        ({"speeds": [1, 0]}, "speeds=\\[1, 0\\] must be one positive number per rank"),
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
        ({"speeds": "nowhere.json"}, "speeds='nowhere.json' must be 'measure' or a JSON file"),
        ({"max_batch_size": [4]}, "has 1 entries, but there are 2 ranks"),
        ({"max_batch_size": 3}, "leaves room for 6 samples on 2 ranks"),
        ({"global_batch_size": 1}, "less than one sample for each of the 2 ranks"),
    ],
)
def test_what_does_not_suit_the_ranks_is_named(arguments, message):
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

    with pytest.raises(ValueError, match="Seed it alike on all ranks"):
        on_ranks([[0, 1]], work)
