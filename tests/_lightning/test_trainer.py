"""Every private or fragile touch of Lightning's Trainer, loops and callbacks still does what we rely on."""

from __future__ import annotations

import signal
from contextlib import contextmanager

import lightning.pytorch as pl
import pytest
import torch
from _lightning.conftest import boring, quiet
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader

from lightning_hiercomm._lightning import trainer as ours


class Together:
    """Stands in for a control plane, and records its calls.

    Args:
        stops_for: Why all ranks come to the next batch, if they do.
    """

    def __init__(self, stops_for: str = "") -> None:
        self.stops_for, self.stops_together, self.heard = stops_for, True, []
        self.should_stop = lambda: self.stops_for != ""
        self.request_stop = lambda why="stop": self.heard.append(why)


@contextmanager
def handling_signals(run):
    run._signal_connector.register_signal_handlers()
    try:
        yield
    finally:
        run._signal_connector.teardown()


def test_the_replaced_broadcast_stops_the_run_and_can_be_put_back():
    run = quiet()
    ours.replace_sigterm_broadcast(run, Together("stop"))
    with pytest.raises(SIGTERMException):
        run.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert run.received_sigterm
    ours.restore_trainer(run)
    assert "_broadcast_sigterm_tensor" not in vars(run.fit_loop.epoch_loop)
    assert {"_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"}.isdisjoint(vars(run._signal_connector))


def test_slurms_signal_saves_at_a_batch_common_to_all_ranks(monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.signal_connector.call", saved.append)
    monkeypatch.setattr(pl.Trainer, "save_checkpoint", lambda self, path: saved.append(path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = quiet(plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR2)], default_root_dir=tmp_path)
    ranks = Together("requeue")
    ours.replace_sigterm_broadcast(run, ranks)
    run.state.fn = TrainerFn.FITTING
    with handling_signals(run):
        signal.raise_signal(signal.SIGUSR2)
        assert (ranks.heard, saved) == (["requeue"], [])
        with pytest.raises(SIGTERMException):
            run.fit_loop.epoch_loop._broadcast_sigterm_tensor()
        expected = [f"{tmp_path}/hpc_ckpt_1.ckpt", ["scontrol", "requeue", "7"]]
        assert (ranks.stops_for, saved) == ("stop", expected)
        ranks.stops_for, ranks.stops_together = "requeue", False  # no collective would end
        with pytest.raises(SIGTERMException):
            run.fit_loop.epoch_loop._broadcast_sigterm_tensor()
        assert saved == expected
        run.state.fn = TrainerFn.VALIDATING  # where there are no batches of training
        signal.raise_signal(signal.SIGUSR2)
        assert saved == 2 * expected


def test_a_version_without_the_touched_method_is_refused(monkeypatch):
    monkeypatch.delattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor")
    with pytest.raises(RuntimeError, match=r"no _TrainingEpochLoop\._broadcast_sigterm_tensor"):
        ours.replace_sigterm_broadcast(quiet(), Together())


def test_lightning_sees_a_marked_sigterm():
    run = quiet()
    assert not run.received_sigterm
    ours.mark_sigterm_received(run)
    assert run.received_sigterm


def test_the_raw_optimizer_is_the_users_own():
    seen = []

    def look(trainer, module, *_):
        seen.append((ours.raw_optimizer(module.optimizers()), trainer.optimizers[0]))

    quiet(max_steps=1, limit_val_batches=0, callbacks=[LambdaCallback(on_train_batch_end=look)]).fit(BoringModel())
    ((raw, users),) = seen
    assert raw is users
    assert type(raw) is torch.optim.SGD


def stop(*_):
    raise KeyError("stop")


def test_an_exception_sets_the_trainer_state_before_callbacks_run():
    seen = []
    listener = LambdaCallback(on_exception=lambda trainer, *_: seen.append(ours.is_interrupted(trainer)))
    run = quiet(max_steps=1, callbacks=[listener], limit_val_batches=0)
    with pytest.raises(KeyError):
        run.fit(boring(training_step=stop))
    assert seen == [True]
    assert run.state.status == TrainerStatus.INTERRUPTED
    assert not ours.is_interrupted(None)


def test_lightning_averages_logged_values_in_batches_and_between_them(monkeypatch):
    monkeypatch.setattr(accelerator_connector._AcceleratorConnector, "is_distributed", True)
    seen = {}

    class Averages(SingleDeviceStrategy):
        def reduce(self, tensor, *args, **kwargs):
            seen.setdefault(tensor.item(), set()).add(ours.is_between_batches(model.trainer))
            return tensor

    def training_step(self, batch, batch_idx):
        self.log("step", 2.5, sync_dist=True)
        self.log("most", 3.5, sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
        return BoringModel.training_step(self, batch, batch_idx)

    model = boring(
        training_step=training_step,
        on_train_epoch_start=lambda self: self.log("epoch", 1.5, sync_dist=True, reduce_fx="max"),
        validation_step=lambda self, *_: self.log("validated", 4.5, sync_dist=True, reduce_fx="max"),
    )
    some = {"limit_train_batches": 2, "limit_val_batches": 1, "use_distributed_sampler": False}
    quiet(max_epochs=1, strategy=Averages("cpu"), **some).fit(model)
    assert seen | {1.5: {True}, 2.5: {False}, 3.5: {True}, 4.5: {True}} == seen


def test_the_first_callback_comes_before_the_users_and_can_leave():
    class First(LambdaCallback):
        """Of a type of its own: another one of its type would be replaced."""

    heard = []
    users = LambdaCallback(on_train_batch_end=lambda *_: heard.append("users"))
    first = First(on_train_batch_end=lambda *_: heard.append("first"))
    run = quiet(max_steps=1, callbacks=[users], limit_val_batches=0)
    ours.put_callback_first(run, first)
    ours.put_callback_first(run, first)  # a second fit does not double it
    run.fit(BoringModel())
    assert heard == ["first", "users"]
    ours.remove_callback(run, first)
    assert first not in run.callbacks


def test_the_epoch_that_only_collects_batchnorm_statistics_is_seen():
    skips, model = [], boring(train_dataloader=lambda self: DataLoader(torch.randn(4, 32), batch_size=4))
    model.layer = nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 2))
    listener = LambdaCallback(on_train_batch_start=lambda trainer, *_: skips.append(ours.skips_backward(trainer)))
    averaging = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    quiet(limit_train_batches=1, limit_val_batches=0, callbacks=[averaging, listener]).fit(model)
    assert skips == [False, False, True]


