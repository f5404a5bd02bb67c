"""Run the commands of ``python -m lightning_hiercomm``."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightning_hiercomm.planning.cluster import (
    INTER_LATENCY,
    INTRA_LATENCY,
    Algorithm,
    Cluster,
    Link,
    PlanningError,
    Workload,
)
from lightning_hiercomm.planning.measure.profile import Profile
from lightning_hiercomm.planning.predict import report
from lightning_hiercomm.planning.predict.accuracy import WIRES
from lightning_hiercomm.planning.predict.candidates import DEFAULT_WIRES
from lightning_hiercomm.planning.predict.candidates import plan as make_plan
from lightning_hiercomm.planning.simulate import curves
from lightning_hiercomm.planning.simulate.simulation import Curve, Experiment, Site, Stalls, check
from lightning_hiercomm.planning.simulate.simulation import simulate as run_one
from lightning_hiercomm.planning.simulate.tasks import Task, load_task
from lightning_hiercomm.planning.user_code import json_object
from lightning_hiercomm.schemes import SCHEMES, AllReduce, Scheme
from lightning_hiercomm.schemes.health.nonfinite import NonfiniteError

_STATE = {"sgd": 0.0, "momentum": 1.0, "adam": 2.0}
_MOST_NODES = 4096
_LEAST_STEPS = 20


def run(arguments: argparse.Namespace) -> int:
    """Run a command and return the exit status; invalid arguments print one line on standard error."""
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "doctor": doctor,
        "probe": probe,
        "plan": plan,
        "simulate": simulate,
        "lighthouse": lighthouse,
    }
    try:
        return commands[arguments.command](arguments)
    except ValueError as error:
        print(f"python -m lightning_hiercomm {arguments.command}: {error}", file=sys.stderr)
        return 2


def lighthouse(arguments: argparse.Namespace) -> int:
    """Serve the lighthouse of elastic nodes."""
    from lightning_hiercomm.elastic.lighthouse import serve

    try:
        return serve(arguments.bind, arguments.min_nodes, arguments.dead_after)
    except ModuleNotFoundError as error:
        raise PlanningError(str(error)) from error


def doctor(arguments: argparse.Namespace) -> int:
    """Check versions, network and processes."""
    if arguments.elastic is not None:
        from lightning_hiercomm.planning.measure.elastic import examine_elastic

        return examine_elastic(arguments.elastic or None)
    from lightning_hiercomm.planning.measure.doctor import examine

    return examine(arguments.ranks_per_node)


def probe(arguments: argparse.Namespace) -> int:
    """Measure the cluster and write a profile."""
    from lightning_hiercomm.planning.measure.probe import probe as measure
    from lightning_hiercomm.planning.measure.ranks import connected
    from lightning_hiercomm.planning.measure.steps import StandIn, load_module, time_steps

    out = Path(arguments.out)
    if not out.absolute().parent.is_dir():
        raise PlanningError(f"--out {out}: the folder {out.parent} does not exist")
    if arguments.module_args and not arguments.module:
        raise PlanningError("--module-args needs --module")
    given = load_module(arguments.module, arguments.module_args) if arguments.module else None
    began = time.monotonic()
    with connected(arguments.ranks_per_node) as ranks:

        def say(text: str) -> None:
            if ranks.is_first:
                print(f"[{time.monotonic() - began:5.1f} s] {text}", flush=True)

        train = partial(time_steps, given or StandIn(arguments.params), None, ranks.device, arguments.seconds)
        profile = measure(ranks, train, say, arguments.seconds / 25)
        if ranks.is_first:
            profile.write(out)
            say(f"wrote {out}; next: python -m lightning_hiercomm plan --profile {out}")
    return 0


def plan(arguments: argparse.Namespace) -> int:
    """Predict every scheme, and recommend one."""
    cluster, workload = _cluster_and_workload(arguments)
    if cluster.nodes > _MOST_NODES:
        raise PlanningError(f"--nodes {cluster.nodes} must be at most {_MOST_NODES}")
    if not arguments.target >= 0:
        raise PlanningError(f"--target {arguments.target} must be a share of the step: 0 or more")
    if cluster.nodes == 1:
        raise PlanningError("--nodes 1: on one node every scheme trains as DDPStrategy does; give at least 2")
    asked_for = sorted(arguments.wires or (), key=WIRES.index)
    wires = [None if wire == "float32" else wire for wire in asked_for] or DEFAULT_WIRES
    made = make_plan(cluster, workload, wires, arguments.memory, arguments.target, _speeds(arguments, cluster))
    if arguments.json:
        print(json.dumps(report.to_dict(made), indent=1))
        return 0
    print(report.table(made, arguments.all))
    wire = made.chosen.candidate.wire_dtype
    print(f"\nRecommended: {made.chosen.candidate.title}{f' with wire_dtype={wire!r}' if wire else ''}")
    print(f"because {made.reason}\n")
    print(report.yaml(made), end="")
    return 0


def _speeds(arguments: argparse.Namespace, cluster: Cluster) -> Sequence[float]:
    """Return the nodes' speeds: those of the flag, or of the profile if it is of this cluster, otherwise equal ones."""
    if arguments.speeds:
        if len(arguments.speeds) != cluster.nodes:
            raise PlanningError(
                f"--speeds has {len(arguments.speeds)} numbers: give one for each of {cluster.nodes} nodes"
            )
        if not all(0 < speed < math.inf for speed in arguments.speeds):
            raise PlanningError(f"--speeds {' '.join(map(str, arguments.speeds))}: all must be positive")
        return list(map(float, arguments.speeds))
    profile = None if arguments.profile is None else Profile.read(Path(arguments.profile))
    return [1.0] * cluster.nodes if profile is None else profile.speeds(cluster.nodes)


