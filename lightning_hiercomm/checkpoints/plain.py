"""Adds this package's state to checkpoints, writes their sidecars, and restores both."""

from __future__ import annotations

import copy
import os
import secrets
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fsspec.core import url_to_fs
from torch import Tensor

from lightning_hiercomm._lightning.saves import after_saves, holds_averaged_weights, take_entries, wait_for_saves
from lightning_hiercomm._lightning.trainer import is_of_tuner
from lightning_hiercomm._lightning.tree import fabric, pl
from lightning_hiercomm.batches.running import RunningBatches
from lightning_hiercomm.checkpoints import FORMAT, KEY, check_format
from lightning_hiercomm.checkpoints.durable import base_name
from lightning_hiercomm.checkpoints.sidecar import REMEDY, restore_sidecar, set_random_state, sidecar_state
from lightning_hiercomm.nodes.buffers import is_of_numbers
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.training_run import TrainingRun

_WEIGHTS_ONLY = "Load only its weights, with LightningModule.load_from_checkpoint, and call fit without ckpt_path."


class Checkpoints:
    """Saves and restores the state of schemes, in a Lightning checkpoint and its sidecars.

    Loading has two halves: :meth:`take` when the file is read, and :meth:`restore` when there are schemes.

    Args:
        with_replicas: Whether every rank also writes a sidecar, for a bit-exact resume.

    Attributes:
        loaded: What :meth:`add_to` has added to the checkpoint that is resumed, until :meth:`restore`.
        random_state: Random states that were saved in mid-epoch. They are to be restored after the epoch's loader and
            sampler took seeds, before a batch is loaded.
        warnings: Those given at a save.
    """

    def __init__(self, with_replicas: bool = False) -> None:
        self.with_replicas = with_replicas
        self.loaded: Mapping[str, Any] = {}
        self._resumed_from: tuple[str, str | None] | None = None
        self._sidecar: dict[str, Any] | None = None
        self.random_state: Mapping[str, Any] | None = None
        self.warnings = pl.utilities.rank_zero.WarningCache()  # type: ignore[attr-defined]

    def add_to(
        self,
        checkpoint: dict[str, Any],
        run: TrainingRun,
        batches: RunningBatches | None,
        together: bool = True,
        is_own: bool = False,
    ) -> None:
        """Add the state that all ranks share, and average the weights of Lightning's ``WeightAveraging``.

        It is collective if ranks are ``together``. A checkpoint with this rank's own parameters instead of the averaged
        ones ``is_own``: then the ranks of its node take part.
        """
        if holds_averaged_weights(checkpoint) and (together or run.is_closed):
            checkpoint["state_dict"] = _averaged_over_nodes(checkpoint, run)
        schemes = run.scheme_states.state(together or is_own)
        if is_own:
            unagreed = [{"unsynchronized_steps": scheme.state.unsynchronized_steps} for scheme in run.schemes]
            schemes = [{**own, **more} for own, more in zip(schemes, unagreed, strict=True)]
        checkpoint[KEY] = {
            "format": FORMAT,
            "schemes": schemes,
            "trained": run.scheme_states.trained(),
            "without_mean": sorted(run.replicas.without_mean),
            "loss": run.loss.common_state_dict() if together else run.loss.state_dict(),
            **({} if batches is None else {"batches": batches.state_dict()}),
        }

    def write_sidecars(
        self,
        checkpoint: dict[str, Any],
        run: TrainingRun,
        io: fabric.plugins.CheckpointIO,
        filepath: Any,
        mid_epoch: bool,
        entries: Mapping[str, Any],
        storage_options: Any | None = None,
    ) -> str:
        """Write every rank's :func:`sidecar_state` to a sidecar, before the checkpoint; collective.

        The same random identity, which is returned, is in the checkpoint and in the path of its sidecars. So they
        become valid together, when the checkpoint's file is renamed. Until then the previous checkpoint stays complete.

        Raises:
            OSError: If a rank could not write its sidecar, on every rank; on rank 0, if it does not see all of them.
        """
        topology, own, message = run.topology, None, None
        identity: str
        # the path may differ between ranks
        identity, path = topology.world.all_gather_object((secrets.token_hex(8), str(filepath)))[0]
        checkpoint[KEY]["identity"], folder = identity, f"{_replicas_folder(path)}/{identity}"
        for scheme in run.schemes:
            scheme.state.settle()
        try:
            state = sidecar_state(run, mid_epoch, entries)
            io.save_checkpoint(state, f"{folder}/{_sidecar_name(topology.rank)}", storage_options)
            wait_for_saves(io)
        except Exception as error:
            own, message = error, f"rank {topology.rank} could not write its sidecar: {type(error).__name__}: {error}"
        message = next(filter(None, topology.world.all_gather_object(message)), None)
        if message is None and topology.rank == 0:
            missing = {*map(_sidecar_name, range(topology.world_size))} - {*_names(folder)}
            if missing and _sidecar_name(0) not in missing:  # otherwise a plugin gives its files other names
                message = f"rank 0 does not see {', '.join(sorted(missing))} in {folder}: all nodes must share it"
        if message is not None:
            if topology.rank == 0:
                _delete(_replicas_folder(path), [identity])
            raise OSError(
                f"there is no new checkpoint {path} (existing ones are complete): {message}. Solve that, or set"
                " checkpoint_replicas=False."
            ) from own
        return identity

    def take(
        self,
        checkpoint: dict[str, Any],
        filepath: Any,
        io: fabric.plugins.CheckpointIO | None = None,
        topology: Topology | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Keep a loaded checkpoint until :meth:`restore`; it gets this rank's own entries from the sidecar now.

        Without ``io`` or ``topology`` no sidecar is read.

        Raises:
            FileNotFoundError: If there is no sidecar.
            ValueError: If the checkpoint has another format, or the sidecar does not belong to it or cannot be read.
        """
        if KEY in checkpoint:  # not in checkpoints of Lightning's strategies
            check_format(checkpoint[KEY].get("format"), filepath, _WEIGHTS_ONLY)
        self.loaded = checkpoint.get(KEY, {})
        identity, self._sidecar = self.loaded.get("identity"), None
        self._resumed_from = (str(checkpoint.get("global_step")), identity)
        # a tuner restores the state of every rank after its trial
        has_sidecars = self.with_replicas or (is_of_tuner(filepath) and identity is not None)
        if has_sidecars and io is not None and topology is not None:
            if identity is None:
                raise ValueError(
                    f"{filepath} has no per-rank state: it was saved without checkpoint_replicas=True, or after the end"
                    f" of the run. {REMEDY}"
                )
            place = os.path.realpath(filepath) if os.path.islink(filepath) else filepath  # such as last.ckpt
            self._sidecar = _read_sidecar(io, f"{_replicas_folder(place)}/{identity}", topology, weights_only)
            take_entries(checkpoint, self._sidecar.pop("entries"))

    def restore(self, run: TrainingRun) -> None:
        """Restore this rank's sidecar, or else the schemes' schedules.

        Raises:
            ValueError: If the checkpoint does not match this run.
        """
        run.exclude(self.loaded.get("without_mean"))
        with run.scheme_states.training(self.loaded.get("trained")):
            sidecar, self._sidecar = self._sidecar, None
            if sidecar is not None:
                restore_sidecar(sidecar, run)
                # the epoch's loader takes a seed when it starts: before a state of mid-epoch, after a state of its end
                if sidecar["mid_epoch"]:
                    self.random_state = sidecar["random"]
                else:
                    set_random_state(sidecar["random"])
            elif self.loaded:
                run.scheme_states.load(self.loaded["schemes"])
                run.loss.load_state_dict(self.loaded["loss"])
        self.loaded = {}  # an outer optimizer's state is as large as the model
        run.remember_values()

    def check_equal(self, topology: Topology) -> None:
        """Raise a ``ValueError`` if ranks resumed from different checkpoints; collective.

        Each rank searches ``"last"`` by itself, and a file in a shared folder may be visible to one before another.
        """
        resumed, self._resumed_from = self._resumed_from, None
        first, *others = topology.world.all_gather_object(resumed)
        for rank, other in enumerate(others, 1):
            if other != first:
                reports = ["from none" if one is None else f"from one of step {one[0]}" for one in (first, other)]
                raise ValueError(
                    f"rank 0 resumed {reports[0]}, but rank {rank} {reports[1]}: they found different checkpoints."
                    " Give fit(ckpt_path=...) the path of a checkpoint in a folder that all nodes share."
                )


def _averaged_over_nodes(checkpoint: Mapping[str, Any], run: TrainingRun) -> Mapping[str, Any]:
    """Return the mean of the weights that ``WeightAveraging`` holds on each rank; collective, except after the run."""
    if run.is_closed:
        averaged: Mapping[str, Any] = checkpoint["current_model_state"]
        return averaged
    run.averaged_model.check_shapes()
    state_dict = {name: copy.deepcopy(value) for name, value in checkpoint["state_dict"].items()}
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    left_out = run.replicas.directions | run.replicas.not_averaged
    numbers = [value for name, value in tensors.items() if is_of_numbers(value) and name not in left_out]
    if not run.topology.is_one_node:
        run.averaged_model.means.average_kept(numbers)
    return state_dict


def _read_sidecar(
    io: fabric.plugins.CheckpointIO, folder: str, topology: Topology, weights_only: bool | None
) -> dict[str, Any]:
    """Read and verify this rank's sidecar, and add its ``"path"``."""
    path = f"{folder}/{_sidecar_name(topology.rank)}"
    try:
        state: dict[str, Any] = io.load_checkpoint(path, map_location="cpu", weights_only=weights_only)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path}, this rank's sidecar of the checkpoint, is missing: a copy of a checkpoint needs its folder"
            f" {folder}. {REMEDY}"
        ) from error
    except Exception as error:  # torch raises different errors for different bytes
        raise ValueError(f"{path} cannot be read: {error}. {REMEDY}") from error
    if _is_damaged(path):
        raise ValueError(f"{path} is damaged: its checksum is wrong. {REMEDY}")
    check_format(state.get("format") if isinstance(state, dict) else None, path, REMEDY)
    nodes = [list(ranks) for ranks in topology.nodes]
    if state["nodes"] != nodes:
        raise ValueError(f"{path} was saved by nodes {state['nodes']}, but this run has {nodes}. {REMEDY}")
    return {**state, "path": path}


