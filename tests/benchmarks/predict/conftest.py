"""Plain clusters and a plain workload."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.predict.cluster import Cluster, Link, Workload


@pytest.fixture
def fast_cluster() -> Callable[..., Cluster]:
    """``fast_cluster(nodes, ranks_per_node, inter=..., latency=...)``: a node's inside costs nothing."""

    def make(nodes: int, ranks_per_node: int = 1, inter: float = 1e9, latency: float = 0.0) -> Cluster:
        return Cluster(nodes, ranks_per_node, Link(float("inf")), Link(inter, latency))

    return make


@pytest.fixture
def gigabyte() -> Workload:
    """A model of a gigabyte, three seconds per step."""
    return Workload(0.25e9, forward=1.0, backward=2.0)
