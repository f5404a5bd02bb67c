"""Memory per scheme beyond DDP: ``python -m benchmarks.memory``.

Each scheme trains a model of 64 MiB on 2 nodes of 2 CPU ranks. Rank 0's peak resident memory is compared with that of
DDP: in the steps after the first ones, and in a validation and checkpoint between two synchronizations.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.report import about_this_run
from lightning_hiercomm import HierarchicalStrategy
from lightning_hiercomm.schemes import SCHEMES

LAYERS, WIDTH = 16, 1024
MODEL_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
STEPS = 21
ASYNCHRONOUS: dict[str, dict[str, Any]] = {  # short runs without warm-up, so that exchanges are in flight
    "periodic": {"sync_every": 4},
    "daso": {"warmup": 0, "cooldown": 0},
    "steps_delay": {"warmup_steps": 0},
    "diloco": {"sync_every": 4},
}
BASELINE = "ddp"
CASES: dict[str, dict[str, Any]] = {name: ASYNCHRONOUS.get(name, {}) for name in SCHEMES} | {
    "diloco, streaming": {"sync_every": 8, "fragments": 2, "staleness": 3},
    "all_reduce, gradient_as_bucket_view": {},
}
"""Arguments of the schemes; what follows a comma tells apart two cases of one scheme."""


class Model(pl.LightningModule):
    """Layers of 4 MiB; validates and writes a checkpoint in the middle of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.peaks: dict[str, int] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layers(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(STEPS * 4, WIDTH))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(4, WIDTH))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 8:
            reset_peak()
        if batch_idx == 18:  # the validation follows this one
            self.peaks["training"] = peak()
            reset_peak()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 19:
            self.peaks["validation and checkpoint"] = peak()

    def on_fit_end(self) -> None:
        if self.global_rank == 0:
            print(json.dumps(self.peaks), flush=True)


def reset_peak() -> None:
    """Forget the peak of resident memory (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Peak resident memory in bytes since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def train(case: str) -> None:
    torch.set_num_threads(1)
    if case == BASELINE:
        return fit(DDPStrategy(start_method="fork"))
    scheme = SCHEMES[case.partition(",")[0]](**CASES[case])
    views = case.endswith(", gradient_as_bucket_view")
    return fit(HierarchicalStrategy(scheme, ranks_per_node=2, start_method="fork", gradient_as_bucket_view=views))


def fit(strategy: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pl.Trainer(
            accelerator="cpu",
            devices=4,
            strategy=strategy,
            max_epochs=1,
            val_check_interval=19,
            num_sanity_val_steps=0,
            callbacks=[ModelCheckpoint(folder)],
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Model())


def measure(case: str) -> dict[str, int]:
    """Peaks of fresh processes whose allocator gives every freed tensor back to the system at once."""
    command = [sys.executable, "-m", "benchmarks.memory", "--case", case]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return json.loads(next(line for line in reversed(run.stdout.splitlines()) if line.startswith("{")))


def keep(rows: dict[str, Any], out: Path) -> None:
    """Store what was measured."""
    about = about_this_run("python -m benchmarks.memory", "2 nodes of 2 CPU ranks on one machine, gloo")
    out.mkdir(parents=True, exist_ok=True)
    stored = {"about": about, "model_bytes": MODEL_BYTES, "rows": rows}
    (out / "memory.json").write_text(json.dumps(stored, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=[BASELINE, *CASES], help="train one and print its peaks")
    parser.add_argument("--out", type=Path, help="the folder that gets the numbers as JSON")
    parser.add_argument("--only", nargs="+", choices=[*CASES], default=[*CASES], metavar="CASE")
    arguments = parser.parse_args()
    if arguments.case:
        return train(arguments.case)
    baseline = measure(BASELINE)
    print(f"Model: {MODEL_BYTES / 2**20:.0f} MiB. Peak resident memory of a rank beyond DDP's, in models:\n")
    print("| scheme | " + " | ".join(baseline) + " |\n|---|" + "--:|" * len(baseline))
    rows: dict[str, Any] = {BASELINE: baseline}
    for name in arguments.only:
        peaks = rows[name] = measure(name)
        beyond = {when: (peaks[when] - base, peaks[when] / base - 1) for when, base in baseline.items()}
        extra = [f"{extra / MODEL_BYTES:+.2f} ({share:+.1%})" for extra, share in beyond.values()]
        print(f"| `{name}` | " + " | ".join(extra) + " |", flush=True)
    if arguments.out is not None:
        keep(rows, arguments.out)


if __name__ == "__main__":
    main()
