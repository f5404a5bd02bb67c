"""A resume from a checkpoint with replicas is bit-identical with the run that was never interrupted."""

from __future__ import annotations

import itertools
import math
import time
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from fits import fit_here, whole_and_resumed
from lightning.pytorch.callbacks import ModelCheckpoint
from pairwise import on_push
from problems import SaveAfter, same_bits
from sidecar_cases import STEPS, TWO_NODES, AdamW, Net, schemes
from torch.utils.data import DataLoader

from lightning_hiercomm import AllReduce, DiLoCo, PeriodicAveraging, Transport

pytestmark = pytest.mark.pooled


# the others are a scheme of these with another wire, or with less in flight
@pytest.mark.parametrize(
    "name", on_push(schemes(), "daso", "gossip_overlap", "steps_delay", "all_reduce_int8", "streaming_int8")
)
def test_a_resume_at_the_end_of_an_epoch_is_bit_identical(fit, tmp_path, name):
    """With a narrow wire, whose last averaged values and what it keeps back are state, too.

    Without one, see compatibility/test_checkpoints.
    """
    path, wire = tmp_path / "saved.ckpt", name.rpartition("_")[2]
    strategy = {"scheme": schemes()[name], "wire_dtype": wire if wire.startswith("int") else "bfloat16"}
    strategy["checkpoint_replicas"] = True
    whole = fit(Net(), strategy, max_epochs=2, callbacks=[SaveAfter(STEPS, path)])
    resumed = fit(Net(), strategy, max_epochs=2, fit_arguments={"ckpt_path": path})
    for one, other in zip(whole, resumed, strict=True):
        assert other["report"] == one["report"][STEPS:]
        for key, value in one["state_dict"].items():
            assert torch.equal(value, other["state_dict"][key]), key


class Logs(Net):
    """Logs its loss, which is another one on each rank."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def _saved_by_names_of_their_own(folder):
    saves = ModelCheckpoint(folder, "{step}-{loss:.6f}", every_n_train_steps=STEPS, save_top_k=-1)

    def run(path=None, **arguments):
        arguments |= {"checkpoint_replicas": True, "limit_train_batches": STEPS}
        return fit_here(folder, Logs(), PeriodicAveraging(3), path, **arguments)

    trainer = run(callbacks=[saves], enable_checkpointing=True)
    resumed = run(next(folder.glob(f"step={STEPS}-*.ckpt")))
    last, name = f"step={2 * STEPS}-*.ckpt*", saves.best_model_path
    trainer.strategy.remove_checkpoint(name)
    deadline = time.monotonic() + 20
    while any(folder.glob(last)) and time.monotonic() < deadline:  # rank 0 deletes them
        time.sleep(0.01)
    whole, resumed = (each.lightning_module.report for each in (trainer, resumed))
    return whole[STEPS:], resumed, Path(name).name, [*folder.glob(last)]


def test_a_file_name_with_a_rank_dependent_metric_is_the_same_on_all_ranks(borrow):
    ranks = borrow(_saved_by_names_of_their_own, ranks=2)
    for whole, resumed, *_ in ranks:
        assert resumed == whole
    (*_, name, _), (*_, other_name, left) = ranks
    assert name != other_name
    assert left == []


class Unfreezing(Net):
    """The first layer is frozen for three steps, by the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        self.layers[0].requires_grad_(self.global_step >= 3)


class Wide(Net):
    """So many elements that three nodes add them up in a ring, whose order depends on where an element is.

    DDP by itself cuts its buckets after the first step of a process, so its first step has another order.
    """

    def __init__(self) -> None:
        super().__init__()
        for layer in (torch.nn.Linear(2000, 5), torch.nn.Linear(5, 2000), torch.nn.Linear(5, 5)):
            self.layers.insert(0, layer)

    def on_train_batch_end(self, *_: object) -> None:
        self.report.append([parameter.grad.flatten().tolist() for parameter in self.parameters()])


