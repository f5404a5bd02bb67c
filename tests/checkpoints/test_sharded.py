"""A directory of shards is whole, whatever happens while it is written; numbers of an optimizer's parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_hiercomm._lightning.saves import METADATA_FILENAME
from lightning_hiercomm.checkpoints import sharded
from lightning_hiercomm.checkpoints.durable import DurableCheckpointIO
from lightning_hiercomm.checkpoints.sharded import held_by, load_optimizers, renumbered, save_directory
from lightning_hiercomm.trainer.model_parallel import HierarchicalModelParallelStrategy


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a directory of zeros that is there already, written by one rank, which needs no process group."""
    monkeypatch.setattr(sharded, "process_group", lambda _: None)
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


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interrupt_between_two_renames_keeps_the_directory(path, monkeypatch, error):
    rename = Path.rename

    def fail(self, other):
        if self.suffix == ".part":
            raise error
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(error):
        save(1.0, path)
    assert holds(path, 0.0)
    assert [*path.parent.iterdir()] == [path]


def test_a_file_takes_the_place_of_a_directory_when_it_is_whole(path):
    strategy = HierarchicalModelParallelStrategy(save_distributed_checkpoint=False)
    strategy.checkpoint_io = DurableCheckpointIO()
    with pytest.raises(AttributeError, match="pickle"):
        strategy.save_checkpoint({"cannot_be_saved": lambda: None}, path)
    assert holds(path, 0.0)
    strategy.save_checkpoint({"value": 1.0}, path)
    assert torch.load(path, weights_only=True) == {"value": 1.0}
    assert [*path.parent.iterdir()] == [path]


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    place = tmp_path / "saved.ckpt"
    (place / "notes").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        DurableCheckpointIO().save_checkpoint({}, place)
    assert [*tmp_path.iterdir()] == [place]
    assert [*place.iterdir()] == [place / "notes"]


def test_leftovers_of_a_failed_write_do_not_block_the_next(path):
    for ending in ("part", "old"):
        unfinished = path.with_name(f"last.ckpt.{ending}")
        unfinished.mkdir()
        (unfinished / "__0_0.distcp").write_bytes(b"half")
    save(1.0, path)
    assert holds(path, 1.0)
    assert [*path.parent.iterdir()] == [path]


def test_numbers_follow_the_optimizers_order_as_its_own_do():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    one, bias, other, last = module.parameters()
    optimizer = torch.optim.SGD(
        [{"params": [last, one]}, {"params": [bias], "weight_decay": 0.1}], lr=0.1, momentum=0.9
    )
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    own = optimizer.state_dict()
    places = {0: 3, 1: 0, 2: 1}  # the optimizer's numbers, and the module's
    by_place = {
        "state": {places[number]: state for number, state in own["state"].items()},
        "param_groups": [
            {**group, "params": sorted(places[n] for n in group["params"])} for group in own["param_groups"]
        ],
    }
    numbered = renumbered(by_place, optimizer, list(module.parameters()), held_by(optimizer))
    assert numbered["param_groups"] == own["param_groups"]
    assert numbered["state"].keys() == own["state"].keys()
    for number, state in own["state"].items():
        assert numbered["state"][number] is state
    assert other.grad is not None, "it has a gradient, and no optimizer"


def test_a_file_without_optimizers_is_refused(tmp_path):
    module = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="holds the states of 0 optimizers, but this run has 1: resume from one"):
        load_optimizers(tmp_path / "weights.ckpt", [], module, [torch.optim.SGD(module.parameters())], strict=True)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_an_optimizer_without_steps_of_its_own_is_refused_with_the_remedy(tmp_path, kind):
    module = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(module.parameters())
    path = tmp_path if kind == "directory" else tmp_path / "run.ckpt"
    with pytest.raises(ValueError, match=r"state of LBFGS .* cannot be resumed .*: restart from its weights"):
        load_optimizers(path, [optimizer.state_dict()], module, [optimizer], strict=True)


def test_a_learning_rate_is_restored_without_other_optimizer_state(tmp_path):
    module = nn.Linear(2, 1)
    saved, resumed = (torch.optim.SGD(module.parameters(), lr=lr) for lr in (0.01, 0.1))
    load_optimizers(tmp_path / "saved.ckpt", [saved.state_dict()], module, [resumed], strict=True)
    assert resumed.param_groups[0]["lr"] == 0.01
