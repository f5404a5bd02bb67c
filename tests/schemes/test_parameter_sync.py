"""Sentences of five words that have no name, each against the plainest calculation of the same in one place."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from harness import place
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from lightning_hiercomm.schemes import (
    DiLoCo,
    DirectedExponential,
    Every,
    Full,
    Graph,
    OuterOptimizer,
    ParameterSync,
    PeriodicAveraging,
    RandomPermutation,
    Replace,
    Ring,
    Schedule,
    Staggered,
)
from lightning_hiercomm.schemes.components.outer import RunningOuterOptimizer

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

SEVENS = {"a": 7, "b": 5, "c": 11}
NODES = [((0,), (1,)), ((0, 1), (2, 3)), ((0, 1, 2), (3,))]
FOUR = ((0,), (1,), (2,), (3,))


def target_of(rank, numel=23):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def towards(steps):
    """Train ``steps`` steps on rank r's loss ``0.5 (x - target_r)^2``; all values after each."""

    def work(rank):
        target = target_of(rank.rank)
        trace = []
        for step in range(steps):
            rank.train(lambda x: x - target.to(x.dtype), last=step == steps - 1)
            trace.append(rank.values)
        return torch.stack(trace)

    return work


def means_of_targets(nodes):
    return [torch.stack([target_of(rank) for rank in ranks]).mean(0) for ranks in nodes]


def assert_follows(traces, nodes, expected, atol=1e-12):
    """``expected``: for every step the values of every node."""
    for rank, trace in enumerate(traces):
        node = next(m for m, ranks in enumerate(nodes) if rank in ranks)
        torch.testing.assert_close(trace, torch.stack([step[node] for step in expected]), rtol=0, atol=atol)


def local_step(x, targets):
    return [own - 0.1 * (own - target) for own, target in zip(x, targets, strict=True)]


def weighted(values, nodes):
    world = sum(map(len, nodes))
    return sum(len(ranks) / world * own for ranks, own in zip(nodes, values, strict=True))


# ---- when, what and merged how ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("reducer", ["sharded", "leader"])
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("merge", ["replace", "eq1", "delta"])
def test_streaming_fragments_merge_without_an_outer_optimizer(on_nodes, nodes, reducer, staleness, merge):
    period, parts, steps = 6, 2, 15
    slices = [slice(0, 12), slice(12, 23)]
    x = [torch.ones(23, dtype=torch.float64) for _ in nodes]
    count, on_the_way, expected = len(nodes), {}, []
    for t in range(1, steps + 1):
        x = local_step(x, means_of_targets(nodes))
        for p, part in enumerate(slices):
            due = (p + 1) * period // parts % period
            if (t + staleness) % period == due:
                on_the_way[p] = [own[part].clone() for own in x]
            if t % period == due and p in on_the_way:
                sent = on_the_way.pop(p)
                mean = weighted(sent, nodes)
                for own, own_sent in zip(x, sent, strict=True):
                    if merge == "replace" or staleness == 0:
                        own[part] = mean
                    elif merge == "eq1":
                        own[part] = (2 * staleness * own[part] + count * mean) / (2 * staleness + count)
                    else:
                        own[part] += mean - own_sent
        expected.append([own.clone() for own in x])
    scheme = ParameterSync(Staggered(period), parts, reducer, merge, staleness)
    assert_follows(on_nodes(towards(steps), scheme, nodes, shapes=SEVENS, dtype=torch.float64), nodes, expected)


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        (PeriodicAveraging(3), ParameterSync(3)),
        (
            DiLoCo(6, fragments=2, staleness=1),
            ParameterSync(Staggered(6), 2, merge=OuterOptimizer(keep_local=0.5), staleness=1),
        ),
    ],
    ids=["periodic averaging", "streaming DiLoCo"],
)
def test_a_sentence_is_the_scheme_that_has_its_words(on_nodes, named, sentence):
    ours = on_nodes(towards(9), sentence, ((0, 1), (2,)), shapes=SEVENS)
    theirs = on_nodes(towards(9), named, ((0, 1), (2,)), shapes=SEVENS)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_keep_local_keeps_a_share_of_the_nodes_own_parameters(on_nodes):
    nodes, x, expected = ((0, 1), (2,)), [torch.ones(23, dtype=torch.float64) for _ in range(2)], []
    for t in range(1, 10):
        x = local_step(x, means_of_targets(nodes))
        if t % 3 == 0:
            mean = weighted(x, nodes)
            x = [0.25 * own + 0.75 * mean for own in x]
        expected.append(x)
    scheme = ParameterSync(3, merge=Replace(keep_local=0.25))
    traces = on_nodes(towards(9), scheme, nodes, shapes=SEVENS, dtype=torch.float64)
    assert_follows(traces, nodes, expected)


