"""What only a GPU shows: ``python -m benchmarks gpu`` runs the tests that need one, and times every scheme on it.

It takes at most ten minutes (``--seconds``; what they do not suffice for is left out, and named), no network, and
nothing but torch, lightning and this checkout. The tests also need pytest and hypothesis: without them they are left
out, and what short fits end with is compared with the CPU's all the same. Two processes share the GPU as two nodes of
one rank. So what they do to each other is part of every number: compare rows with ``none``, two processes side by side
that exchange nothing, and not with another machine's. ``--stand-in`` plays all of it on the CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
SCHEMES = ["all_reduce", "periodic", "daso", "diloco", "gossip", "steps_delay"]
OVERLAPPED = {  # short runs without warm-up, so that exchanges are in flight
    "periodic": {"sync_every": 8},
    "daso": {"sync_every": 8, "staleness": 4, "warmup": 0, "cooldown": 0},
    "diloco": {"sync_every": 8, "staleness": 3, "fragments": 2},
    "steps_delay": {"warmup_steps": 0},
}
ROWS = ["none", "ddp", *SCHEMES, *(f"{name}, staged" for name in SCHEMES)]
RANKS = 2
ROW_SECONDS = 120.0
TEST_FOLDERS = [
    "tests/gpu",
    "tests/comm",
    "tests/nodes",
    "tests/run",
    "tests/batches",
    "tests/checkpoints",
    "tests/schemes",
]
NEEDED_BY_TESTS = ["pytest", "hypothesis"]
WORKERS = 8
"""Of pytest at most, all on the one GPU."""
_ENDED = re.compile(
    r"^\[gw\d+\] \[ *\d+%\] (?P<ended_of_several>PASSED|FAILED|SKIPPED|ERROR) (?P<of_several>\S+::.*?) *$"
    r"|^(?P<one>\S+::.*?) (?P<ended>PASSED|FAILED|SKIPPED|ERROR) .*\[ *\d+%\]$"
    r"|^ERROR (?P<not_collected>[^\s:]+)(?: - .*)?$",
    re.MULTILINE,
)
"""A line of ``pytest -v``, with several workers and alone; and of its end, for a file that could not be imported."""
TOLERANCE = 1e-3
"""Of weights after twelve steps, relative to the largest: sums have other orders on a GPU."""


class Layers(L.LightningModule):
    """Linear layers on samples of its own; notes when steps end."""

    def __init__(self, width: int, depth: int, batch: int, steps: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))
        self.width, self.batch, self.steps = width, batch, steps
        self.began = 0.0
        self.seconds = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.steps // 4:  # what is compiled, found and allocated once is behind
            self.began = self._now()
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.steps - 1:
            self.seconds = (self._now() - self.began) / (self.steps - self.steps // 4)

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        samples = torch.randn(self.batch, self.width)
        return DataLoader([samples] * self.steps, batch_size=None)  # type: ignore[arg-type]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def strategy_of(row: str) -> Strategy | str:
    from lightning_hiercomm import HierarchicalStrategy, Transport
    from lightning_hiercomm.schemes import SCHEMES as BY_NAME

    if row == "none":
        return "auto"
    if row == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    name, _, staged = row.partition(", ")
    return HierarchicalStrategy(
        BY_NAME[name](**OVERLAPPED.get(name, {})),
        process_group_backend="gloo",  # nccl refuses two ranks on one GPU
        transport=Transport(inter_node="gloo" if staged else "torch"),
    )


def work(row: str, accelerator: str, width: int, depth: int, steps: int) -> dict[str, float]:
    """Train a row as one of two ranks; what this one measured."""
    module = Layers(width, depth, batch=64, steps=steps)
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=1,
        num_nodes=1 if row == "none" else RANKS,
        strategy=strategy_of(row),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module)
    measured = {"milliseconds": 1e3 * module.seconds}
    topology = getattr(trainer.strategy, "topology", None)
    if topology is not None:  # the exposed part of the exchanges
        waited = topology.meter.snapshot()
        measured["waited_milliseconds"] = 1e3 * waited["inter_exposed_seconds"] / steps
    if accelerator == "gpu":
        model = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        measured["models_of_memory"] = torch.cuda.max_memory_allocated() / model
    return measured


def python_path(*first: Path) -> str:
    """Folders that come first, and those in which this Python may have found torch: a cluster's modules name them."""
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_ranks(commands: Sequence[Sequence[str]], seconds: float, folder: Path, alone: bool = False) -> str | None:
    """Let processes run as ranks of a world, each a node; None, or what went wrong.

    Args:
        commands: One for each rank.
        seconds: For all of them.
        folder: Where they run, and log.
        alone: Whether each is a world of its own.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    both = {"PYTHONPATH": python_path(ROOT, ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "gpu"}
    world |= {"WORLD_SIZE": str(len(commands)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ranks = []
    for rank, command in enumerate(commands):
        own = {} if alone else world | {name: str(rank) for name in ("RANK", "GROUP_RANK", "NODE_RANK")}
        with open(folder / f"{rank}.log", "w") as log:
            ranks.append(
                subprocess.Popen(command, env={**os.environ, **both, **own}, cwd=folder, stdout=log, stderr=log)
            )
    deadline = time.monotonic() + seconds
    try:
        codes = [rank.wait(max(0.1, deadline - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        return f"did not end within {seconds:.0f} s"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if not any(codes):
        return None
    output = (folder / f"{codes.index(next(filter(None, codes)))}.log").read_text().strip().splitlines()
    return output[-1] if output else f"exit codes {codes}"


def time_row(
    row: str, accelerator: str, width: int, depth: int, steps: int, seconds: float = ROW_SECONDS
) -> dict[str, Any]:
    """Let two processes train a row, in as many seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "benchmarks.gpu", row, accelerator, *map(str, (width, depth, steps))]
        commands = [[*command, str(folder / f"{rank}.json")] for rank in range(RANKS)]
        error = run_ranks(commands, seconds, folder, alone=row == "none")
        if error is not None:
            return {"row": row, "error": error}
        measured = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {"row": row, **{name: max(each[name] for each in measured) for name in measured[0]}}


