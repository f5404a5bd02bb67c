"""Benchmarks over real slow networks, against real peers."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks import gpu, gpu_network, gradients, report, scaling, startup
from benchmarks.contenders import BOUNDS, ROWS
from benchmarks.job import Job, Record
from benchmarks.language import command as language_command
from benchmarks.launch import machine_lock, run
from benchmarks.measure import Cell, cells, learning_curve, mean_curve, speed_job
from benchmarks.network import busy_share, one_scheduling_group, open_network, why_no_namespaces
from benchmarks.settings import (
    PRESETS,
    Batch,
    Setting,
    TimeLeft,
    batches,
    clock_steps,
    moment,
    unknown_rows,
)
from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from benchmarks.papers.tuned import Comparison

SPEED_ROWS = [key for key in ROWS if "@" not in key]
WIRES = ("bf16", "int8", "int4", "sparse2")
LATENCY_ROWS = ["loop", "ddp", *(key for key in ROWS if key.endswith("@8") and not any(wire in key for wire in WIRES))]
ONE_NODE_ROWS = ["ddp", "all_reduce", "periodic", "daso", "diloco", "steps_delay", "gossip"]
ACCURACY_ROWS = ["hand", "ddp", "post_local_hook", "all_reduce", "periodic", "daso", "steps_delay", "gossip"]
TIMELINE_ROWS = ["ddp", "torch_hierarchical", "all_reduce", "periodic", "daso", "daso_stale", "steps_delay", "gossip"]


OUT = Path("runs/benchmarks")  # which git ignores
_SCALING = "scaling-"  # begins the names of what is stored of it


def main() -> None:
    arguments = make_parser().parse_args()
    signal.signal(signal.SIGTERM, _end)
    arguments.command(arguments)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    speed = commands.add_parser("speed", help="step times at some bandwidths, a table for each")
    _common(speed, None)
    _speed(speed, nodes=2, ranks_per_node=2, workload="mlp11m", mbit=None, steps=None)
    speed.add_argument(
        "--preset", choices=PRESETS, help="several layouts and rates, with the rows and peers that make sense on each"
    )

    latency = commands.add_parser("latency", help="speed: four one-rank nodes, a tiny model, H = 8, no rate limit")
    _common(latency, LATENCY_ROWS)
    _speed(latency, nodes=4, ranks_per_node=1, workload="mlp85k", mbit=[0.0], steps=400)

    one_node = commands.add_parser("one-node", help="speed: every scheme on one node, against DDPStrategy")
    _common(one_node, ONE_NODE_ROWS)
    _speed(one_node, nodes=1, ranks_per_node=2, workload="mlp11m", mbit=[0.0], steps=30)

    narrow = commands.add_parser(
        "gradients", help="speed: gradients of each wire type against computing and bytes / rate"
    )
    _common(narrow, list(gradients.ROWS))
    _speed(narrow, nodes=2, ranks_per_node=2, workload="mlp11m", mbit=list(gradients.RATES), steps=None)
    narrow.set_defaults(command=gradients_command)

    more_nodes = commands.add_parser("scaling", help="step time and bytes per node against the number of nodes")
    _common(more_nodes, scaling.ROWS_TO_SCALE)
    more_nodes.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8], help="of one rank each")
    more_nodes.add_argument("--workload", choices=sorted(WORKLOADS), default="mlp1m")
    more_nodes.add_argument("--mbit", type=float, default=500.0, help="rate of each node's link")
    _effort(more_nodes, repetitions=3, periods=1, steps=None, seconds=1.0)
    more_nodes.add_argument("--stored", action="store_true", help="only write the table and the picture again")
    more_nodes.set_defaults(command=scaling_command)

    accuracy = commands.add_parser("accuracy", help="held-out accuracy against time and against bytes")
    _common(accuracy, ACCURACY_ROWS)
    _layout(accuracy, nodes=2, ranks_per_node=2, workload="digits")
    accuracy.add_argument("--mbit", type=float, default=500.0, help="link rate; 0 for no limit")
    accuracy.add_argument("--steps", type=int, default=240)
    accuracy.add_argument("--seeds", type=int, default=1, help="runs of every row, each with other batches")
    accuracy.add_argument("--every", type=int, default=16, help="steps between evaluations")
    accuracy.add_argument("--target", type=float, help="report the time to this accuracy; default: 98 %% of DDP's best")
    accuracy.add_argument(
        "--learning-rates",
        nargs="+",
        type=_rate_of_row,
        default=[],
        metavar="ROW=RATE",
        help="instead of the workload's",
    )
    accuracy.set_defaults(command=accuracy_command)

    timeline = commands.add_parser("timeline", help="when each rank computes and each link is used")
    _common(timeline, TIMELINE_ROWS)
    _layout(timeline, nodes=2, ranks_per_node=2, workload="mlp11m")
    timeline.add_argument("--mbit", type=float, default=500.0)
    timeline.add_argument("--show", type=int, default=10, help="steps to show")
    timeline.set_defaults(command=timeline_command)

    papers = commands.add_parser("papers", help="the five papers' claims on small tasks, with the papers' numbers")
    papers.add_argument("numbers", nargs="*", metavar="NUMBER", help="of papers: 000 to 004, or 'tasks'; default: all")
    papers.add_argument(
        "--seeds", type=int, default=5, help="of every setting; those that are known are not done again"
    )
    papers.add_argument("--processes", type=int, default=2, help="that train at the same time")
    papers.add_argument("--out", type=Path, default=OUT / "papers", help="the folder with the results")
    papers.add_argument("--stored", action="store_true", help="only write tables and figures of what is stored")
    papers.set_defaults(command=papers_command)

    plots = commands.add_parser("report", help="one Markdown document and the plots, from what is stored")
    plots.add_argument("--out", type=Path, default=OUT, help="the folder with the results")
    plots.set_defaults(command=report_command)

    both = commands.add_parser("tuned", help="methods against each other where both sides are tuned")
    both.add_argument("names", nargs="*", metavar="NAME", help="of comparisons; default: all")
    both.add_argument("--minutes", type=float, default=math.inf, help="begin nothing afterwards; what is known is kept")
    both.add_argument("--out", type=Path, default=OUT / "tuned", help="the folder with the results")
    both.set_defaults(command=tuned_command)

    sooner = commands.add_parser("front", help="time to all-reduce's accuracy, by method, where all sides are tuned")
    sooner.add_argument("names", nargs="*", metavar="NAME", help="of settings, such as 8-sgd-short-cnn; default: all")
    sooner.add_argument(
        "--minutes", type=float, default=math.inf, help="begin nothing afterwards; what is known is kept"
    )
    sooner.add_argument("--out", type=Path, default=OUT / "front", help="the folder with the results")
    sooner.set_defaults(command=front_command)

    language = commands.add_parser("language", help="a byte language model with every scheme, all nodes in one process")
    language_command.add_arguments(language, OUT)
    language.set_defaults(command=language_command.command)

    pages = commands.add_parser("documents", help="write what is stored in benchmarks/results into the documentation")
    pages.set_defaults(command=documents_command)

    on_gpu = commands.add_parser(
        "gpu", help="the tests that need a GPU, and every scheme's step on it", epilog=gpu.__doc__
    )
    gpu.add_arguments(on_gpu)
    on_gpu.set_defaults(command=gpu.command)

    between = commands.add_parser(
        "gpu-network", help="two nodes on one GPU over nccl, joined by a slow link", epilog=gpu_network.__doc__
    )
    _common(between, gpu_network.ROWS)
    _effort(between, repetitions=1, periods=1, steps=None, seconds=3.0)
    between.add_argument("--mbit", type=float, nargs="+", default=gpu_network.RATES, help="link rates; 0 for no limit")
    gpu_network.add_arguments(between)
    between.set_defaults(command=gpu_network_command, out=None, resume=True, session_seconds=60.0)

    starting = commands.add_parser(
        "startup", help="what a run costs before its first step, against its ranks", epilog=startup.__doc__
    )
    startup.add_arguments(starting, OUT)
    starting.set_defaults(command=startup.command)

    rows = commands.add_parser("rows", help="list the rows")
    rows.set_defaults(command=lambda _: print(*(f"{key:<24} {row.title}" for key, row in ROWS.items()), sep="\n"))
    check = commands.add_parser("check", help="say whether this machine can make slow networks")
    check.set_defaults(command=lambda _: print(why_no_namespaces() or "network namespaces work here"))
    return parser


def _end(*_: object) -> None:
    """Leave the way an exception does, so that what was made is removed; a second signal does not cut that short."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit("terminated")


