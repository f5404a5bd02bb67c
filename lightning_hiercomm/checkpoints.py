"""What goes into a checkpoint besides the agreed model, and what comes back out of it."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from lightning_hiercomm import _lightning
from lightning_hiercomm.batches import HeterogeneousBatches
from lightning_hiercomm.companion import (
    companion_path,
    companion_state,
    load_companion,
    restore_companion,
    set_random_state,
)
from lightning_hiercomm.replica import Replica
from lightning_hiercomm.schemes.averaging import Average
from lightning_hiercomm.training_run import TrainingRun

_KEY = "hiercomm"


class Checkpoints:
    """Adds the schemes' schedules to a plain Lightning checkpoint, writes companions beside it, and restores from both.

    Loading has two halves: :meth:`take` when the file is read, :meth:`restore` when there are schemes to restore.

    Args:
        with_replicas: Whether every rank also stores what it alone knows in a companion, for a bit-exact resume.
    """

    def __init__(self, with_replicas: bool = False) -> None:
        self.with_replicas = with_replicas
        self._loaded: Mapping[str, Any] = {}
        self._loaded_from: Any = None
        self._random_state: Mapping[str, Any] | None = None

    def add_to(self, checkpoint: dict[str, Any], run: TrainingRun, batches: HeterogeneousBatches | None) -> None:
        """Add the state that all ranks share."""
        state: dict[str, Any] = {"schemes": run.schedules()}
        if batches is not None:
            state["batches"] = batches.state_dict()
        checkpoint[_KEY] = state

    def average_foreign_weights(self, checkpoint: dict[str, Any], run: TrainingRun) -> None:
        """Average what ``WeightAveraging`` put in the place of the agreed model, each node its own; collective."""
        if _lightning.holds_averaged_weights(checkpoint):
            state_dict = {name: copy.deepcopy(value) for name, value in checkpoint["state_dict"].items()}
            floats = [v for v in state_dict.values() if isinstance(v, Tensor) and v.is_floating_point()]
            Average(Replica((), floats, run.replicas.bucket_bytes), run.topology)()
            checkpoint["state_dict"] = state_dict

    def announce_companions(self, checkpoint: dict[str, Any], share: Callable[[str], str]) -> None:
        """Give the checkpoint and its companions an identity, after :meth:`add_to`; collective.

        Args:
            checkpoint: Not yet written.
            share: Broadcasts rank 0's word.
        """
        checkpoint[_KEY]["identity"] = share(secrets.token_hex(8))

    def save_companion(
        self,
        checkpoint: Mapping[str, Any],
        run: TrainingRun,
        mid_epoch: bool,
        io: CheckpointIO,
        filepath: Any,
        storage_options: Any | None = None,
    ) -> None:
        """Write what this rank alone knows beside the checkpoint, after :meth:`announce_companions`; collective.

        Args:
            checkpoint: As it was written.
            run: What to save.
            mid_epoch: Whether more batches of the epoch follow.
            io: Writes the file.
            filepath: Of the checkpoint.
            storage_options: For ``io``.
        """
        for scheme in run.schemes:
            scheme.settle()
        state = companion_state(
            checkpoint[_KEY]["identity"],
            run.topology,
            run.module,
            run.optimizers,
            run.schemes,
            run.agreed_model.own_values(),
            mid_epoch,
        )
        io.save_checkpoint(state, companion_path(filepath, run.topology.rank), storage_options)

    def remove_companion(self, io: CheckpointIO, filepath: Any, rank: int) -> None:
        """Delete this rank's companion of a checkpoint that is deleted."""
        companion = companion_path(filepath, rank)
        if self.with_replicas and Path(companion).exists():
            io.remove_checkpoint(companion)

    def take(self, checkpoint: Mapping[str, Any], filepath: Any, batches: HeterogeneousBatches | None) -> None:
        """Remember what was read, until there are schemes to restore; ``batches`` is restored now."""
        self._loaded = checkpoint.get(_KEY, {})
        self._loaded_from = filepath
        if batches is not None:
            batches.load_state_dict(self._loaded.get("batches", {}))

    def restore(self, run: TrainingRun, io: CheckpointIO) -> None:
        """Put back what was taken: this rank's own state, or else the schemes' schedules.

        Raises:
            FileNotFoundError: If a companion is asked for, and there is none.
            ValueError: If what was saved does not fit this run.
        """
        if self.with_replicas:
            identity = self._loaded.get("identity")
            companion = load_companion(io, self._loaded_from, identity, run.topology, run.schemes)
            restore_companion(companion, run.module, run.optimizers, run.schemes)
            # the epoch's loader draws a seed when it starts: in mid-epoch that has been drawn, at its end it has not
            if companion["mid_epoch"]:
                self._random_state = companion["random"]
            else:
                set_random_state(companion["random"])
        elif self._loaded:
            run.load_schedules(self._loaded["schemes"])

    def restore_random_state(self) -> None:
        """Put back random streams that were saved in mid-epoch, once that epoch's loader has drawn its seed."""
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None