def compare_fits(accelerator: str, seconds: float) -> dict[str, Any]:
    """Short fits of two ranks, by name: how far their weights end from the CPU's, relative to the largest.

    They are those of ``tests/jobs/on_a_device.py``: every scheme over torch's groups and by way of the host, FSDP2,
    resumes and an exhausted memory; mixed precision and what draws random numbers is fitted, and not compared.
    """
    with tempfile.TemporaryDirectory() as folder:
        ended: dict[str, Any] = {}
        for where in (accelerator, "cpu"):
            if where in ended:
                continue
            command = [sys.executable, "-m", "jobs.on_a_device", where, str(Path(folder) / where)]
            error = run_ranks([[*command, str(rank)] for rank in range(RANKS)], seconds, Path(folder))
            if error is not None:
                return {"error": f"on the {where}: {error}"}
            ended[where] = torch.load(Path(folder) / f"{where}.0", weights_only=False)
    differences = {}
    for name, fit in ended[accelerator].items():
        # others draw random numbers on their device, and a division follows from measured speeds
        if any(what in name for what in ("mixed", "whole", "resumed", "memory is short")):
            continue
        expected = ended["cpu"][name]["state"]
        largest = max(float(value.double().abs().max()) for value in expected.values())
        away = max(float((value.double() - expected[key].double()).abs().max()) for key, value in fit["state"].items())
        differences[name] = away / largest
    return {"differences": differences, "fitted": len(ended[accelerator])}


def run_tests(marker: str, seconds: float, paths: Sequence[str] = ("tests",)) -> dict[str, Any]:
    """Run tests of a marker; how many passed, failed and were skipped, by room, and which failed."""
    if missing := [name for name in NEEDED_BY_TESTS if importlib.util.find_spec(name) is None]:
        return {"error": f"left out: they need {' and '.join(missing)} (pip install {' '.join(missing)})"}
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-m", marker, *paths]
    if importlib.util.find_spec("pytest_timeout") is None:  # whose option pyproject.toml sets, and strictly
        command += ["-c", os.devnull, f"--rootdir={ROOT}", "--import-mode=importlib"]
    command += ["--continue-on-collection-errors"]  # of modules that need more packages
    if importlib.util.find_spec("xdist") is not None:  # one process alone would take most of the ten minutes
        command += ["--numprocesses", str(min(WORKERS, os.cpu_count() or 1)), "--dist", "loadfile"]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as log:
        running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            running.wait(seconds)
            stopped = {}
        except subprocess.TimeoutExpired:
            stopped = {"stopped_after": seconds}
        finally:
            running.kill()
            running.wait()
        log.seek(0)
        output = log.read()
    counted = count_tests(output)
    if not counted["rooms"]:
        return {"error": f"pytest reported no test: {output.strip().splitlines()[-1:]}"}
    return {**counted, **stopped}


def count_tests(output: str) -> dict[str, Any]:
    """Count the results of ``pytest -v`` by folder, such as ``tests/schemes``."""
    rooms: dict[str, Counter[str]] = {}
    failed = []
    for match in _ENDED.finditer(output):
        name = match["one"] or match["of_several"] or match["not_collected"]
        ended = match["ended"] or match["ended_of_several"] or "ERROR"
        outcome = "failed" if ended == "ERROR" else ended.lower()
        rooms.setdefault("/".join(name.split("::")[0].split("/")[:2]), Counter())[outcome] += 1
        if outcome == "failed":
            failed.append(name)
    return {"rooms": {room: dict(counts) for room, counts in sorted(rooms.items())}, "failed": sorted(failed)}