def _common(parser: argparse.ArgumentParser, rows: Sequence[str] | None) -> None:
    parser.add_argument("--rows", nargs="+", choices=sorted(ROWS), default=rows and list(rows), metavar="ROW")
    parser.add_argument("--lock", help="hold this file's lock while processes run")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which one row counts as hung")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=OUT, help="the folder that gets the results (default: %(default)s)")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/hiercomm-benchmarks"))


def _layout(parser: argparse.ArgumentParser, nodes: int, ranks_per_node: int, workload: str) -> None:
    parser.add_argument("--nodes", type=int, default=nodes)
    parser.add_argument("--ranks-per-node", type=int, default=ranks_per_node)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default=workload)


def _speed(
    parser: argparse.ArgumentParser,
    nodes: int,
    ranks_per_node: int,
    workload: str,
    mbit: list[float] | None,
    steps: int | None,
) -> None:
    _layout(parser, nodes, ranks_per_node, workload)
    parser.add_argument("--mbit", type=float, nargs="+", default=mbit, help="link rates; 0 for no limit (default: 500)")
    _effort(parser, repetitions=3, periods=2 if steps else 1, steps=steps, seconds=2.0)
    parser.set_defaults(command=speed_command, preset=None)


def _effort(parser: argparse.ArgumentParser, repetitions: int, periods: int, steps: int | None, seconds: float) -> None:
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--periods", type=int, default=periods, help="periods on the clock, at the least")
    parser.add_argument("--steps", type=int, default=steps, help="least number of steps on the clock")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="without --steps: as many as take about so long, at least three"
    )
    parser.add_argument("--resume", action="store_true", help="leave out the rows in --out with enough repetitions ...")
    parser.add_argument(
        "--since", type=moment, metavar="WHEN", help="... if they were measured after this date and time (UTC)"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no session that would end later")
    parser.add_argument("--session-seconds", type=float, default=240.0, help="of measuring, after which it is stored")


def _session(
    arguments: argparse.Namespace, jobs: list[Job], rates: Sequence[float]
) -> list[tuple[float | None, dict[str, list[Record]], str]]:
    """Do the jobs at every rate; returns (rate, records, note) for each."""
    done = []
    jobs = sorted(jobs, key=lambda job: (ROWS[job.row].venv != "main", ROWS[job.row].venv))
    alone = "local" if jobs[0].device == "cpu" else "node_shared"
    jobs.insert(0, replace(jobs[0], id="burn-in", row=alone, warmup=5, steps=10, evaluate_every=0))
    with one_scheduling_group(), open_network(arguments.nodes, arguments.mtu) as network:
        for mbit in rates if network.limits_rates else [0.0]:
            with machine_lock(arguments.lock):
                network.set_rate(mbit or None)
                note = f"{network.note}; the machine was {busy_share():.0%} busy before"
                print(note, flush=True)
                results = run(network, arguments.ranks_per_node, jobs, arguments.logs)
            done.append((mbit or None, results, note))
    return done


def speed_command(arguments: argparse.Namespace) -> None:
    """Measure step times; every session measures its own bounds, and is stored when it ends."""
    if arguments.preset:
        chosen = [it for it in PRESETS[arguments.preset] if not arguments.mbit or it.mbit in arguments.mbit]
        rows = arguments.rows and tuple(arguments.rows)
        settings = [replace(it, rows=rows or it.rows) for it in chosen]
    else:
        rows = ("link", *(key for key in arguments.rows or SPEED_ROWS if key not in BOUNDS))
        layout = (arguments.workload, arguments.nodes, arguments.ranks_per_node)
        settings = [Setting(*layout, mbit or None, rows) for mbit in arguments.mbit or [500.0]]
    for setting, found in _measure(arguments, settings, lambda: report.load(arguments.out)):
        path = arguments.out / f"{report.setting_name(found[0])}.json"
        print(setting, report.table(report.load_one(path)), report.overheads(found), path, sep="\n", flush=True)


def gradients_command(arguments: argparse.Namespace) -> None:
    """Measure step times at every rate, and compare them with the longer one of computing and sending."""
    layout = (arguments.workload, arguments.nodes, arguments.ranks_per_node)
    settings = [Setting(*layout, mbit or None, tuple(arguments.rows)) for mbit in arguments.mbit]
    found = [cell for _, cells in _measure(arguments, settings, lambda: report.load(arguments.out)) for cell in cells]
    print(gradients.table(found))


def gpu_network_command(arguments: argparse.Namespace) -> None:
    """Measure what is missing of the rows at every rate, and write the page."""
    is_dry = arguments.dry_run
    if not is_dry and not torch.cuda.is_available():
        sys.exit("torch finds no GPU here. `--dry-run` trains a tiny model on the CPU.")
    arguments.out = arguments.out or (OUT / "gpu-network" if is_dry else gpu_network.RESULTS)
    settings = gpu_network.settings(arguments.mbit, tuple(arguments.rows), is_dry)
    for setting, _ in _measure(arguments, settings, lambda: report.load(arguments.out)):
        print(setting, flush=True)
    device = "The CPU, over gloo: a dry run." if is_dry else f"{torch.cuda.get_device_name()}, over nccl."
    note = why_no_namespaces()
    limits = "" if note is None else f" No limit of rate: {note}."
    text = gpu_network.page(report.load(arguments.out), f"{device} torch {torch.__version__}.{limits}")
    (arguments.out / "README.md").write_text(text)
    print(text)


def scaling_command(arguments: argparse.Namespace) -> None:
    """Measure more and more nodes of one rank; write the table, the numbers and the picture."""
    from benchmarks import plots

    rate = arguments.mbit or None
    settings = [Setting(arguments.workload, nodes, 1, rate, tuple(arguments.rows)) for nodes in arguments.nodes]

    def stored() -> list[list[Cell]]:
        found = report.load(arguments.out, _SCALING)
        return [cells for cells in found if cells[0].workload == arguments.workload and cells[0].mbit in (rate, None)]

    if not arguments.stored:
        for setting, found in _measure(arguments, settings, stored, _SCALING):
            print(setting, report.table(found), sep="\n", flush=True)
    text = scaling.page(stored())
    print(text)
    if stored():
        (arguments.out / "scaling.md").write_text(text)
        plots.scaling(stored(), arguments.out / "scaling.png")


def _measure(
    arguments: argparse.Namespace,
    settings: list[Setting],
    stored: Callable[[], list[list[Cell]]],
    prefix: str = "",
) -> Iterator[tuple[Setting, list[Cell]]]:
    """Measure the rows that are due, in sessions that are stored one by one; gives every setting when it is done."""
    if why_no_namespaces() is not None:  # then there are no rates
        settings = list(dict.fromkeys(replace(setting, mbit=None) for setting in settings))
    plan: list[Batch] = []
    for setting in settings:
        place = (setting.workload, setting.nodes, setting.ranks_per_node, setting.mbit)
        cells_there = [cell for cells in stored() for cell in cells]
        known = {
            cell.row: cell
            for cell in cells_there
            if (cell.workload, cell.nodes, cell.ranks_per_node, cell.mbit) == place
        }
        resume = arguments.resume or arguments.since is not None
        due = unknown_rows(setting.rows, known, arguments.repetitions, arguments.since) if resume else setting.rows
        steps_of = clock_steps(arguments.steps, arguments.seconds)
        effort = (arguments.repetitions, steps_of, arguments.periods, arguments.timeout, arguments.session_seconds)
        plan += batches(setting, due, known, *effort)
    left, began = TimeLeft(plan), time.monotonic()
    print(f"{sum(len(batch.rows) for batch in plan)} rows, about {left.seconds / 60:.0f} minutes", flush=True)
    found: dict[Setting, dict[str, Cell]] = {}
    for number, batch in enumerate(plan):
        setting, now = batch.setting, time.monotonic()
        if now - began + left.of(batch) > 60 * arguments.minutes:
            print("out of time; --resume goes on", flush=True)
            break
        arguments.nodes, arguments.ranks_per_node = setting.nodes, setting.ranks_per_node
        for mbit, results, note in _session(arguments, list(batch.jobs), [setting.mbit or 0.0]):
            cells_found = cells(list(batch.jobs), results, setting.nodes, setting.ranks_per_node, mbit)
            report.save(cells_found, report.about_this_run(shlex.join(sys.argv), note), arguments.out, prefix)
            found.setdefault(setting, {}).update({cell.row: cell for cell in cells_found})
        left.done(batch, time.monotonic() - now)
        print(f"{number + 1} of {len(plan)} sessions, about {left.seconds / 60:.0f} minutes left", flush=True)
        if not any(later.setting == setting for later in plan[number + 1 :]):
            yield setting, list(found[setting].values())


def accuracy_command(arguments: argparse.Namespace) -> None:
    """Train every row for the same number of steps, and compare what that took."""
    rates = dict(arguments.learning_rates)
    if unknown := set(rates) - set(arguments.rows):
        sys.exit(f"--learning-rates names {', '.join(sorted(unknown))}, which --rows does not")
    jobs = [
        Job(
            f"{key}.{seed}",
            key,
            arguments.workload,
            0,
            arguments.steps,
            arguments.every,
            seed=seed,
            timeout=arguments.timeout,
            learning_rate=rates.get(key),
        )
        for seed in range(arguments.seeds)
        for key in arguments.rows
    ]
    for mbit, results, note in _session(arguments, jobs, [arguments.mbit]):
        setting = _setting_name(arguments, mbit)
        runs: dict[str, list[list[dict[str, float]]]] = {}
        for job in jobs:
            if not results[job.id][0].error:
                runs.setdefault(job.row, []).append(learning_curve(results[job.id]))
        curves = {row: mean_curve(of_seeds) for row, of_seeds in runs.items()}
        errors = {job.row: str(results[job.id][0].error) for job in jobs if results[job.id][0].error}
        best = max((point["accuracy"] for point in curves.get("ddp", [])), default=0.0)
        target = arguments.target or 0.98 * best
        path = arguments.out / f"accuracy-{setting}.json"
        arguments.out.mkdir(parents=True, exist_ok=True)
        about = report.about_this_run(shlex.join(sys.argv), note)
        stored = {"target": target, "errors": errors, "curves": curves, "runs": runs, "learning_rates": rates, **about}
        path.write_text(json.dumps(stored, indent=1) + "\n")
        print(report.accuracy_table(curves, errors, target), report.sooner_table(runs, target), path, sep="\n")
        from benchmarks import plots

        plots.accuracy(curves, setting, path.with_suffix(".png"))


def timeline_command(arguments: argparse.Namespace) -> None:
    """Record a few steps of every row."""
    jobs = [
        replace(speed_job(key, arguments.workload, 0, 1, arguments.show, arguments.timeout), trace=True)
        for key in arguments.rows
    ]
    for mbit, results, _ in _session(arguments, jobs, [arguments.mbit]):
        from benchmarks import plots

        found = {
            job.row: [record.to_dict() for record in results[job.id]] for job in jobs if not results[job.id][0].error
        }
        name = f"timeline-{_setting_name(arguments, mbit)}.png"
        plots.timeline(found, arguments.show, mbit, arguments.out / name)


def _setting_name(arguments: argparse.Namespace, mbit: float | None) -> str:
    rate = "unlimited" if mbit is None else f"{mbit:g}mbit"
    return f"{arguments.workload}-{arguments.nodes}x{arguments.ranks_per_node}-{rate}"


def papers_command(arguments: argparse.Namespace) -> None:
    """Play what is not known yet; write the tables and figures of everything that is stored."""
    from benchmarks.papers.command import papers

    unknown = papers(arguments.numbers, arguments.seeds, arguments.processes, arguments.out, arguments.stored)
    if unknown:
        sys.exit(unknown)


def _tune(arguments: argparse.Namespace, comparisons: Mapping[str, Comparison]) -> Iterator[str]:
    """Tune and judge the named comparisons as far as unknown; yield each name after it."""
    from benchmarks.papers import tuned

    if unknown := [name for name in arguments.names if name not in comparisons]:
        sys.exit(f"unknown: {', '.join(unknown)}; choose from {', '.join(comparisons)}")
    until = time.time() + 60 * arguments.minutes
    for name in arguments.names or comparisons:
        tuned.climb(comparisons[name], arguments.out, until)
        yield name


def tuned_command(arguments: argparse.Namespace) -> None:
    """Tune and judge comparisons, and draw them."""
    from benchmarks.papers import pictures, tuned

    for name in _tune(arguments, tuned.COMPARISONS):
        comparison = tuned.COMPARISONS[name]
        pictures.ladders(comparison, tuned.load(comparison, arguments.out), arguments.out / f"{name}.png")


def front_command(arguments: argparse.Namespace) -> None:
    """Tune and judge settings, and print their tables."""
    from benchmarks.papers import front, tuned

    for name in _tune(arguments, front.SETTINGS):
        comparison = front.SETTINGS[name]
        known = tuned.load(comparison, arguments.out)
        print(f"{front.title(comparison)}\n\n{front.table(comparison, known)}\n", flush=True)


def documents_command(_: argparse.Namespace) -> None:
    """Write the pages whose generated parts have changed, and the planner's table of accuracy."""
    from benchmarks import documents

    documents.ACCURACY.write_text(documents.accuracy_table())
    for page in documents.PAGES:
        before = page.read_text()
        after = documents.written(before)
        if after != before:
            page.write_text(after)
            print(page)


def _rate_of_row(text: str) -> tuple[str, float]:
    row, _, rate = text.partition("=")
    return row, float(rate)


def report_command(arguments: argparse.Namespace) -> None:
    """Write the tables of all stored settings, and the plots over bandwidth."""
    from benchmarks import plots
    from benchmarks.papers import pictures

    path = arguments.out / "README.md"
    path.write_text(report.full_report(arguments.out))
    print(path)

    def work_and_layout(setting: list[Cell]) -> tuple[str, int, int]:
        return setting[0].workload, setting[0].nodes, setting[0].ranks_per_node

    for (workload, nodes, ranks), group in groupby(
        sorted(report.load(arguments.out), key=work_and_layout), work_and_layout
    ):
        settings = list(group)
        if len({setting[0].mbit for setting in settings}) > 1:
            plots.step_time_against_bandwidth(settings, arguments.out / f"bandwidth-{workload}-{nodes}x{ranks}.png")
        for setting in settings:
            if setting[0].mbit == 500 and len(setting) > 12:
                plots.rows_of_a_setting(setting, arguments.out / f"rows-{report.setting_name(setting[0])}.png")
    for written in pictures.fronts(arguments.out / "front"):
        print(written)
    for stored in sorted(arguments.out.glob("accuracy-*.json")):
        plots.accuracy(
            json.loads(stored.read_text())["curves"], stored.stem.removeprefix("accuracy-"), stored.with_suffix(".png")
        )


if __name__ == "__main__":
    main()
