"""A sharded node trains like one that is not, whatever the scheme."""

from __future__ import annotations

import csv
import math
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from model_parallel.conftest import trainer, whole_state
from model_parallel.sharded import STEPS, Net, Searching, Twice, Unfreezing
from pairwise import requested, selected

from lightning_hiercomm import (
    DASO,
    AllReduce,
    CommunicationMonitor,
    DiLoCo,
    Epochs,
    Gossip,
    HierarchicalModelParallelStrategy,
    HierarchicalStrategy,
    ParameterSync,
    PeriodicAveraging,
    Ring,
    Transport,
)
from lightning_hiercomm.schemes import OuterOptimizer
from lightning_hiercomm.schemes.nonfinite import NonfiniteError

pytestmark = pytest.mark.timeout(900)  # the first test's fixture is a launch of some forty fits

SCHEMES = {
    "all_reduce": AllReduce,
    "periodic": lambda: PeriodicAveraging(5),
    "daso": lambda: DASO(4, 2, warmup=0, cooldown=0, reducer="sharded"),
    "daso delta": lambda: DASO(4, 1, Epochs(1), 0, merge="delta", reducer="sharded"),
    "diloco": lambda: DiLoCo(6),
    "streaming diloco": lambda: DiLoCo(6, fragments=2, staleness=1, keep_local=0.5),
    "gossip": Gossip,
    "gossip overlapped": lambda: Gossip(fragments=["net.2", "net.0"], overlap=True),
    "noloco": lambda: ParameterSync(schedule=4, reducer=Ring(), merge=OuterOptimizer()),
}
BOTH = {(name, optimizer): {"check_val_every_n_epoch": 2} for name in SCHEMES for optimizer in ("sgd", "adamw")}
OTHERS = {
    ("all_reduce", "clipped"): {"gradient_clip_val": 0.1},
    ("periodic", "clipped"): {"gradient_clip_val": 0.1},
    ("periodic", "clipped by value"): {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ("all_reduce", "accumulated"): {"accumulate_grad_batches": 2},
    ("periodic", "accumulated"): {"accumulate_grad_batches": 2},
    ("periodic", "bf16-mixed"): {"precision": "bf16-mixed"},
    ("periodic", "bf16-true"): {"precision": "bf16-true"},
    ("periodic", "validated between synchronizations"): {"val_check_interval": 3},
    ("diloco", "int8"): {"max_epochs": 2},  # with one synchronization each
    ("all_reduce", "int8"): {},
    ("all_reduce", "twice"): {},
    ("all_reduce", "searched"): {},
    ("periodic", "searched"): {},
    ("periodic", "unfrozen"): {},
}
RUNS = {**BOTH, **{run: {"max_epochs": 1, **arguments} for run, arguments in OTHERS.items()}}
BETWEEN_SYNCHRONIZATIONS = "periodic", "validated between synchronizations"
NIGHTLY = [
    ("periodic", "clipped"),
    ("periodic", "clipped by value"),
    ("all_reduce", "twice"),
    ("all_reduce", "searched"),
    ("periodic", "accumulated"),
    ("periodic", "bf16-true"),
    ("diloco", "int8"),
    *((name, optimizer) for name in ("daso", "daso delta", "noloco") for optimizer in ("sgd", "adamw")),
]
"""Runs that are like another one of the push."""
AMONG_OTHERS = [run for run in BOTH if run[0] in ("all_reduce", "periodic", "diloco", "gossip")]
ALL = [
    *selected(run for run in BOTH if run not in AMONG_OTHERS and run not in NIGHTLY),
    *(pytest.param(*run, marks=pytest.mark.nightly) for run in [*AMONG_OTHERS, *NIGHTLY]),
    *(pytest.param(*run) for run in OTHERS if run not in NIGHTLY),
]


class BytesOfTraining(pl.Callback):
    """Between nodes, without the first broadcast."""

    def on_train_start(self, trainer, pl_module):
        self.before = trainer.strategy.total_communication()["inter_bytes"]

    def on_fit_end(self, trainer, pl_module):
        self.sent = trainer.strategy.total_communication()["inter_bytes"] - self.before


def _train_all(runs, folder):
    results = {}
    for name, how in runs:
        arguments = RUNS[name, how]
        for strategy in (HierarchicalModelParallelStrategy, HierarchicalStrategy):
            # with a rank's part in one bucket both strategies send as many blocks of codes, each with its scale
            small = {"transport": Transport(bucket_mb=1e-3)}
            wire = {"wire_dtype": "int8"} if how == "int8" else small
            make = {"twice": Twice, "searched": Searching, "unfrozen": Unfreezing}.get(how, Net)
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
    results["logged"] = _fit_monitored(folder / "logged")
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


def _fit_monitored(folder):
    """The rows that a monitor logged, on rank 0."""
    logger = CSVLogger(folder, name="", version="")
    arguments = {"callbacks": [CommunicationMonitor()], "logger": logger, "log_every_n_steps": 3, "max_epochs": 1}
    run = trainer(HierarchicalModelParallelStrategy(PeriodicAveraging(3), ranks_per_node=2), **arguments)
    run.fit(Net())
    if not run.is_global_zero:
        return []
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


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
def trained(launch, request):
    wanted = {*requested(request, "name", "how"), BETWEEN_SYNCHRONIZATIONS}
    return launch(partial(_train_all, [run for run in RUNS if run in wanted]))


@pytest.mark.parametrize(("name", "how"), ALL, ids=str)
def test_training_follows_the_strategy_whose_ranks_hold_all(trained, name, how):
    tolerance = {"int8": 5e-2, "bf16-true": 5e-2}.get(how, 1e-5)  # blocks of codes end elsewhere; all sums round
    for rank, results in enumerate(trained):
        ours, expected = results[name, how, True], results[name, how, False]
        assert len(ours["losses"]) == RUNS[name, how].get("max_epochs", 2) * STEPS
        torch.testing.assert_close(ours["losses"], expected["losses"], rtol=0, atol=tolerance)
        torch.testing.assert_close(ours["val_loss"], expected["val_loss"], rtol=0, atol=tolerance)
        for parameter, values in expected["state"].items():
            torch.testing.assert_close(ours["state"][parameter], values, rtol=0, atol=tolerance)
            assert torch.equal(ours["state"][parameter], trained[0][name, how, True]["state"][parameter]), rank


@pytest.mark.parametrize(("name", "how"), ALL, ids=str)
def test_as_many_bytes_travel_between_nodes(trained, name, how):
    ours, expected = trained[0][name, how, True], trained[0][name, how, False]
    assert ours["synchronizations"] == expected["synchronizations"]
    # shards need no padding, and a preflight check may have one number more, or less, per synchronization
    padding = 4 * 4 * 8 * max(ours["synchronizations"], 1)
    assert abs(ours["bytes"] - expected["bytes"]) <= padding
    assert ours["bytes"] > 1000


def test_the_monitor_logs_the_bytes_of_a_sharded_node(trained):
    rows = [row for row in trained[0]["logged"] if row["hiercomm/inter_bytes"]]
    parameters = sum(parameter.numel() for parameter in Net().build().parameters())
    assert len(rows) == 2
    for row in rows:  # a synchronization every three steps, at which a node sends the model to the other
        assert float(row["hiercomm/inter_bytes"]) == pytest.approx(4 * parameters / 3, rel=0.05)
        assert float(row["hiercomm/disagreement"]) > 0


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
        for parameter, values in trained[0]["again"]["state"].items():
            assert torch.equal(results["again"]["state"][parameter], values)
