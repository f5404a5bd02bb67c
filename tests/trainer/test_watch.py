"""How a rank that raises ends."""

from __future__ import annotations

import pickle
import re
import signal
import sys
import time
import weakref
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from fits import fit_here
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from problems import SHORT_SCHEMES, Oracle, one_trainer
from torch.distributed import HashStore
from torch.utils.data import DataLoader

from lightning_hiercomm import AllReduce, Health, PeriodicAveraging
from lightning_hiercomm.control.plane import ControlPlane
from lightning_hiercomm.trainer.watch import RunControl, print_without_traceback


@pytest.fixture
def control():
    control = RunControl()
    control.plane = ControlPlane(1, 2, "rank 1 (node 1)")
    return control


@pytest.mark.parametrize(
    ("error", "together", "exits_with"),
    [
        (SystemExit(0), False, 1),
        (SystemExit(None), False, 1),
        (SystemExit(3), False, 3),
        (SIGTERMException(), True, None),
    ],
    ids=repr,
)
def test_only_ranks_that_stop_together_exit_with_0(control, error, together, exits_with):
    """torchrun would take the node of one that leaves alone for finished, and wait five minutes for the others."""
    control.plane._stop_at = 4 if together else None  # noqa: SLF001
    control.note_exception(error)
    assert error.code == exits_with


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("heard", [None, "rank 3 (node 1) was interrupted"])
def test_ctrl_c_is_an_interruption_that_one_rank_logs_in_one_line(control, caplog, monkeypatch, rank, heard):
    control.plane = ControlPlane(rank, 4, f"rank {rank} (node 0)")
    reported, report = [], control.plane.report_failure
    monkeypatch.setattr(control.plane, "wait_for_failure", lambda timeout, **_: heard)
    monkeypatch.setattr(control.plane, "report_failure", lambda error: reported.append(error) or report(error))
    error = KeyboardInterrupt()
    control.note_exception(error)
    control.note_exception(error)  # callbacks hear of it, and then the strategy
    assert reported == ([] if heard else [error])
    assert caplog.messages == ([] if heard else [f"rank {rank} (node 0) was interrupted"])
    assert all(record.levelname == "WARNING" for record in caplog.records)
    assert not getattr(error, "__notes__", [])


def test_a_single_process_keeps_its_exit_code():
    error = SystemExit(0)
    RunControl().note_exception(error)
    assert error.code == 0


def test_a_forked_rank_that_raises_asks_no_other_any_more(control):
    """Lightning calls it interrupted in the process only that has forked it."""
    trainer = one_trainer(None)
    assert control.ranks_are_together(trainer)
    control.note_exception(ValueError("before training begins"))
    assert not control.ranks_are_together(trainer)
    assert control.is_interrupted(trainer)


def test_the_next_run_reports_the_failure_again(control, monkeypatch):
    """A program may catch an error, and train again with the same Trainer."""
    control.note_exception(ValueError("in the run before"))
    control.plane = None
    assert control.is_interrupted(None)
    monkeypatch.setattr(ControlPlane, "start", lambda *_: None)
    control.start(1, 2, 1, HashStore(), None, gather=lambda said: [said])
    assert not control.is_interrupted(None)
    reported = []
    monkeypatch.setattr(control.plane, "report_failure", reported.append)
    error = ValueError("in this one")
    control.note_exception(error)
    assert reported == [error]


def test_an_error_after_a_common_stop_is_reported(control, monkeypatch):
    reported = []
    monkeypatch.setattr(control.plane, "report_failure", lambda error: reported.append(error) or "")
    control.plane._stop_at = 4  # noqa: SLF001
    control.note_exception(SIGTERMException())
    error = OSError("no space left on device")  # while the ranks save
    control.note_exception(error)
    assert reported == [error]


def test_ranks_that_leave_together_exit_with_0(control):
    """While the node waits for other nodes: there all its ranks are together."""
    trainer = one_trainer(None)
    control.watch_over(trainer, leave=lambda: None)
    assert control.exception_to_leave() is None
    control.plane.stop_requested = True
    error = pickle.loads(pickle.dumps(control.exception_to_leave()))
    reported = []
    control.plane.report_failure = reported.append
    control.note_exception(error)
    assert not error.code
    assert not reported


