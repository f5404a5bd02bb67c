"""Checkpoints of sharded nodes: whole in one file, or a directory of shards; and those that resume to the bit."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import traceback

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from model_parallel.conftest import trainer, whole_state
from model_parallel.sharded import STEPS, Dropped, Net, Unfreezing

from lightning_hiercomm import (
    DASO,
    DiLoCo,
    HierarchicalModelParallelStrategy,
    HierarchicalStrategy,
    PeriodicAveraging,
    Transport,
)

SCHEMES = {"daso": lambda: DASO(3, 2, 0, 0, reducer="sharded"), "diloco": lambda: DiLoCo(6, fragments=2, staleness=2)}
KINDS = {"file": False, "directory": True}
SAVED_AS = {"daso": "directory", "diloco": "file"}
SAVED_AT, DIES_AT = 7, 9


class Dies(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == DIES_AT and trainer.global_rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)


class GroupedUnfrozen(Unfreezing, Dropped):
    """Its optimizer has the parameters in another order, by groups."""

    def configure_optimizers(self):
        *others, matrix = sorted(self.parameters(), key=torch.Tensor.dim)
        groups = [{"params": others, "weight_decay": 0.0}, {"params": [matrix], "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, lr=0.01)


def _fit(folder, name, kind, resume=None, replicas=True, callbacks=(), module_class=Dropped, **arguments):
    strategy = HierarchicalModelParallelStrategy(
        SCHEMES[name](),
        ranks_per_node=2,
        wire_dtype="int8" if name == "daso" else None,  # what a code keeps back is state, too
        save_distributed_checkpoint=KINDS[kind],
        checkpoint_replicas=replicas,
        transport=Transport(bucket_mb=1e-3),
    )
    return _fit_under(strategy, folder / name / kind, resume, module_class, callbacks, **arguments)


def _fit_whole(folder, resume=None, **arguments):
    strategy = HierarchicalStrategy(SCHEMES["diloco"](), ranks_per_node=2, transport=Transport(bucket_mb=1e-3))
    return _fit_under(strategy, folder, resume, GroupedUnfrozen, **arguments)


def _fit_under(strategy, folder, resume, module_class, callbacks=(), **arguments):
    module = module_class("adamw")
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AT, save_top_k=1)
    run = trainer(strategy, enable_checkpointing=True, callbacks=[saves, *callbacks], **arguments)
    run.fit(module, ckpt_path=resume)
    return {"state": whole_state(module), "losses": module.report}


def _train(folder):
    """Each scheme without a break, one checkpoint in it; then a run whose rank dies after the checkpoint."""
    results = {name: _fit(folder, name, kind) for name, kind in SAVED_AS.items()}
    short = {"max_steps": SAVED_AT, "max_epochs": None}
    _fit_whole(folder / FILES["whole"], **short)
    _fit(folder / "sharded", "diloco", "file", module_class=GroupedUnfrozen, **short)
    torch.save(results, folder / f"trained-{os.environ['LOCAL_RANK']}.pt")
    with _heard(folder, os.environ["LOCAL_RANK"]).open("a", buffering=1) as heard, contextlib.redirect_stderr(heard):
        logging.getLogger("lightning_hiercomm").addHandler(logging.StreamHandler(heard))
        try:
            _fit(folder, "diloco", "directory", callbacks=[Dies()])
        except Exception:  # torch.multiprocessing passes on that of one rank
            traceback.print_exc()
            raise


def _heard(folder, rank):
    return folder / f"heard-{rank}.txt"


def _checkpoint(folder, name, kind):
    return folder / name / kind / f"step={SAVED_AT}.ckpt"


def _resume(folder):
    results = {}
    for name, kind in SAVED_AS.items():
        results["exact", name] = _fit(folder / "resumed", name, kind, _checkpoint(folder, name, kind))
    results["exact", "killed"] = _fit(
        folder / "resumed again", "diloco", "directory", _checkpoint(folder, "diloco", "directory")
    )
    for kind in KINDS:
        path = _checkpoint(folder, "diloco", kind)
        results["plain", kind] = _fit(folder / "plain", "diloco", kind, path, replicas=False)
        module, begins = Dropped("adamw"), Begins()
        run = trainer(ModelParallelStrategy(4, 1, save_distributed_checkpoint=False), max_epochs=2, callbacks=[begins])
        run.fit(module, ckpt_path=path)
        results["Lightning", kind] = {"steps": run.global_step, "losses": module.report, "loaded": begins.state}
    for saved_by, place in FILES.items():
        path, plain = folder / place / f"step={SAVED_AT}.ckpt", {"replicas": False, "module_class": GroupedUnfrozen}
        results["whole", saved_by] = _fit_whole(folder / "whole again", path)
        results["sharded", saved_by] = _fit(folder / "sharded again", "diloco", "file", path, **plain)
    return results


class Begins(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        self.state = whole_state(pl_module)


FILES = {"sharded": "sharded/diloco/file", "whole": "whole"}
"""Folders, by whose files they are."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def trained(launch, folder):
    with pytest.raises(Exception, match="rank 3: ended without a word"):
        launch(_train, folder=folder)
    return [torch.load(folder / f"trained-{rank}.pt") for rank in range(4)]


