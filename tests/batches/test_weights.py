"""What ranks with batches of unequal size weigh: gradients and parameters, against the simplest simulation."""

from __future__ import annotations

import harness
import pytest
import torch
from batches.conftest import bound, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hiercomm import AllReduce, PeriodicAveraging
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import Context
from lightning_hiercomm.schemes.gradient_path import NodeMean, gradient_path

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


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


def parts(sizes):
    """Where each rank's samples lie in the global batch."""
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]


node_sizes = st.lists(st.integers(1, 3), min_size=1, max_size=3)


def nodes_of(counts):
    ranks = iter(range(sum(counts)))
    return [[next(ranks) for _ in range(count)] for count in counts]


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
        own = parts(sizes)[rank]
        bucket = gradient(weight, x[own], y[own]).float().to(harness.place.device)
        path.reduce(bucket).wait()
        path.close()
        return bucket

    for bucket in on_ranks(nodes, work):
        torch.testing.assert_close(bucket, gradient(weight, x, y).float(), rtol=1e-5, atol=1e-6)


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
        scheme.begin_epoch(0)
        for step in range(steps):

            def user_step(step=step):
                own = parts(sizes)[rank]
                batch = slice(step * total + own.start, step * total + own.stop)
                weight.grad = gradient(weight.detach().cpu(), x[batch], y[batch]).float().to(harness.place.device)
                NodeMean(topology).reduce(weight.grad).wait()
                scheme.optimizer.step()

            scheme.step(user_step, last=step == steps - 1)
        scheme.end_epoch(None)
        return weight.detach()

    # the simplest simulation: each node trains on the samples of its ranks, nodes count by their samples
    replicas = [initial.double() for _ in nodes]
    node_samples = [[i for rank in ranks for i in range(*parts(sizes)[rank].indices(total))] for ranks in nodes]
    for step in range(1, steps + 1):
        for node, samples in enumerate(node_samples):
            chosen = torch.tensor(samples) + (step - 1) * total
            replicas[node] = replicas[node] - lr * gradient(replicas[node], x[chosen], y[chosen])
        if step % sync_every == 0 or step == steps:
            mean = sum(len(s) / total * replica for s, replica in zip(node_samples, replicas, strict=True))
            replicas = [mean] * len(nodes)
    for weight in on_ranks(nodes, work):
        torch.testing.assert_close(weight, replicas[0].float(), rtol=1e-5, atol=1e-6)
