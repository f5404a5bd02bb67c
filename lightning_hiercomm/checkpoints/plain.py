"""What goes into a checkpoint besides the agreed model, and what comes back out of it."""

from __future__ import annotations

import copy
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from fsspec.core import url_to_fs
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_hiercomm._lightning.saves import after_saves, holds_averaged_weights, take_entries, wait_for_saves
from lightning_hiercomm._lightning.trainer import is_of_tuner
from lightning_hiercomm.batches import HeterogeneousBatches
from lightning_hiercomm.checkpoints.companion import (
    check_companion,
    companion_path,
    companion_prefix,
    companion_state,
    load_companion,
    restore_companion,
    set_random_state,
)
from lightning_hiercomm.checkpoints.formats import FORMAT, check_format
from lightning_hiercomm.nodes.buffers import is_of_numbers
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.training_run import TrainingRun

_KEY = "hiercomm"
_WEIGHTS_ONLY = "Load only its weights, with LightningModule.load_from_checkpoint, and call fit without ckpt_path."


def per_rank_names(checkpoint: Mapping[str, Any]) -> list[str]:
    """Names of tensors whose shapes differed between ranks when a checkpoint was saved; it holds rank 0's."""
    names: list[str] = checkpoint.get(_KEY, {}).get("per_rank", [])
    return names