def test_a_step_that_fetches_its_own_batches_is_seen():
    assert ours.takes_dataloader_iter(boring(training_step=lambda self, dataloader_iter: None))
    assert not ours.takes_dataloader_iter(BoringModel())


@pytest.mark.parametrize("workers", [0, 1])
def test_samplers_have_drawn_their_seed_before_a_batch_is_loaded(workers):
    drawn = []

    def on_train_start(self):
        ours.draw_first_indices(self.trainer)
        drawn.append(torch.get_rng_state())

    def training_step(self, batch, batch_idx):
        drawn.append((torch.get_rng_state(), batch.item()))
        return self.layer(torch.ones(1, 32)).sum()

    loader = DataLoader(torch.arange(6.0), shuffle=True, num_workers=workers)
    model = boring(training_step=training_step, on_train_start=on_train_start)
    quiet(max_epochs=1, use_distributed_sampler=False, limit_val_batches=0).fit(model, loader)
    before, *batches = drawn
    assert sorted(value for _, value in batches) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(torch.equal(state, before) for state, _ in batches)


@pytest.mark.parametrize("automatic", [True, False])
def test_batches_in_which_lightning_accumulates_gradients_are_known(automatic):
    module, seen = BoringModel(), []
    module.automatic_optimization = automatic
    listener = LambdaCallback(on_train_batch_end=lambda trainer, *_: seen.append(ours.accumulates(trainer)))
    arguments = {"accumulate_grad_batches": 2} if automatic else {}
    arguments.update(limit_train_batches=5, limit_val_batches=0, max_epochs=1)
    quiet(callbacks=[listener], **arguments).fit(module)
    assert seen == ([True, False, True, False, False] if automatic else [False] * 5)
