"""What does it cost to watch: heartbeats, ``on_nonfinite``, ``verify_replicas``?

Four processes play two nodes of two and train one model. In every round they take some steps in each of these ways, one
after another, in an order that changes from round to round: so whatever else the machine does hits all alike. Printed
are medians over the rounds: how much longer a step took than in the same round with nobody watching (which scatters, as
"nobody, again" shows), and the share of a step that was spent in the looks themselves.

    python -m benchmarks.studies.watching --workload characters
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from benchmarks.workloads import WORKLOADS, Workload, loss_of, parameter_count
from lightning_hiercomm.control.plane import start_control_plane
from lightning_hiercomm.nodes.connect import connect_world
from lightning_hiercomm.nodes.hosts import Place
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import Gossip, PeriodicAveraging, Scheme, care
from lightning_hiercomm.schemes.reducers import all_reduce as averaging

RANKS = 4
WATCHES: dict[str, dict[str, Any]] = {
    "nobody": {},
    "nobody, again": {},  # what the others are to be compared with
    "on_nonfinite": {"on_nonfinite": "raise"},
    "verify_replicas": {"verify_replicas": "raise"},
    "heartbeats": {"hang_timeout": 10.0},
    "all": {"on_nonfinite": "raise", "verify_replicas": "raise", "hang_timeout": 10.0},
}
SCHEMES: dict[str, Callable[[], Scheme]] = {"periodic, every 10": lambda: PeriodicAveraging(10), "gossip": Gossip}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="characters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="in each way, per round")
    arguments = parser.parse_args()
    port = find_free_network_port()
    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=measure, args=(rank, port, arguments)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


def measure(rank: int, port: int, arguments: argparse.Namespace) -> None:
    """What one rank does; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    workload = WORKLOADS[arguments.workload]
    if rank == 0:
        print(f"| {workload.name}, {parameter_count(workload.model())} parameters | ms a step | more | looking |")
        print("|---|--:|--:|--:|", flush=True)
    for name, scheme in SCHEMES.items():
        seconds, looking = side_by_side(rank, scheme(), workload, arguments.rounds, arguments.steps)
        for watch, taken in seconds.items() if rank == 0 else ():
            more = statistics.median(own / nobody - 1 for own, nobody in zip(taken, seconds["nobody"], strict=True))
            share = statistics.median(looked / own for looked, own in zip(looking[watch], taken, strict=True))
            print(f"| {name}: {watch} | {1e3 * statistics.median(taken):.2f} | {more:+.2%} | {share:.2%} |", flush=True)
    dist.destroy_process_group()


class Looks:
    """Counts the seconds that the training thread spends in the looks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for module, name in ((averaging, "is_unfit"), (care, "is_unfit"), (care, "first_difference")):
            setattr(module, name, self._timed(getattr(module, name)))

    def _timed(self, look: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            found = look(*arguments)
            self.seconds += time.perf_counter() - begun
            return found

        return timed


def side_by_side(
    rank: int, scheme: Scheme, workload: Workload, rounds: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds a step, by who watches and round, and those of them that were spent in looks."""
    looks = Looks()
    topology = connect_world(rank, RANKS, Place(rank // 2, rank % 2))
    model, batches = workload.model(), workload.batches(rank, RANKS, 0)
    optimizer = workload.optimizer(model)
    replicas = Replicas(model, [optimizer])
    runs = {}
    for watch, how in WATCHES.items():
        policies = {name: value for name, value in how.items() if name != "hang_timeout"}
        runs[watch] = TrainingRun(scheme, replicas, topology, **{"on_nonfinite": "ignore", **policies})
        runs[watch].begin(1, None)
        runs[watch].begin_epoch(0, dict)

    def step(run: TrainingRun) -> None:
        def own() -> None:
            optimizer.zero_grad()
            loss_of(model, next(batches)).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            run.gradients.reduce(flat).wait()
            for gradient, values in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(values.view_as(gradient))
            optimizer.step()

        run.step(optimizer, own)

    def gather(own: Any, alarm: Callable[[], None] | None = None, among: str = "", aloud: bool = False) -> list[Any]:
        return topology.world.all_gather_object(own)

    seconds: dict[str, list[float]] = {watch: [] for watch in WATCHES}
    looking: dict[str, list[float]] = {watch: [] for watch in WATCHES}
    for round_ in range(-1, rounds):
        order = list(WATCHES)
        order = order[round_ % len(order) :] + order[: round_ % len(order)]
        for watch in order:
            limit, plane = WATCHES[watch].get("hang_timeout"), None
            if limit is not None:
                place = f"rank {rank}"
                plane = start_control_plane(
                    rank, RANKS, place, "127.0.0.1", 0, limit, lambda own: gather(own)[0], gather
                )
            topology.world.barrier()
            begun, looked = time.perf_counter(), looks.seconds
            for index in range(steps):
                step(runs[watch])
                if plane is not None:
                    plane.note_progress(f"training batch {index}")
            topology.world.barrier()
            if round_ >= 0:  # the one before that was to warm up
                seconds[watch].append((time.perf_counter() - begun) / steps)
                looking[watch].append((looks.seconds - looked) / steps)
            if plane is not None:
                plane.close()
    for run in runs.values():
        run.close(1.0)
    topology.close()
    return seconds, looking


if __name__ == "__main__":
    main()
