"""Runs that end early: ranks that take unequal numbers of batches, that fail in a tuner, or that SLURM queues again."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress

import lightning.pytorch as pl
import pytest
import torch
from fits import outcome
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities.exceptions import SIGTERMException
from problems import Oracle, Stream, one_trainer
from torch.utils.data import DataLoader

from lightning_hiercomm import Health, HierarchicalStrategy, PeriodicAveraging

pytestmark = pytest.mark.pooled


class Uneven(Oracle):
    """Rank 0 has 5 batches and rank 1 has 8; both wait for each other in a validation."""

    def train_dataloader(self):
        return DataLoader(Stream(torch.ones(5 + 3 * self.global_rank, 1)))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.x.sum(), sync_dist=True)

    def val_dataloader(self):
        return DataLoader(torch.ones(4, 1))


class Stopping(Uneven):
    """Rank 0 stops in the middle of an epoch."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 0 and batch_idx == 2:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return DataLoader(torch.ones(100_000, 1))  # otherwise the other rank reaches its validation, too


BY_BATCHES = r"rank 0 \(node 0\) ended (an epoch|training), 5 optimizer steps after 5 batches of the run.*, and rank 1"
ALONE = r"the ranks wait for each other\n(.*\n)+rank 0 \(node 0\) .*past training batch 2 of epoch 0, after 3 steps"


@pytest.mark.long("heartbeats are seconds apart, and ranks are started and end")
@pytest.mark.parametrize(
    ("module", "found"), [(Uneven(), BY_BATCHES), (Stopping(), ALONE)], ids=["unequal", "one stops"]
)
def test_ranks_that_take_unequal_numbers_of_batches_are_named(fit, capfd, module, found):
    arguments = {"devices": 2, "use_distributed_sampler": False, "forked": True}
    settings = {"scheme": PeriodicAveraging(50, at_epoch_end=False), "health": Health(hang_timeout=3.0)}
    with pytest.raises(Exception, match=r"exit code 1|equally many steps"):
        fit(module, {"ranks_per_node": 1, **settings}, **arguments)
    assert re.search(found, capfd.readouterr().err)


def test_a_rank_that_raises_in_the_learning_rate_finder_ends_the_others(fit):
    """The finder restores the state before it, with barriers, before its error is raised."""

    class Unlucky(Oracle):
        lr = 0.1

        def training_step(self, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 2:
                raise ValueError("the dog ate the batch")
            return super().training_step(batch, batch_idx)

    finder = LearningRateFinder(num_training_steps=4, update_attr=False)
    strategy = {"scheme": PeriodicAveraging(4), "ranks_per_node": 1}
    with pytest.raises(Exception, match="the dog ate the batch"):
        fit(Unlucky(), strategy, devices=2, callbacks=[finder], forked=True)


def test_timed_validation_is_refused_with_synchronous_schemes(borrow):
    def timed(folder):
        return outcome(folder, Oracle(), "all_reduce", val_check_interval="00:00:10:00")

    for error, _, _ in borrow(timed, ranks=2):
        assert "every rank measures by its own clock" in error


class AskedToEnd(pl.Callback):
    """SLURM tells the ranks, each at another batch, that their time is nearly up; ``began`` is where fits begin."""

    def __init__(self) -> None:
        self.began: list[int] = []

    def on_train_start(self, trainer, pl_module):
        self.began.append(trainer.global_step)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.began == [0] and batch_idx == 3 + 2 * trainer.global_rank:
            os.kill(os.getpid(), signal.SIGUSR2)
        if self.began == [0] and batch_idx == 8:  # on a busy machine the news may be slower than batches are
            plane, deadline = trainer.strategy._control, time.monotonic() + 30  # noqa: SLF001
            while not plane.stops_for and time.monotonic() < deadline:
                time.sleep(0.001)


def _requeued(folder):
    rank = int(os.environ["LOCAL_RANK"])
    where = {"NTASKS": 2, "NTASKS_PER_NODE": 1, "PROCID": rank, "NODEID": rank, "LOCALID": 0, "JOB_ID": 7}
    os.environ["SLURM_JOB_NAME"] = "digits"
    os.environ |= {f"SLURM_{name}": str(value) for name, value in where.items()}
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    modules, asked = [], AskedToEnd()
    for callbacks in ([], [asked], [asked]):  # undisturbed; asked; and the job that was queued again
        trainer = one_trainer(
            folder,
            num_nodes=2,
            max_epochs=1,
            strategy=HierarchicalStrategy(PeriodicAveraging(4), checkpoint_replicas=True),
            plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR2)],
            callbacks=callbacks,
        )
        with suppress(SIGTERMException):
            trainer.fit(module := Oracle(30, momentum=0.9))
        modules.append(module.state_dict())
    return modules, asked.began, trainer.global_step


@pytest.mark.timeout(100)
def test_slurms_signal_saves_one_file_and_requeues_once(borrow, tmp_path):
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n')
    (tmp_path / "scontrol").chmod(0o755)
    for (undisturbed, _, resumed), began, steps in borrow(_requeued, ranks=2, folder=tmp_path):
        torch.testing.assert_close(resumed, undisturbed, rtol=0, atol=0)
        assert began == [0, torch.load(tmp_path / "hpc_ckpt_1.ckpt")["global_step"]]
        assert 4 <= began[1] < steps == 30
    assert (tmp_path / "said").read_text() == "requeue 7\n"
