"""Who talks to whom in gossip: properties of the mixing matrices, for any size and seed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hiercomm.schemes import DirectedExponential, Full, Graph, RandomPermutation, Ring
from lightning_hiercomm.schemes.reducers.graphs import partners_of

FAIR = ["uniform", "cyclic", "roulette"]
sizes, steps, seeds = st.integers(2, 64), st.integers(0, 10**9), st.integers(0, 2**32)
regular_graphs = st.one_of(
    st.builds(RandomPermutation, st.sampled_from(FAIR), seeds),
    st.builds(DirectedExponential, st.integers(1, 5)),
    st.just(Ring()),
    st.just(Full()),
)
all_graphs = regular_graphs | st.builds(RandomPermutation, st.just("independent"), seeds)


def is_derangement(sources):
    return sorted(sources) == list(range(len(sources))) and all(r != s for r, s in enumerate(sources))


class Given(Graph):
    def __init__(self, *send_to):
        self.answer = send_to

    def send_to(self, size, step, fragment):
        return self.answer


@settings(deadline=None)
@given(st.sampled_from(FAIR), seeds, sizes, steps, st.integers(0, 100))
def test_a_fair_permutation_moves_everyone(sampling, seed, size, step, fragment):
    assert is_derangement(RandomPermutation(sampling, seed).receive_from(size, step, fragment))


@settings(deadline=None)
@given(regular_graphs, sizes, steps)
def test_mixing_is_doubly_stochastic_in_balanced_graphs(graph, size, step):
    matrix = partners_of(graph, size, step).mixing_matrix()
    ones = torch.ones(size, dtype=torch.float64)
    torch.testing.assert_close(matrix.sum(0), ones)
    torch.testing.assert_close(matrix.sum(1), ones)
    assert partners_of(graph, size, step).push([1.0] * size) == [1.0] * size


@settings(deadline=None)
@given(all_graphs, sizes, steps)
def test_any_graph_conserves_the_sum_and_pushes_weights_as_its_matrix_does(graph, size, step):
    partners = partners_of(graph, size, step)
    matrix = partners.mixing_matrix()
    torch.testing.assert_close(matrix.sum(0), torch.ones(size, dtype=torch.float64))
    weights = torch.linspace(0.5, 2.0, size, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(partners.push(weights.tolist()), dtype=torch.float64), matrix @ weights)


@pytest.mark.parametrize(("sampling", "expected"), [("uniform", 9), ("cyclic", 6), ("roulette", 9)])
def test_every_permutation_of_four_that_may_come_does(sampling, expected):
    # Of 4 ranks there are 9 derangements, 6 of them a single cycle.
    drawn = Counter(tuple(RandomPermutation(sampling).receive_from(4, step, 0)) for step in range(9000))
    assert len(drawn) == expected
    if sampling != "roulette":
        # chi-square with 8 (5) degrees of freedom, whose 99.99 % quantile is 31.8 (25.7)
        mean = 9000 / expected
        assert sum((count - mean) ** 2 / mean for count in drawn.values()) < 32


@pytest.mark.parametrize("steps", [20_000, pytest.param(100_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("size", range(2, 9))
def test_the_roulette_never_runs_out_of_partners(size, steps):
    graph = RandomPermutation("roulette", seed=size)
    assert all(is_derangement(graph.receive_from(size, step, 0)) for step in range(steps))


@pytest.mark.parametrize(("size", "peers"), [(2, 1), (4, 1), (16, 1), (64, 1), (9, 2), (27, 2), (16, 3)])
def test_a_round_of_the_exponential_graph_averages_powers_exactly(size, peers):
    graph, product, rounds = DirectedExponential(peers), torch.eye(size, dtype=torch.float64), 0
    while (peers + 1) ** rounds < size:
        product = partners_of(graph, size, rounds).mixing_matrix() @ product
        rounds += 1
    torch.testing.assert_close(product, torch.full_like(product, 1 / size))


@pytest.mark.parametrize(
    ("size", "hops"), [(2, [1]), (3, [1, 2]), (4, [1, 2]), (5, [1, 2, 4]), (8, [1, 2, 4]), (9, [1, 2, 4, 8])]
)
def test_the_exponential_graph_hops_by_all_powers_of_two_below_its_size(size, hops):
    seen = [DirectedExponential().send_to(size, step, 0)[0] for step in range(2 * len(hops))]
    assert seen == [[hop] for hop in hops] * 2


def test_independent_picks_reach_every_other_rank_equally_often():
    picks = [RandomPermutation("independent").receive_from(4, step, 0) for step in range(3000)]
    for rank, other in itertools.permutations(range(4), 2):
        assert sum(pick[rank] == other for pick in picks) == pytest.approx(1000, abs=4 * (3000 * 2 / 9) ** 0.5)
    assert not any(pick[rank] == rank for pick in picks for rank in range(4))


def test_graphs_depend_on_step_bucket_and_seed_only():
    first = RandomPermutation(seed=1).receive_from(32, 5, 3)
    assert RandomPermutation(seed=1).receive_from(32, 5, 3) == first
    others = [(1, 6, 3), (1, 5, 4), (2, 5, 3)]
    assert all(RandomPermutation(seed=seed).receive_from(32, t, s) != first for seed, t, s in others)


@pytest.mark.parametrize(
    ("send_to", "message"),
    [
        ([[1], [2], [2]], "rank 2 sends to itself"),
        ([[1], [0], []], "rank 2 receives from no rank"),
        ([[1], [2], [3]], "rank 2 sends to rank 3, which does not exist"),
        ([[1, 1], [2], [0]], "rank 0 sends twice to rank 1"),
        ([[1], [0]], "rank 2 is missing"),
        ([[1], [2], [0], [0]], "rank 3 does not exist"),
    ],
)
def test_an_invalid_graph_is_refused_with_the_rank(send_to, message):
    with pytest.raises(ValueError, match=rf"Given\(.*at step 4, fragment 1, for 3 ranks: {message}"):
        partners_of(Given(*send_to), 3, 4, 1)
