"""Measure a cluster: collectives inside and between nodes, and a training step of every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from typing import Protocol

import torch

from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.planning.cluster import Algorithm, Cluster, Collective, CostCurve, Link, Workload
from lightning_hiercomm.planning.measure.profile import Profile
from lightning_hiercomm.planning.measure.ranks import Ranks, processors_per_node, this_machine
from lightning_hiercomm.planning.measure.steps import LEAST_STEPS, StepTimes
from lightning_hiercomm.planning.measure.stopwatch import ProcessorShare, Stopwatch
from lightning_hiercomm.planning.predict.node import Node

_SIZES = (2**16, 2**20, 2**22)
_WITH_GRADIENTS = (*_SIZES, 2**24)  # DDP's buckets are larger than ours
_INTRA: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_INTER: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather", "exchange")
_AVERAGED_STEPS = 10  # steps with averages take as long as this number of kinds and sizes of collectives
_COPIED = 2**25  # bytes, more than caches hold


class Train(Protocol):
    """Trains on this rank for a few seconds, see :func:`~lightning_hiercomm.planning.measure.steps.time_steps`."""

    def __call__(self, average_in: Topology | None = None, steps: int | None = None) -> StepTimes: ...


def probe(ranks: Ranks, train: Train, say: Callable[[str], None], seconds: float = 0.2) -> Profile:
    """Measure the cluster; collective. Sizes that would take too long on a slow link are left out.

    Args:
        ranks: All of them.
        train: Trains on this rank for a few seconds, without communication or with gradients averaged in the node.
        say: Reports progress.
        seconds: For how long each kind and size of collective is repeated.
    """
    began, topology = time.perf_counter(), ranks.topology
    say(f"{topology.num_nodes} nodes of {sorted({len(node) for node in topology.nodes})} ranks, {ranks.backend}")
    machine = this_machine()
    cores = processors_per_node(topology, machine)
    topology.world.barrier()
    steps: list[StepTimes] = topology.world.all_gather_object(train())
    share = _fewest_processors(ranks, cores, steps)
    workload = _workload(steps, share, ranks.device)
    shown = max(step.seconds for step in steps)
    say(f"a step of {workload.parameters:,.0f} parameters: {shown * 1e3:.1f} ms on the slowest rank")

    watch = Stopwatch(topology.world, ranks.device, seconds)
    copying = share.uncrowded(watch.copy(_COPIED))
    say(f"copying: {_COPIED / copying.seconds / 1e9:.1f} GB/s on every rank")

    def link(name: str, group: Communicator | None, members: int, sharing: int, kinds: tuple[Collective, ...]) -> Link:
        sizes = _WITH_GRADIENTS if name != "between nodes" else _SIZES
        curves: dict[Collective, CostCurve] = {}
        for kind in kinds if members > 1 else ():
            curve = curves[kind] = watch.curve(group, members, sharing, kind, sizes, share)
            (_, latency, _), *_, (sent, longest, _) = curve.points
            rate = sharing * sent / longest * 8 / 1e9
            say(f"{name}, {kind.replace('_', '-')}: {latency * 1e6:.0f} us, {rate:.3g} Gbit/s")
        return _link(curves, "halving" if ranks.backend == "nccl" else "ring")

    smallest = topology.num_shards
    intra = link("inside nodes", topology.intra, len(topology.nodes[0]), 1, _INTRA)
    inter = link("between nodes", topology.inter, topology.num_nodes, topology.num_shards, _INTER)
    world = link("all ranks", topology.world, topology.world_size, 1, ("all_reduce",))
    everywhere = world if topology.num_nodes > 1 else None
    cluster = Cluster(
        topology.num_nodes, smallest, intra, inter, everywhere, share.processors, _COPIED / copying.seconds
    )
    if topology.world_size > 1:
        count = max(LEAST_STEPS, math.ceil(_AVERAGED_STEPS * seconds / shown))
        again = _workload(topology.world.all_gather_object(train()), share, ranks.device)  # machines' speed drifts
        averaging = _averaging(cluster, again, _slowest(topology, train, count))
        workload = replace(_mean(workload, again), averaging=averaging)
        say(f"averaging gradients: {workload.averaging * 1e3:.1f} ms of a step, without its collectives")
    return Profile(
        cluster,
        workload,
        tuple(step.seconds for step in steps),
        {
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "lightning": metadata.version("lightning"),
            "backend": ranks.backend,
            "device": "cpu" if ranks.device.type == "cpu" else torch.cuda.get_device_name(ranks.device),
            "hosts": sorted(set(topology.world.all_gather_object(machine.host))),
            "nodes": [list(node) for node in topology.nodes],
            "seconds": round(time.perf_counter() - began, 1),
        },
    )


def _fewest_processors(ranks: Ranks, cores: list[float], steps: list[StepTimes]) -> ProcessorShare:
    if ranks.device.type != "cpu":
        return ProcessorShare(None, ranks.topology.num_shards)
    threads = torch.get_num_threads()
    shares = [
        ProcessorShare.found(its, [steps[rank].timing for rank in node], threads)
        for node, its in zip(ranks.topology.nodes, cores, strict=True)
    ]
    crowded = [share for share in shares if share.processors is not None]
    return min(crowded, key=lambda share: share.processors or 0.0) if crowded else shares[0]


def _workload(steps: list[StepTimes], share: ProcessorShare, device: torch.device) -> Workload:
    """Return the slowest rank's step, as it would be on processors of its own."""
    alone = [share.uncrowded_step(step.timing, torch.get_num_threads()) for step in steps]
    slowest, timing = max(zip(steps, alone, strict=True), key=lambda pair: pair[1].seconds)
    shorter = timing.seconds / slowest.seconds
    return Workload(
        slowest.parameters,
        slowest.forward * shorter,
        slowest.backward * shorter,
        slowest.update * shorter,
        _like(slowest.bytes_per_parameter),
        slowest.state_per_parameter,
        timing.processor_seconds / timing.seconds if device.type == "cpu" else 0.0,
    )


