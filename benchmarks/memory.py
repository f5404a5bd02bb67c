"""Memory per scheme beyond DDP: ``python -m benchmarks.memory``; beyond FSDP2 on one node, with ``--sharded``.

Each scheme trains a model of 64 MiB on 2 nodes of 2 CPU ranks. Rank 0's peak resident memory is compared with that of
DDP, or with that of ``ModelParallelStrategy`` on one node of 2 ranks: in the steps after the first ones, and in a
validation and checkpoint between two synchronizations. torchft's methods train the same model in a loop of their own,
and are compared with that loop without them, in the same environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from benchmarks.job import Job, Recorder, World
from benchmarks.peers import PeerMissing, interpreter
from benchmarks.report import about_this_run
from lightning_hiercomm import HierarchicalModelParallelStrategy, HierarchicalStrategy
from lightning_hiercomm.schemes import SCHEMES

LAYERS, WIDTH = 16, 1024
MODEL_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
STEPS = 21
ASYNCHRONOUS: dict[str, dict[str, Any]] = {  # short runs without warm-up, so that exchanges are in flight
    "periodic": {"sync_every": 4},
    "daso": {"warmup_epochs": 0, "cooldown_epochs": 0},
    "steps_delay": {"warmup_steps": 0},
    "diloco": {"sync_every": 4},
}
SHARDED: dict[str, dict[str, Any]] = {"daso": {"exchange": "sharded"}}
PART = MODEL_BYTES // 2
ON_THEIR_WAY = 3 * 4 * 2**20  # buckets
OWN_PART = {
    "all_reduce": (ON_THEIR_WAY, 0),
    "periodic": (ON_THEIR_WAY, PART),
    "daso": (PART, PART),  # in flight during training
    "diloco": (2 * PART + ON_THEIR_WAY, 3 * PART),  # outer parameters and momentum
    "diloco, streaming": (2 * PART + PART // 2, 3 * PART + PART // 2),  # and a fragment on its way
    "gossip": (2 * PART, PART),  # what is sent, and what is received
}
"""Bytes that a rank of a sharded node needs for a scheme in training, and for a look at the averaged model: for that it
keeps its own part aside."""
BASELINES = {False: "ddp", True: "model_parallel"}
CASES: dict[str, dict[str, Any]] = {name: ASYNCHRONOUS.get(name, {}) for name in SCHEMES} | {
    "diloco, streaming": {"sync_every": 8, "fragments": 2, "staleness": 3}
}
"""Arguments of the schemes; what follows a comma tells apart two cases of one scheme."""

PEERS = {"local_sgd": 4, "diloco": 4, "streaming": 8}
"""torchft's kinds, see :mod:`benchmarks.contenders.torchft_local_sgd`, and their periods."""


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

    def configure_model(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, ModelParallelStrategy) and not isinstance(next(self.parameters()), DTensor):
            for layer in self.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

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


def train(case: str, sharded: bool) -> None:
    torch.set_num_threads(1)
    if not sharded:
        if case == BASELINES[False]:
            return fit(DDPStrategy(start_method="fork"), 4)
        scheme = SCHEMES[case.partition(",")[0]](**CASES[case])
        return fit(HierarchicalStrategy(scheme, ranks_per_node=2, start_method="fork"), 4)
    ranks = 2 if case == BASELINES[True] else 4
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(find_free_network_port()))
    torch.multiprocessing.start_processes(_train_sharded, args=(case, ranks), nprocs=ranks, start_method="fork")


def _train_sharded(rank: int, case: str, ranks: int) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    if case == BASELINES[True]:
        return fit(ModelParallelStrategy(ranks, 1), ranks)
    arguments = {**CASES[case], **SHARDED.get(case, {})}
    fit(HierarchicalModelParallelStrategy(SCHEMES[case.partition(",")[0]](**arguments), ranks_per_node=2), ranks)


