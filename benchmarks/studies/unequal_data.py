"""Test accuracy on digits of nodes with 100, 70 and 31 batches, against one process with all samples; paired by seed.

With ``--split sorted`` nodes have other classes; with ``--batches 67 67 67`` they have equal data, to see what a scheme
itself costs. No learning rate is tuned.

    python -m benchmarks.studies.unequal_data --seeds 10 --split random
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.papers.paired import difference
from lightning_hiercomm import AllReduce, DiLoCo, Health, HierarchicalStrategy, PeriodicAveraging

BATCH, EPOCHS = 7, 6
Samples = tuple[Tensor, Tensor]
RUNS = {
    "AllReduce": AllReduce(),
    "PeriodicAveraging(10)": PeriodicAveraging(10),
    "PeriodicAveraging(None)": PeriodicAveraging(None),
    "DiLoCo(10)": DiLoCo(10),
}


class Digits(pl.LightningModule):
    """A small network on some of the digits."""

    def __init__(self, train: Samples, test: Samples, batch: int, seed: int, lr: float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.train_data, self.test_data, self.batch, self.seed, self.lr = train, test, batch, seed, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(self.seed)
        return DataLoader(TensorDataset(*self.train_data), self.batch, shuffle=True, generator=generator)

    @torch.no_grad()
    def accuracy(self) -> float:
        images, labels = self.test_data
        return 100.0 * (self.net(images).argmax(1) == labels).float().mean().item()


def divided(seed: int, split: str, batches: list[int]) -> tuple[list[Samples], Samples]:
    """Return the samples of every node, and the test samples."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    count = sum(batches) * BATCH
    train, test = order[:count], order[count:]
    if split == "sorted":
        train = train[y[train].argsort(stable=True)]
    parts = train.split([own * BATCH for own in batches])
    return [(x[part], y[part]) for part in parts], (x[test], y[test])


def quiet(**arguments: Any) -> pl.Trainer:
    flags = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(accelerator="cpu", max_epochs=EPOCHS, use_distributed_sampler=False, **flags, **arguments)


def of_rank(rank: int, chosen: argparse.Namespace, folder: Path) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_hiercomm").setLevel(logging.ERROR)
    found: dict[str, list[float]] = {}
    for seed in range(chosen.seeds):
        nodes, test = divided(seed, chosen.split, chosen.batches)
        if rank == 0:
            pooled = tuple(torch.cat(each) for each in zip(*nodes, strict=True))
            module = Digits(pooled, test, len(nodes) * BATCH, seed, chosen.lr)
            _alone(module)
            found.setdefault("pooled", []).append(module.accuracy())
        for name in chosen.only:
            module = Digits(nodes[rank], test, BATCH, seed, chosen.lr)
            strategy = HierarchicalStrategy(
                RUNS[name], ranks_per_node=1, unequal_data=True, health=Health(hang_timeout=60.0)
            )
            quiet(devices=len(nodes), strategy=strategy).fit(module)
            found.setdefault(name, []).append(module.accuracy())
    if rank == 0:
        torch.save(found, folder / "found.pt")


def _alone(module: Digits) -> None:
    """Train without a Trainer, which would read that there are three ranks from the environment."""
    optimizer = module.configure_optimizers()
    loader = module.train_dataloader()
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--split", choices=("random", "sorted"), default="random")
    parser.add_argument("--batches", type=int, nargs="+", default=[100, 70, 31])
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    chosen = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(of_rank, (chosen, Path(folder)), len(chosen.batches), start_method="fork")
        found = torch.load(Path(folder) / "found.pt")
    pooled = found.pop("pooled")
    print(f"pooled: {statistics.mean(pooled):.2f} % ({vars(chosen)}, {EPOCHS} epochs)")
    by_seed = dict(enumerate(pooled))
    for name, accuracies in found.items():
        apart = difference(dict(enumerate(accuracies)), by_seed)
        print(f"{name}: {statistics.mean(accuracies):.2f} %, against pooled {apart.text(2)}")


if __name__ == "__main__":
    main()