def page(found: dict[str, Any]) -> str:
    """The page of a run."""
    lines = [f"# On {found['device']}", "", found["about"], ""]
    if found["is_stand_in"]:
        lines += ["**A stand-in: this ran on the CPU, to see that it runs. It says nothing about GPUs.**", ""]
    tests = found["tests"]
    if "error" in tests:
        lines += [f"Tests: {tests['error']}.", ""]
    else:
        lines += ["| tests of | passed | failed | skipped |", "|---|---|---|---|"]
        for room, counts in tests["rooms"].items():
            cells = [str(counts.get(outcome, 0)) for outcome in ("passed", "failed", "skipped")]
            lines.append(f"| {room} | {' | '.join(cells)} |")
        if "stopped_after" in tests:
            lines += ["", f"Stopped after {tests['stopped_after']:.0f} s: others have not run."]
        lines += ["", *(f"- failed: `{name}`" for name in tests["failed"]), ""]
    lines += _page_of_fits(found["fits"])
    none = next((row["milliseconds"] for row in found["rows"] if row["row"] == "none" and "milliseconds" in row), None)
    lines += ["| two processes | ms per step | against none | waited for nodes, ms per step | peak memory, in models |"]
    lines += ["|---|---|---|---|---|"]
    for row in found["rows"]:
        if "error" in row:
            lines.append(f"| {row['row']} | {row['error']} | | | |")
            continue
        ratio = f"{row['milliseconds'] / none:.2f}" if none else ""
        memory = f"{row['models_of_memory']:.2f}" if "models_of_memory" in row else ""
        waited = f"{row['waited_milliseconds']:.2f}" if "waited_milliseconds" in row else ""
        lines.append(f"| {row['row']} | {row['milliseconds']:.2f} | {ratio} | {waited} | {memory} |")
    return "\n".join(lines) + "\n"


def _page_of_fits(fits: dict[str, Any]) -> list[str]:
    if "error" in fits:
        return [f"Fits compared with the CPU's: {fits['error']}.", ""]
    apart = {name: away for name, away in fits["differences"].items() if not away <= TOLERANCE}
    count = len(fits["differences"])
    said = f"{count - len(apart)} of {count} fits end with the CPU's weights, within {TOLERANCE:g} of the largest."
    return [said, "", *(f"- apart: {name} by {away:.2g}" for name, away in apart.items()), *[""] * bool(apart)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stand-in", action="store_true", help="on the CPU, small, to see that it runs")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW")
    parser.add_argument("--tests", nargs="*", default=TEST_FOLDERS, help="where tests are looked for; none: no tests")
    parser.add_argument("--no-fits", action="store_true", help="leave out the fits that are compared with the CPU's")
    parser.add_argument("--steps", type=int, default=None, help="of a row; default: 200, or 24 with --stand-in")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all of it: fits, then rows, then tests")
    parser.add_argument("--out", type=Path, default=None, help=f"default: {RESULTS.relative_to(ROOT)}")


def command(arguments: argparse.Namespace) -> None:
    is_stand_in = arguments.stand_in
    if not is_stand_in and not torch.cuda.is_available():
        sys.exit("torch finds no GPU here. `--stand-in` plays this on the CPU.")
    out = arguments.out or (ROOT / "runs" / "gpu-stand-in" if is_stand_in else RESULTS)
    device = "the CPU" if is_stand_in else torch.cuda.get_device_name()
    cuda = "" if is_stand_in else f", CUDA {torch.version.cuda}, nccl {'.'.join(map(str, torch.cuda.nccl.version()))}"
    about = f"`python -m benchmarks gpu`, torch {torch.__version__}{cuda}, lightning {L.__version__}."
    deadline = time.monotonic() + arguments.seconds
    accelerator, width, depth, steps = ("cpu", 64, 2, 24) if is_stand_in else ("gpu", 2048, 8, 200)
    steps = arguments.steps or steps
    fits: dict[str, Any] = {"error": "left out"}
    if not arguments.no_fits:
        fits = compare_fits(accelerator, arguments.seconds / 3)
        print(fits, flush=True)
    rows = []
    for row in arguments.rows:
        if (left := deadline - time.monotonic()) > 0:
            limit = left if is_stand_in else min(left, ROW_SECONDS)  # a busy CPU may take its time
            rows.append(time_row(row, accelerator, width, depth, steps, seconds=limit))
        else:
            rows.append({"row": row, "error": "left out: the time was up"})
        print(rows[-1], flush=True)
    left = deadline - time.monotonic()
    tests = {"error": "left out: the time was up" if arguments.tests else "left out"}
    if arguments.tests and left > 0:
        tests = run_tests("not gpu" if is_stand_in else "gpu", left, arguments.tests)
    found = {"device": device, "is_stand_in": is_stand_in, "about": about, "tests": tests, "fits": fits, "rows": rows}
    out.mkdir(parents=True, exist_ok=True)
    name = device.lower().replace(" ", "-")
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / f"{name}.md").write_text(page(found))
    print(f"{out / name}.md")


if __name__ == "__main__":
    row, accelerator, width, depth, steps, answer = sys.argv[1:]
    Path(answer).write_text(json.dumps(work(row, accelerator, int(width), int(depth), int(steps))))
