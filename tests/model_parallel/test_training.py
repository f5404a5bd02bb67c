"""A sharded node trains like one that is not, whatever the scheme."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import pytest
import torch
from fits import our_warnings
from model_parallel.conftest import trainer, whole_state
from model_parallel.sharded import STEPS, Net, Searching, Unfreezing

from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    Gossip,
    HierarchicalModelParallelStrategy,
    HierarchicalStrategy,
    PeriodicAveraging,
    Transport,
)
from lightning_hiercomm.schemes.nonfinite import NonfiniteError

pytestmark = pytest.mark.timeout(900)  # the first test's fixture is a launch of some twenty fits

SCHEMES = {
    "all_reduce": AllReduce,
    "periodic": lambda: PeriodicAveraging(5),
    "daso": lambda: DASO(4, 2, warmup=0, cooldown=0, reducer="sharded"),
    "streaming diloco": lambda: DiLoCo(6, fragments=2, staleness=1, keep_local=0.5),
    "gossip overlapped": lambda: Gossip(fragments=["net.2", "net.0"], overlap=True),
}
RUNS = {
    ("daso", "adamw"): {},
    ("streaming diloco", "sgd"): {"max_epochs": 2, "check_val_every_n_epoch": 2},
    ("gossip overlapped", "adamw"): {},
    ("all_reduce", "clipped"): {"gradient_clip_val": 0.1},
    ("periodic", "bf16-mixed"): {"precision": "bf16-mixed"},
    ("periodic", "validated between synchronizations"): {"val_check_interval": 3},
    ("all_reduce", "int8"): {},
    ("periodic", "searched"): {},
    ("periodic", "unfrozen"): {},
}
BETWEEN_SYNCHRONIZATIONS = "periodic", "validated between synchronizations"


class BytesOfTraining(pl.Callback):
    """Between nodes, without the first broadcast."""

    def on_train_start(self, trainer, pl_module):
        self.before = self.bytes_of_all(trainer.strategy)

    def on_fit_end(self, trainer, pl_module):
        self.sent = self.bytes_of_all(trainer.strategy) - self.before

    def bytes_of_all(self, strategy):
        return sum(strategy.topology.world.all_gather_object(strategy.communication()["inter_bytes"]))


def _train_all(folder):
    results = {}
    for (name, how), chosen in RUNS.items():
        arguments = {"max_epochs": 1, **chosen}
        for strategy in (HierarchicalModelParallelStrategy, HierarchicalStrategy):
            # with a rank's part in one bucket both strategies send as many blocks of codes, each with its scale
            small = {"transport": Transport(bucket_mb=1e-3)}
            wire = {"wire_dtype": "int8"} if how == "int8" else small
            make = {"searched": Searching, "unfrozen": Unfreezing}.get(how, Net)
            module, counted = make("adamw" if how == "adamw" else "sgd"), BytesOfTraining()
            run = trainer(strategy(SCHEMES[name](), ranks_per_node=2, **wire), callbacks=[counted], **arguments)
            run.fit(module)
            results[name, how, strategy is HierarchicalModelParallelStrategy] = {
                "state": whole_state(module),
                "losses": module.report,
                "bytes": counted.sent,
                "synchronizations": run.strategy.communication()["synchronizations"],
                "val_loss": run.callback_metrics["val_loss"].item(),
            }
    results["again"] = _fit_again()
    results["nonfinite"] = _become_nonfinite()
    results["taught"] = _fit_taught()
    results["plain"] = _fit_plain()
    return results


class OneShardBecomesNonfinite(pl.Callback):
    """A shard of one rank of node 1 becomes non-finite, and then the whole model of the node."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_rank == 3 and trainer.global_step == 3:
            next(pl_module.parameters()).grad.to_local().view(-1)[0] = math.nan


def _become_nonfinite():
    strategy = HierarchicalModelParallelStrategy(PeriodicAveraging(5), ranks_per_node=2)
    try:
        trainer(strategy, max_epochs=1, callbacks=[OneShardBecomesNonfinite()]).fit(Net("adamw"))
    except NonfiniteError as error:
        return str(error)


