"""HierarchicalStrategy over real processes: whom it synchronizes, by what, and with what in mid-run."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from fits import whole_and_resumed
from harness import TARGETS
from lightning.pytorch.callbacks import LambdaCallback, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from problems import Net, Oracle, fitted, one_trainer, same_bits
from torch.distributed import distributed_c10d

from lightning_hiercomm import DASO, AllReduce, DiLoCo, Epochs, Health, HierarchicalStrategy, PeriodicAveraging
from lightning_hiercomm.control import plane as control
from lightning_hiercomm.control.plane import RankFailure

pytestmark = pytest.mark.pooled


class Unusual(Net):
    """Everything that could go wrong bitwise: frozen, tied, BatchNorm, momentum."""

    def __init__(self) -> None:
        super().__init__(steps=12)
        hidden, tied = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        tied.weight = hidden.weight
        frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        first, *others = self.layers
        self.layers = torch.nn.Sequential(first, torch.nn.BatchNorm1d(8), hidden, tied, frozen, *others)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("scheme", "ranks_per_node", "devices", "expected"),
    [
        (
            PeriodicAveraging(2),
            2,
            4,
            [[0.5, 3, 3.5, 2.25, 3.875, 3.9375]] * 2 + [[3.5, 3, 3.5, 5.25, 3.875, 3.9375]] * 2,
        ),
        (PeriodicAveraging(2), [3, 1], 4, [[1, 3, 3.5, 2.75, 3.875, 3.9375]] * 3 + [[5, 3, 3.5, 6.75, 3.875, 3.9375]]),
        (PeriodicAveraging(2), 1, 4, [[a / 2, 3, 3.5, (3.5 + a) / 2, 3.875, 3.9375] for a in TARGETS]),
        ("all_reduce", 2, 4, [[2, 3, 3.5, 3.75, 3.875, 3.9375]] * 4),
        (PeriodicAveraging(2), 1, 1, [[0.0] * 6]),
    ],
    ids=["nodes of two", "unequal nodes weigh by their ranks", "local SGD", "synchronous", "one process"],
)
def test_ranks_follow_the_table_to_the_digit(fit, scheme, ranks_per_node, devices, expected):
    strategy = {"scheme": scheme, "ranks_per_node": ranks_per_node}
    reports = fit(Oracle(3), strategy, devices=devices, max_epochs=2)  # each ends with a synchronization
    assert [report["report"] for report in reports] == expected
    same_bits(reports)


@pytest.mark.parametrize(("devices", "shares_memory"), [(2, "1"), (3, "0")], ids=["shared memory", "gloo"])
def test_one_node_gives_the_weights_of_ddp_bit_for_bit(launch, monkeypatch, devices, shares_memory):
    def train(folder):
        ours = [HierarchicalStrategy(scheme, ranks_per_node=devices) for scheme in (AllReduce(), PeriodicAveraging(3))]
        return [fitted(folder, Unusual(), each, devices=devices)["state_dict"] for each in (DDPStrategy(), *ours)]

    monkeypatch.setenv("HIERCOMM_SHARED_MEMORY", shares_memory)
    ddp, *ours = launch(train, ranks=devices)[0]
    for state in ours:
        torch.testing.assert_close(state, ddp, rtol=0, atol=0)


def test_values_set_in_on_train_start_are_trained_from(fit):
    class Pretrained(Oracle):
        def on_train_start(self):
            self.x.data.fill_(8 + self.global_rank)  # loaded, or drawn, there: rank 0's count

    reports = fit(Pretrained(2), {"scheme": DiLoCo(2)})
    assert [report["report"][0] for report in reports] == [4.5, 4.5, 7.5, 7.5]
    # the nodes reach 2.75 and 7.25, 3 below the reference; SGD with momentum makes that 0.7 * (1 + 0.9) * 3
    assert [report["report"][1] for report in reports] == pytest.approx([8 - 3.99] * 4)


class Diverges(Oracle):
    """Rank 3 changes its parameter in the third batch."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_rank == 3 and self.global_step == 2:
            self.x.data += 1e-3