def fit(strategy: Any, devices: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pl.Trainer(
            accelerator="cpu",
            devices=devices,
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


class PeakRecorder(Recorder):
    """A recorder that looks at memory instead of the clock."""

    peak = 0

    def step_done(self) -> bool:
        is_last = super().step_done()
        if len(self.record.step_ends) == 9:
            reset_peak()
        if len(self.record.step_ends) == 18:
            self.peak = peak()
        return is_last


def train_peer(kind: str) -> None:
    """Train as a rank under torchrun: with torchft's ``kind``, or ``"local"`` without it."""
    from benchmarks.contenders import plain, torchft_local_sgd

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    recorder = PeakRecorder(Job(kind, "local", "linear16m", 0, STEPS), World.from_environment(), "lo")
    if kind == "local":
        plain.train(recorder, {"kind": "local"})
    else:
        torchft_local_sgd.train(recorder, {"kind": kind, "sync_every": PEERS[kind]})
    if recorder.world.rank == 0:
        print(json.dumps({"training": recorder.peak}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # libraries differ in how they leave


def measure(*command: str) -> dict[str, int]:
    """Peaks of fresh processes whose allocator gives every freed tensor back to the system at once."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return json.loads(next(line for line in reversed(run.stdout.splitlines()) if line.startswith("{")))


def measure_case(case: str, sharded: bool) -> dict[str, int]:
    return measure(sys.executable, "-m", "benchmarks.memory", "--case", case, *["--sharded"] * sharded)


def measure_peer(kind: str) -> dict[str, int]:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    return measure(interpreter("torchft"), *torchrun, "-m", "benchmarks.memory", "--peer", kind)


def measure_sharded(cases: list[str], out: Path | None) -> None:
    """Print, and keep, how much more than ``ModelParallelStrategy`` on one node a rank takes, and why."""
    baseline = measure_case(BASELINES[True], True)
    whens = list(baseline)
    print(
        f"Model: {MODEL_BYTES / 2**20:.0f} MiB, half of it on each rank of a node; `ModelParallelStrategy` on one node:"
    )
    print(", ".join(f"{when} {baseline[when] / 2**20:.0f} MiB" for when in whens) + ". Beyond that, in MiB:\n")
    print("| scheme | " + " | ".join(f"{when} | the scheme's own part | rest, of all" for when in whens) + " |")
    print("|---|" + "--:|--:|--:|" * len(whens))
    rows: dict[str, Any] = {BASELINES[True]: {when: {"bytes": baseline[when]} for when in whens}}
    for name in cases:
        peaks, row, cells = measure_case(name, True), {}, []
        for when in whens:
            own = OWN_PART[name][when != "training"]
            beyond = peaks[when] - baseline[when]
            rest = (beyond - own) / (baseline[when] + own)
            row[when] = {"bytes": peaks[when], "own_part": own, "rest": round(rest, 4)}
            cells.append(f"{beyond / 2**20:+.0f} | {own / 2**20:.0f} | {rest:+.1%}")
        rows[name] = row
        print(f"| `{name}` | " + " | ".join(cells) + " |", flush=True)
    keep("memory-sharded.json", "--sharded", rows, out)


def keep(name: str, flags: str, rows: dict[str, Any], out: Path | None) -> None:
    """Store what was measured, if there is a folder for it."""
    if out is None:
        return
    command = f"python -m benchmarks.memory {flags}".rstrip()
    about = about_this_run(command, "2 nodes of 2 CPU ranks on one machine, gloo")
    out.mkdir(parents=True, exist_ok=True)
    stored = {"about": about, "model_bytes": MODEL_BYTES, "rows": rows}
    (out / name).write_text(json.dumps(stored, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sharded", action="store_true", help="shard the model over the ranks of a node with FSDP2")
    parser.add_argument("--case", choices=[*BASELINES.values(), *CASES], help="train one and print its peaks")
    parser.add_argument(
        "--peer", choices=["local", *PEERS], help="train by torchft, under torchrun, and print its peak"
    )
    parser.add_argument("--out", type=Path, help="the folder that gets the numbers as JSON")
    parser.add_argument("--only", nargs="+", choices=[*CASES, *PEERS], default=[*CASES, *PEERS], metavar="CASE")
    arguments = parser.parse_args()
    sharded: bool = arguments.sharded
    if arguments.case:
        return train(arguments.case, sharded)
    if arguments.peer:
        return train_peer(arguments.peer)
    if sharded:
        return measure_sharded([name for name in OWN_PART if name in arguments.only], arguments.out)
    baseline = measure_case(BASELINES[False], False)
    print(f"Model: {MODEL_BYTES / 2**20:.0f} MiB. Peak resident memory of a rank beyond DDP's, in models:\n")
    print("| scheme | " + " | ".join(baseline) + " |\n|---|" + "--:|" * len(baseline))
    rows: dict[str, Any] = {BASELINES[False]: baseline}
    for name in [name for name in CASES if name in arguments.only]:
        peaks = rows[name] = measure_case(name, False)
        beyond = {when: (peaks[when] - base, peaks[when] / base - 1) for when, base in baseline.items()}
        extra = [f"{extra / MODEL_BYTES:+.2f} ({share:+.1%})" for extra, share in beyond.values()]
        print(f"| `{name}` | " + " | ".join(extra) + " |", flush=True)
    keep("memory.json", "", rows, arguments.out)
    peers = [kind for kind in PEERS if kind in arguments.only]
    if peers:
        try:
            alone = measure_peer("local")["training"]
        except PeerMissing as missing:
            print(f"torchft is not to be had: {missing}")
            return
        for kind in peers:
            extra_model = (measure_peer(kind)["training"] - alone) / MODEL_BYTES
            print(f"| torchft {kind} | {extra_model:+.2f} | |", flush=True)


if __name__ == "__main__":
    main()
