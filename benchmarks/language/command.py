"""``python -m benchmarks language``."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.language import corpus, nodes, report, runs
from benchmarks.language.methods import METHODS
from benchmarks.language.model import SIZES


def add_arguments(parser: argparse.ArgumentParser, out: Path) -> None:
    """Add the options of the command."""
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"default: all of {', '.join(METHODS)}")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--nodes", type=int, default=8, help="all in one process (default: %(default)s)")
    parser.add_argument("--seeds", type=int, help="at the best rate of each method; default: of the size")
    parser.add_argument("--device", default="cpu", help="of all nodes, such as cuda")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then; what is unfinished continues later")
    parser.add_argument("--out", type=Path, default=out / "language", help="the folder with results and checkpoints")
    parser.add_argument("--store", action="store_true", help="only write what is known to benchmarks/results/language")
    parser.add_argument("--plan", action="store_true", help="only list what is due, and the time it would take")
    parser.add_argument("--dry-run", type=int, metavar="STEPS", help="take a few steps of a method on short sequences")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--cpu", type=int, help=argparse.SUPPRESS)


def command(arguments: argparse.Namespace) -> None:
    """Train what is due, most valuable runs first, and store every run when it ends."""
    size, out = arguments.size, arguments.out
    methods = arguments.methods or list(METHODS)
    seeds = arguments.seeds or SIZES[size].seeds
    if unknown := set(methods) - set(METHODS):
        raise SystemExit(f"there is no method {', '.join(sorted(unknown))}: choose from {', '.join(METHODS)}")
    if arguments.one:
        key = runs.Key.named(arguments.one)
        runs.run_one(size, arguments.nodes, key, out, arguments.device, arguments.cpu)
        return
    if arguments.dry_run:
        for method in arguments.methods or ["all_reduce"]:
            print(dry_run(size, method, arguments.nodes, arguments.dry_run, arguments.device))
        return
    driver = runs.Driver(size, arguments.nodes, methods, seeds, out, arguments.device, arguments.workers)
    if arguments.plan:
        print(driver.estimate(), *(key.name for key in runs.due(driver.known(), methods, seeds)), sep="\n")
        return
    if not arguments.store:
        out.mkdir(parents=True, exist_ok=True)
        (out / "corpus.txt").write_text("\n".join(corpus.load().files) + "\n")
        driver.run(time.time() + 60 * arguments.minutes)
        print(driver.estimate())
        return
    print(runs.store(size, arguments.nodes, driver.known(), runs.STORED))
    for written in report.write(runs.STORED):
        print(written)


class _Enough(Exception):
    pass


def dry_run(size: str, method: str, node_count: int, steps: int, device: str) -> str:
    """Take steps of a full-sized model, on a CPU with one sequence of 64 bytes per node; return their time."""
    full = SIZES[size]
    SIZES[size] = replace(full, batch=1, length=64, windows=(1, 1)) if device == "cpu" else full
    moments: list[float] = []

    def after_step(step: int) -> None:
        moments.append(time.perf_counter())
        if step == steps:
            raise _Enough

    try:
        nodes.train(nodes.Plan(size, method, 1e-3, 0, node_count, device), None, after_step)
    except _Enough:
        pass
    finally:
        SIZES[size] = full
    seconds = (moments[-1] - moments[0]) / (len(moments) - 1)
    return f"{size}, {method}, {node_count} nodes on {device}: {len(moments)} steps, {seconds:.3g} seconds per step"
