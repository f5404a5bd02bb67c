"""What a communication hook in Python costs DDP's backward pass, where nothing has to be communicated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import WORKLOADS, loss_of
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.torch import connect_torch
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.gradients import NodeMean

pytestmark = pytest.mark.usefixtures("world_of_one")


def backward(benchmark: BenchmarkFixture, hook: Any) -> None:
    workload = WORKLOADS["mlp85k"]
    model = DistributedDataParallel(workload.model())
    if hook is not None:
        hook.__annotations__ = {"bucket": dist.GradBucket, "return": Future[torch.Tensor]}  # type: ignore[attr-defined]
        model.register_comm_hook(None, hook)
    batch = next(workload.batches(0, 1, 0))
    benchmark(lambda: loss_of(model, batch).backward())


def test_ddp_without_a_hook(benchmark: BenchmarkFixture) -> None:
    backward(benchmark, None)


def test_a_hook_that_does_nothing(benchmark: BenchmarkFixture) -> None:
    def hook(_: object, bucket: Any) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    backward(benchmark, hook)


def test_our_hook(benchmark: BenchmarkFixture) -> None:
    meter = Meter()
    path = NodeMean(Topology([[0]], 0, connect_torch(meter), meter))

    def hook(_: object, bucket: Any) -> Future[torch.Tensor]:
        gradients = bucket.buffer()
        return path.reduce(gradients).future(gradients)

    backward(benchmark, hook)
