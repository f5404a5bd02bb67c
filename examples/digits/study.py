"""What the studies in this folder have in common: train the digits CNN, and test the agreed model."""

import logging
import statistics
import sys
import time
import warnings
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from data import DigitsDataModule
from lightning.pytorch.callbacks import Callback
from torch.utils.data import ConcatDataset, DataLoader

from lightning_hiercomm import HierarchicalStrategy


def be_quiet() -> None:
    """One thread a rank, for all share this machine's cores, and no more output than the study's own."""
    torch.set_num_threads(1)
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def train_and_test(
    model: pl.LightningModule,
    data: DigitsDataModule,
    strategy: HierarchicalStrategy,
    *,
    ranks: int,
    epochs: int,
    callbacks: Sequence[Callback] = (),
    all_held_out: bool = False,
) -> tuple[float, dict[str, float]]:
    """Train on CPU ranks of this machine.

    Args:
        model: Made after ``seed_everything``.
        data: The digits.
        strategy: Starts its ranks with ``start_method="fork"``.
        ranks: How many.
        epochs: How long.
        callbacks: What else takes part.
        all_held_out: Test on the validation scans as well.

    Returns:
        The share of test scans that the agreed model gets right, and what rank zero logged.
    """
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    trainer.fit(model, data)
    data.setup("test")
    scans = ConcatDataset([data.val, data.test]) if all_held_out else data.test
    model.eval()
    with torch.no_grad():
        hits = [(model(images).argmax(1) == digits).float() for images, digits in DataLoader(scans, 256)]
    return torch.cat(hits).mean().item(), {name: value.item() for name, value in trainer.callback_metrics.items()}


def mean_and_spread(values: Sequence[float], digits: int = 2) -> tuple[str, str]:
    """The mean, and the standard deviation between seeds, as text; of a single seed nothing is known of it."""
    spread = f"± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "one seed"
    return f"{statistics.mean(values):.{digits}f}", spread


class Progress:
    """Says on the terminal, beside the table, which run has begun and how long the rest will take.

    Args:
        runs: How many there will be.
    """

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._done = -1
        self._began = time.monotonic()

    def __call__(self, what: str) -> None:
        """The next run begins."""
        self._done += 1
        rest = ""
        if self._done:
            seconds = (time.monotonic() - self._began) / self._done * (self._runs - self._done)
            rest = f", about {seconds / 60:.0f} min left" if seconds > 90 else f", about {seconds:.0f} s left"
        print(f"run {self._done + 1} of {self._runs}: {what}{rest}", file=sys.stderr, flush=True)
