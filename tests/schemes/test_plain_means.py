"""Synchronizations against means in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import on_nodes, with_policy

from lightning_hiercomm import Gossip, PeriodicAveraging
from lightning_hiercomm.schemes import ParameterSync
from lightning_hiercomm.schemes.reducers.graphs import DirectedExponential, Full, RandomPermutation, Ring

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

PERIOD, STEPS, LR = 3, 14, 0.1
NODES = {
    "one device": ((0,),),
    "one node": ((0, 1),),
    "2x2": ((0, 1), (2, 3)),
    "3+1": ((0, 1, 2), (3,)),
    "1+2+1": ((0,), (1, 2), (3,)),
}
WAYS = {
    "sharded": "sharded",
    "leader": "leader",
    "ring": Ring(),
    "full": Full(),
    "exponential": DirectedExponential(),
    "random": RandomPermutation(),
}
INNER = partial(torch.optim.SGD, lr=LR)


def target_of(rank: int) -> torch.Tensor:
    return torch.arange(7, dtype=torch.float64) * (rank + 1) - 3.0 * rank


def plainly(nodes, weights, reducer, staleness):
    """Every rank's values after each step, with nothing but means."""
    total = sum(weights)
    w = [weight / total for weight in weights]
    of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}

    def mean(values, ranks):
        return sum(w[r] * values[r] for r in ranks) / sum(w[r] for r in ranks)

    def received(sent, turn):
        """What comes of what everybody sent, by rank."""
        if isinstance(reducer, str):
            everyone = mean(sent, range(len(sent)))
            return [everyone] * len(sent)
        of_node = [mean(sent, ranks) for ranks in nodes]
        if len(nodes) == 1:
            return [of_node[0]] * len(sent)
        peers = reducer.send_to(len(nodes), turn, 0)
        means = []
        for node in range(len(nodes)):
            sources = [node, *(other for other, to in enumerate(peers) if node in to)]
            means.append(sum(of_node[source] for source in sources) / len(sources))
        return [means[of[r]] for r in range(len(sent))]

    x = [torch.zeros(7, dtype=torch.float64) for _ in of]
    trace, on_the_way, turn = [], None, -1
    for step in range(1, STEPS + 1):
        slopes = [x[r] - target_of(r) for r in range(len(x))]
        slopes = [mean(slopes, nodes[of[r]]) for r in range(len(x))]
        x = [own - LR * slope for own, slope in zip(x, slopes, strict=True)]
        sends = (step + staleness) % PERIOD == 0
        if len(nodes) > 1:  # else there is no other replica
            if staleness and step % PERIOD == 0 and on_the_way is not None:
                x, on_the_way = on_the_way, None
            if sends:
                turn += 1
                arrives = received(x, turn)
                if staleness:
                    on_the_way = arrives
                else:
                    x = arrives
        trace.append([own.clone() for own in x])
    return trace


@pytest.mark.pairwise
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("staleness", [0, 1, PERIOD])
@pytest.mark.parametrize("place", NODES)
def test_every_rank_holds_the_plain_mean(way, staleness, place):
    nodes, reducer = NODES[place], WAYS[way]
    weights = [1.0 + 0.5 * rank for rank in range(sum(map(len, nodes)))] if isinstance(reducer, str) else None

    def work(rank):
        target = target_of(rank.rank)
        for _ in range(STEPS):
            rank.train(lambda x: x - target)
        return torch.tensor(rank.trace, dtype=torch.float64)

    scheme = ParameterSync(PERIOD, reducer=reducer, staleness=staleness)
    arguments = {"shapes": [(4,), (3,)], "dtype": torch.float64, "inner": INNER, "bucket_bytes": 2**20}
    expected = plainly(nodes, weights or [1.0] * sum(map(len, nodes)), reducer, staleness)
    ranks = on_nodes(work, scheme, nodes, weights=weights, timeout=10.0, **arguments)
    for number, trace in enumerate(ranks):
        own = torch.stack([values[number] for values in expected])
        torch.testing.assert_close(trace, own, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "scheme", [PeriodicAveraging(2, at_epoch_end=False), ParameterSync(2)], ids=["periodic", "parameter_sync"]
)
@pytest.mark.parametrize("place", NODES)
def test_the_optimizers_state_is_the_mean_over_all_nodes(scheme, place):
    nodes = NODES[place]
    weights = [1.0 + rank for rank in range(sum(map(len, nodes)))]
    scheme = with_policy(scheme, average_optimizer_state=True)

    def work(rank):
        for _ in range(2):
            rank.train(float(rank.rank + 1))
        return rank.optimizer.state[rank.parameters[0]]["momentum_buffer"].item(), rank.values[0].item()

    inner = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    found = on_nodes(work, scheme, nodes, weights=weights, dtype=torch.float64, inner=inner)
    slope = sum(w * (rank + 1) for rank, w in enumerate(weights)) / sum(weights)
    if len(nodes) > 1:
        assert found == [(pytest.approx(1.9 * slope, abs=1e-12), pytest.approx(-0.29 * slope, abs=1e-12))] * len(found)


def test_optimizer_state_is_averaged_once_all_nodes_have_it():
    scheme = with_policy(PeriodicAveraging(1, at_epoch_end=False), average_optimizer_state=True)

    def work(rank):
        momenta = []
        for step in range(2):
            rank.train(float(rank.topology.node + 1), skip=step == 0 and rank.topology.node == 0)
            state = rank.optimizer.state[rank.parameters[0]]
            momenta.append(state["momentum_buffer"].item() if "momentum_buffer" in state else None)
        return momenta

    inner = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
    found = on_nodes(work, scheme, NODES["2x2"], dtype=torch.float64, inner=inner)
    # node 1 goes on from its own 2: half of that and 2 again is 3; node 0 begins with 1; their mean is 2
    assert found == [[None, 2.0]] * 2 + [[2.0, 2.0]] * 2


def test_weights_that_change_while_an_exchange_leaves_do_not_move_anybody():
    # no rank trains, so parameters stay as they are, whatever the weights
    def work(rank):
        for step in range(12):
            rank.train(0.0)
            rank.topology.set_weights([1.0 + step % 3, 2.0, 1.0, 3.0 - step % 2])
        return rank.trace

    scheme = ParameterSync(3, staleness=2)
    arguments = {"shapes": [(5,)], "dtype": torch.float64, "start": 2.0, "wire": "bfloat16", "bucket_bytes": 16}
    for trace in on_nodes(work, scheme, NODES["2x2"], **arguments):
        torch.testing.assert_close(torch.tensor(trace), torch.full((12, 5), 2.0), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "graph", [Ring(), Full(), DirectedExponential(2), *map(RandomPermutation, ("uniform", "independent"))]
)
@pytest.mark.parametrize("hierarchical", [True, False])
def test_gossip_of_one_device_is_training_alone(graph, hierarchical):
    def work(rank):
        for _ in range(3):
            rank.train()
        rank.scheme.finish()
        return rank.trace

    (trace,) = on_nodes(work, Gossip(graph, hierarchical=hierarchical), ((0,),), targets=(8.0,))
    assert trace == [[4.0], [6.0], [7.0]]
