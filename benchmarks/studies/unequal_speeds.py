"""Seconds to an accuracy on digits of four nodes with speeds 4 : 2 : 1 : 1: equal batches against batches by speed.

Each node is one rank with a quota of CPU time. Rank 0 times a run from its first epoch to the ends of its epochs, and
measures the accuracy of the averaged model on the test samples there. Seeds are paired, and the order alternates.

    python -m benchmarks.studies.unequal_speeds --seeds 0 1 2 --store runs.json
    python -m benchmarks.studies.unequal_speeds --seeds 3 4 5 --store runs.json  # reports all six
"""

from __future__ import annotations

import argparse
import json
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
from lightning_hiercomm import AllReduce, Health, HeterogeneousBatches, HierarchicalStrategy, PeriodicAveraging

SHARES = (0.6, 0.3, 0.15, 0.15)
"""CPU seconds per second of the four nodes."""

TRAIN = 1536


class Digits(pl.LightningModule):
    """A small CNN on the digits, whose samples cost far more than a step as such.

    ``curve`` has the seconds and the accuracy at the end of every epoch.
    """

    def __init__(self, seed: int, chosen: argparse.Namespace, share: float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        width = chosen.width
        first, second = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        pooled = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10)]
        self.net = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), first, nn.ReLU(), second, nn.ReLU(), *pooled)
        self.batch, self.lr, self.share = chosen.global_batch // len(SHARES), chosen.lr, share
        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        self.train_data = TensorDataset(x[order[:TRAIN]], y[order[:TRAIN]])
        self.test_data = x[order[TRAIN:]], y[order[TRAIN:]]
        self.began = 0.0
        self.curve: list[tuple[float, float]] = []
        self.samples = 0

    def on_train_start(self) -> None:  # without the quota, which would lengthen the start of the processes
        self.quota = CpuQuota(self.share) if self.share < 1 else None

    def on_train_end(self) -> None:
        if self.quota is not None:
            self.quota.close()

    def on_train_epoch_start(self) -> None:
        self.began = self.began or time.perf_counter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.samples += len(batch[0])
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
    flags = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    names = ("equal", "by speed")
    found: dict[str, dict[int, Any]] = {name: {} for name in names}
    for seed in (None, *chosen.seeds):  # the first run imports what is imported late
        for name in names if seed is None or seed % 2 else reversed(names):
            os.environ["PL_GLOBAL_SEED"] = str(seed or 0)
            module = Digits(seed or 0, chosen, 1.0 if seed is None else SHARES[rank])
            strategy = HierarchicalStrategy(
                PeriodicAveraging(chosen.sync_every) if chosen.sync_every else AllReduce(),
                ranks_per_node=1,
                batches=HeterogeneousBatches(chosen.global_batch) if name == "by speed" else None,
                health=Health(hang_timeout=60.0),
            )
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=len(SHARES),
                strategy=strategy,
                max_epochs=chosen.epochs if seed is not None else 1,
                **flags,
            )
            trainer.fit(module)
            if seed is not None:
                found[name][seed] = {"curve": module.curve, "samples": module.samples}
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


def first(curve: list[tuple[float, float]], accuracy: float) -> float:
    """Return the seconds until an accuracy was first reached; those of the whole run if it was not."""
    return next((seconds for seconds, reached in curve if reached >= accuracy), curve[-1][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--store", type=Path, help="file with the runs of earlier calls, to which these are added")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--sync-every", type=int, default=12, help="of PeriodicAveraging; 0 for AllReduce")
    chosen = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(of_rank, (chosen, Path(folder)), len(SHARES), start_method="fork")
        ranks = [json.loads((Path(folder) / f"found-{rank}.json").read_text()) for rank in range(len(SHARES))]
    if chosen.store is not None:
        before = json.loads(chosen.store.read_text()) if chosen.store.exists() else [{} for _ in ranks]
        ranks = [
            {name: {**old.get(name, {}), **new[name]} for name in new} for old, new in zip(before, ranks, strict=True)
        ]
        chosen.store.write_text(json.dumps(ranks))
    report(chosen, ranks)


def report(chosen: argparse.Namespace, ranks: list[Any]) -> None:
    print(vars(chosen))
    for name, runs in ranks[0].items():
        samples = [round(statistics.mean(run["samples"] for run in rank[name].values())) for rank in ranks]
        seconds, accuracy = (statistics.mean(run["curve"][-1][part] for run in runs.values()) for part in (0, 1))
        print(f"{name}: {seconds:.2f} s, accuracy at the end {accuracy:.2f} %, samples of the nodes {samples}")
    print(table(ranks))


def table(ranks: list[Any]) -> str:
    """Return a table of batches by speed against equal ones, from what the ranks have stored."""
    equal, divided = (
        {int(seed): run["curve"] for seed, run in ranks[0][name].items()} for name in ("equal", "by speed")
    )
    ends = {seed: curve[-1] for seed, curve in equal.items()}
    sooner = {seed: first(divided[seed], accuracy) for seed, (_, accuracy) in ends.items()}
    missed = sum(max(reached for _, reached in divided[seed]) < accuracy for seed, (_, accuracy) in ends.items())
    ratios = {
        "times as fast, at equal samples": {seed: ends[seed][0] / divided[seed][-1][0] for seed in ends},
        f"times as soon at the accuracy of equal batches ({missed} of {len(ends)} seeds ended below it; their"
        " ends count, so this is too good)": {seed: first(equal[seed], ends[seed][1]) / sooner[seed] for seed in ends},
    }
    rows = [(what, difference(of_seeds, dict.fromkeys(ends, 0.0)), "") for what, of_seeds in ratios.items()]
    accuracy = difference(*({seed: curve[-1][1] for seed, curve in curves.items()} for curves in (divided, equal)))
    rows.append(("points of accuracy at the end", accuracy, "+"))
    lines = [
        f"| {what} | {found.mean:{sign}.2f}, from {found.low:{sign}.2f} to {found.high:{sign}.2f} |"
        for what, found, sign in rows
    ]
    return "\n".join(["| batches by speed, against equal ones | mean and 95 % interval |", "|---|---|", *lines])


if __name__ == "__main__":
    main()
