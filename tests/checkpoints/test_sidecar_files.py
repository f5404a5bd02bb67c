"""Sidecars are written, replaced and deleted with their checkpoint, which stays complete."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import fsspec
import pytest
import torch
from fits import fit_here
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from problems import SaveAfter, report_of, same_bits
from sidecar_cases import STEPS, TWO_NODES, Net

from lightning_hiercomm import HierarchicalStrategy, PeriodicAveraging
from lightning_hiercomm.checkpoints.durable import DurableCheckpointIO
from lightning_hiercomm.checkpoints.plain import remove_replaced

pytestmark = pytest.mark.pooled


def sidecars_of(path: Path) -> list[str]:
    """Return the paths in the folder of a checkpoint, which exists and has nothing else next to it."""
    assert path.exists()
    folder = path.with_name(f"{path.name}.replicas")
    assert {*path.parent.glob(f"{path.name}*")} == {path, folder}
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


def identity_of(path: Path) -> str:
    return torch.load(path, weights_only=True)["hiercomm"]["identity"]


def test_sidecars_follow_the_deletion_of_their_checkpoint(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, filename="{epoch}", monitor=None, every_n_epochs=1, save_top_k=1)
    strategy = {"checkpoint_replicas": True, "ranks_per_node": 1}
    fit(Net(), strategy, max_epochs=2, callbacks=[callback], enable_checkpointing=True, **TWO_NODES)
    path = tmp_path / "epoch=1.ckpt"
    assert sidecars_of(path) == [f"{identity_of(path)}/rank-{rank:04d}" for rank in range(2)]
    assert len([*tmp_path.glob("epoch*")]) == 2


def test_a_run_resumes_from_a_remote_checkpoint(tmp_path):
    path = "memory://resumed/saved.ckpt"

    def fitted(resume=None):
        arguments = {"devices": 1, "checkpoint_replicas": True, "limit_train_batches": STEPS}
        arguments["callbacks"] = [SaveAfter(2, path), SaveAfter(STEPS, path)]
        return report_of(fit_here(tmp_path, Net(), PeriodicAveraging(4), resume, **arguments))

    whole = fitted()
    assert len(fsspec.filesystem("memory").find("/resumed")) == 2, "only the last sidecar"
    same_bits([whole, fitted(path)])


def test_an_interrupt_after_the_write_leaves_the_checkpoint_complete(tmp_path):
    path = tmp_path / "saved.ckpt"

    class Interrupted(DurableCheckpointIO):
        def save_checkpoint(self, checkpoint, at, storage_options=None):
            super().save_checkpoint(checkpoint, at, storage_options)
            if Path(at) == path:
                raise KeyboardInterrupt  # within the sync that makes the new name last

    io = {"checkpoint_replicas": True, "plugins": [Interrupted()]}
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit_here(tmp_path, Net(), devices=1, callbacks=[SaveAfter(2, path)], **io)
    assert sidecars_of(path) == [f"{identity_of(path)}/rank-0000"]


def test_a_link_to_a_checkpoint_resumes_and_its_deletion_keeps_shards(fit, tmp_path):
    strategy = {"checkpoint_replicas": True, "ranks_per_node": 1}
    callback = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_last="link")
    callback.CHECKPOINT_NAME_LAST = "last-{epoch}"
    fit(Net(), strategy, max_epochs=2, callbacks=[callback], enable_checkpointing=True, **TWO_NODES)
    assert [path.name for path in tmp_path.glob("last*")] == ["last-epoch=1.ckpt"]
    assert len(sidecars_of(tmp_path / "epoch=0.ckpt")) == len(sidecars_of(tmp_path / "epoch=1.ckpt")) == 2
    fit(Net(), strategy, max_epochs=3, fit_arguments={"ckpt_path": tmp_path / "last-epoch=1.ckpt"}, **TWO_NODES)


def test_a_slow_save_does_not_delete_the_shards_of_the_next(tmp_path):
    path, may_end = tmp_path / "last.ckpt", threading.Event()

    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *_):
            may_end.wait(60)

    io = AsyncCheckpointIO(Slow())
    replicas = tmp_path / "last.ckpt.replicas"
    before, own, following = (replicas / identity / "rank-0003" for identity in ("before", "own", "following"))
    for sidecar in (before, own, following):
        sidecar.parent.mkdir(parents=True)
        sidecar.touch()
    following.parent.rename(tmp_path / "not yet")
    io.save_checkpoint({}, path)
    remove_replaced(io, path, "own")
    (tmp_path / "not yet").rename(following.parent)
    may_end.set()
    io.teardown()
    assert {*own.parents[1].iterdir()} == {own.parent, following.parent}


@pytest.mark.parametrize("io", [None, AsyncCheckpointIO], ids=["now", "overlapped"])
def test_a_checkpoint_that_replaces_another_brings_its_own_sidecars(fit, tmp_path, io):
    path = tmp_path / "last.ckpt"
    strategy = {"checkpoint_replicas": True, "checkpoint_io": io and io(), "ranks_per_node": 1}
    whole = fit(Net(), strategy, max_epochs=2, callbacks=[SaveAfter(2, path), SaveAfter(STEPS, path)], **TWO_NODES)
    assert sidecars_of(path) == [f"{identity_of(path)}/rank-{rank:04d}" for rank in range(2)]
    resumed = fit(Net(), strategy, max_epochs=2, fit_arguments={"ckpt_path": path}, **TWO_NODES)
    assert resumed[0]["report"] == whole[0]["report"][STEPS:]


class Fails(DurableCheckpointIO):
    """Fails, or dies, in the middle of the second file of a name."""

    def __init__(self, name: str, how: str) -> None:
        self.name, self.how = name, how
        self.saved = 0

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        own = Path(path).name == self.name
        self.saved += own
        if own and self.saved == 2:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(f"{path}.part").write_bytes(b"half")
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.fixture(scope="module")
def undisturbed(borrow):
    """Return the ranks' reports of a run whose synchronizations do not end its epochs."""

    def main(folder):
        fit_here(folder, module := Net(), PeriodicAveraging(4, at_epoch_end=False), **TWO_NODES)
        return module.report

    return borrow(main, ranks=2)


