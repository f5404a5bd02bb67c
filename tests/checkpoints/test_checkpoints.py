"""What a checkpoint holds besides the averaged model goes from every scheme to every other; on threads."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from pathlib import Path

import pytest
import torch
from harness import on_ranks
from lightning.pytorch.demos.boring_classes import BoringModel
from problems import one_trainer, warnings_with
from torch import nn

from lightning_hiercomm import HierarchicalStrategy, PeriodicAveraging
from lightning_hiercomm.checkpoints.durable import DurableCheckpointIO
from lightning_hiercomm.checkpoints.plain import Checkpoints
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import SCHEMES, Scheme

ARGUMENTS = {"daso": {"sync_every": 4, "warmup": 0, "cooldown": 0}, "diloco": {"sync_every": 2}}


def on_two_nodes(scheme: Scheme, work, nodes=((0,), (1,))):
    """``work(run)`` on two nodes, of one rank by default, with a run that is set up."""

    def body(topology):
        module = nn.Linear(3, 2)
        nn.init.constant_(module.weight, 0.5)
        nn.init.zeros_(module.bias)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        run = TrainingRun(scheme, Replicas(module, [optimizer]), topology)
        try:
            return work(run)
        finally:
            run.close(timeout=5.0)

    return on_ranks(body, nodes, timeout=5.0)


def restored(run: TrainingRun, checkpoint: dict) -> Checkpoints:
    checkpoints = Checkpoints()
    checkpoints.take(checkpoint, "saved.ckpt")
    checkpoints.restore(run)
    return checkpoints


def train(run: TrainingRun, epoch: int, steps: int) -> None:
    run.begin(epochs=4, steps=None)
    run.begin_epoch(epoch)
    shared_by = {"world": 0, "node": run.topology.node}[run.schemes[0].config.gradients]
    for step in range(steps):
        for parameter in run.module.parameters():
            parameter.grad = torch.full_like(parameter, shared_by + 1)
        run.step(run.optimizers[0], run.optimizers[0].step, last=step == steps - 1)
    run.end_epoch()


def scheme(name: str) -> Scheme:
    return SCHEMES[name](**ARGUMENTS.get(name, {}))


def saved_by(name: str) -> dict:
    """A checkpoint after an epoch of five steps."""

    def work(run):
        train(run, 0, 5)
        checkpoint = {"global_step": 5}
        Checkpoints().add_to(checkpoint, run, None)
        return checkpoint

    return on_two_nodes(scheme(name), work)[0]


@pytest.mark.parametrize(("before", "after"), [*itertools.product(SCHEMES, SCHEMES)])
def test_a_checkpoint_of_any_scheme_is_resumed_by_any_other(before, after):
    checkpoint = saved_by(before)

    def work(run):
        restored(run, checkpoint).check_equal(run.topology)
        (resumed,) = run.schemes
        counted = resumed.state.steps, resumed.state.step_in_epoch, resumed.state.epoch
        train(run, 1, 5)
        return counted, (resumed.state.steps, resumed.state.step_in_epoch, resumed.state.epoch)

    with warnings_with("the checkpoint was saved with") as messages:
        assert on_two_nodes(scheme(after), work) == [((5, 5, 0), (10, 5, 1))] * 2
    names = [type(scheme(name)).__name__ for name in (before, after)]
    expected = f"the checkpoint was saved with {names[0]}: {names[1]} continues from its parameters"
    assert [message.startswith(expected) for message in messages] == [True] * (before != after)


@pytest.mark.parametrize("nodes", [((0,),), ((0, 1),), ((0, 1, 2), (3,))], ids=["1", "2", "3+1"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_checkpoint_goes_to_other_nodes(name, nodes):
    checkpoint = saved_by(name)

    def work(run):
        restored(run, checkpoint)
        train(run, 1, 5)
        run.finish()
        return run.schemes[0].state.steps, [parameter.tolist() for parameter in run.module.parameters()]

    (steps, values), *others = on_two_nodes(scheme(name), work, nodes)
    assert steps == 10
    assert all(other == (steps, values) for other in others)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_rank_that_is_alone_with_an_error_can_save_without_the_others(name):
    """``OnExceptionCheckpoint`` does; a rank that waits for the others there waits until they end."""

    def work(run):
        train(run, 0, 5)
        checkpoint = {"global_step": 5}
        if run.topology.rank == 0:
            Checkpoints().add_to(checkpoint, run, None, together=False)
        return checkpoint

    alone, *_ = on_two_nodes(scheme(name), work, ((0, 1), (2, 3)))
    (schedule,) = alone["hiercomm"]["schemes"]
    assert schedule["steps"] == 5

    def resumed(run):
        restored(run, alone)
        return run.schemes[0].state.steps

    assert on_two_nodes(scheme(name), resumed) == [5, 5]


@pytest.mark.parametrize(("number", "found"), [(None, "no format number"), (0, "format 0")])
def test_a_checkpoint_of_another_format_is_refused(number, found):
    checkpoint = saved_by("periodic")
    checkpoint["hiercomm"]["format"] = number
    with pytest.raises(ValueError, match="format") as raised:
        Checkpoints().take(checkpoint, "saved.ckpt")
    assert str(raised.value) == (
        f"saved.ckpt has {found}, but this version of lightning-hiercomm reads only format 5. Load only its weights,"
        " with LightningModule.load_from_checkpoint, and call fit without ckpt_path."
    )


def _foreign(folder: Path) -> list[str]:
    """What a run says that resumes from, or validates, checkpoints that this version has not written."""
    path, messages = folder / "plain.ckpt", []
    trainer = one_trainer(folder, max_epochs=1, limit_train_batches=2)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(path)
    plain = torch.load(path, weights_only=False)
    torch.save({**plain, "hiercomm": {"schemes": []}}, folder / "other.ckpt")
    for file, act in ((path, "fit"), (folder / "other.ckpt", "fit"), (folder / "other.ckpt", "validate")):
        strategy = HierarchicalStrategy(PeriodicAveraging(2), ranks_per_node=1)
        trainer = one_trainer(folder, strategy=strategy, devices=2, limit_train_batches=2, limit_val_batches=1)
        try:
            getattr(trainer, act)(BoringModel(), ckpt_path=file)
            messages.append(f"{act}: step {trainer.global_step}")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_only_a_resume_refuses_another_format_and_reads_lightnings_own(borrow):
    for resumed, refused, validated in borrow(_foreign, ranks=2):
        assert (resumed, validated) == ("fit: step 4", "validate: step 0")
        assert "other.ckpt has no format number, but this version of lightning-hiercomm reads only format 5" in refused


def test_a_scheme_finds_its_own_schedule_again():
    checkpoint = saved_by("daso")
    (schedule,) = checkpoint["hiercomm"]["schemes"]
    schedule["cycle"], schedule["plateau"]["bad_values"] = [2, 1], 1

    def work(run):
        restored(run, checkpoint)
        return run.schemes[0].state_dict(shared=True)

    assert on_two_nodes(scheme("daso"), work) == [schedule] * 2


def test_restored_state_is_freed():
    checkpoint = saved_by("diloco")

    def work(run):
        own, checkpoints = copy.deepcopy(checkpoint), Checkpoints()
        momentum = weakref.ref(own["hiercomm"]["schemes"][0]["outer"]["state"][0]["momentum_buffer"])
        checkpoints.take(own, "saved.ckpt")
        checkpoints.restore(run)
        own.clear()
        gc.collect()
        return momentum()

    assert on_two_nodes(scheme("diloco"), work) == [None, None]


def test_nodes_without_a_common_folder_are_refused_before_the_checkpoint(tmp_path):
    class OwnDisk(DurableCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            super().save_checkpoint(checkpoint, tmp_path / "disk of node 1" / Path(path).name, storage_options)

    def work(run):
        rank, checkpoint = run.topology.rank, {"global_step": 5}
        checkpoints, io = Checkpoints(with_replicas=True), OwnDisk() if rank else DurableCheckpointIO()
        checkpoints.add_to(checkpoint, run, None)
        checkpoints.write_sidecars(checkpoint, run, io, tmp_path / "saved.ckpt", False, {})

    with pytest.raises(OSError, match=r"rank 0 does not see rank-0001 in .*: all nodes must share it"):
        on_two_nodes(scheme("periodic"), work)
    assert [each.name for each in tmp_path.iterdir()] == ["disk of node 1"]