class Best(Net):
    """Keeps its best loss, which begins at infinity and so has no mean in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("best", torch.tensor(math.inf))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx) + self.global_rank
        self.best.copy_(torch.minimum(self.best, loss.detach()))
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        self.report.append(self.best.item())


UNFROZEN = [schemes()[name] for name in ("periodic", "steps_delay", "gossip")] + [DiLoCo(4, AdamW)]


@pytest.mark.parametrize(
    ("make", "trained", "wires", "ranks"),
    [
        (Unfreezing, UNFROZEN, [None], 2),
        (Wide, [AllReduce()], [None, "int8"], 3),
        (Best, [PeriodicAveraging(2)], [None, "int8"], 2),
    ],
    ids=["parameters were unfrozen", "three nodes sum in a ring", "a buffer has no mean"],
)
def test_a_resume_is_bit_identical_where(borrow, make, trained, wires, ranks):
    steps = 3 if ranks == 3 else STEPS

    def main(folder):
        length = {"devices": ranks, "limit_train_batches": steps}
        found = []
        for scheme, wire in itertools.product(trained, wires):
            whole, resumed = whole_and_resumed(folder, make, scheme, after=steps, wire_dtype=wire, **length)
            found.append((whole.report, resumed.report))
            if make is Unfreezing:
                assert fit_here(folder, make(), scheme, folder / "whole.ckpt", **length).global_step == 2 * steps
        return found

    for found in borrow(main, ranks=ranks):
        for whole, resumed in found:
            assert len(whole) == 2 * steps
            assert resumed == whole[steps:]


class Shares(Net):
    """Reports the running mean that ranks of a node share, and validates.

    Attributes:
        automatic_optimization: If not, it steps its optimizer itself.
    """

    def __init__(self, automatic_optimization: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic_optimization

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        self.report.append(self.layers[1].running_mean.tolist())

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.layers(batch[0])

    def val_dataloader(self) -> DataLoader:
        data = self.train_dataloader().dataset
        return DataLoader(data, generator=torch.Generator())  # or it takes a number from dropout's


def _validated_and_resumed(folder):
    steps, found = 4, []  # per epoch
    scheme, four = PeriodicAveraging(3, at_epoch_end=False), {"ranks_per_node": 2, "devices": 4}
    four["limit_train_batches"], validates = steps, {"limit_val_batches": 2, "val_check_interval": steps // 2}
    for automatic in (True, False):
        fit_here(folder, plain := Shares(automatic), scheme, limit_val_batches=0, **four)
        make = partial(Shares, automatic)
        whole, resumed = whole_and_resumed(folder, make, scheme, after=steps, **validates, **four)
        found.append((plain.report, whole.report, whole.report[steps:], resumed.report))
    return found


@pytest.mark.long("six runs on four ranks")
def test_buffers_shared_in_a_node_are_unchanged_by_validation(borrow):
    """DDP shares them before a forward pass, except the first after a validation.

    And Lightning's manual optimization lets it do so before the first one of a process only.
    """
    for found in borrow(_validated_and_resumed, ranks=4):
        for plain, whole, rest, resumed in found:
            assert whole == plain
            assert resumed == rest


@pytest.mark.parametrize("name", ["periodic", "gossip_overlap", "steps_delay"])
def test_resuming_a_finished_run_ends_on_the_averaged_model(fit, tmp_path, name):
    strategy = {"scheme": schemes()[name], "checkpoint_replicas": True, "ranks_per_node": 1}
    saves = {"callbacks": [ModelCheckpoint(tmp_path, "over")], "enable_checkpointing": True}
    whole = fit(Net(), strategy, **saves, **TWO_NODES)
    again = fit(Net(), strategy, fit_arguments={"ckpt_path": tmp_path / "over.ckpt"}, **TWO_NODES)
    same_bits([*whole, *again])


@pytest.mark.parametrize("max_epochs", [0, 1])
def test_a_run_in_which_nothing_is_left_to_train_can_be_saved_afterwards(borrow, max_epochs):
    def main(folder):
        fit = partial(fit_here, folder, scheme=DiLoCo(6, AdamW, fragments=2, staleness=2), max_epochs=max_epochs)
        first = fit(Net(), callbacks=[ModelCheckpoint(folder, "over")], enable_checkpointing=True)
        again = fit(Net(), ckpt_path=folder / "over.ckpt" if max_epochs else None)
        again.save_checkpoint(folder / "again.ckpt")
        first.save_checkpoint(folder / "first.ckpt")
        saved = [torch.load(folder / f"{which}.ckpt", weights_only=True)["hiercomm"] for which in ("first", "again")]
        return [schedule["schemes"][0]["steps"] for schedule in saved]

    assert borrow(main, 2) == [[2 * STEPS * max_epochs] * 2] * 2


@pytest.fixture(scope="module")
def saved_after_a_synchronization(borrow, tmp_path_factory):
    path = tmp_path_factory.mktemp("outer") / "saved.ckpt"

    def main(folder):
        four = {"devices": 4, "ranks_per_node": 2, "max_steps": 11}
        fit_here(folder, Net(), DiLoCo(6, AdamW), callbacks=[SaveAfter(11, path)], **four)

    borrow(main)
    return path


@pytest.mark.parametrize("nodes", [2, 1, [3, 1]], ids=str)
def test_other_nodes_go_on_with_the_outer_optimizer_of_a_plain_checkpoint(fit, saved_after_a_synchronization, nodes):
    path = saved_after_a_synchronization
    saved = torch.load(path, weights_only=True)
    (scheme,) = saved["hiercomm"]["schemes"]
    outer = scheme["outer"]["state"]
    assert [state["step"].item() for state in outer] == [1.0] * 6  # one synchronization before
    assert [state["exp_avg"].shape for state in outer] == [p.shape for p in Net().parameters()]
    seen = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if not seen:
                seen.append(trainer.strategy.schemes[0].state_dict(shared=True)["outer"]["state"])
                pl_module.report.append(seen[0])

    strategy = {"scheme": DiLoCo(6, AdamW, fragments=2, staleness=1), "transport": Transport(bucket_mb=1e-4)}
    strategy["ranks_per_node"], arguments = nodes, {"max_epochs": 2, "fit_arguments": {"ckpt_path": path}}
    resumed = fit(Net(), strategy, callbacks=[Look()], **arguments)
    for report in resumed:
        for restored, before in zip(report["report"][0], outer, strict=True):
            assert restored.keys() == before.keys()
            assert all(torch.equal(restored[name], before[name]) for name in before)
