"""A checkpoint's file is whole, whatever happens while it is written."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_hiercomm import HierarchicalStrategy
from lightning_hiercomm.checkpoints import durable
from lightning_hiercomm.checkpoints.durable import DurableCheckpointIO

OLD, NEW = {"x": torch.zeros(5)}, {"x": torch.ones(500_000)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "saved.ckpt"
    DurableCheckpointIO().save_checkpoint(OLD, path)
    return path


def holds(path: Path, expected: dict[str, torch.Tensor]) -> bool:
    return torch.equal(torch.load(path, weights_only=True)["x"], expected["x"])


def test_a_checkpoint_takes_the_place_of_another(path):
    DurableCheckpointIO().save_checkpoint(NEW, path)
    assert holds(path, NEW)
    assert [*path.parent.iterdir()] == [path]


def test_a_full_disk_leaves_the_old_checkpoint_and_is_named(path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            DurableCheckpointIO().save_checkpoint(NEW, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert holds(path, OLD)
    assert [*path.parent.iterdir()] == [path]


def die_while_saving(monkeypatch, owner: object, moment: str, path: Path) -> None:
    """Save in a process that is killed when it comes to a call."""
    monkeypatch.setattr(owner, moment, lambda *_: os._exit(9))
    child = os.fork()
    if child == 0:
        DurableCheckpointIO().save_checkpoint(NEW, path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.undo()


@pytest.mark.parametrize(("owner", "moment"), [(os, "fsync"), (Path, "replace")])
def test_a_kill_at_any_moment_leaves_the_old_checkpoint(path, monkeypatch, owner, moment):
    die_while_saving(monkeypatch, owner, moment, path)
    assert holds(path, OLD)
    DurableCheckpointIO().save_checkpoint(NEW, path)  # despite the files of the dead process
    assert [*path.parent.iterdir()] == [path]


def test_a_kill_during_slurms_checkpoint_keeps_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "hpc_ckpt_1.ckpt"
    DurableCheckpointIO().save_checkpoint(OLD, path)
    die_while_saving(monkeypatch, os, "fsync", tmp_path / "hpc_ckpt_2.ckpt")
    trainer = pl.Trainer(accelerator="cpu", default_root_dir=tmp_path, logger=False)
    assert trainer._checkpoint_connector._hpc_resume_path == str(path)


@pytest.mark.parametrize("ends", ["first", "last"])
def test_two_interleaved_writes_of_a_file_are_both_complete(path, monkeypatch, ends):
    """As a node that was stopped in its write, and whose place another has taken since."""
    newest = {"x": torch.full((300,), 2.0)}
    save = durable._save  # noqa: SLF001

    def write_between(checkpoint, file):
        save(checkpoint, file)
        if checkpoint is NEW:
            DurableCheckpointIO().save_checkpoint(newest, path)
            assert holds(path, newest)

    def write_around(checkpoint, file):
        save(checkpoint, file)
        if checkpoint is newest:
            goes_on.set()
            assert is_done.wait(10.0)
        else:
            is_open.set()
            assert goes_on.wait(10.0)
            save(checkpoint, file)

    is_open, goes_on, is_done = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(durable, "_save", write_between if ends == "last" else write_around)
    if ends == "last":
        DurableCheckpointIO().save_checkpoint(NEW, path)
    else:
        late = threading.Thread(target=lambda: DurableCheckpointIO().save_checkpoint(newest, path))
        early = threading.Thread(target=lambda: (DurableCheckpointIO().save_checkpoint(NEW, path), is_done.set()))
        early.start()
        assert is_open.wait(10.0)
        late.start()
        for thread in (early, late):
            thread.join(10.0)
    assert holds(path, newest)
    assert [*path.parent.iterdir()] == [path]


def test_the_file_and_then_its_name_are_synced(path, monkeypatch):
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: (events.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))
    )
    monkeypatch.setattr(Path, "replace", lambda self, other: (events.append("renamed"), replace(self, other)))
    DurableCheckpointIO().save_checkpoint(NEW, path)
    assert events == [f"{path}.part", "renamed", str(path.parent)]


def test_other_file_systems_are_left_to_lightning():
    DurableCheckpointIO().save_checkpoint(OLD, "memory://saved.ckpt")
    assert torch.equal(DurableCheckpointIO().load_checkpoint("memory://saved.ckpt")["x"], OLD["x"])


def test_a_strategy_uses_it_unless_the_user_brings_another(tmp_path):
    def of(*plugins, **arguments):
        strategy = HierarchicalStrategy(**arguments)
        trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, plugins=[*plugins], logger=False)
        return trainer.strategy.checkpoint_io

    assert type(of()) is DurableCheckpointIO
    assert type(of(TorchCheckpointIO())) is TorchCheckpointIO
    assert type(of(checkpoint_io=TorchCheckpointIO())) is TorchCheckpointIO
    assert type(of(AsyncCheckpointIO()).checkpoint_io) is DurableCheckpointIO
    assert type(of(AsyncCheckpointIO(TorchCheckpointIO())).checkpoint_io) is TorchCheckpointIO
