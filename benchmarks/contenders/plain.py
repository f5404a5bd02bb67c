"""Hand-written loops in plain torch: the bounds, and the least overhead that local SGD can have."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.job import Recorder, World
from benchmarks.workloads import parameter_count
from lightning_hiercomm.comm import costs


def train(recorder: Recorder, options: dict[str, Any]) -> None:
    """``kind``: "local" (no communication), "node" (DDP inside the node), "flat" (mean over all ranks every period)."""
    if options["kind"] == "link":
        exchange_least_bytes(recorder)
        return
    model = recorder.model()
    optimizer = recorder.optimizer(model)
    forward: nn.Module = model
    if options["kind"] == "node":
        forward = DistributedDataParallel(model, process_group=node_group(recorder.world))
    average = FlatAverage(model) if options["kind"] == "flat" else None

    step, last = 0, False
    while not last:
        optimizer.zero_grad()
        recorder.loss(forward, recorder.next_batch()).backward()
        optimizer.step()
        step += 1
        if average is not None and step % options["sync_every"] == 0:
            average()
        last = recorder.step_done()
        if recorder.evaluation_due() and not last:
            recorder.evaluate_mean(model)
    recorder.finish(model)


def node_group(world: World) -> dist.ProcessGroup:
    """The process group of this rank's node."""
    ranks = [list(range(node * world.local_size, (node + 1) * world.local_size)) for node in range(world.nodes)]
    group, _ = dist.new_subgroups_by_enumeration(ranks)
    assert isinstance(group, dist.ProcessGroup)
    return group


class FlatAverage:
    """Parameters as views of one flat tensor, averaged by one all-reduce."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            parameter.data = self.flat[start:end].view_as(parameter)
            start = end

    def __call__(self) -> None:
        dist.all_reduce(self.flat, dist.ReduceOp.AVG)


def exchange_least_bytes(recorder: Recorder, pieces: int = 8) -> None:
    """Every step: send each node's share of an averaging to the next node, split over its ranks, and receive as much.

    In pieces, since gloo does not send and receive one large message at the same time.
    """
    world = recorder.world
    parameters = parameter_count(recorder.workload.model())
    share = torch.zeros(int(costs.all_reduce(world.nodes, parameters) / world.local_size))
    received = torch.empty_like(share)
    after, before = (world.rank + world.local_size) % world.size, (world.rank - world.local_size) % world.size
    last = False
    while not last:
        works = []
        if world.nodes > 1:
            for ours, theirs in zip(share.chunk(pieces), received.chunk(pieces), strict=True):
                works += [dist.irecv(theirs, before), dist.isend(ours, after)]
        for work in works:
            assert work is not None
            work.wait()
        last = recorder.step_done()