def test_the_outer_scheduler_steps_before_the_next_exchange_is_merged(on_nodes):
    """An exchange that leaves when the one before it is merged is stepped with the next period's learning rate."""

    class Recorded(OuterOptimizer):
        def build(self, reducer, before=None):
            return Recording(self, reducer, before)

    class Late(RunningOuterOptimizer):
        def end_round(self):
            time.sleep(0.02)  # the exchange that has left arrives meanwhile, if one has
            super().end_round()

    class Recording(Late):
        def update_reference(self, index, reference, difference):
            rates.append(self.learning_rate)
            return super().update_reference(index, reference, difference)

    rates = []
    merge = Recorded(partial(SGD, lr=0.8), partial(StepLR, step_size=1, gamma=0.5))
    on_nodes(towards(9), ParameterSync(2, merge=merge, staleness=2), ((0,), (1,)), shapes=SEVENS)
    assert sorted(rates, reverse=True) == [0.8, 0.8, 0.4, 0.4, 0.2, 0.2, 0.1, 0.1]


# ---- through whom ----------------------------------------------------------------------------------------------------


def noloco(nodes, steps, *, every, graph, outer, lengths=(23,), staleness=0):
    """Kolehmainen et al. 2025, Algorithm 1: every node's values after each step.

    Node i's outer parameters a_i and momentum are its own; it meets one peer per fragment, from whom ``graph`` says
    that it receives.
    """
    count = len(nodes)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    slices = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    x = [torch.ones(23, dtype=torch.float64) for _ in nodes]
    references = [[torch.nn.Parameter(own[part].clone()) for part in slices] for own in x]
    optimizers = [[outer([reference]) for reference in own] for own in references]
    expected, sent, turn = [], None, -1
    for t in range(1, steps + 1):
        x = local_step(x, means_of_targets(nodes))
        if (t + staleness) % every == 0:
            sent, turn = [own.clone() for own in x], turn + 1
        if t % every == 0 and sent is not None:
            for s, part in enumerate(slices):
                send_to = graph.send_to(count, turn, s)
                for node in range(count):
                    met = [node, *(peer for peer in range(count) if node in send_to[peer])]
                    reference = references[node][s]
                    reference.grad = reference.detach() - sum(sent[peer][part] for peer in met) / len(met)
                    optimizers[node][s].step()
                    x[node][part] = reference.detach()
        expected.append([own.clone() for own in x])
    return expected


@pytest.mark.parametrize("nodes", [FOUR, ((0, 1), (2, 3), (4, 5)), ((0, 1, 2), (3,), (4, 5))], ids=str)
@pytest.mark.parametrize("outer", [partial(SGD, lr=0.7, momentum=0.5), partial(Adam, lr=0.05)], ids=["SGD", "Adam"])
@pytest.mark.parametrize(
    ("graph", "staleness", "bucket_bytes", "lengths"),
    [
        (RandomPermutation(seed=3), 0, 2**22, (23,)),
        (RandomPermutation(seed=3), 0, 80, (10, 10, 3)),
        (RandomPermutation(seed=1), 2, 80, (10, 10, 3)),
        (DirectedExponential(), 0, 2**22, (23,)),
        (Ring(), 1, 2**22, (23,)),
    ],
)
def test_gossip_with_an_outer_optimizer_is_noloco(on_nodes, nodes, outer, graph, staleness, bucket_bytes, lengths):
    scheme = ParameterSync(3, reducer=graph, merge=OuterOptimizer(outer), staleness=staleness)
    arguments = {"shapes": SEVENS, "dtype": torch.float64, "bucket_bytes": bucket_bytes}
    expected = noloco(nodes, 11, every=3, graph=graph, outer=outer, lengths=lengths, staleness=staleness)
    assert_follows(on_nodes(towards(11), scheme, nodes, **arguments), nodes, expected)


class AtOddSteps(Schedule):
    def __repr__(self):
        return "odd steps"

    def due(self, step, step_in_epoch, parts):
        return range(parts) if step % 2 else ()

    def longest_staleness(self, parts):
        return 1


@pytest.mark.parametrize("when", [2, 4, Staggered(4), Staggered(8), AtOddSteps()], ids=repr)
def test_a_graph_advances_by_one_round_at_each_sync(on_nodes, when):
    """Or, synchronizing every second step, nodes would know only those two places away."""
    what = 2 if isinstance(when, Staggered) else 1
    scheme = ParameterSync(when, fragments=what, reducer=DirectedExponential())
    ends = [trace[-1] for trace in on_nodes(towards(96), scheme, FOUR, shapes=SEVENS)]
    wishes = [target_of(rank) for rank in range(4)]
    apart, alone = ((each[0] + each[2] - each[1] - each[3]).norm() for each in (ends, wishes))
    assert apart < 0.9 * alone  # of halves that never meet it is alone


