"""Atomic writes of checkpoints: after an error or a crash the previous file is still complete."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from lightning_hiercomm._lightning.saves import METADATA_FILENAME
from lightning_hiercomm._lightning.tree import fabric


class DurableCheckpointIO(fabric.plugins.TorchCheckpointIO):
    """Writes a checkpoint to a temporary file in its folder, syncs it to the disk, and renames it.

    Lightning's plugin holds the file in memory, and moves it from the system's temporary folder. On another file system
    that is a copy: if the disk fills or the process dies, the new file is incomplete and the old one is lost. Other
    storage than local files is left to Lightning.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: fabric.utilities.types._PATH, storage_options: Any | None = None
    ) -> None:
        file_system, name = url_to_fs(str(path))
        if storage_options is not None or not isinstance(file_system, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(name)
        made = [folder for folder in place.parents if not folder.exists()]
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = unfinished(place)
        temporary.unlink(missing_ok=True)  # a writer that was stopped must not continue in this file
        with temporary.open("wb") as file:
            try:
                _save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
                if _is_at(file, temporary):  # otherwise a later writer has replaced it
                    if (place / METADATA_FILENAME).is_file():  # a directory of shards
                        replace(place, temporary)
                    else:
                        temporary.replace(place)
            except BaseException:
                if _is_at(file, temporary):
                    temporary.unlink(missing_ok=True)
                raise
        for folder in {place.parent, *(each.parent for each in made)}:
            _sync_folder(folder)


def base_name(name: str) -> str:
    """Return the prefix of files next to a checkpoint.

    It is not ``hpc_ckpt_``: Lightning takes the highest number in all names with that prefix as the newest checkpoint.
    """
    return name.replace("hpc_ckpt_", "hpc-")


def unfinished(place: Path) -> Path:
    """Return the path to which a file or directory is written before it is renamed."""
    return place.with_name(f"{base_name(place.name)}.part")


def replace(place: Path, new: Path) -> None:
    """Replace a file or directory by another one in the same folder."""
    old = place.with_name(f"{base_name(place.name)}.old")
    remove(old)
    try:
        if os.path.lexists(place):
            place.rename(old)
        new.rename(place)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(place):
            old.rename(place)
        raise
    _sync_folder(place.parent)
    remove(old)


def remove(path: Path) -> None:
    """Remove a file, a link or a directory, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _save(checkpoint: dict[str, Any], file: IO[bytes]) -> None:
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch hides that the disk is full
            raise error.__context__ from None
        raise


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
