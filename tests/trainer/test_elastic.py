"""What elastic nodes refuse of a Trainer. How they train is in `tests/elastic`."""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import MagicMock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import SIGTERMException
from problems import Quadratic, one_trainer
from torch.distributed import DistNetworkError

from lightning_hiercomm import DiLoCo, HierarchicalStrategy
from lightning_hiercomm.checkpoints.plain import Checkpoints
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.elastic import Elastic, rendezvous
from lightning_hiercomm.elastic.lighthouse import lighthouse
from lightning_hiercomm.elastic.topology import ElasticTopology
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.trainer import elastic, hooks
from lightning_hiercomm.trainer.elastic import ElasticNode
from lightning_hiercomm.trainer.elastic_refusals import check_trainer
from lightning_hiercomm.trainer.epoch_clock import check_training


class Logging(Quadratic):
    """Logs its loss in training and in validation, and the step."""

    plateau: str | None = None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss + 0.1, on_step=True, on_epoch=True, sync_dist=True)
        self.log("at", float(self.global_step))
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.plateau is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.plateau}}


def node(trainer=None, leads: bool = True, nodes: int = 1, kind=ElasticNode, **membership) -> ElasticNode:
    own = ElasticTopology(Topology([[0]], 0, ThreadWorld(1).connect(0, Meter()), Meter()))
    run = SimpleNamespace(topology=own, schemes=[])
    history = SimpleNamespace(nodes=nodes)
    rendezvous = SimpleNamespace(end_if_behind=lambda: None)
    given = {"leads": leads, "history": history, "rendezvous": rendezvous, **membership}
    return kind(trainer, run, SimpleNamespace(**given), Checkpoints(), lambda: None)


def nothing(*_: object) -> None:
    """A hook that asks no other node."""


HOOKS = ("on_train_epoch_start", "on_train_batch_start", "on_train_end", "on_exception")
Checks = type("Checks", (ElasticNode,), dict.fromkeys(HOOKS, nothing))


def fit(folder, *callbacks: pl.Callback, plateau: str | None = None) -> None:
    checks = node(kind=Checks)
    run = one_trainer(folder, callbacks=[checks, *callbacks], enable_checkpointing=True, max_epochs=2)
    run.fit(Logging(plateau=plateau))


@pytest.mark.parametrize("monitor", ["loss", "loss_step", "loss_epoch"])
@pytest.mark.parametrize("kind", [ModelCheckpoint, EarlyStopping])
def test_a_callback_that_decides_by_training_metrics_is_named(tmp_path, kind, monitor):
    with pytest.raises(ValueError, match=f"{kind.__name__} monitors '{monitor}', .*: monitor what validation logs"):
        fit(tmp_path, kind(monitor=monitor))


def test_a_scheduler_that_decides_by_training_metrics_is_named(tmp_path):
    with pytest.raises(ValueError, match="ReduceLROnPlateau monitors 'loss'"):
        fit(tmp_path, plateau="loss")


def test_numbers_of_validation_and_whole_numbers_may_decide(tmp_path):
    stops = EarlyStopping(monitor="val_loss")
    keeps = [ModelCheckpoint(tmp_path, f"{name}-{{step}}", name, save_top_k=2) for name in ("at", "val_loss")]
    fit(tmp_path, stops, *keeps, plateau="val_loss")
    assert len([*tmp_path.glob("at-*.ckpt")]) == 2


class Averages(EMAWeightAveraging):
    """As Lightning's documentation has users write it."""


class RayTrainReportCallback(Callback):
    """Stands for Ray's, which may not be installed."""

    __module__ = "ray.train.lightning"


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (Timer(timedelta(hours=1)), r"Timer \(Trainer\(max_time=\.\.\.\) adds one\) ends training at another batch"),
        (Averages(), "Averages averages on each node separately"),
        (ModelCheckpoint(save_last="link"), "ModelCheckpoint with save_last='link'.*use save_last=True"),
        (ModelCheckpoint(train_time_interval=timedelta(hours=1)), "use every_n_train_steps"),
        (RayTrainReportCallback(), "RayTrainReportCallback waits for a report of every worker.*: use ModelCheckpoint"),
        (LearningRateFinder(), "LearningRateFinder .Tuner.lr_find uses it.*: find a rate without elastic="),
    ],
    ids=lambda value: type(value).__name__,
)
def test_callbacks_that_decide_per_node_are_refused(tmp_path, callback, said):
    pytest.importorskip("torchft", reason="needs the extra `elastic`")
    with pytest.raises(ValueError, match=said):
        check_trainer(one_trainer(tmp_path, callbacks=[callback], enable_checkpointing=True))