def test_the_documented_callback_finds_a_rank_that_differs(fit):
    page = Path(__file__).resolve().parents[2] / "docs" / "howto" / "debug_a_hang.md"
    (program,) = re.findall(r"```python\n(import lightning.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    scheme, compares = {"scheme": PeriodicAveraging(4)}, names["CompareRanks"](every_n_steps=1)
    fit(Oracle(4), scheme, callbacks=[compares])
    with pytest.raises(Exception, match="rank 3, step 3: x differs from the first rank's"):
        fit(Diverges(4), scheme, callbacks=[compares], forked=True)


def test_reduce_takes_operations_of_each_rank_and_leaves_numbers_alone(fit):
    """``str(ReduceOp(...))`` contains an address; DDPStrategy returns what is no tensor without a collective."""

    class Reducing(Oracle):
        def on_train_epoch_end(self):
            operations = [dist.ReduceOp(dist.ReduceOp.SUM) for _ in range(1 + 50 * self.global_rank)]
            reduced = self.trainer.strategy.reduce(torch.ones(1), reduce_op=operations[-1]).item()
            self.report = reduced, self.trainer.strategy.reduce(2.0) if self.global_rank == 0 else 0.0

    reports = fit(Reducing(), {"ranks_per_node": 1, "health": Health(hang_timeout=3.0)}, devices=2)
    assert [report["report"] for report in reports] == [(2.0, 2.0), (2.0, 0.0)]


class GivenUp(Exception):
    """Of a search: not worth more."""


class GivesUp(pl.Callback):
    """As all ranks do that look at the same numbers."""

    is_content = False

    def on_train_batch_end(self, trainer, *_):
        control._GRACE = 60.0  # do not end a late rank on a busy machine  # noqa: SLF001
        if not self.is_content:
            raise GivenUp


def _given_up_and_begun_again(folder):
    groups, judge, module = [], GivesUp(), Oracle(targets=(0.0, 2.0))
    for _ in range(3):
        strategy = HierarchicalStrategy(PeriodicAveraging(2), ranks_per_node=1)
        trainer = one_trainer(folder, devices=2, strategy=strategy, callbacks=[judge])
        with pytest.raises((GivenUp, RankFailure)):
            trainer.fit(Oracle())
        groups.append(len(distributed_c10d._world.pg_map))
    left, judge.is_content = strategy.topology, True
    trainer.fit(module)
    groups.append(len(distributed_c10d._world.pg_map))
    return groups, strategy.topology is left, module.report


def test_abandoned_fits_leave_no_process_groups(launch):
    """A search that gives a trial up on all ranks goes on in their processes; each had left four behind."""
    for (first, second, third, last), is_same, report in launch(_given_up_and_begun_again, ranks=2):
        assert first == second == third
        assert last == 1  # the default group: another fit has begun, and has closed its own
        assert not is_same
        assert report[:2] in ([0.0, 0.75], [1.0, 0.75])


class TakingBatches(Oracle):
    """Takes its batches out of the loader by itself; ``report`` is the scheme's count of steps."""

    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_):
        self.report.append(self.trainer.strategy.schemes[0].state.step_in_epoch)


def _resumed_within_an_epoch(folder):
    length = {"checkpoint_replicas": False, "max_steps": 5, "max_epochs": None}
    modules = whole_and_resumed(folder, partial(TakingBatches, 8), PeriodicAveraging(4), after=2, **length)
    return [module.report for module in modules]


def test_a_step_that_takes_its_batches_by_itself_goes_on_within_an_epoch(borrow):
    assert borrow(_resumed_within_an_epoch, ranks=2) == [[[1, 2, 3, 4, 5], [3, 4, 5]]] * 2


def note_phase(trainer, module, *_):
    """Which phase each epoch's last step was in."""
    if trainer.is_last_batch and not trainer.fit_loop._skip_backward:  # noqa: SLF001
        module.report = [*(module.report or []), trainer.strategy.schemes[0].phase]


def test_the_cool_down_is_in_the_last_epoch_that_trains(fit):
    """Where there are statistics to collect for its average, the callback adds an epoch that does not."""
    averaging = StochasticWeightAveraging(0.05, swa_epoch_start=1)
    callbacks = [averaging, LambdaCallback(on_train_batch_end=note_phase)]
    strategy = {"scheme": DASO(2, warmup=Epochs(1), cooldown=Epochs(1)), "ranks_per_node": 1}
    for report in fit(Unusual(), strategy, devices=2, max_epochs=4, callbacks=callbacks):
        assert report["report"] == ["warm-up", "cycling", "cycling", "cool-down"]
