"""A callback that kills ranks at random, and remembers what a run resumed from."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import lightning.pytorch as pl


class Kills(pl.Callback):
    """Kills one rank at a time by SIGKILL, at random moments, some of them in the middle of writing a checkpoint.

    Args:
        folder: Gets one file per kill, and a line per start of the run: the step it starts from.
        times: How often.
        seed: Of ranks and moments.
        within: Steps after a start within which the kill comes.
    """

    def __init__(self, folder: str, times: int = 5, seed: int = 0, within: int = 30) -> None:
        self.folder = Path(folder)
        self.times, self.seed, self.within = times, seed, within
        self.victim, self.at = -1, -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        kills = len([*self.folder.glob("kill-*")])
        trainer.strategy.barrier()  # or the victim of the next kill writes before others have counted
        draw = random.Random(f"{self.seed} {kills}")
        if kills < self.times:
            self.victim = draw.randrange(trainer.world_size)
            self.at = trainer.global_step + draw.randrange(2, self.within)
        if trainer.global_rank == 0:
            with (self.folder / "starts").open("a") as starts:
                starts.write(f"{trainer.global_step} {trainer.world_size}\n")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_rank == self.victim and trainer.global_step >= self.at:
            kills = len([*self.folder.glob("kill-*")])
            (self.folder / f"kill-{kills}").write_text(f"rank {self.victim} at step {trainer.global_step}")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.folder / "end.ckpt", weights_only=True)
