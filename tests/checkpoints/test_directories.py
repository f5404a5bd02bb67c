"""A directory of shards is whole, whatever happens while it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import on_ranks
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_hiercomm._lightning.saves import METADATA_FILENAME
from lightning_hiercomm.checkpoints import directories
from lightning_hiercomm.checkpoints.directories import save_directory


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a directory of zeros that is there already, written by one rank, which needs no process group."""
    monkeypatch.setattr(directories, "process_group", lambda _: None)
    path = tmp_path / "folder" / "last.ckpt"
    save(0.0, path)
    return path


def save(value: float, path: Path, **more: object) -> None:
    checkpoint = {"state_dict": {"x": torch.full((3,), value)}, "value": value, **more}
    on_ranks(lambda topology: save_directory(checkpoint, path, topology), [[0]])


def holds(path: Path, value: float) -> bool:
    state = {"state_dict": {"x": torch.empty(3)}}
    load(state, checkpoint_id=path)
    saved = torch.load(path / METADATA_FILENAME, weights_only=True)
    return state["state_dict"]["x"].tolist() == [value] * 3 and saved["value"] == value


def test_a_directory_takes_the_place_of_another_of_a_file_and_of_a_link(path):
    save(1.0, path)
    assert holds(path, 1.0)
    file, link = path.with_name("file.ckpt"), path.with_name("link.ckpt")
    file.touch()
    link.symlink_to(path.name)
    for each in (file, link):
        save(2.0, each)
        assert holds(each, 2.0)
    assert holds(path, 1.0), "to which the link led"
    assert sorted(path.parent.iterdir()) == [file, path, link]


def test_a_write_that_fails_leaves_the_directory_that_was_there(path):
    with pytest.raises(AttributeError, match="pickle"):
        save(1.0, path, cannot_be_saved=lambda: None)
    assert holds(path, 0.0)
    assert [*path.parent.iterdir()] == [path]


def test_what_a_write_that_died_has_left_behind_is_in_nobodys_way(path):
    for ending in ("part", "old"):
        beside = path.with_name(f"last.ckpt.{ending}")
        beside.mkdir()
        (beside / "__0_0.distcp").write_bytes(b"half")
    save(1.0, path)
    assert holds(path, 1.0)
    assert [*path.parent.iterdir()] == [path]