def test_a_users_own_callback_may_have_the_name_of_a_refused_one(tmp_path):
    pytest.importorskip("torchft", reason="needs the extra `elastic`")
    own = type("Timer", (Callback,), {"__module__": "user_program"})()
    check_trainer(one_trainer(tmp_path, callbacks=[own]))


def test_elastic_world_of_several_nodes_is_refused(tmp_path, monkeypatch):
    """Such as `torchrun --nnodes=2`, whose nodes would each ask the lighthouse."""
    monkeypatch.setattr(hooks, "connect_world", lambda *_: MagicMock(num_nodes=2))
    run = one_trainer(tmp_path, strategy=HierarchicalStrategy(DiLoCo(sync_every=2), elastic="127.0.0.1:29510"))
    with pytest.raises(ValueError, match="this one has 2 nodes: start each node with `torchrun --nnodes=1`"):
        run.fit(BoringModel())


def test_timed_validation_is_refused_for_elastic_nodes(tmp_path):
    node = MagicMock(world_size=1, is_one_node=False, **{"world.all_gather_object.return_value": [8]})
    timed = one_trainer(tmp_path, val_check_interval=timedelta(minutes=15))
    with pytest.raises(ValueError, match=r"val_check_interval=.*by its own clock.*give a number of batches"):
        check_training(timed, DiLoCo(sync_every=2), node)


@pytest.mark.parametrize(
    ("leads", "nodes", "leaves", "writes"),
    [
        (True, 2, lambda own: None, True),
        (False, 2, lambda own: None, False),
        (True, 2, ElasticNode.give_up, False),
        (True, 1, ElasticNode.give_up, True),
        (True, 2, ElasticNode.leave_others, False),  # when it is queued again
        (True, 1, ElasticNode.leave_others, True),
    ],
)
def test_first_node_writes_unless_it_leaves_others(leads, nodes, leaves, writes):
    """It would overwrite the averaged model with its own parameters."""
    own = node(leads=leads, nodes=nodes)
    leaves(own)
    assert own.writes == writes


def test_node_with_other_parameters_or_buffers_is_at_another_position():
    """Its tensors would not fit theirs, and gloo ends a process that receives more than it asked for."""
    own, scheme = node(), SimpleNamespace(state=SimpleNamespace(steps=5))
    own._run.schemes = [scheme]  # noqa: SLF001
    positions = []
    for parameters, buffers in (((3, 4), ()), ((3,), ()), ((3,), (2,))):
        scheme.replica = Replica(map(torch.zeros, parameters), map(torch.zeros, buffers))
        positions.append(own.position())
    assert positions == [f"after 5 optimizer steps of {count} elements" for count in (7, 3, 5)]


@pytest.mark.parametrize(("moment", "done", "gives"), [("batch", 6, False), ("batch", 8, True), ("epoch", 6, True)])
def test_no_state_is_sent_while_gradients_are_accumulated(moment, done, gives):
    """The first step of a recovered node would lack them."""
    progress = SimpleNamespace(current=SimpleNamespace(completed=done))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    trainer, given = SimpleNamespace(fit_loop=loop, accumulate_grad_batches=4), []
    healing = SimpleNamespace(is_expected=True)
    node(trainer, healing=healing, give_state=given.append).at_boundary(moment)
    assert bool(given) == gives


@pytest.fixture
def address(monkeypatch):
    """The address of a lighthouse, at which this process is the only node."""
    pytest.importorskip("torchft", reason="needs the extra `elastic`")
    with lighthouse("127.0.0.1:0", dead_after=0.5) as address:
        monkeypatch.setenv("HIERCOMM_LIGHTHOUSE", address)
        monkeypatch.setenv("HIERCOMM_ADDRESS", "127.0.0.1")
        yield address


