"""Seconds to an accuracy on digits of four nodes with speeds 4 : 2 : 1 : 1: equal steps against each node's own pace.

Each node is one rank with a quota of CPU time. Rank 0 times a run from its first epoch to the ends of its epochs, and
measures the accuracy of the averaged model on the test samples there. Seeds are paired, and the order alternates.

    python -m benchmarks.studies.own_pace --seeds 8
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.papers.paired import difference
from benchmarks.quota import CpuQuota
from lightning_hiercomm import EverySeconds, Health, HierarchicalStrategy, PeriodicAveraging

SHARES = (0.6, 0.3, 0.15, 0.15)
"""CPU seconds per second of the four nodes."""

TRAIN = 1536


class Digits(pl.LightningModule):
    """A small network on the digits; ``curve`` has the seconds and the accuracy at the end of every epoch."""

    def __init__(self, seed: int, batch: int, lr: float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.batch, self.lr = batch, lr
        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        self.train_data = TensorDataset(x[order[:TRAIN]], y[order[:TRAIN]])
        self.test_data = x[order[TRAIN:]], y[order[TRAIN:]]
        self.began = 0.0
        self.curve: list[tuple[float, float]] = []
        self.steps = 0

    def on_train_start(self) -> None:  # without the quota, which would lengthen the start of the processes
        self.quota = CpuQuota(SHARES[self.global_rank])

    def on_train_end(self) -> None:
        self.quota.close()

    def on_train_epoch_start(self) -> None:
        self.began = self.began or time.perf_counter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:  # every rank holds the averaged model
        seconds = time.perf_counter() - self.began
        images, labels = self.test_data
        self.curve.append((seconds, 100.0 * (self.net(images).argmax(1) == labels).float().mean().item()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_data, self.batch, shuffle=True)


def of_rank(rank: int, chosen: argparse.Namespace, folder: Path) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_hiercomm").setLevel(logging.ERROR)
    runs = {"equal": PeriodicAveraging(chosen.sync_every), "own": PeriodicAveraging(EverySeconds(chosen.seconds))}
    flags = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    found: dict[str, list[Any]] = {name: [] for name in runs}
    for seed in range(chosen.seeds):
        for name in [*runs] if seed % 2 else [*reversed(runs)]:
            os.environ["PL_GLOBAL_SEED"] = str(seed)
            module = Digits(seed, chosen.batch, chosen.lr)
            strategy = HierarchicalStrategy(runs[name], ranks_per_node=1, health=Health(hang_timeout=60.0))
            trainer = pl.Trainer(
                accelerator="cpu", devices=len(SHARES), strategy=strategy, max_epochs=chosen.epochs, **flags
            )
            trainer.fit(module)
            found[name].append((module.curve, module.steps))
    torch.save(found, folder / f"found-{rank}.pt")


def first(curve: list[tuple[float, float]], accuracy: float) -> float:
    """Return the seconds until an accuracy was first reached; those of the whole run if it was not."""
    return next((seconds for seconds, reached in curve if reached >= accuracy), curve[-1][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--sync-every", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.15)
    chosen = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(of_rank, (chosen, Path(folder)), len(SHARES), start_method="fork")
        ranks = [torch.load(Path(folder) / f"found-{rank}.pt") for rank in range(len(SHARES))]
    report(chosen, ranks)


def report(chosen: argparse.Namespace, ranks: list[Any]) -> None:
    print(vars(chosen))
    runs = {name: [curve for curve, _ in ranks[0][name]] for name in ("equal", "own")}
    for name in runs:
        steps = [statistics.mean(steps for _, steps in rank[name]) for rank in ranks]
        seconds, accuracy = (statistics.mean(curve[-1][part] for curve in runs[name]) for part in (0, 1))
        print(f"{name}: {seconds:.2f} s, accuracy at the end {accuracy:.2f} %, steps of the nodes {steps}")
    seeds = range(chosen.seeds)
    ends = {name: {seed: runs[name][seed][-1] for seed in seeds} for name in runs}
    targets = {seed: ends["equal"][seed][1] for seed in seeds}
    apart = difference(*({seed: ends[name][seed][1] for seed in seeds} for name in ("own", "equal")))
    print(f"accuracy, own pace minus equal steps: {apart.text(2)}")
    whole = {seed: ends["equal"][seed][0] / ends["own"][seed][0] for seed in seeds}
    to_end = {seed: ends["equal"][seed][0] / first(runs["own"][seed], targets[seed]) for seed in seeds}
    to_first = {
        seed: first(runs["equal"][seed], targets[seed]) / first(runs["own"][seed], targets[seed]) for seed in seeds
    }
    missed = sum(max(reached for _, reached in runs["own"][seed]) < targets[seed] for seed in seeds)
    none = dict.fromkeys(seeds, 0.0)
    print(f"times as fast, equal samples: {difference(whole, none).text(2)}")
    print(f"times as soon at the accuracy, against the end of equal steps: {difference(to_end, none).text(2)}")
    print(f"times as soon at the accuracy, against its first epoch there: {difference(to_first, none).text(2)}")
    print(f"seeds that never reached it: {missed}")


if __name__ == "__main__":
    main()