def simulate(arguments: argparse.Namespace) -> int:
    """Train many replicas of a model on this machine, and predict the time on a cluster."""
    task = load_task(arguments.task)
    experiments = _experiments(arguments, task)
    site = _site(arguments, task, nodes=max(arguments.nodes))
    for experiment in experiments:  # refuse all of them before the first one trains
        if experiment.nodes == min(arguments.nodes) and experiment.seed == 0:
            check(experiment)
    done: list[Curve] = []
    for experiment in experiments:
        curve = _curve(experiment, site)
        done.append(curve)
        end = None if curve.has_diverged else curve.points[-1]
        print(
            f"[{len(done)} of {len(experiments)}, {curve.took:.1f} s] {experiment.replicas} replicas,"
            f" {experiment.label}: {f'{end.accuracy:.1%}, loss {end.loss:.3f}' if end else 'diverged'}",
            file=sys.stderr,
            flush=True,
        )
    print(json.dumps(curves.to_dict(done), indent=1) if arguments.json else curves.table(done))
    return 0


def _curve(experiment: Experiment, site: Site) -> Curve:
    began = time.perf_counter()
    try:
        return run_one(experiment, site)
    except NonfiniteError:
        return Curve(experiment, [], math.nan, time.perf_counter() - began)


def _experiments(arguments: argparse.Namespace, task: Task) -> list[Experiment]:
    if not 0 < arguments.epochs < math.inf:
        raise PlanningError(f"--epochs {arguments.epochs} must be positive")
    ranks = 1 if arguments.ranks_per_node is None else arguments.ranks_per_node
    batch = task.batch if arguments.batch is None else arguments.batch
    for flag, values in {
        "--seeds": [arguments.seeds],
        "--nodes": arguments.nodes,
        "--ranks-per-node": [ranks],
        "--batch": [batch],
    }.items():
        if min(values) < 1:
            raise PlanningError(f"{flag} {min(values)} must be at least 1")
    stalls = None
    if arguments.stalled is not None:
        if arguments.stall_time is None:
            raise PlanningError("--stalled needs --stall-time, the length of a stall, such as 10s")
        stalls = Stalls(arguments.stalled, arguments.stall_time)
    given = [scheme for scheme in _schemes(arguments) if scheme != AllReduce()]
    (_, targets), _ = task.load()
    return [
        Experiment(
            label,
            scheme,
            nodes,
            max(_LEAST_STEPS, round(arguments.epochs * len(targets) / (batch * nodes * ranks))),
            task.learning_rate * (nodes * ranks) ** 0.5,  # a linear rule diverges from some hundred replicas on
            batch,
            task,
            ranks,
            arguments.wire,
            seed,
            speeds=None if arguments.speeds is None else tuple(arguments.speeds),
            stalls=stalls,
        )
        for nodes in arguments.nodes
        for label, scheme in {"all-reduce": AllReduce(), **{repr(each): each for each in given}}.items()
        for seed in range(arguments.seeds)
    ]


def _schemes(arguments: argparse.Namespace) -> list[Scheme]:
    if arguments.scheme_args is not None and len(arguments.scheme) > 1:
        raise PlanningError("--scheme-args are for one scheme: give one name with --scheme")
    values = json_object("--scheme-args", arguments.scheme_args, '{"sync_every": 8}')
    if unknown := [name for name in arguments.scheme if name not in SCHEMES]:
        raise PlanningError(f"--scheme {unknown[0]}: choose from {', '.join(SCHEMES)}")
    try:
        return [SCHEMES[name](**values) for name in arguments.scheme]
    except TypeError as error:
        raise PlanningError(str(error)) from error