def test_a_node_of_one_rank_is_queued_again_before_a_batch_and_leaves(monkeypatch, tmp_path):
    """Lightning would save inside the signal's handler: a synchronization to which no other node comes."""
    done = []
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.signal_connector.call", done.append)
    monkeypatch.setattr(pl.Trainer, "save_checkpoint", lambda self, path: done.append("saves"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    trainer = one_trainer(tmp_path, plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR2)])
    control = RunControl()
    control.watch_over(trainer, leave=lambda: done.append("leaves"))
    trainer.state.fn = TrainerFn.FITTING
    trainer._signal_connector.register_signal_handlers()
    try:
        control.before_batch()
        signal.raise_signal(signal.SIGUSR2)
        assert not done
        assert control.exception_to_leave() is None, "it could not be queued again there"
        with pytest.raises(SIGTERMException):
            control.before_batch()
        assert done == ["leaves", "saves", ["scontrol", "requeue", "7"]]
        assert trainer.received_sigterm
        assert isinstance(control.exception_to_leave(), SIGTERMException)
    finally:
        trainer._signal_connector.teardown()
    control.stop(trainer)
    assert control.exception_to_leave() is None
    control.before_batch()


HANG = 3.0


class Alone(Oracle):
    """Trains epochs, each with a validation; one rank does at one moment what the others do not do."""

    def __init__(self, moment="", rank=0, act=None):
        super().__init__()
        self.moment, self.rank, self.act = moment, rank, act

    def _at(self, moment):
        if moment == self.moment and self.global_rank == self.rank and not self.trainer.sanity_checking:
            self.act(self.trainer)

    def on_train_batch_end(self, *_):
        super().on_train_batch_end()
        self._at(f"step {self.trainer.global_step}")
        if self.trainer.is_last_batch:
            self._at("last batch")

    def validation_step(self, batch, batch_idx):
        pass

    def val_dataloader(self):
        return DataLoader(torch.zeros(2, 1))

    def on_train_epoch_end(self):
        self._at("epoch end")

    def on_validation_end(self):
        self._at("validation end")

    def on_train_end(self):
        self._at("train end")


def stop(trainer):
    trainer.should_stop = True


def save(trainer):
    trainer.save_checkpoint(f"{trainer.default_root_dir}/alone.ckpt")


class StopsByDivergence(Alone):
    """Takes up to four steps a batch, as PPO does, and stops early where its own divergence is large."""

    def __init__(self, together=False):
        super().__init__()
        self.automatic_optimization = False
        self.together = together

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for step in range(4):
            is_large = self.global_rank == 1 and batch_idx == 1 and step == 2
            if self.together:
                is_large = self.trainer.strategy.reduce_boolean_decision(is_large, all=False)
            if is_large:
                break
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


def end_of(fit, capfd, module, scheme):
    """What a run of two nodes that must fail writes to standard error."""
    settings = {"scheme": scheme, "ranks_per_node": 1, "health": Health(hang_timeout=HANG)}
    with pytest.raises(Exception, match=r"exit code 1|rank \d"):
        fit(module, settings, devices=2, forked=True, max_epochs=3)
    return capfd.readouterr().err


@pytest.mark.long("its runs hang until the control plane ends them")
@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("moment", "scheme"), [("last batch", "all_reduce"), ("epoch end", "periodic"), ("validation end", "steps_delay")]
)
def test_a_stop_on_one_rank_after_an_epoch_ends_the_run(fit, capfd, moment, scheme):
    said = end_of(fit, capfd, Alone(moment, 1, stop), SHORT_SCHEMES[scheme])
    assert "rank 1 (node 1) ended training after 4 batches of the run" in said
    assert "and rank 0 (node 0) trains on with batch " in said
    assert "If trainer.should_stop was set on some ranks only" in said


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("moment", "scheme"), [("step 2", "daso"), ("validation end", "all_reduce"), ("train end", "diloco")]
)
def test_a_checkpoint_saved_on_one_rank_ends_the_run(fit, capfd, moment, scheme):
    said = end_of(fit, capfd, Alone(moment, 0, save), SHORT_SCHEMES[scheme])
    assert "test_watch.py" in said
    assert "rank 0" in said
    assert "Call trainer.save_checkpoint on all ranks; only rank 0 writes the file" in said