@pytest.fixture(scope="module")
def resumed(launch, folder, trained):
    return launch(_resume, folder=folder)


@pytest.mark.parametrize("name", [*SAVED_AS, "killed"])
def test_a_run_resumes_to_the_bit(trained, resumed, name):
    for before, after in zip(trained, resumed, strict=True):
        expected, ours = before["diloco" if name == "killed" else name], after["exact", name]
        assert ours["losses"] == expected["losses"][SAVED_AT:]
        torch.testing.assert_close(ours["state"], expected["state"], rtol=0, atol=0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_dies_is_named_by_the_others(folder, trained, rank):
    assert "rank 3 (node 1) died" in _heard(folder, rank).read_text()


def test_a_directory_resumes_like_a_file(resumed):
    for results in resumed:
        assert results["plain", "file"]["losses"] == results["plain", "directory"]["losses"]


@pytest.mark.parametrize("saved_by", FILES)
def test_files_go_to_ranks_that_hold_all_and_come_from_them(resumed, saved_by):
    for results in resumed:
        ours, expected = results["sharded", saved_by], results["whole", saved_by]
        torch.testing.assert_close(ours["losses"], expected["losses"], rtol=0, atol=1e-5)
        for name, values in expected["state"].items():
            if "running" not in name:  # DDP lets a node's ranks follow the first one's statistics
                torch.testing.assert_close(ours["state"][name], values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_lightnings_own_strategy_goes_on_from_it(folder, resumed, kind):
    saved = torch.load(_checkpoint(folder, "diloco", "file"), weights_only=True)
    for results in resumed:
        assert results["Lightning", kind]["steps"] == 2 * STEPS
        assert len(results["Lightning", kind]["losses"]) == 2 * STEPS - SAVED_AT
        torch.testing.assert_close(results["Lightning", kind]["loaded"], saved["state_dict"], rtol=0, atol=0)


def test_one_process_goes_on_from_a_file(launch, folder, resumed):
    path = _checkpoint(folder, "diloco", "file")

    def go_on(_):
        module = Dropped("adamw", replicas=1)
        run = trainer("auto", 1)
        run.fit(module, ckpt_path=path, weights_only=True)
        shapes = [parameter.shape for parameter in module.parameters()]
        return {"steps": run.global_step, "shapes": shapes}

    # in a process of its own: its backward starts threads that no later test could fork
    (run,) = launch(go_on, ranks=1)
    assert run["steps"] == 2 * STEPS
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
    assert [state["step"].item() for state in saved.values()] == [SAVED_AT] * len(run["shapes"])
    assert [state["exp_avg"].shape for state in saved.values()] == run["shapes"]


class Unoptimized(Net):
    """Has sharded parameters and no optimizer."""

    def configure_optimizers(self):
        return None


@pytest.mark.pooled
def test_a_sharded_module_without_an_optimizer_is_saved_and_resumed(borrow):
    def main(folder):
        steps = []
        for name, in_directory in KINDS.items():
            path, after = folder / f"{name}.ckpt", folder / f"{name}-after"
            saves = ModelCheckpoint(folder, path.stem, every_n_train_steps=2, save_top_k=1)
            # with replicas, what is saved after fit holds nothing of single ranks
            for resume in (None, path, *([] if in_directory else [after])):
                strategy = HierarchicalModelParallelStrategy(
                    PeriodicAveraging(2),
                    ranks_per_node=1,
                    checkpoint_replicas=in_directory,
                    save_distributed_checkpoint=in_directory,
                )
                callbacks = [saves] if resume is None else []
                arguments = {"max_epochs": 1 if resume is None else 2, "enable_checkpointing": resume is None}
                run = trainer(strategy, 2, callbacks=callbacks, **arguments)
                run.fit(Unoptimized(replicas=2), ckpt_path=resume)
                if resume is None:
                    run.save_checkpoint(after)  # also when the run has closed its process groups
                else:
                    steps.append(run.global_step)
        return steps

    assert borrow(main, ranks=2) == [[2 * STEPS] * 3] * 2
