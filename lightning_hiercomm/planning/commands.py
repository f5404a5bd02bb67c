"""What the commands of ``python -m lightning_hiercomm`` do."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from lightning_hiercomm.planning import quantities
from lightning_hiercomm.planning.cluster import Algorithm, Cluster, Link, PlanningError, Workload
from lightning_hiercomm.planning.measure.profile import Profile
from lightning_hiercomm.planning.predict import report
from lightning_hiercomm.planning.predict.accuracy import WIRES
from lightning_hiercomm.planning.predict.candidates import DEFAULT_WIRES
from lightning_hiercomm.planning.predict.candidates import plan as make_plan
from lightning_hiercomm.planning.predict.faults import Faults, advice
from lightning_hiercomm.planning.simulate import curves
from lightning_hiercomm.planning.simulate.simulation import Curve, Experiment, Site, check
from lightning_hiercomm.planning.simulate.simulation import simulate as run_one
from lightning_hiercomm.planning.simulate.tasks import Task, load_task
from lightning_hiercomm.schemes import SCHEMES, AllReduce, Scheme
from lightning_hiercomm.schemes.health.nonfinite import NonfiniteError

T = TypeVar("T")

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
    if arguments.elastic is not None or arguments.dead_after is not None:
        from lightning_hiercomm.planning.measure.elastic import examine_elastic

        return examine_elastic(arguments.elastic or None, arguments.dead_after)
    from lightning_hiercomm.planning.measure.doctor import examine

    return examine(arguments.ranks_per_node)


def probe(arguments: argparse.Namespace) -> int:
    """Measure the cluster and write a profile."""
    from lightning_hiercomm.planning.measure.probe import probe as measure
    from lightning_hiercomm.planning.measure.ranks import connected
    from lightning_hiercomm.planning.measure.steps import StandIn, load_module, time_steps

    seconds = _read("--seconds", quantities.duration, arguments.seconds)
    parameters = _read("--params", quantities.count, arguments.params)
    out = Path(arguments.out)
    if not out.absolute().parent.is_dir():
        raise PlanningError(f"--out {out}: there is no folder {out.parent}")
    if arguments.module_args and not arguments.module:
        raise PlanningError("--module-args needs --module")
    module, data = load_module(arguments.module, arguments.module_args) if arguments.module else (None, None)
    began = time.monotonic()
    with connected(arguments.ranks_per_node) as ranks:

        def say(text: str) -> None:
            if ranks.is_first:
                print(f"[{time.monotonic() - began:5.1f} s] {text}", flush=True)

        trained = StandIn(parameters) if module is None else module
        train = partial(time_steps, trained, data, ranks.device, seconds)
        profile = measure(ranks, train, say, seconds / 25)
        if ranks.is_first:
            profile.write(out)
            say(f"wrote {out}; next: python -m lightning_hiercomm plan --profile {out}")
    return 0


def plan(arguments: argparse.Namespace) -> int:
    """Predict every scheme, and recommend one."""
    cluster, workload = _cluster_and_workload(arguments)
    if cluster.nodes > _MOST_NODES:
        raise PlanningError(f"--nodes {cluster.nodes}: plans are made for up to {_MOST_NODES} nodes")
    if not arguments.target >= 0:
        raise PlanningError(f"--target {arguments.target} must be a share of the step: 0 or more")
    if cluster.nodes == 1:
        raise PlanningError(
            "--nodes 1: on one node every scheme trains as DDPStrategy does, so there is nothing to plan"
        )
    asked_for = sorted(arguments.wires or (), key=WIRES.index)
    wires = [None if wire == "float32" else wire for wire in asked_for] or DEFAULT_WIRES
    memory = None if arguments.memory is None else _read("--memory", quantities.size, arguments.memory)
    faults, picture = _faults(arguments), _picture(arguments)
    made = make_plan(cluster, workload, wires, memory, arguments.target)
    if picture is not None:
        report.plot(made, picture)
    if arguments.json:
        print(json.dumps(report.to_dict(made, faults), indent=1))
        return 0
    print(report.table(made, arguments.all, faults))
    wire = made.chosen.candidate.wire_dtype
    print(f"\nRecommended: {made.chosen.candidate.title}{f' with wire_dtype={wire!r}' if wire else ''}")
    print(f"because {made.reason}\n")
    if faults is not None:
        print(f"{advice(made, faults)}\n")
    print(report.yaml(made), end="")
    return 0


def _picture(arguments: argparse.Namespace) -> Path | None:
    """Check the path of --plot before anything is computed."""
    if not arguments.plot:
        return None
    path = Path(arguments.plot)
    if not path.parent.is_dir():
        raise PlanningError(f"--plot {path}: there is no folder {path.parent}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanningError("--plot needs matplotlib: pip install matplotlib") from error
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise PlanningError(f"--plot {path} must end with one of {', '.join(f'.{each}' for each in formats)}")
    return path


def _faults(arguments: argparse.Namespace) -> Faults | None:
    """Return the flags about failing nodes, if there are any."""
    durations = {"restart": "--restart-time", "checkpoint": "--checkpoint-time", "dead_after": "--dead-after"}
    prices = {"price": "--price", "egress": "--egress"}
    given = {name: getattr(arguments, flag[2:].replace("-", "_")) for name, flag in {**durations, **prices}.items()}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.mtbf is None:
        if given:
            flag = {**durations, **prices}[next(iter(given))]
            raise PlanningError(f"{flag} needs --mtbf, the mean time between failures of a node, such as --mtbf 3h")
        return None
    for name in prices.keys() & given.keys():
        if not 0 <= given[name] < math.inf:
            raise PlanningError(f"{prices[name]} {given[name]} must be a price: 0 or more")
    for name in durations.keys() & given.keys():
        given[name] = _read(durations[name], quantities.duration, given[name])
    return Faults(_read("--mtbf", quantities.duration, arguments.mtbf), **given)


def simulate(arguments: argparse.Namespace) -> int:
    """Train many replicas of a model on this machine, and predict the time on a cluster."""
    task = load_task(arguments.task)
    experiments = _experiments(arguments, task)
    site = _site(arguments, task, nodes=max(experiment.nodes for experiment in experiments))
    fewest = {experiment.label: experiment for experiment in sorted(experiments, key=lambda one: -one.nodes)}
    for experiment in fewest.values():  # before the first one trains
        check(experiment)
    done: list[Curve] = []
    for index, experiment in enumerate(experiments, 1):
        equal = next((curve for curve in done if replace(curve.experiment, label=experiment.label) == experiment), None)
        curve = _curve(experiment, site) if equal is None else replace(equal, experiment=experiment, took=0.0)
        done.append(curve)
        found = "diverged"
        if not curve.has_diverged:
            end = curve.points[-1]
            found = f"{end.accuracy:.1%}, loss {end.loss:.3f}"
        print(
            f"[{index} of {len(experiments)}, {curve.took:.1f} s] {experiment.replicas} replicas, {experiment.label}:"
            f" {found}",
            file=sys.stderr,
            flush=True,
        )
    if arguments.json:
        print(json.dumps(curves.to_dict(done), indent=1))
        return 0
    print(curves.table(done))
    return 0


def _curve(experiment: Experiment, site: Site) -> Curve:
    """Run an experiment; one that diverges does not end the others."""
    began = time.perf_counter()
    try:
        return run_one(experiment, site)
    except NonfiniteError:
        return Curve(experiment, [], math.nan, time.perf_counter() - began)


def _experiments(arguments: argparse.Namespace, task: Task) -> list[Experiment]:
    """Return the experiments of the flags; all train on the same number of examples."""
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
    try:
        chosen = {"all-reduce": AllReduce(), **{repr(s): s for s in map(_scheme_of(arguments), arguments.scheme)}}
    except TypeError as error:
        raise PlanningError(str(error)) from error
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
        )
        for nodes in arguments.nodes
        for label, scheme in chosen.items()
        for seed in range(arguments.seeds)
    ]


def _scheme_of(arguments: argparse.Namespace) -> Callable[[str], Scheme]:
    if arguments.scheme_args is not None and len(arguments.scheme) > 1:
        raise PlanningError("--scheme-args are for one scheme: give one name with --scheme")
    try:
        values = json.loads(arguments.scheme_args or "{}")
    except json.JSONDecodeError as error:
        raise PlanningError(f"--scheme-args is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise PlanningError('--scheme-args must be a JSON object, such as {"sync_every": 8}')

    def make(name: str) -> Scheme:
        if name not in SCHEMES:
            raise PlanningError(f"--scheme {name}: choose from {', '.join(SCHEMES)}")
        return SCHEMES[name](**values)

    return make


def _site(arguments: argparse.Namespace, task: Task, nodes: int) -> Site:
    """Return the cluster of the virtual clock, from a profile and flags, or from flags alone."""
    if arguments.profile is not None:
        profile = Profile.read(Path(arguments.profile))
        cluster, workload = _with_network(profile.cluster, nodes, arguments), profile.workload
    elif arguments.inter is None or arguments.step_time is None:
        raise PlanningError("give --inter and --step-time, or --profile with a file of `probe`")
    else:
        parameters = sum(parameter.numel() for parameter in task.model().parameters())
        cluster = Cluster(nodes, 1, Link(math.inf), Link(1.0, 50e-6))
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
    latency = _read("--latency", quantities.duration, arguments.latency or "50us")
    inside = _read("--intra-latency", quantities.duration, arguments.intra_latency or "5us")
    intra = float("inf") if arguments.intra is None else _read("--intra", quantities.bandwidth, arguments.intra)
    inter = _read("--inter", quantities.bandwidth, arguments.inter)
    parameters = _read("--params", quantities.count, arguments.params)
    step = _read("--step-time", quantities.duration, arguments.step_time)
    ranks = 1 if arguments.ranks_per_node is None else arguments.ranks_per_node
    cluster = Cluster(arguments.nodes, ranks, Link(intra, inside, algorithm), Link(inter, latency, algorithm))
    state = _STATE[arguments.optimizer or "adam"]
    return cluster, Workload.of_step(parameters, step, dtype=arguments.dtype or "float32", state_per_parameter=state)


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
    """Replace measured values by those of flags."""
    if arguments.inter is not None:
        factor = _read("--inter", quantities.bandwidth, arguments.inter) / cluster.inter.bandwidth
        world = None if cluster.world is None else cluster.world.faster(factor)
        cluster = replace(cluster, inter=cluster.inter.faster(factor), world=world)
    if arguments.step_time is not None:
        factor = _read("--step-time", quantities.duration, arguments.step_time) / workload.seconds
        parts = {name: getattr(workload, name) * factor for name in ("forward", "backward", "update")}
        workload = replace(workload, **parts)
    if arguments.params is not None:
        workload = replace(workload, parameters=_read("--params", quantities.count, arguments.params))
    if getattr(arguments, "dtype", None) is not None:
        workload = replace(workload, dtype=arguments.dtype)
    if getattr(arguments, "optimizer", None) is not None:
        workload = replace(workload, state_per_parameter=_STATE[arguments.optimizer])
    return cluster, workload


def _with_network(cluster: Cluster, nodes: int, arguments: argparse.Namespace) -> Cluster:
    """Give a profile of one node a network, whose bandwidth ``--inter`` sets."""
    if cluster.nodes > 1 or nodes == 1:
        return cluster
    if arguments.inter is None:
        raise PlanningError("--nodes: the profile of a single node has no network: give --inter, too")
    return replace(cluster, inter=Link(1.0, 50e-6, cluster.inter.algorithm))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read(flag: str, reader: Callable[[str], T], text: str) -> T:
    try:
        return reader(text)
    except ValueError as error:
        raise PlanningError(f"{flag}: {error}") from error
