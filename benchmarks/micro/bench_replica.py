"""Packing parameters into flat buckets, against the plainest way to copy as much."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.workloads import WORKLOADS
from lightning_hiercomm.nodes.replica import Replica

pytestmark = pytest.mark.parametrize("workload", ["mlp85k", "mlp1m", "mlp11m"])


def test_pack(benchmark: BenchmarkFixture, workload: str) -> None:
    replica = Replica(WORKLOADS[workload].model().parameters())
    flats = [bucket.empty() for bucket in replica.buckets]

    def pack() -> None:
        for bucket, flat in zip(replica.buckets, flats, strict=True):
            bucket.pack(flat)

    benchmark(pack)


def test_unpack(benchmark: BenchmarkFixture, workload: str) -> None:
    replica = Replica(WORKLOADS[workload].model().parameters())
    flats = [bucket.pack() for bucket in replica.buckets]

    def unpack() -> None:
        for bucket, flat in zip(replica.buckets, flats, strict=True):
            bucket.unpack(flat)

    benchmark(unpack)


def test_plain_copy(benchmark: BenchmarkFixture, workload: str) -> None:
    """The floor: one copy of as many bytes."""
    size = Replica(WORKLOADS[workload].model().parameters()).numel
    source, target = torch.zeros(size), torch.zeros(size)
    benchmark(target.copy_, source)
