"""A callback that kills ranks at random, and writes down what a run started from, and where it was killed."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl


class Kills(pl.Callback):
    """Kills one rank at a time by SIGKILL, at random moments, every second time while a checkpoint is written.

    Args:
        folder: Gets one file per start of the run, and one per kill.
        times: How often.
    """

    def __init__(self, folder: str, times: int = 5) -> None:
        self.folder, self.times = Path(folder), times
        self.kills = 0
        self.victim, self.at = -1, -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.kills = len([*self.folder.glob("kill-*")])
        trainer.strategy.barrier()  # or the victim of the next kill writes before others have counted
        draw = random.Random(f"0 {self.kills}")
        if self.kills < self.times:
            self.victim = draw.randrange(trainer.world_size)
            self.at = trainer.global_step + draw.randrange(2, 24)
        if trainer.global_rank == 0:
            start = {"step": trainer.global_step, "ranks": trainer.world_size}
            (self.folder / f"start-{len([*self.folder.glob('start-*')])}").write_text(json.dumps(start))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self._kill(trainer, is_saving=False)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._kill(trainer, is_saving=True)

    def _kill(self, trainer: pl.Trainer, is_saving: bool) -> None:
        chosen = trainer.global_rank == self.victim and trainer.global_step >= self.at
        if chosen and is_saving == (self.kills % 2 == 1):
            kill = {"rank": self.victim, "step": trainer.global_step, "saving": is_saving}
            (self.folder / f"kill-{self.kills}").write_text(json.dumps(kill))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.victim = -1
        trainer.save_checkpoint(self.folder / "end.ckpt", weights_only=True)