def _is_damaged(path: str) -> bool:
    """Return whether a checksum in a file of ``torch.save`` is wrong: ``torch.load`` does not check them."""
    try:
        file_system, place = url_to_fs(path)
    except (ImportError, ValueError):  # a plugin has its own storage, and its own format below
        return False
    if not file_system.isfile(place):
        return False
    with file_system.open(place, "rb") as file:
        try:
            return zipfile.is_zipfile(file) and zipfile.ZipFile(file).testzip() is not None
        except Exception:  # in a header
            return True


def remove_checkpoint(io: fabric.plugins.CheckpointIO, filepath: Any) -> None:
    """Delete a checkpoint and its sidecars, after all pending writes; on rank 0."""
    after_saves(io, lambda: io.remove_checkpoint(filepath))
    remove_replaced(io, filepath, None)


def remove_replaced(io: fabric.plugins.CheckpointIO, filepath: Any, identity: str | None) -> None:
    """Delete the sidecars of replaced checkpoints, after the new one is written; on rank 0."""
    folder = _replicas_folder(filepath)
    # listed now: with asynchronous writes, those of the next checkpoint may appear before this one is written
    replaced = [name for name in _names(folder) if name != identity]
    after_saves(io, lambda: _delete(folder, replaced))


def _replicas_folder(filepath: Any) -> str:
    """Return the folder next to a checkpoint that has a folder of sidecars per identity."""
    folder, separator, name = str(filepath).rpartition("/")
    return f"{folder}{separator}{base_name(name)}.replicas"


def _sidecar_name(rank: int) -> str:
    return f"rank-{rank:04d}"


def _names(folder: str) -> list[str]:
    """Return the names in a folder; none if there is no folder, or no file system."""
    try:
        file_system, path = url_to_fs(folder)
        file_system.invalidate_cache(path)
        return [each.rstrip("/").rpartition("/")[2] for each in file_system.ls(path, detail=False)]
    except (FileNotFoundError, ImportError, ValueError):
        return []


def _delete(folder: str, identities: Sequence[str]) -> None:
    """Delete sidecars, and their folder if no others are in it."""
    for each in identities:
        file_system, path = url_to_fs(folder)
        with suppress(FileNotFoundError):
            file_system.rm(f"{path}/{each}", recursive=True)
        with suppress(OSError):
            file_system.rmdir(path)
