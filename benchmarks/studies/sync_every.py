"""How far may nodes go between two synchronizations?

Nodes of one rank train the character model with AdamW, as threads of one process, for one number of steps and with
every period H: DiLoCo with its default outer optimizer, the same in two fragments that overlap with training (nodes
keep nothing of their own, or half), the same with 4-bit payloads, and plain averaging. The table has the held-out loss
of the averaged model at the end, the mean over the seeds, and the spread between them; the bytes are those that a node
sends per step.

    python -m benchmarks.studies.sync_every
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable

import torch

from benchmarks.workloads import WORKLOADS, judged, loss_of
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes import Context, DiLoCo, PeriodicAveraging, Scheme

CONTENDERS: dict[str, tuple[Callable[[int], Scheme], str | None]] = {
    "DiLoCo": (lambda every: DiLoCo(every), None),
    "streaming DiLoCo": (lambda every: DiLoCo(every, fragments=2, staleness=every // 4, keep_local=0.0), None),
    "streaming DiLoCo, keep_local=0.5": (lambda every: DiLoCo(every, fragments=2, staleness=every // 4), None),
    "streaming DiLoCo, int4": (lambda every: DiLoCo(every, fragments=2, staleness=every // 4, keep_local=0.0), "int4"),
    "PeriodicAveraging": (lambda every: PeriodicAveraging(every), None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--every", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), metavar="NAME")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{arguments.nodes} nodes, {arguments.steps} steps, {arguments.seeds} seeds\n")
    print("| H | how | loss | between seeds | KB per node and step |\n|--:|---|--:|--:|--:|")
    for every in arguments.every:
        for name in arguments.contenders:
            runs = [trained(name, every, arguments.nodes, arguments.steps, seed) for seed in range(arguments.seeds)]
            losses = [loss for loss, _ in runs]
            spread, sent = max(losses) - min(losses), runs[0][1] / arguments.steps / 1e3
            print(f"| {every} | {name} | {statistics.mean(losses):.3f} | {spread:.3f} | {sent:.2f} |", flush=True)


def trained(name: str, every: int, nodes: int, steps: int, seed: int) -> tuple[float, float]:
    """The held-out loss of the averaged model after so many steps, and the bytes that a node has sent."""
    make, wire = CONTENDERS[name]
    workload = WORKLOADS["characters_adamw"]
    initial = workload.model()

    def work(rank: int, world: ThreadWorld) -> tuple[float, float]:
        meter = Meter()
        topology = Topology([[node] for node in range(nodes)], rank, world.connect(rank, meter), meter)
        model = copy.deepcopy(initial)
        optimizer = workload.optimizer(model)
        batches = workload.batches(rank, nodes, seed)
        scheme = make(every).build(Context(Replica(model.parameters()), topology, optimizer, Wire.named(wire)))
        scheme.begin_run(1, steps)
        scheme.begin_epoch(0, dict)

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model, next(batches)).backward()
            optimizer.step()

        for number in range(steps):
            scheme.step(step, last=number == steps - 1)
        scheme.end_epoch(None)
        sent = meter.snapshot()["inter_bytes"]
        scheme.finish()
        held_out = workload.held_out
        assert held_out is not None
        return judged(model, held_out())[1], sent

    return ThreadWorld(nodes, timeout=600.0).run(work)[0]


if __name__ == "__main__":
    main()
