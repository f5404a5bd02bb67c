"""Asynchronous SGD, which the package does not offer: the baseline that SSD-SGD's paper is compared with."""

from __future__ import annotations

import time

from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.simulate.simulation import Curve, Experiment, Point, Site, schedule
from benchmarks.simulate.tasks import Batches, judge, loss_of, momentum_sgd


def asynchronous(experiment: Experiment, site: Site, evaluations: int = 10) -> Curve:
    """Nodes push gradients to a server that steps at once for each, and pull; without waiting for each other.

    Equally fast nodes push in turn, so every gradient is taken at weights that are ``nodes - 1`` updates old. The
    server is sharded over the nodes. A node waits for its own push and pull, of ``(M - 1) / M`` of the model each,
    which its link shares with those that it serves.

    Args:
        experiment: Its scheme counts for nothing; a step is one update by each node. The task has one optimizer.
        site: What the virtual clock goes by.
        evaluations: How often the server's weights are judged.
    """
    began = time.perf_counter()
    task, nodes = experiment.task, experiment.nodes
    model = task.model(experiment.seed)
    optimizer = (experiment.optimizer or momentum_sgd)(model.parameters(), experiment.learning_rate)
    batches = [Batches(task, node, experiment.batch, experiment.seed) for node in range(nodes)]
    server = parameters_to_vector(model.parameters()).detach()
    seen = [server] * nodes
    moved = (nodes - 1) / nodes * site.workload.model_bytes
    seconds = site.workload.seconds + 2 * (moved / site.cluster.inter.bandwidth + site.cluster.inter.latency)
    looks = {experiment.steps * (i + 1) // evaluations for i in range(evaluations)}
    points: list[Point] = []
    for step in range(experiment.steps):
        optimizer.param_groups[0]["lr"] = experiment.learning_rate * schedule(step, experiment.steps)
        for node in range(nodes):
            vector_to_parameters(seen[node], model.parameters())
            optimizer.zero_grad()
            loss_of(model, batches[node].draw()).backward()  # type: ignore[no-untyped-call]
            vector_to_parameters(server, model.parameters())
            optimizer.step()
            server = seen[node] = parameters_to_vector(model.parameters()).detach()
        if step + 1 in looks:
            _, held_out = task.load()
            points.append(Point(step + 1, (step + 1) * seconds, *judge(model, held_out)))
    return Curve(experiment, points, 2 * moved, time.perf_counter() - began)