def fit_alone(folder, module: pl.LightningModule, *callbacks: pl.Callback, path=None) -> pl.Trainer:
    strategy = HierarchicalStrategy(DiLoCo(sync_every=2), elastic=Elastic(dead_after=0.5))
    run = one_trainer(folder, strategy=strategy, callbacks=[*callbacks], max_epochs=1 if path is None else 2)
    run.fit(module, ckpt_path=path)
    return run


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        (
            "own_address",
            socket.gaierror(-2, "Name or service not known"),
            "no route .*lighthouse.*Name or service not known",
        ),
        ("TCPStore", DistNetworkError("timed out\nframe #0"), r"at 127.0.0.1 \(timed out\): set HIERCOMM_ADDRESS"),
    ],
)
def test_an_unreachable_lighthouse_or_own_address_is_named(tmp_path, address, monkeypatch, name, error, said):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(elastic, name, fails)
    if name == "own_address":
        monkeypatch.delenv("HIERCOMM_ADDRESS")
    with pytest.raises((ValueError, RuntimeError), match=said):
        fit_alone(tmp_path, Quadratic())


class WithTeacher(BoringModel):
    """Writes to a part of itself in a hook, as programs do that load what was trained before."""

    def __init__(self, hook: str, part: str) -> None:
        super().__init__()
        self.teacher = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        setattr(self, hook, lambda: self.get_parameter(part).data.fill_(7.0))


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_parameters_changed_after_a_sync_are_refused_except_a_teacher(tmp_path, address, hook):
    with pytest.raises(
        ValueError, match=r"changed in on_fit_start or on_train_start, .* Change them in configure_model"
    ):
        fit_alone(tmp_path, WithTeacher(hook, "layer.weight"))
    run = fit_alone(tmp_path, WithTeacher(hook, "teacher"))
    run.save_checkpoint(tmp_path / "saved.ckpt")
    with pytest.raises(ValueError, match="changed in on_fit_start or on_train_start"):
        fit_alone(tmp_path, WithTeacher(hook, "layer.weight"), path=tmp_path / "saved.ckpt")


def test_state_kept_for_joining_nodes_is_freed_after_fit(tmp_path, address):
    """It listened as long as the strategy lived, with the last state that it gave in memory."""
    ports = []

    class Looks(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            ports.append(trainer.strategy._elastic_node.membership.around.store.port)  # noqa: SLF001
            socket.create_connection(("127.0.0.1", ports[0]), 5.0).close()

    run = fit_alone(tmp_path, Quadratic(), Looks())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]), 5.0)
    assert run.strategy.schemes[0].state.steps > 0


def test_a_leaving_node_exits_with_an_unfinished_status(tmp_path, address):
    """It ended with 0, as after the last step, and the shell went on with what comes after a training."""

    class Terminates(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        fit_alone(tmp_path, Quadratic(), Terminates())
    assert ended.value.code == 143


@pytest.mark.parametrize(
    ("error", "at_once", "is_over"),
    [(None, False, True), (SIGTERMException(), False, False), (RuntimeError(), True, False)],
    ids=repr,
)
def test_a_leaving_node_stays_until_others_have_read_its_vote(error, at_once, is_over):
    """They would be left behind, and start again; only one that fails cannot wait."""
    left = []
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(), _data_connector=SimpleNamespace(), callbacks=[])
    own = node(trainer, leave=lambda **how: left.append(how))
    if error is not None:
        own.on_exception(None, None, error)
    own.leave(at_once=error is not None)
    assert left == [{"at_once": at_once, "is_over": is_over}]


def test_a_second_fit_does_not_count_as_a_restart(monkeypatch):
    """Every node would take the second run for the first one, which is over."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setattr(rendezvous, "_ended_here", set())
    assert elastic.was_restarted()
    monkeypatch.setattr(rendezvous, "_ended_here", {"the first"})
    assert not elastic.was_restarted()