@pytest.mark.long("a run that is broken off in mid-save, and its resume, on forked ranks")
@pytest.mark.parametrize("how", ["dies", "finds no space"])
@pytest.mark.parametrize("name", ["rank-0001", "last.ckpt"], ids=["sidecar", "checkpoint"])
def test_the_last_checkpoint_stays_complete_until_the_next_one_is(fit, undisturbed, tmp_path, name, how):
    path = tmp_path / "last.ckpt"

    def strategy(io=None):
        scheme = PeriodicAveraging(4, at_epoch_end=False)
        return {"scheme": scheme, "checkpoint_replicas": True, "checkpoint_io": io, "ranks_per_node": 1}

    saves = [SaveAfter(STEPS, path), SaveAfter(2 * STEPS, path)]
    with pytest.raises(Exception, match="No space left on device" if "space" in how else "SIGKILL"):
        fit(Net(), strategy(Fails(name, how)), max_epochs=2, callbacks=saves, forked=True, **TWO_NODES)
    assert torch.load(path, weights_only=True)["global_step"] == STEPS
    again = {"fit_arguments": {"ckpt_path": path}, "callbacks": saves[1:]}
    resumed = fit(Net(), strategy(), max_epochs=2, **again, **TWO_NODES)
    assert resumed[1]["report"] == undisturbed[1][STEPS:]
    # what was left behind goes with the next one
    assert sidecars_of(path) == [f"{identity_of(path)}/rank-{rank:04d}" for rank in range(2)]


def test_ranks_that_find_different_checkpoints_are_named(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    fit(Net(), callbacks=[callback], enable_checkpointing=True, **TWO_NODES)

    class Confused(HierarchicalStrategy):
        def load_checkpoint(self, checkpoint_path, weights_only=None):
            other = Path(checkpoint_path).with_name("step=4.ckpt")
            return super().load_checkpoint(other if self.global_rank == 1 else checkpoint_path, weights_only)

    resume = {"fit_arguments": {"ckpt_path": tmp_path / "step=2.ckpt"}}
    with pytest.raises(Exception, match="rank 0 resumed from one of step 2, but rank 1 from one of step 4"):
        fit(Net(), Confused(ranks_per_node=2, start_method="fork"), **resume, forked=True, **TWO_NODES)