class Checkpoints:
    """Adds the schemes' schedules to a plain Lightning checkpoint, writes companions beside it, and restores from both.

    Loading has two halves: :meth:`take` when the file is read, :meth:`restore` when there are schemes to restore.

    Args:
        with_replicas: Whether every rank also stores what it alone knows in a companion, for a bit-exact resume.
    """

    def __init__(self, with_replicas: bool = False) -> None:
        self.with_replicas = with_replicas
        self._loaded: Mapping[str, Any] = {}
        self._resumed_from: tuple[str, str | None] | None = None
        self._companion: dict[str, Any] | None = None
        self._random_state: Mapping[str, Any] | None = None
        self._paths: dict[str, str] = {}  # of checkpoints that rank 0 calls otherwise, by what they are called here
        self._written: dict[str, str] = {}  # the identity of this rank's newest companion, by the checkpoint's path

    def add_to(
        self,
        checkpoint: dict[str, Any],
        run: TrainingRun,
        batches: HeterogeneousBatches | None,
        together: bool = True,
        is_own: bool = False,
    ) -> None:
        """Add the state that all ranks share.

        Args:
            checkpoint: Gets it.
            run: Of it.
            batches: Of the run.
            together: Whether the ranks can be asked for it.
            is_own: Whether the checkpoint's parameters are this rank's own, not the agreed ones; then those of its node
                can be asked.
        """
        state: dict[str, Any] = {
            "format": FORMAT,
            "schemes": run.schedules(together or is_own),
            "trained": run.trained(),
            "without_mean": sorted(run.replicas.without_mean),
            "per_rank": sorted(run.replicas.per_rank),
        }
        if is_own:
            unagreed = [{"unsynchronized_steps": scheme.state.unsynchronized_steps} for scheme in run.schemes]
            state["schemes"] = [{**own, **more} for own, more in zip(state["schemes"], unagreed, strict=True)]
        state["loss"] = run.mean_loss_so_far() if together and not run.topology.is_closed else run.loss_so_far()
        if batches is not None:
            state["batches"] = batches.state_dict()
        checkpoint[_KEY] = state

    def average_foreign_weights(self, checkpoint: dict[str, Any], run: TrainingRun) -> None:
        """Average what ``WeightAveraging`` put in the place of the agreed model, each rank its own; collective.

        When the run is over, the module holds that average already.
        """
        if not holds_averaged_weights(checkpoint):
            return
        if run.is_closed:
            checkpoint["state_dict"] = checkpoint["current_model_state"]
            return
        run.averaged_model.compare_shapes()
        state_dict = {name: copy.deepcopy(value) for name, value in checkpoint["state_dict"].items()}
        tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
        left_out = run.replicas.directions | run.replicas.per_rank
        numbers = [value for name, value in tensors.items() if is_of_numbers(value) and name not in left_out]
        ranks_are_equal = all(scheme.replica.equal_in_node for scheme in run.schemes)
        run.averaged_model.average_kept(numbers, ranks_are_equal)
        checkpoint["state_dict"] = state_dict

    @contextmanager
    def companions(
        self,
        checkpoint: dict[str, Any],
        run: TrainingRun,
        mid_epoch: bool,
        share: Callable[[tuple[str, str]], tuple[str, str]],
        io: CheckpointIO,
        filepath: Any,
        storage_options: Any | None = None,
        precision: Mapping[str, Any] | None = None,
        entries: Mapping[str, Any] | None = None,
    ) -> Iterator[None]:
        """Write what each rank alone knows beside a checkpoint that is written inside; after :meth:`add_to`.

        Collective. The companions carry an identity in their names, and the checkpoint says which one is its own. So
        all become valid together, when the checkpoint's file gets its name; until then, what was there before is
        complete, and after an error it stays so.

        Args:
            checkpoint: Not yet written.
            run: What to save.
            mid_epoch: Whether more batches of the epoch follow.
            share: Broadcasts rank 0's word.
            io: Writes the files.
            filepath: Of the checkpoint. A name may hold a number that each rank logs its own; only rank 0 writes there.
            storage_options: For ``io``.
            precision: State of this rank's precision plugin.
            entries: What callbacks and the module say on this rank.

        Raises:
            OSError: On every rank, if one could not write its companion.
        """
        identity, path = share((secrets.token_hex(8), str(filepath)))
        checkpoint[_KEY]["identity"] = identity
        for scheme in run.schemes:
            scheme.settle()
        run.has_saved_own_values = True
        state = partial(
            companion_state,
            identity,
            run.topology,
            run.module,
            run.optimizers,
            run.schemes,
            run.gradients,
            run.averaged_model.own_values(),
            mid_epoch,
            run.loss_so_far(),
            precision,
            entries,
        )
        rank, replaced = run.topology.rank, _version_at(path)
        are_written = False
        try:
            self._write_together(run.topology, io, state, companion_path(path, rank, identity), storage_options)
            are_written = True
            self._remove_replaced(io, rank, identity)
            yield
        except BaseException:
            if are_written and rank != 0:
                raise  # alone, perhaps, and rank 0 writes the checkpoint that this rank's companion is a part of
            if _version_at(path) == replaced:  # else the checkpoint has got its name, before a Ctrl-C came
                self._remove_companions(io, path, lambda other: other == identity, rank)
            raise
        self._written[path] = identity
        self._paths.pop(str(filepath), None)
        if path != str(filepath):
            self._paths[str(filepath)] = path

    def _write_together(
        self,
        topology: Topology,
        io: CheckpointIO,
        state: Callable[[], dict[str, Any]],
        path: str,
        storage_options: Any | None,
    ) -> None:
        """Write a companion, and return when all ranks have written theirs."""
        failure: Exception | None = None
        try:
            io.save_checkpoint(state(), path, storage_options)
            wait_for_saves(io)
        except Exception as error:
            failure = error
        hint = ". Make room there, or set" if isinstance(failure, OSError) else ". Or set"
        what = None if failure is None else f"{type(failure).__name__}: {failure}{hint}"
        failures = topology.world.all_gather_object(what)
        for rank, what in enumerate(failures):
            if what is not None:
                raise OSError(
                    f"rank {rank} could not write its part of the checkpoint next to {path} (the checkpoints that were"
                    f" there are complete): {what} checkpoint_replicas=False."
                ) from failure

    def settle(self, topology: Topology, io: CheckpointIO) -> None:
        """Delete what saves have replaced, once all that was told to be written is written; collective."""
        if self.with_replicas and self._written:
            wait_for_saves(io)
            topology.world.barrier()
            self._remove_replaced(io, topology.rank)

    def _remove_replaced(self, io: CheckpointIO, rank: int, new: str | None = None) -> None:
        """Delete this rank's companions of what earlier saves have replaced, on a disk that rank 0 does not see.

        Args:
            io: Has written what it was told to, on all ranks.
            rank: This one.
            new: Identity of a checkpoint that is being written.
        """
        written, self._written = self._written, {}
        if rank != 0:
            for filepath, own in written.items():
                kept = (own, new)
                self._remove_companions(io, filepath, lambda other, kept=kept: other not in kept, rank)  # type: ignore[misc]

    def remove_stale_companions(self, io: CheckpointIO, filepath: Any, checkpoint: Mapping[str, Any]) -> None:
        """Delete the companions of what a checkpoint has replaced; on rank 0, once the checkpoint is written."""
        own = checkpoint[_KEY].get("identity")
        # those that lie there now: beside training, the next checkpoint's may come before this one is written
        replaced = [path for identity, path in self._companions(filepath, rank=0) if identity != own]
        after_saves(io, lambda: _delete(io, replaced))

    def remove(self, io: CheckpointIO, filepath: Any, rank: int) -> None:
        """Delete a checkpoint and its companions, after all that was told to be written is written.

        Rank 0 deletes what it sees. What others have written to a disk of their own node, they delete there.
        """
        path = self._paths.pop(str(filepath), filepath)

        def remove() -> None:
            if rank == 0:
                io.remove_checkpoint(filepath)
            self._remove_companions(io, path, lambda _: True, rank)

        after_saves(io, remove)

    def _remove_companions(self, io: CheckpointIO, filepath: Any, condemned: Callable[[str], bool], rank: int) -> None:
        """Delete companions at a checkpoint's place whose identity is condemned: see :meth:`_companions`."""
        _delete(io, [path for identity, path in self._companions(filepath, rank) if condemned(identity)])

    def _companions(self, filepath: Any, rank: int) -> list[tuple[str, str]]:
        """Identity and path of companions at a checkpoint's place: on rank 0 those of all ranks.

        On others their own, and only where the checkpoint itself is not there, so that rank 0 does not see them.
        """
        try:
            file_system, prefix = url_to_fs(companion_prefix(filepath))
            if rank != 0 and file_system.exists(url_to_fs(str(filepath))[1]):
                return []
            folder = os.path.dirname(prefix)
            file_system.invalidate_cache(folder)
            beside = file_system.ls(folder, detail=False)
        except (FileNotFoundError, ImportError, ValueError):  # nothing there, or no file system at all
            return []
        own = prefix if rank == 0 else f"{prefix}{rank:04d}."
        return [
            (
                path.removesuffix(".part").rpartition(".")[2],
                file_system.unstrip_protocol(path) if "://" in str(filepath) else path,
            )
            for path in beside
            if path.startswith(own)
        ]

    def take(
        self,
        checkpoint: dict[str, Any],
        filepath: Any,
        batches: HeterogeneousBatches | None,
        io: CheckpointIO | None = None,
        topology: Topology | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Remember what was read, until there are schemes to restore; ``batches``, and what callbacks get, now.

        Args:
            checkpoint: As it was read; gets this rank's own entries where they were kept.
            filepath: Of the checkpoint.
            batches: Restored.
            io: Reads the companion.
            topology: The nodes. Without them, or ``io``, there is no companion.
            weights_only: With which the checkpoint was read.

        Raises:
            ValueError: If the checkpoint holds state of another format, or the companion does not belong to it.
        """
        if _KEY in checkpoint:  # Lightning's own strategies have written others
            check_format(checkpoint[_KEY].get("format"), filepath, _WEIGHTS_ONLY)
        self._loaded = checkpoint.get(_KEY, {})
        self._resumed_from = (str(checkpoint.get("global_step")), self._loaded.get("identity"))
        self._companion = None
        if batches is not None:
            batches.load_state_dict(self._loaded.get("batches", {}))
        # a tuner has looked, and no rank is to know it afterwards
        has_companions = self.with_replicas or (is_of_tuner(filepath) and self._loaded.get("identity") is not None)
        if has_companions and io is not None and topology is not None:
            self._companion = load_companion(io, filepath, self._loaded.get("identity"), topology, weights_only)
            take_entries(checkpoint, self._companion.pop("entries"))

    @property
    def trained(self) -> list[str] | None:
        """Names of the parameters that were trained when what was read was saved; None if Lightning wrote it."""
        return self._loaded.get("trained")

    def restore(self, run: TrainingRun, precision: Precision | None = None) -> None:
        """Put back what was taken: this rank's own state, or else the schemes' schedules.

        Args:
            run: Gets it.
            precision: Has got rank 0's state from the checkpoint, and gets this rank's own where that was kept.

        Raises:
            ValueError: If what was saved does not fit this run.
        """
        run.leave_to_ranks(self._loaded.get("per_rank", []))
        run.exclude_without_mean(self._loaded.get("without_mean"))
        with run.training(self.trained):
            companion, self._companion = self._companion, None
            if companion is not None:
                check_companion(companion, run.module, run.schemes, run.replicas.per_rank)
                restore_companion(
                    companion, run.module, run.optimizers, run.schemes, run.gradients, run.replicas.per_rank
                )
                run.load_loss(companion["loss"])
                if precision is not None and companion["precision"]:
                    precision.load_state_dict(companion["precision"])
                # the epoch's loader draws a seed when it starts: in mid-epoch that has been drawn, at its end not yet
                if companion["mid_epoch"]:
                    self._random_state = companion["random"]
                else:
                    set_random_state(companion["random"])
            elif self._loaded:
                run.load_schedules(self._loaded["schemes"])
                run.load_loss(self._loaded["loss"])
        self._loaded = {}  # an outer optimizer's state is as large as the model
        run.remember_values()

    def check_equal(self, topology: Topology) -> None:
        """See that all ranks have resumed from the same checkpoint, or none; collective.

        Each looks for itself which one is ``"last"``, and a shared folder may show one rank what it hides from another.

        Raises:
            ValueError: If they have not.
        """
        resumed, self._resumed_from = self._resumed_from, None
        everyone = topology.world.all_gather_object(resumed)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                said = ["from none" if one is None else f"from one of step {one[0]}" for one in (everyone[0], other)]
                raise ValueError(
                    f"rank 0 resumed {said[0]}, but rank {rank} {said[1]}: they have not found the same checkpoint."
                    " Give fit(ckpt_path=...) the path of a checkpoint in a folder that all nodes share."
                )

    @property
    def has_random_state(self) -> bool:
        """Whether there are random streams that were saved in mid-epoch, and are not put back yet."""
        return self._random_state is not None

    def restore_random_state(self) -> None:
        """Put them back, once that epoch's loader and sampler have drawn their seeds, and before a batch is loaded."""
        assert self._random_state is not None
        set_random_state(self._random_state)
        self.forget_random_state()

    def forget_random_state(self) -> None:
        """The run is over, perhaps before it has trained."""
        self._random_state = None


def _version_at(filepath: Any) -> str | None:
    """Equal as long as the same file lies at a checkpoint's place; None if there is none, or no file system."""
    try:
        file_system, path = url_to_fs(str(filepath))
        file_system.invalidate_cache(os.path.dirname(path))
        return str(file_system.ukey(path))
    except (FileNotFoundError, ImportError, ValueError):
        return None


def _delete(io: CheckpointIO, companions: Iterable[str]) -> None:
    for path in companions:
        with suppress(FileNotFoundError):  # where a folder is shared, rank 0 may have been faster
            io.remove_checkpoint(path)
