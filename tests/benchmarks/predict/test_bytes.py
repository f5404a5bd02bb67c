"""Predicted bytes are those that the meter counts when the real schemes run."""

from __future__ import annotations

from itertools import product

import pytest
from harness import Rank, on_nodes
from zoo import ZOO

from benchmarks.predict.cluster import Cluster, Link, Workload
from benchmarks.predict.cost import predict
from benchmarks.predict.cycles import cycle
from benchmarks.predict.node import Node
from benchmarks.predict.schemes import Payload, follow
from lightning_hiercomm.nodes.topology import nodes_by_count

NUMEL = 2**17


def on(nodes: int, ranks_per_node: int) -> Cluster:
    return Cluster(nodes, ranks_per_node, Link(1e10), Link(1e9))


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (4, 1), (3, 2)])
def test_predicted_bytes_are_those_of_a_scheme(name, nodes, ranks_per_node):
    check(ZOO[name], nodes, ranks_per_node)


PAYLOADS = [*product(("all_reduce", "periodic", "daso, sharded delta", "gossip", "streaming"), ("int8", "int4"))]
PAYLOADS += product(("all_reduce", "periodic", "gossip", "steps_delay"), ("bfloat16",))


@pytest.mark.parametrize(("name", "wire"), PAYLOADS)
def test_predicted_payloads_have_the_size_of_real_ones(name, wire):
    check(ZOO[name], 3, 2, wire)


def metered(scheme, nodes, ranks_per_node, steps, wire):
    """Bytes that a node's ranks count between two numbers of steps: to other nodes, and among themselves."""

    def train(rank: Rank) -> list[tuple[float, float]]:
        seen = []
        for step in range(1, max(steps) + 1):
            rank.train()
            if step in steps:
                rank.scheme.state.settle()
                seen.append((rank.meter.bytes["inter"], rank.meter.bytes["intra"]))
        return seen

    ranks = nodes_by_count(ranks_per_node, nodes * ranks_per_node)
    everyone = on_nodes(train, scheme, ranks, shapes={"a": NUMEL // 2, "b": NUMEL // 2}, wire=wire, epochs=10)
    return [sum(after[level] - before[level] for before, after in everyone) / nodes for level in (0, 1)]


def check(scheme, nodes, ranks_per_node, wire=None):
    cluster = on(nodes, ranks_per_node)
    workload = Workload.of_step(NUMEL, 0.1)
    period = max(4, cycle(scheme))
    inter, intra = metered(scheme, nodes, ranks_per_node, (period, 2 * period), wire)
    predicted = predict(scheme, cluster, workload, wire).inter_bytes * period
    # not predicted: the preflight of every synchronization, and the padding of unequal parts
    assert predicted == pytest.approx(inter, rel=5e-3)
    counted = []
    for steps in (period, 2 * period):
        node = Node(cluster, workload)
        follow(scheme, node, Payload.named(wire), steps)
        counted.append(node.intra_bytes)
    assert counted[1] - counted[0] == pytest.approx(intra, rel=5e-3)
