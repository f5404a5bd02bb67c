"""Every private or fragile touch of Lightning still does what `_lightning.py` relies on."""

from __future__ import annotations

import inspect
import signal

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hiercomm import _lightning


def trainer(**arguments) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "enable_model_summary": False, **quiet, **arguments})


def test_the_epoch_loop_calls_the_sigterm_broadcast_before_every_batch():
    # on one rank it is not called at all, so look at the source: this is what `replace_sigterm_broadcast` stands on
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._broadcast_sigterm_tensor()" in source
    assert source.index("self._broadcast_sigterm_tensor()") < source.index("next(data_fetcher)")
    assert "torch.distributed.broadcast(" in inspect.getsource(_TrainingEpochLoop._broadcast_sigterm_tensor)


def test_the_replaced_broadcast_stops_the_run_and_can_be_put_back():
    run, heard = trainer(), []
    _lightning.replace_sigterm_broadcast(run, lambda: True, lambda: heard.append("term"))
    with pytest.raises(SIGTERMException):
        run.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert run.received_sigterm
    _lightning.restore_sigterm_broadcast(run)
    assert "_broadcast_sigterm_tensor" not in vars(run.fit_loop.epoch_loop)
    assert "_sigterm_notifier_fn" not in vars(run._signal_connector)


def test_a_sigterm_reaches_the_replaced_handler_only():
    run, heard = trainer(), []
    _lightning.replace_sigterm_broadcast(run, lambda: False, lambda: heard.append("term"))
    run._signal_connector.register_signal_handlers()
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        run._signal_connector.teardown()
    assert heard == ["term"]
    assert not run.received_sigterm


def test_a_version_without_the_touched_method_is_refused(monkeypatch):
    monkeypatch.delattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor")
    with pytest.raises(RuntimeError, match=r"no _TrainingEpochLoop\._broadcast_sigterm_tensor"):
        _lightning.replace_sigterm_broadcast(trainer(), lambda: False, lambda: None)


def test_a_marked_sigterm_is_what_lightning_sees():
    run = trainer()
    assert not run.received_sigterm
    _lightning.mark_sigterm_received(run)
    assert run.received_sigterm


def test_the_raw_optimizer_is_the_users_own():
    seen = []

    class Model(BoringModel):
        def training_step(self, batch, batch_idx):
            seen.append((_lightning.raw_optimizer(self.optimizers()), self.trainer.optimizers[0]))
            return super().training_step(batch, batch_idx)

    trainer(max_steps=1, limit_val_batches=0).fit(Model())
    ((raw, users),) = seen
    assert raw is users
    assert type(raw) is torch.optim.SGD


def test_an_exception_marks_the_trainer_before_callbacks_hear_of_it():
    seen = []

    class Listener(pl.Callback):
        def on_exception(self, trainer, pl_module, exception):
            seen.append(_lightning.is_interrupted(trainer))

    class Model(BoringModel):
        def training_step(self, batch, batch_idx):
            raise KeyError("stop")

    run = trainer(max_steps=1, callbacks=[Listener()], limit_val_batches=0)
    with pytest.raises(KeyError):
        run.fit(Model())
    assert seen == [True]
    assert run.state.status == TrainerStatus.INTERRUPTED
    assert not _lightning.is_interrupted(None)


def test_the_first_callback_hears_before_the_users_and_can_leave():
    heard = []

    class Named(pl.Callback):
        def __init__(self, name):
            self.name = name

        def on_train_batch_end(self, *_):
            heard.append(self.name)

    class First(Named):
        pass

    first = First("first")
    run = trainer(max_steps=1, callbacks=[Named("users")], limit_val_batches=0)
    _lightning.put_callback_first(run, first)
    _lightning.put_callback_first(run, first)  # a second fit does not double it
    run.fit(BoringModel())
    assert heard == ["first", "users"]
    _lightning.remove_callback(run, first)
    assert first not in run.callbacks


def test_the_epoch_ends_are_where_the_strategy_looks_for_them():
    """Order of calls: the last batch's end, then validation, then the epoch's end."""
    heard = []

    class Listener(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            heard.append(("batch", trainer.is_last_batch))

        def on_validation_start(self, *_):
            heard.append("validation")

        def on_train_epoch_end(self, *_):
            heard.append("epoch")

    run = trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=1, num_sanity_val_steps=0)
    run.callbacks.append(Listener())
    run.fit(BoringModel())
    assert heard == [("batch", False), ("batch", True), "validation", "epoch"]


def test_sync_batchnorm_layers_take_the_group():
    model = torch.nn.Sequential(torch.nn.SyncBatchNorm(3), torch.nn.BatchNorm1d(3))
    group = object()
    _lightning.keep_sync_batchnorm_in_group(model, group)
    assert model[0].process_group is group
    assert not hasattr(model[1], "process_group")


def test_batches_that_stepped_are_the_loggers_steps():
    run = trainer(max_steps=3, limit_val_batches=0)
    assert _lightning.batches_that_stepped(run) == 0
    run.fit(BoringModel())
    assert _lightning.batches_that_stepped(run) == 3