@pytest.mark.long("its run hangs until the control plane ends it")
@pytest.mark.timeout(100)
def test_a_barrier_on_one_rank_ends_the_run_with_a_table(fit, capfd):
    said = end_of(fit, capfd, Alone("step 3", 1, lambda _: dist.barrier()), PeriodicAveraging(2))
    assert "rank 1 (node 1) | torch.distributed.barrier" in said
    assert "Likely cause: rank 1 called more collectives (barrier, all_gather" in said


@pytest.mark.long("its run hangs until the control plane ends it")
@pytest.mark.timeout(100)
def test_a_loop_that_stops_on_one_rank_ends_the_run_with_its_remedy(fit, capfd):
    said = end_of(fit, capfd, StopsByDivergence(), AllReduce())
    assert "Likely cause: rank 1 ended a batch, and rank 0 did not. The ranks took unequal numbers of optimizer" in said
    assert "trainer.strategy.reduce_boolean_decision(kl > limit, all=False)" in said
    settings = {"scheme": AllReduce(), "ranks_per_node": 1}
    for report in fit(StopsByDivergence(together=True), settings, devices=2, forked=True):
        assert len(report["report"]) == 4


def calls_after_fit(folder, method, other):
    """The error on a rank, if rank 0 calls a method of the trainer after a fit, and rank 1 another one, or ends."""
    module = Alone()
    trainer = fit_here(folder, module, PeriodicAveraging(2), health=Health(hang_timeout=HANG))
    if not trainer.is_global_zero and other == "ends":
        dist.destroy_process_group()  # closes connections, as the end of a process does
        return ""
    called = method if trainer.is_global_zero else other
    with pytest.raises(RuntimeError) as caught:
        getattr(trainer, called)(folder / "alone.ckpt" if called == "save_checkpoint" else module)
    if other == "ends":
        dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("method", ["validate", "save_checkpoint"])
def test_a_call_on_rank_0_after_other_ranks_ended_fails(borrow, method):
    said, _ = borrow(partial(calls_after_fit, method=method, other="ends"), ranks=2)
    assert (
        "rank 0 waits for a rank that has ended. Call trainer.fit, validate, test, predict and save_checkpoint" in said
    )


@pytest.mark.timeout(100)
def test_ranks_that_call_different_functions_of_the_trainer_fail(borrow):
    for said in borrow(partial(calls_after_fit, method="validate", other="fit"), ranks=2):
        assert re.search(r"rank 0 \(node 0\) called trainer.validate.*, and rank 1 \(node 1\) called trainer.fit", said)


@pytest.mark.long("one rank waits longer than hang_timeout")
def test_a_long_task_of_one_rank_while_the_others_wait_goes_on(fit):
    evaluates = Alone("validation end", 0, lambda _: time.sleep(2 * HANG))
    settings = {"scheme": AllReduce(), "ranks_per_node": 1, "health": Health(hang_timeout=HANG)}
    reports = fit(evaluates, settings, devices=2, forked=True)
    assert [len(report["report"]) for report in reports] == [4, 4]


def test_a_rank_that_ends_because_of_another_prints_no_traceback(capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    caught = {}
    for name in ("own", "of another rank"):
        try:
            try:
                raise KeyError("first")
            except KeyError:
                raise RuntimeError(name)  # noqa: B904
        except RuntimeError as error:
            caught[name] = error
    print_without_traceback(caught["of another rank"])
    for error in caught.values():
        sys.excepthook(type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert said.count("Traceback") == 2, "of the first error, and its context"
    assert said.endswith("\nRuntimeError: own\nRuntimeError: of another rank\n")


def test_a_program_that_continues_after_a_failure_of_another_rank_does_not_keep_it(monkeypatch):
    class FailureError(RuntimeError):
        pass

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    hooks, left = [], []
    for _ in range(2):
        failure = FailureError()
        print_without_traceback(failure)
        hooks.append(sys.excepthook)
        left.append(weakref.ref(failure))
    del failure
    assert [each() for each in left] == [None, None]
    assert hooks[0] is hooks[1]
