"""A module with all that a resume has to restore, for tests of sidecars."""

from __future__ import annotations

from functools import partial

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiercomm import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, StepsDelay

STEPS = 6  # per epoch
TWO_NODES: dict = {"devices": 2, "limit_train_batches": STEPS}  # of one rank, for what four ranks show no better


class Net(pl.LightningModule):
    """Random numbers (dropout), BatchNorm, momentum, and a schedule; ``report`` is a weight after each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 2)
        )
        self.report: list[list[float]] = []

    def on_fit_start(self) -> None:
        torch.manual_seed(self.global_rank)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def on_train_batch_end(self, *_: object) -> None:
        self.report.append(self.layers[0].weight[0].tolist())

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(STEPS * 4 * 2, 5, generator=generator)
        y = torch.randint(2, (len(x),), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=2)


def schemes():
    return {
        "all_reduce": AllReduce(),
        "periodic": PeriodicAveraging(4, at_epoch_end=False),
        "daso": DASO(sync_every=4, staleness=2, warmup=0, cooldown=0),
        "gossip": Gossip(fragments=2),
        "gossip_overlap": Gossip(fragments=2, overlap=True),
        "steps_delay": StepsDelay(delay=3, warmup_steps=3),
        "all_reduce_int8": AllReduce(),
        "diloco_int4": DiLoCo(4, staleness=3),  # in flight after 6 steps
        "streaming_int8": DiLoCo(6, AdamW, fragments=2, staleness=2),
    }


AdamW = partial(torch.optim.AdamW, lr=0.02)
