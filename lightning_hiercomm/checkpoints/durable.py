"""Files that are either the old ones or the new ones, whatever ends the writing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from typing_extensions import override

from lightning_hiercomm._lightning.saves import METADATA_FILENAME


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, syncs it to the disk, and renames it.

    Lightning's own writes to the folder for temporary files and moves from there: on another file system that is a
    copy, and when the disk fills or the process dies meanwhile, the new file is half written and the old one gone.
    Nothing is synced. Besides, this one does not hold the file in memory.

    Object stores, which have no halves, are left to Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        file_system, name = url_to_fs(str(path))
        if storage_options is not None or not isinstance(file_system, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = place.with_name(f"{name_beside(place.name)}.part")
        beside.unlink(missing_ok=True)  # of one that has died, or stands still, and would go on to write into this one
        own = None
        try:
            with beside.open("wb") as file:
                own = os.fstat(file.fileno())
                _save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            if _is_there(own, beside):  # or somebody has begun to write the same since, and has the newer one
                if (place / METADATA_FILENAME).is_file():  # a directory of shards
                    replace(place, beside)
                else:
                    beside.replace(place)
        except BaseException:
            if own is not None and _is_there(own, beside):
                beside.unlink(missing_ok=True)
            raise
        _sync_folder(place.parent)


def name_beside(name: str) -> str:
    """With what the names of files beside a checkpoint begin.

    Of ``hpc_ckpt_1.ckpt`` too: Lightning looks for the newest by the numbers in all names with that beginning.
    """
    return name.replace("hpc_ckpt_", "hpc-")


def replace(place: Path, new: Path) -> None:
    """Give what is beside a place that name, where one of both is a directory.

    What had it has another between the two renames, and then is gone.
    """
    old = place.with_name(f"{name_beside(place.name)}.old")
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


class _Remembering:
    """A file whose first error is not lost: torch raises another, of its own, over it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def _save(checkpoint: dict[str, Any], file: IO[bytes]) -> None:
    remembering = _Remembering(file)
    try:
        torch.save(checkpoint, remembering)  # type: ignore[arg-type]
    except RuntimeError:
        if remembering.error is not None:
            raise remembering.error from None
        raise


def _is_there(own: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(own, path.stat())
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """Make the renaming last, where folders can be synced."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
