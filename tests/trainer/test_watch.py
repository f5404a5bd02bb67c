"""How a rank that raises ends."""

from __future__ import annotations

import pickle
import signal
import sys

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from problems import Oracle, one_trainer
from torch.distributed import HashStore

from lightning_hiercomm.trainer.watch import RunControl


def connected(rank, size):
    control = RunControl(rank, size, f"rank {rank} (node 0)")
    control._store = HashStore()  # noqa: SLF001
    control._store.set("failure", "")  # noqa: SLF001
    control.is_connected, control.stops_together = True, False
    return control


@pytest.fixture
def control():
    return connected(1, 2)


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
    control.stops_together = together
    control.note_exception(error)
    assert error.code == exits_with


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("heard", [None, "rank 3 (node 1) was interrupted"])
def test_ctrl_c_is_an_interruption_that_one_rank_logs_in_one_line(control, caplog, monkeypatch, rank, heard):
    control = connected(rank, 4)
    reported, report = [], control.report_failure
    monkeypatch.setattr(control, "wait_for_failure", lambda timeout, **_: heard)
    monkeypatch.setattr(control, "report_failure", lambda error: reported.append(error) or report(error))
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


def test_an_error_after_a_common_stop_is_reported(control, monkeypatch):
    reported = []
    monkeypatch.setattr(control, "report_failure", lambda error: reported.append(error) or "")
    control.stops_together = True
    control.note_exception(SIGTERMException())
    error = OSError("no space left on device")  # while the ranks save
    control.note_exception(error)
    assert reported == [error]


def test_ranks_that_leave_together_exit_with_0(control):
    """While the node waits for other nodes: there all its ranks are together."""
    trainer = one_trainer(None)
    control.watch_over(trainer, leave=lambda: None)
    assert control.exception_to_leave() is None
    control.stops_for = "stop"
    error = pickle.loads(pickle.dumps(control.exception_to_leave()))
    reported = []
    control.report_failure = reported.append
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


HANG = 3.0


class Alone(Oracle):
    """Trains epochs, each with a validation; one rank does at one moment what the others do not do."""


def test_a_rank_that_ends_because_of_another_prints_where_it_was_told_only(control):
    control.failure = "rank 0 (node 0) died"
    error = RuntimeError("of another rank")
    error.__context__ = error.__cause__ = KeyError("first")
    control.note_exception(error)
    assert error.__traceback__ is error.__context__ is error.__cause__ is None
    if sys.version_info >= (3, 11):
        assert error.__notes__ == ["lightning_hiercomm: rank 1 (node 0) ends because rank 0 (node 0) died"]