class Taught(Net):
    """Its first layer is frozen, and filled by every rank when training starts."""

    def build(self):
        net = super().build()
        net[0].requires_grad_(False)
        return net

    def on_train_start(self):
        with torch.no_grad():
            self.net[0].weight.fill_(self.global_rank)


def _fit_taught():
    module = Taught()
    trainer(HierarchicalModelParallelStrategy(PeriodicAveraging(5), ranks_per_node=2), max_epochs=1).fit(module)
    return module.net[0].weight.to_local().unique().tolist()


class Plain(Net):
    """Its backward passes average nothing."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx).backward()
        self.optimizers().step()
        self.optimizers().zero_grad()


def _fit_plain():
    with our_warnings() as said:
        trainer(HierarchicalModelParallelStrategy(AllReduce(), ranks_per_node=2)).fit(Plain())
    return said


def _fit_again():
    """One module under one strategy, then under another, and validated in between."""
    module, values = Net(), []
    for _ in range(2):
        run = trainer(HierarchicalModelParallelStrategy(PeriodicAveraging(5), ranks_per_node=2), max_epochs=1)
        run.fit(module)
        values.append(run.callback_metrics["val_loss"].item())
        values.append(run.validate(module, verbose=False)[0]["val_loss"])
    return {"values": values, "state": whole_state(module)}


@pytest.fixture(scope="module")
def trained(launch):
    return launch(_train_all)


@pytest.mark.parametrize(("name", "how"), RUNS, ids=str)
def test_training_follows_the_strategy_whose_ranks_hold_all(trained, name, how):
    tolerance = 5e-2 if how == "int8" else 1e-5  # blocks of codes end elsewhere
    for results in trained:
        ours, expected = results[name, how, True], results[name, how, False]
        assert len(ours["losses"]) == RUNS[name, how].get("max_epochs", 1) * STEPS
        torch.testing.assert_close(ours["losses"], expected["losses"], rtol=0, atol=tolerance)
        torch.testing.assert_close(ours["val_loss"], expected["val_loss"], rtol=0, atol=tolerance)
        torch.testing.assert_close(ours["state"], expected["state"], rtol=0, atol=tolerance)
        torch.testing.assert_close(ours["state"], trained[0][name, how, True]["state"], rtol=0, atol=0)


@pytest.mark.parametrize(("name", "how"), RUNS, ids=str)
def test_as_many_bytes_travel_between_nodes(trained, name, how):
    ours, expected = trained[0][name, how, True], trained[0][name, how, False]
    assert ours["synchronizations"] == expected["synchronizations"]
    # shards need no padding, and a preflight check may have one number more, or less, per synchronization
    padding = 4 * 4 * 8 * max(ours["synchronizations"], 1)
    assert abs(ours["bytes"] - expected["bytes"]) <= padding
    assert ours["bytes"] > 1000


def test_late_frozen_shards_come_from_the_first_node(trained):
    assert [results["taught"] for results in trained] == [[0.0], [1.0], [0.0], [1.0]]


def test_one_nonfinite_shard_ends_the_run_on_all_ranks(trained):
    for results in trained:
        assert "these are NaN or infinite: rank 2 (node 1): parameter net.0.weight" in results["nonfinite"]


def test_nodes_differ_between_synchronizations(trained):
    losses = [results[(*BETWEEN_SYNCHRONIZATIONS, True)]["losses"] for results in trained]
    assert losses[0] != losses[2]


def test_a_module_is_validated_and_trained_again(trained):
    after_first, again, after_second, once_more = trained[0]["again"]["values"]
    assert after_first == again > after_second == once_more
    for results in trained[1:]:
        torch.testing.assert_close(results["again"]["state"], trained[0]["again"]["state"], rtol=0, atol=0)


def test_gradients_that_nodes_should_share_and_do_not_are_named(trained):
    said = [results["plain"] for results in trained]
    assert [len(each) for each in said] == [1, 1, 0, 0]
    assert "ranks 1, 3 should share" in said[1][0]
    assert "call self.manual_backward(loss)" in said[1][0]
