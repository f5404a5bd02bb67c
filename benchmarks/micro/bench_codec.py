"""Encoding and decoding what travels between nodes; GB/s of values, against the plainest copy (bench_replica.py)."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from lightning_hiercomm.comm.codec import codec_named

pytestmark = [
    pytest.mark.parametrize("numel", [10_000, 1_000_000, 11_000_000]),
    pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8", "int4"]),
]


def test_encode(benchmark: BenchmarkFixture, wire: str, numel: int) -> None:
    codec, values = codec_named(wire), torch.randn(numel)
    payload = codec.encode(values)
    benchmark(codec.encode, values, payload)
    _tell_rate(benchmark, numel)


def test_decode(benchmark: BenchmarkFixture, wire: str, numel: int) -> None:
    codec, values = codec_named(wire), torch.randn(numel)
    benchmark(codec.decode, codec.encode(values), values)
    _tell_rate(benchmark, numel)


def _tell_rate(benchmark: BenchmarkFixture, numel: int) -> None:
    if benchmark.stats is not None:  # None with --benchmark-disable
        benchmark.extra_info["GB/s of float32"] = round(4 * numel / benchmark.stats.stats.median / 1e9, 2)
