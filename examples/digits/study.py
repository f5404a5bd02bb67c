"""What the studies in this folder have in common: train the digits CNN, and test the agreed model."""

import logging
import statistics
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


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the standard deviation where there is more than one."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