def _like(bytes_per_parameter: float) -> str:
    """Return the type of about this size, which is a mean if types are mixed."""
    return "bfloat16" if bytes_per_parameter < 3 else "float32" if bytes_per_parameter < 6 else "float64"


def _mean(first: Workload, second: Workload) -> Workload:
    parts = {name: (getattr(first, name) + getattr(second, name)) / 2 for name in ("forward", "backward", "update")}
    return replace(first, **parts)


def _slowest(topology: Topology, train: Train, steps: int) -> float:
    """Return the seconds of a step that averages gradients in its node; 0 if the module does not support it."""
    try:
        seconds = train(topology, steps).seconds
    except RuntimeError:  # such as DDP's, of parameters that a loss does not use: on all ranks
        seconds = 0.0
    everyone: list[float] = topology.world.all_gather_object(seconds)
    return max(everyone)


def _averaging(cluster: Cluster, workload: Workload, seconds: float) -> float:
    """Return the time of a step that averages gradients in its node, without its collectives."""
    node = Node(cluster, workload)
    node.train(4)
    unexplained = max(0.0, seconds - node.run(2).seconds)
    if cluster.processors is None:
        return unexplained
    return unexplained * min(1.0, cluster.processors / (cluster.ranks_per_node * workload.threads))


def _link(curves: dict[Collective, CostCurve], algorithm: Algorithm) -> Link:
    """Summarize curves as a link with a latency and a bandwidth."""
    if not curves:
        return Link(float("inf"), algorithm=algorithm)
    best = 0.0
    for curve in curves.values():
        (_, latency, _), *_, (sent, seconds, _) = curve.points
        best = max(best, curve.sharing * sent / seconds)
    latency = min(curve.points[0][1] for curve in curves.values())
    return Link(best, latency, algorithm, curves=curves)