def test_eq_1_weighs_the_nodes_of_which_the_mean_was_taken(on_nodes):
    def work(rank):
        rank.parameters[0].data.fill_(6.0 * (rank.rank == 0))
        rank.train(0.0)  # sent
        rank.train(0.0)  # and merged
        return rank.values.item()

    scheme = ParameterSync(2, reducer=Ring(), merge="eq1", staleness=1)
    seen = on_nodes(work, scheme, tuple((rank,) for rank in range(6)), dtype=torch.float64)
    # (2 S x + sum of what arrived) / (2 S + P), of P = 3 nodes: the own one and its two neighbours
    assert seen == pytest.approx([(2 * 6 + 6) / 5, 6 / 5, 0, 0, 0, 6 / 5])


def test_early_merge_counts_the_steps_since_sending(on_nodes):
    def work(rank):
        rank.parameters[0].data.fill_(8.0 * rank.rank)
        for epoch in range(2):
            rank.scheme.begin_epoch(epoch, dict)
            for step in range(5):
                rank.train(0.0, last=step == 4)
                if (epoch, step) == (1, 0):
                    return rank.values.item()

    # S = 3, sent after steps 1 and 5 of the first epoch; the one of the next leaves a step later
    (first, second), s = (1.0, 7.0), 1
    seen = on_nodes(work, ParameterSync(Every(4, "epoch"), merge="eq1", staleness=3), ((0,), (1,)), dtype=torch.float64)
    assert seen == pytest.approx([(2 * s * own + first + second) / (2 * s + 2) for own in (first, second)])


def test_a_sum_of_all_peers_is_diloco(on_nodes):
    arguments = {"shapes": SEVENS, "dtype": torch.float64}
    gossip = on_nodes(towards(9), ParameterSync(3, reducer=Full(), merge=OuterOptimizer()), FOUR, **arguments)
    for ours, theirs in zip(gossip, on_nodes(towards(9), DiLoCo(3), FOUR, **arguments), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("merge", ["replace", "outer"])
def test_peers_end_on_the_mean_of_all_nodes(on_nodes, merge):
    words = {"reducer": RandomPermutation(), "merge": OuterOptimizer() if merge == "outer" else merge}

    def work(rank):
        towards(7)(rank)
        own, averaged = rank.values, rank.averaged()
        rank.scheme.finish()
        if merge != "outer":  # an outer optimizer takes a last step
            assert torch.equal(rank.values, averaged)
        return own, averaged

    results = on_nodes(work, ParameterSync(3, **words), FOUR, shapes=SEVENS, dtype=torch.float64)
    mean = torch.stack([own for own, _ in results]).mean(0)
    for own, averaged in results:
        torch.testing.assert_close(averaged, mean, rtol=0, atol=1e-12)
        assert not torch.equal(own, averaged)


def test_a_graph_with_unequal_in_and_out_degrees_is_refused(on_nodes):
    class Star(Graph):
        def send_to(self, size, step, fragment):
            return [[1, 2, 3], [0], [0], [0]][:size]

    class Lopsided(Graph):
        def send_to(self, size, step, fragment):
            return [[1], [0, 2], [0, 3], [2]]

    on_nodes(towards(3), ParameterSync(2, reducer=Star()), FOUR, shapes=SEVENS)  # everyone sends as much as it receives
    with pytest.raises(ValueError, match="lets nodes receive more than they send"):
        on_nodes(towards(3), ParameterSync(2, reducer=Lopsided()), FOUR, shapes=SEVENS)


# ---- what all sentences have -----------------------------------------------------------------------------------------

SENTENCES = {
    "streaming": ParameterSync(Staggered(6), 2, staleness=2),
    "streaming eq1": ParameterSync(Staggered(6), ["c", "a"], reducer="leader", merge="eq1", staleness=1),
    "delta by turns": ParameterSync(4, reducer="leader", merge="delta", staleness=3),
    "gossip": ParameterSync(2, 2, reducer=RandomPermutation()),
    "NoLoCo": ParameterSync(4, reducer=RandomPermutation(), merge=OuterOptimizer(partial(Adam, lr=0.1)), staleness=1),
    "epochs": ParameterSync(Every(3, of="epoch"), merge=OuterOptimizer(keep_local=0.5)),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("wire", [None, "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("sentence", SENTENCES)
@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 1), (2,), (3,))], ids=str)
def test_exact_resume_and_averaging_change_no_bit(on_nodes, sentence, wire, nodes):
    scheme, arguments = SENTENCES[sentence], {"shapes": SEVENS, "wire": wire, "bucket_bytes": 40}

    def training(rank, steps, asking=False):
        target = target_of(rank.rank)
        trace = []
        for _ in range(steps):
            rank.train(lambda x: x - target.to(x.dtype))
            trace.append(rank.values)
            if asking:
                averaged = rank.topology.world.all_gather_object(rank.averaged())
                assert all(torch.equal(one, averaged[0]) for one in averaged)
        return trace

    def saving(rank):
        before = training(rank, 9, asking=True)
        return rank.state(), before + training(rank, 8)

    saved = on_nodes(saving, scheme, nodes, **arguments)
    whole = on_nodes(partial(training, steps=17), scheme, nodes, **arguments)

    def resuming(rank):
        rank.load(saved[rank.rank][0])
        return training(rank, 8)

    for rank, trace in enumerate(on_nodes(resuming, scheme, nodes, **arguments)):
        assert all(torch.equal(one, other) for one, other in zip(saved[rank][1], whole[rank], strict=True))
        assert all(torch.equal(one, other) for one, other in zip(trace, whole[rank][9:], strict=True))


