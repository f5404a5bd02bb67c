"""Experiments of the benchmarks' simulation, for a Trainer on real ranks."""

from __future__ import annotations

import lightning.pytorch as pl

from benchmarks.simulate.simulation import schedule
from benchmarks.simulate.tasks import Batches


class Drawn:
    """Batches in their order; no DataLoader, of which Lightning gives every rank a part, and no list of several."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


class Simulated(pl.LightningModule):
    """What a replica of an experiment trains, for a Trainer."""

    def __init__(self, made):
        super().__init__()
        self.automatic_optimization = len(made.task.turns) == 1
        self.made = made
        self.model = made.task.model(made.seed)

    def train_dataloader(self):
        batches = Batches(self.made.task, self.trainer.global_rank, self.made.batch, self.made.seed)
        return Drawn([batches.draw() for _ in range(self.made.steps)])

    def on_train_batch_start(self, batch, batch_idx):
        for optimizer in self.trainer.optimizers:
            optimizer.param_groups[0]["lr"] = self.made.learning_rate * schedule(batch_idx, self.made.steps)

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return self.made.task.turns[0].loss(self.model, batch)
        for turn, optimizer in zip(self.made.task.turns, self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(turn.loss(self.model, batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return None

    def configure_optimizers(self):
        task = self.made.task
        make = self.made.optimizer or task.optimizer
        parts = [self.model.get_submodule(turn.part) for turn in task.turns]
        return [make(part.parameters(), self.made.learning_rate) for part in parts]