def _site(arguments: argparse.Namespace, task: Task, nodes: int) -> Site:
    if arguments.profile is not None:
        profile = Profile.read(Path(arguments.profile))
        cluster, workload = _with_network(profile.cluster, nodes, arguments), profile.workload
    elif arguments.inter is None or arguments.step_time is None:
        raise PlanningError("give --inter and --step-time, or --profile with a file of `probe`")
    else:
        parameters = sum(parameter.numel() for parameter in task.model().parameters())
        cluster = Cluster(nodes, 1, Link(math.inf), Link(1.0, INTER_LATENCY))
        workload = Workload.of_step(parameters, 1.0)
    cluster, workload = _with_flags(cluster, workload, arguments)
    ranks = cluster.ranks_per_node if arguments.ranks_per_node is None else arguments.ranks_per_node
    return Site(replace(cluster, ranks_per_node=ranks), workload)


def _cluster_and_workload(arguments: argparse.Namespace) -> tuple[Cluster, Workload]:
    """Return the cluster and workload of `plan`, from a profile and flags, or from flags alone."""
    if arguments.profile is not None:
        return _changed(Profile.read(Path(arguments.profile)), arguments)
    needed = {name: getattr(arguments, name) for name in ("nodes", "params", "step_time", "inter")}
    if missing := [_flag(name) for name, value in needed.items() if value is None]:
        raise PlanningError(f"give {', '.join(missing)}, or --profile with a file of `probe`")
    algorithm: Algorithm = "ring" if arguments.backend == "gloo" else "halving"
    intra = Link(arguments.intra or math.inf, arguments.intra_latency or INTRA_LATENCY, algorithm)
    inter = Link(arguments.inter, arguments.latency or INTER_LATENCY, algorithm)
    ranks = 1 if arguments.ranks_per_node is None else arguments.ranks_per_node
    return Cluster(arguments.nodes, ranks, intra, inter), Workload.of_step(
        arguments.params,
        arguments.step_time,
        dtype=arguments.dtype or "float32",
        state_per_parameter=_STATE[arguments.optimizer or "adam"],
    )


def _changed(profile: Profile, arguments: argparse.Namespace) -> tuple[Cluster, Workload]:
    """Return a profile's cluster and workload, changed by the flags."""
    cluster = profile.cluster
    if measured := [
        _flag(name) for name in ("latency", "intra_latency", "intra", "backend") if getattr(arguments, name)
    ]:
        raise PlanningError(f"{', '.join(measured)}: part of the profile; omit it, or plan without --profile")
    if arguments.ranks_per_node not in (None, cluster.ranks_per_node):
        raise PlanningError(
            f"--ranks-per-node {arguments.ranks_per_node}: the profile has nodes of {cluster.ranks_per_node} ranks;"
            " run `probe` on nodes of that size"
        )
    cluster = _with_network(cluster, arguments.nodes or 1, arguments)
    if arguments.nodes is not None and arguments.nodes != cluster.nodes:
        cluster = replace(cluster, nodes=arguments.nodes, world=None)
    return _with_flags(cluster, profile.workload, arguments)


def _with_flags(cluster: Cluster, workload: Workload, arguments: argparse.Namespace) -> tuple[Cluster, Workload]:
    if arguments.inter is not None:
        factor = arguments.inter / cluster.inter.bandwidth
        world = None if cluster.world is None else cluster.world.faster(factor)
        cluster = replace(cluster, inter=cluster.inter.faster(factor), world=world)
    if arguments.step_time is not None:
        factor = arguments.step_time / workload.seconds
        parts = {name: getattr(workload, name) * factor for name in ("forward", "backward", "update")}
        workload = replace(workload, **parts)
    if arguments.params is not None:
        workload = replace(workload, parameters=arguments.params)
    if getattr(arguments, "dtype", None) is not None:
        workload = replace(workload, dtype=arguments.dtype)
    if getattr(arguments, "optimizer", None) is not None:
        workload = replace(workload, state_per_parameter=_STATE[arguments.optimizer])
    return cluster, workload


def _with_network(cluster: Cluster, nodes: int, arguments: argparse.Namespace) -> Cluster:
    if cluster.nodes > 1 or nodes == 1:
        return cluster
    if arguments.inter is None:
        raise PlanningError("--nodes: the profile of a single node has no network; give --inter, too")
    return replace(cluster, inter=Link(1.0, INTER_LATENCY, cluster.inter.algorithm))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