@pytest.mark.parametrize("sentence", [*SENTENCES])
def test_nodes_go_on_from_a_plain_state(on_nodes, sentence):
    def saving(rank):
        towards(9)(rank)
        state = rank.scheme.state_dict(shared=True)
        rank.scheme.synchronize()
        return state, rank.values

    saved, values = on_nodes(saving, SENTENCES[sentence], ((0, 1), (2, 3)), shapes=SEVENS)[0]

    def resuming(rank):
        torch.nn.utils.vector_to_parameters(values.to(place.device, copy=True), list(rank.module.parameters()))
        rank.scheme.load_state_dict(saved)
        assert torch.equal(rank.averaged(), values)
        towards(4)(rank)
        assert rank.scheme.state.steps == 13
        return rank.averaged()

    averaged = on_nodes(resuming, SENTENCES[sentence], ((0,), (1, 2), (3,)), shapes=SEVENS)
    assert all(torch.equal(one, averaged[0]) for one in averaged)
    assert not torch.equal(averaged[0], values)


@pytest.mark.parametrize("sentence", [*SENTENCES])
def test_on_one_node_nothing_is_exchanged(on_nodes, sentence):
    alone = on_nodes(towards(9), SENTENCES[sentence], ((0, 1, 2),), shapes=SEVENS)
    data_parallel = on_nodes(towards(9), ParameterSync(10**6), ((0, 1, 2),), shapes=SEVENS)
    assert all(torch.equal(one, other) for one, other in zip(alone, data_parallel, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": 0}, "schedule=0 must be a positive number of optimizer steps, or a schedule"),
        ({"fragments": 0}, "fragments=0 must be a positive number, or a list"),
        ({"fragments": "layers"}, "fragments='layers' must be"),
        ({"fragments": []}, r"fragments=\[\] must be"),
        ({"reducer": "unknown"}, "reducer='unknown' must be 'sharded', 'leader' or a Graph"),
        ({"merge": "somehow"}, "merge='somehow' must be one of 'replace', 'eq1', 'delta', or a Merge"),
        ({"staleness": -1}, "staleness=-1 must not be negative"),
        ({"reducer": "leader", "merge": OuterOptimizer()}, "reducer='leader' does not support OuterOptimizer"),
    ],
)
def test_bad_words_are_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ParameterSync(**arguments)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda: Every(0), "period=0 must be a positive"),
        (lambda: Every(3, of="day"), "of='day' must be 'epoch' or 'run'"),
        (lambda: Staggered(0), "period=0 must be a positive"),
    ],
)
def test_bad_schedules_are_named(schedule, message):
    with pytest.raises(ValueError, match=message):
        schedule()


def test_an_exchange_that_overlaps_the_next_one_is_refused(on_nodes):
    with pytest.raises(ValueError, match=r"staleness=3 must be at most 2 for Staggered\(period=6\) with 2 fragments"):
        on_nodes(towards(1), ParameterSync(Staggered(6), 2, staleness=3), ((0,), (1,)), shapes=SEVENS)
    with pytest.raises(ValueError, match=r"staleness=5 must be at most 4 for Every\(period=4"):
        on_nodes(towards(1), ParameterSync(4, staleness=5), ((0,), (1,)), shapes=SEVENS)
