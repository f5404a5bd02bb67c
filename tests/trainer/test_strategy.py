"""HierarchicalStrategy over real processes."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from harness import TARGETS
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from pairwise import requested
from problems import Oracle, SaveAfter, SaveAfterEpoch, Stream, fitted, one_trainer, same_bits
from torch.distributed import distributed_c10d
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.spawn import ProcessException
from torch.utils.data import DataLoader

from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    Epochs,
    Health,
    HierarchicalFabricStrategy,
    HierarchicalStrategy,
    PeriodicAveraging,
    Transport,
)
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.control.plane import RankFailure
from lightning_hiercomm.schemes import SCHEMES, Scheme

pytestmark = pytest.mark.pooled


class Net(pl.LightningModule):
    """A small network with everything that could go wrong bitwise: frozen, tied, BatchNorm, momentum."""

    def __init__(self, samples: int = 48, batch_size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.hidden = torch.nn.Linear(8, 8)
        self.tied = torch.nn.Linear(8, 8)
        self.tied.weight = self.hidden.weight
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.head = torch.nn.Linear(8, 3)
        self.samples, self.batch_size = samples, batch_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(x))
        return self.head(self.frozen(self.tied(torch.relu(self.hidden(x)))))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.samples, 6, generator=generator)
        y = torch.randint(3, (self.samples,), generator=generator)
        return DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=self.batch_size)


AFTER = [(0.5, 3.5), (3, 3), (2, 5), (3.75, 3.75), (3.875, 3.875), (2.4375, 5.4375), (3.96875, 3.96875)]
BEFORE = [(0.5, 3.5), (2.25, 3.75), (1.625, 5.375), (3.1875, 4.3125), (2.65625, 5.09375), (1.828125, 6.046875)]


@pytest.mark.parametrize(("order", "expected"), [("after_step", AFTER), ("before_step", BEFORE)])
def test_four_processes_follow_the_table_to_the_digit(fit, order, expected):
    reports = fit(Oracle(5), {"scheme": PeriodicAveraging(2, order=order)}, max_epochs=2)
    for rank, report in enumerate(reports):
        assert report["report"][: len(expected)] == [pair[rank // 2] for pair in expected]
        assert report["state_dict"]["x"].item() == reports[0]["state_dict"]["x"].item()


def test_unequal_nodes_weigh_by_their_ranks(fit):
    reports = fit(Oracle(2), {"scheme": PeriodicAveraging(2), "ranks_per_node": [3, 1]})
    assert [report["report"][1] for report in reports] == [3.0] * 4


def test_one_rank_per_node_is_local_sgd(fit):
    reports = fit(Oracle(2), {"scheme": PeriodicAveraging(2), "ranks_per_node": 1})
    assert [report["report"] for report in reports] == [[target / 2, 3.0] for target in TARGETS]


def test_all_reduce_over_two_nodes_is_synchronous_training(fit):
    reports = fit(Oracle(4), {"scheme": "all_reduce"})
    assert [report["report"] for report in reports] == [[2, 3, 3.5, 3.75]] * 4


ONE_NODE = [AllReduce(), PeriodicAveraging(3)]


def on_one_node(launch, devices):
    """Weights that DDP, and then every scheme, ends with."""

    def train(folder):
        strategies = [DDPStrategy(), *(HierarchicalStrategy(s, ranks_per_node=devices) for s in ONE_NODE)]
        return [fitted(folder, Net(), strategy, devices=devices)["state_dict"] for strategy in strategies]

    ddp, *ours = launch(train, ranks=devices)[0]
    assert len(ours) == len(ONE_NODE)
    return ddp, ours


@pytest.mark.parametrize(("devices", "shares_memory"), [(2, "1"), (3, "0")], ids=["shared memory", "gloo"])
def test_one_node_gives_the_weights_of_ddp_bit_for_bit(launch, monkeypatch, devices, shares_memory):
    monkeypatch.setenv("HIERCOMM_SHARED_MEMORY", shares_memory)
    ddp, ours = on_one_node(launch, devices)
    for state in ours:
        for name, expected in ddp.items():
            assert torch.equal(state[name], expected), name


def test_three_ranks_in_shared_memory_equal_ddp_up_to_summation_order(borrow):
    ddp, ours = on_one_node(borrow, 3)
    for state in ours:
        for name, expected in ddp.items():
            torch.testing.assert_close(state[name], expected, rtol=1e-5, atol=1e-7)


LAYOUTS = {"nodes of one": 1, "nodes of two": 2, "nodes of three and one": [3, 1]}
WAYS = {
    "plainly": {},
    "accumulating": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "cut short": {"limit_train_batches": 2},
}


@pytest.fixture(scope="module")
def four_ranks(borrow, request):
    """What every rank reports of fits on four: by layout and way with an average every two steps; all-reduce, DDP."""
    hows = requested(request, "layout", "way")

    def train(folder):
        results = {
            (layout, way): fitted(
                folder,
                Net(samples=44),
                HierarchicalStrategy(PeriodicAveraging(2), ranks_per_node=LAYOUTS[layout]),
                **WAYS[way],
            )
            for layout, way in itertools.product(LAYOUTS, WAYS)
            if (layout, way) in hows
        }
        results["all-reduce"] = fitted(folder, Net(), HierarchicalStrategy(AllReduce(), ranks_per_node=2))
        results["DDP"] = fitted(folder, Net(), DDPStrategy())
        return results

    return borrow(train)


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_every_rank_ends_on_the_same_bits(four_ranks, layout, way):
    reports = [results[layout, way] for results in four_ranks]
    assert not torch.equal(reports[0]["state_dict"]["embed.weight"], Net().embed.weight)
    same_bits(reports)


def test_averaging_every_step_matches_ddp_over_the_world(four_ranks):
    ours, ddp = (four_ranks[0][name]["state_dict"] for name in ("all-reduce", "DDP"))
    for name, _ in Net().named_parameters():
        torch.testing.assert_close(ours[name], ddp[name], rtol=1e-5, atol=1e-6)


def test_one_process_needs_no_peers(fit):
    (report,) = fit(Oracle(3), {"scheme": PeriodicAveraging(2), "ranks_per_node": 1}, devices=1)
    assert report["report"] == [0.0, 0.0, 0.0]


def test_values_set_in_on_train_start_are_trained_from(fit):
    class Pretrained(Oracle):
        def on_train_start(self):
            self.x.data.fill_(8 + self.global_rank)  # loaded, or drawn, there: rank 0's count

    reports = fit(Pretrained(2), {"scheme": DiLoCo(2)})
    assert [report["report"][0] for report in reports] == [4.5, 4.5, 7.5, 7.5]
    # the nodes reach 2.75 and 7.25, 3 below the reference; SGD with momentum makes that 0.7 * (1 + 0.9) * 3
    assert [report["report"][1] for report in reports] == pytest.approx([8 - 3.99] * 4)


class Validated(Oracle):
    """Also validates: reports x as validation sees it."""

    def __init__(self, steps: int = 5) -> None:
        super().__init__(steps)
        self.seen: list[float] = []

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen.append(self.x.item())

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(self.trainer.world_size, 1))

    def on_train_end(self) -> None:
        self.report = [self.report, self.seen]


def test_validation_sees_the_averaged_model_and_leaves_training_unchanged(fit):
    arguments = {"val_check_interval": 1, "num_sanity_val_steps": 0}
    plain = fit(Oracle(5), {"scheme": PeriodicAveraging(4)})
    validated = fit(Validated(), {"scheme": PeriodicAveraging(4)}, **arguments)
    for before, after in zip(plain, validated, strict=True):
        trace, seen = after["report"]
        assert trace == before["report"]
        assert seen == [2, 3, 3.5, 3.75, 3.875]  # the rank mean, whatever the nodes do


def test_each_rank_validates_its_own_replica_when_asked_to(fit):
    arguments = {"val_check_interval": 1, "num_sanity_val_steps": 0}
    reports = fit(Validated(3), {"scheme": PeriodicAveraging(4), "evaluate": "replica"}, **arguments)
    for report in reports:
        trace, seen = report["report"]
        assert seen[:2] == trace[:2]


def test_a_checkpoint_between_synchronizations_holds_the_averaged_model(fit, tmp_path):
    path = tmp_path / "mid.ckpt"

    reports = fit(Oracle(5), {"scheme": PeriodicAveraging(4)}, callbacks=[SaveAfter(3, path)])
    saved = torch.load(path, weights_only=True)
    assert saved["state_dict"]["x"].item() == 3.5
    assert [report["report"][3] for report in reports] == [3.75] * 4


class BecomesNonfinite(Oracle):
    """The gradient of node 1 is no number in the third batch."""

    def __init__(self) -> None:
        super().__init__(9)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_rank in (2, 3) and self.global_step == 2:
            self.x.grad.fill_(torch.nan)


def test_an_invalid_node_ends_the_run_and_is_named(fit):
    message = r"rank 2 \(node 1\): parameter x \(1 of 1 elements\); rank 3 \(node 1\): parameter x"
    with pytest.raises(Exception, match=message):
        fit(BecomesNonfinite(), {"scheme": PeriodicAveraging(4)}, forked=True)


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


RAW = Transport(wire_raw=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "telepathy"}, "scheme='telepathy' is unknown; use one of all_reduce, periodic"),
        ({"scheme": 3}, "must be a Scheme"),
        ({"scheme": PeriodicAveraging}, r"scheme=PeriodicAveraging is a class: use an instance, PeriodicAveraging\("),
        ({"scheme": Scheme()}, r"scheme=Scheme\(\) is the base class"),
        ({"scheme": "DASO"}, r"or a Scheme\. Did you mean 'daso'\?"),
        ({"scheme": "PeriodicAveraging"}, "Did you mean 'periodic'"),
        ({"timeout": 30}, "timeout=30 must be timedelta or None, not of type int"),
        ({"start_method": "fokr"}, "start_method='fokr' must be 'popen', 'spawn', 'fork' or 'forkserver'"),
        ({"find_unused_parameters": "yes"}, "find_unused_parameters='yes' must be bool"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb='25' must be float or None"),
        ({"evaluate": "sometimes"}, "evaluate='sometimes'"),
        ({"wire_dtype": "int3"}, "wire_dtype='int3'"),
        ({"transport": RAW}, "wire_raw=True needs a wire_dtype"),
        (
            {"transport": RAW, "wire_dtype": "sparse2"},
            "parameters themselves; wire_dtype='sparse2' would drop most of them",
        ),
        ({"health": "raise"}, "health='raise' must be Health, not of type str"),
        ({"process_group": object()}, "process_group cannot be set"),
        ({"model_averaging_period": 4}, "model_averaging_period cannot be set"),
        ({"device_ids": [0]}, "device_ids cannot be set"),
    ],
)
def test_bad_arguments_are_named_before_anything_starts(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        HierarchicalStrategy(**arguments)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        (Health, {"on_nonfinite": "stop"}, "on_nonfinite='stop' must be 'raise' or 'ignore'"),
        (Health, {"hang_timeout": 0}, "hang_timeout=0 must be a number of seconds from 1 on, or None for never"),
        (Transport, {"bucket_mb": 0}, "bucket_mb=0 must be positive"),
        (Transport, {"inter_node": "pigeon"}, "inter_node='pigeon' must be 'torch', 'gloo' or 'mpi'"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(options, arguments, message):
    with pytest.raises(ValueError, match=message):
        options(**arguments)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rank_per_node", "has no argument 'rank_per_node'. Did you mean 'ranks_per_node'?"),
        ("find_unused_parameter", "Did you mean 'find_unused_parameters'?"),
        ("nonsense", "It takes scheme, .*bucket_cap_mb"),
        ("sync_every", r"is the scheme's: write HierarchicalStrategy\(PeriodicAveraging\(sync_every="),
        ("delay", r"write HierarchicalStrategy\(StepsDelay\(delay="),
        ("hang_timeout", r"is Health's: write HierarchicalStrategy\(health=Health\(hang_timeout=\.\.\.\)\)$"),
        ("inter_node", r"write HierarchicalStrategy\(transport=Transport\(inter_node="),
        ("speeds", r"write HierarchicalStrategy\(batches=HeterogeneousBatches\(speeds="),
        ("compress", "wire_dtype='int8' or 'int4' compresses traffic"),
        ("transport", r"write transport=Transport\('gloo'\)"),
    ],
)
def test_a_keyword_that_is_unknown_is_refused_with_the_nearest_one(name, message):
    with pytest.raises(TypeError, match=message):
        HierarchicalStrategy(**{name: "gloo"})


def test_a_wire_type_may_be_one_of_torch():
    assert repr(HierarchicalStrategy(wire_dtype=torch.bfloat16)) == repr(HierarchicalStrategy(wire_dtype="bfloat16"))


@pytest.mark.parametrize(("ending", "start_method"), [("", "popen"), ("_fork", "fork"), ("_notebook", "fork")])
@pytest.mark.parametrize(
    ("name", "scheme"), [("hierarchical", "all_reduce"), *((f"hierarchical_{s}", s) for s in SCHEMES)]
)
def test_registered_names_select_the_scheme_and_the_launcher(name, scheme, ending, start_method):
    registered = StrategyRegistry.get(name + ending)
    assert isinstance(registered.scheme, SCHEMES[scheme])
    assert registered._start_method == start_method  # noqa: SLF001


@pytest.mark.parametrize(
    ("ranks_per_node", "message"), [(3, "does not divide the world of 4"), ([3, 2], "adds up to 5")]
)
def test_ranks_per_node_must_fit_the_world_before_processes_are_started(ranks_per_node, message):
    with pytest.raises(ValueError, match=message):
        pl.Trainer(accelerator="cpu", devices=4, strategy=HierarchicalStrategy(ranks_per_node=ranks_per_node))


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("glo", r"torch has no backend 'glo'\. Did you mean 'gloo'\?"),
        ("cpu:gloo,cuda:ncl", r"torch has no backend 'ncl'\. Did you mean 'nccl'\?"),
        ("telepathy", r"no backend 'telepathy'\. Use 'gloo', .*, or leave it out\."),
        ("cuda:gloo", "does not support cpu tensors"),
        ("nccl", "does not support cpu tensors|built without 'nccl'"),
    ],
)
def test_an_unavailable_backend_is_refused_before_processes_start(backend, message):
    with pytest.raises(ValueError, match=f"^process_group_backend={backend!r}.*{message}"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=HierarchicalStrategy(process_group_backend=backend))
    with pytest.raises(ValueError, match=f"^process_group_backend={backend!r}.*{message}"):
        Fabric(accelerator="cpu", devices=2, strategy=HierarchicalFabricStrategy(process_group_backend=backend))


@pytest.mark.parametrize("backend", [None, "gloo", "GLOO", "cpu:gloo,cuda:nccl"])
def test_a_backend_that_torch_has_is_taken(backend):
    pl.Trainer(accelerator="cpu", devices=2, strategy=HierarchicalStrategy(process_group_backend=backend))


def test_dataloaders_of_unequal_length_are_refused(fit):
    class Unequal(Oracle):
        def train_dataloader(self):
            return DataLoader(torch.ones(3 + self.global_rank, 1))

    with pytest.raises(Exception, match="unequal lengths: \\[3, 4, 5, 6\\]"):
        fit(Unequal(), {}, use_distributed_sampler=False, forked=True)


def test_ranks_that_end_after_different_numbers_of_steps_get_an_error(fit):
    class Uneven(Oracle):
        def train_dataloader(self):
            return DataLoader(Stream(torch.ones(5 + self.global_rank, 1)))

    with pytest.raises(Exception, match="All ranks must take equally many steps"):
        fit(Uneven(), {"scheme": PeriodicAveraging(4), "ranks_per_node": 1}, devices=2, forked=True)


@pytest.mark.long("heartbeats are seconds apart, and ranks are started and end")
@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(50, at_epoch_end=False)], ids=type)
def test_unequal_numbers_of_batches_end_the_run_and_name_the_ranks(fit, capfd, scheme):
    class Uneven(Oracle):
        def train_dataloader(self):
            return DataLoader(Stream(torch.ones(5 + 3 * self.global_rank, 1)))

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.x.sum(), sync_dist=True)

        def val_dataloader(self):
            return DataLoader(torch.ones(4, 1))

    with pytest.raises(Exception, match=r"exit code 1|equally many steps"):
        fit(Uneven(), {"scheme": scheme, "ranks_per_node": 1}, devices=2, forked=True)
    said = capfd.readouterr().err  # what is found first, depends on when ranks report
    by_batches = r"rank 0 \(node 0\) ended (an epoch|training) after 5 batches of the run.*, and rank 1"
    assert re.search(rf"{by_batches}|rank 0 \(node 0\) has taken 5 optimizer steps and rank 1 \(node 1\) 8", said)


@pytest.mark.long("ranks that wait for a stopped one end after a while")
def test_a_rank_that_stops_alone_and_validates_is_named(fit, capfd):
    class Stopping(Oracle):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 0 and batch_idx == 2:
                self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.x.sum(), sync_dist=True)

        def val_dataloader(self):
            return DataLoader(torch.ones(4, 1))

    strategy = {"scheme": PeriodicAveraging(50, at_epoch_end=False), "ranks_per_node": 1}
    with pytest.raises(Exception, match=r"exit code 1|equally many steps"):
        fit(Stopping(100_000), strategy, devices=2, forked=True)  # or the other comes to its validation, too
    said = capfd.readouterr().err  # what is found first, depends on when ranks report
    found = r"rank 0 \(node 0\) (ended .*|asked .*|reduced .*) after 3 batches of the run.*, and rank 1"
    assert re.search(found, said)


def test_ranks_reduce_with_their_own_reduce_op_objects(fit):
    """``str(ReduceOp(...))`` contains an address, which differs between ranks."""

    class Reducing(Oracle):
        def on_train_epoch_end(self):
            operations = [dist.ReduceOp(dist.ReduceOp.SUM) for _ in range(1 + 50 * self.global_rank)]
            self.report = self.trainer.strategy.reduce(torch.ones(1), reduce_op=operations[-1]).item()

    reports = fit(Reducing(), {"ranks_per_node": 1}, devices=2)
    assert [report["report"] for report in reports] == [2.0, 2.0]


def test_a_number_reduced_on_one_rank_does_not_wait(fit):
    """DDPStrategy returns what is no tensor as it is, without a collective."""

    class Reducing(Oracle):
        def on_train_epoch_end(self):
            self.report = self.trainer.strategy.reduce(2.0) if self.global_rank == 0 else 0.0

    reports = fit(Reducing(), {"ranks_per_node": 1, "health": Health(hang_timeout=3.0)}, devices=2)
    assert [report["report"] for report in reports] == [2.0, 0.0]


def test_a_rank_that_raises_in_the_learning_rate_finder_ends_the_others(fit):
    """The finder restores the state before it, with barriers, before its error is raised."""

    class Unlucky(Oracle):
        lr = 0.1

        def training_step(self, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 2:
                raise ValueError("the dog ate the batch")
            return super().training_step(batch, batch_idx)

    finder = LearningRateFinder(num_training_steps=4, update_attr=False)
    with pytest.raises(Exception, match="the dog ate the batch"):
        fit(
            Unlucky(), {"scheme": PeriodicAveraging(4), "ranks_per_node": 1}, devices=2, callbacks=[finder], forked=True
        )


@pytest.mark.parametrize("view", [None, True])
def test_gradients_lie_in_ddps_buckets_on_request(fit, view):
    class Looking(Oracle):
        def on_train_batch_end(self, *_):
            self.report.append(self.trainer.strategy.model.gradient_as_bucket_view)

    given = {} if view is None else {"gradient_as_bucket_view": view}
    reports = fit(Looking(), {"scheme": PeriodicAveraging(4), **given}, devices=2)
    assert all(set(report["report"]) == {view is True} for report in reports)


@pytest.mark.parametrize("averaged", [True, False])
def test_the_optimizer_state_is_averaged_on_request(fit, averaged):
    class Momentum(Oracle):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)

        def on_train_batch_end(self, *_):
            self.report.append(self.optimizers().state[self.x]["momentum_buffer"].item())

    strategy = {"scheme": PeriodicAveraging(2), "average_optimizer_state": averaged}
    reports = fit(Momentum(2), strategy)
    # by hand: node gradients -1, -7 at 0, then -0.5, -3.5 at 0.5, 3.5: momenta -1, -7, then -1, -7 (mean -4)
    assert [report["report"][0] for report in reports] == [-1, -1, -7, -7]
    assert [report["report"][1] for report in reports] == ([-4] * 4 if averaged else [-1, -1, -7, -7])


def test_parameters_unfrozen_in_mid_run_synchronize(fit):
    class Unfreezing(Net):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                for parameter in self.frozen.parameters():
                    parameter.requires_grad_(True)
                self.optimizers().add_param_group({"params": list(self.frozen.parameters())})

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    reports = fit(Unfreezing(), {"scheme": PeriodicAveraging(2), "ranks_per_node": 1}, max_epochs=2)
    before = Net().frozen.weight
    for report in reports:
        assert not torch.equal(report["state_dict"]["frozen.weight"], before)
        assert torch.equal(report["state_dict"]["frozen.weight"], reports[0]["state_dict"]["frozen.weight"])


@pytest.mark.parametrize("how", ["added", "replaced"])
def test_parameters_that_come_in_mid_run_get_the_mean_of_all_gradients(fit, how):
    class Growing(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.values = torch.nn.ParameterList([torch.zeros(1)])
            self.report = []

        def training_step(self, batch, batch_idx):
            return 0.5 * sum((value - self.global_rank).square().sum() for value in self.values)

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                new = torch.nn.Parameter(torch.full((1,), 8.0))
                if how == "added":
                    self.values.append(new)
                    self.optimizers().add_param_group({"params": [new], "lr": 0.5})
                else:
                    self.values[0] = new
                    self.optimizers().param_groups[0]["params"] = [new]

        def on_train_batch_end(self, *_):
            self.report.append([value.item() for value in self.values])

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.zeros(6, 1))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    reports = fit(Growing(), {"scheme": AllReduce(), "ranks_per_node": 2}, max_epochs=1, use_distributed_sampler=False)
    old, new, expected = 0.0, 8.0, []
    for step in range(6):  # the mean of all ranks' targets is 1.5
        old = old - 0.5 * (old - 1.5)
        if step >= 2:
            new = new - 0.5 * (new - 1.5)
        expected.append([old] if step < 2 else [old, new] if how == "added" else [new])
    assert [report["report"] for report in reports] == [expected] * 4


def test_parameters_of_several_dtypes_and_memory_formats_synchronize(fit):
    class Mixed(Net):
        def __init__(self):
            super().__init__()
            self.in_float64 = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.in_bfloat16 = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.conv = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)

        def training_step(self, batch, batch_idx):
            images = self.conv(batch[0].repeat(1, 3).view(-1, 2, 3, 3)).mean()
            scale = self.global_rank + 1
            extra = self.in_float64.sum() + self.in_bfloat16.sum() + images
            return super().training_step(batch, batch_idx) + scale * extra

    reports = fit(Mixed(), {"scheme": PeriodicAveraging(2), "transport": Transport(bucket_mb=1e-5)})
    same_bits(reports)
    assert not torch.equal(reports[0]["state_dict"]["conv.weight"], Mixed().conv.weight)


class Teaching(Net):
    """A frozen teacher, which a hook fills when training starts; again when it is resumed."""

    def on_train_start(self):
        with torch.no_grad():
            self.frozen.weight.fill_(self.global_rank + 1.0)


def _taught_and_resumed(folder):
    reports = []
    for path in (None, folder / "saved.ckpt"):
        module, saves = Teaching(), [] if path else [SaveAfterEpoch(folder / "saved.ckpt")]
        strategy = HierarchicalStrategy(
            PeriodicAveraging(100, at_epoch_end=False), ranks_per_node=1, checkpoint_replicas=True
        )
        one_trainer(folder, devices=2, strategy=strategy, callbacks=saves).fit(module, ckpt_path=path)
        reports.append((module.frozen.weight[0, 0].item(), [p.tolist() for p in module.parameters()]))
    return reports


def test_a_teacher_filled_at_train_start_leaves_parameters_unchanged(borrow):
    for (filled, whole), (again, resumed) in borrow(_taught_and_resumed, ranks=2):
        assert filled == again == 1.0  # rank 0's
        assert resumed == whole


class Toggling(pl.LightningModule):
    """Trains two parts in turns, the second one frozen for the first, as when a batch begins; a third unfreezes."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second, self.third = (torch.nn.Linear(1, 1) for _ in range(3))
        for part in self.children():
            torch.nn.init.ones_(part.weight)
            torch.nn.init.zeros_(part.bias)
        self.third.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.third.requires_grad_(True)

    def training_step(self, batch, batch_idx):
        of_first, of_second = self.optimizers()
        x = torch.full((1, 1), 1.0 + self.global_rank)
        self.second.requires_grad_(True)
        of_second.zero_grad()
        self.manual_backward((self.second(self.first(self.third(x)).detach()) - self.global_rank).square().sum())
        of_second.step()
        self.second.requires_grad_(False)
        of_first.zero_grad()
        self.manual_backward((self.second(self.first(self.third(x))) - 1.0).square().sum())
        of_first.step()

    def train_dataloader(self):
        return DataLoader(torch.zeros(5, 1))

    def configure_optimizers(self):
        first = [*self.first.parameters(), *self.third.parameters()]
        return torch.optim.SGD(first, lr=0.01), torch.optim.SGD(self.second.parameters(), lr=0.01)


def test_toggled_parameters_are_still_reduced_after_an_unfreeze(fit):
    strategy = {"scheme": AllReduce(), "find_unused_parameters": True}
    same_bits(fit(Toggling(), strategy, devices=2, max_epochs=1, use_distributed_sampler=False))


class Growing(pl.LightningModule):
    """Trains a parameter that is no part of it, and, from the middle of the second batch on, one more that is."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first = torch.nn.Parameter(torch.zeros(1))
        self.apart = [torch.nn.Parameter(torch.zeros(1))]
        self.report = []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        parameters = [*self.parameters(), *self.apart]
        self.manual_backward(sum((each - self.global_rank).square().sum() for each in parameters))
        optimizer.step()
        if batch_idx == 1:
            self.late = torch.nn.Parameter(torch.zeros(1))
            optimizer.add_param_group({"params": [self.late]})
            optimizer.step()
        self.report.append([each.item() for each in self.parameters()])

    def configure_optimizers(self):
        return torch.optim.SGD([self.first, *self.apart], lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.zeros(12, 1))


def _wrapped_while_growing(folder):
    strategy, wrapped = HierarchicalStrategy(PeriodicAveraging(100), ranks_per_node=2), []
    wrap = strategy._wrap_in_ddp  # noqa: SLF001
    strategy._wrap_in_ddp = lambda: (wrapped.append(1), wrap())  # noqa: SLF001
    module = Growing()
    one_trainer(folder, devices=2, strategy=strategy, max_epochs=1).fit(module)
    return len(wrapped), module.report


def test_ddp_is_made_again_when_parameters_come_and_not_before_every_batch(borrow):
    (times, report), (_, other) = borrow(_wrapped_while_growing, ranks=2)
    assert len(report) == 6
    assert times == 3  # at first, for the one that is apart, and for the late one
    assert report == other


def _frozen_between_fits(folder):
    strategy = HierarchicalStrategy(AllReduce(), ranks_per_node=2, find_unused_parameters=True)
    reduced, reduce = [], strategy._reduce_bucket  # noqa: SLF001
    strategy._reduce_bucket = lambda bucket: (reduced.append(bucket.buffer().numel()), reduce(bucket))[1]  # noqa: SLF001
    trainer, module = one_trainer(folder, devices=2, strategy=strategy, max_epochs=1), Oracle(steps=1)
    module.unused = torch.nn.Parameter(torch.zeros(10))
    for _ in range(2):
        trainer.fit(module)
        module.unused.requires_grad_(False)
        trainer.fit_loop.max_epochs += 1
    return reduced


def test_parameters_frozen_between_fits_are_not_reduced(borrow):
    assert borrow(_frozen_between_fits, ranks=2) == [[11, 1]] * 2


class GivenUp(Exception):
    """Of a search: not worth more."""


class GivesUp(pl.Callback):
    """As all ranks do that look at the same numbers."""

    is_content = False

    def on_train_batch_end(self, trainer, *_):
        trainer.strategy._control.plane.grace = 60.0  # do not end a late rank on a busy machine  # noqa: SLF001
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
    """Takes its batches out of the loader by itself."""

    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class CountsSteps(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(trainer.strategy.schemes[0].state.step_in_epoch)
        if trainer.global_step == 2 and not self.path.exists():
            trainer.save_checkpoint(self.path)


def _resumed_within_an_epoch(folder):
    seen = []
    for path in (None, folder / "saved.ckpt"):
        counts = CountsSteps(folder / "saved.ckpt")
        strategy = HierarchicalStrategy(PeriodicAveraging(4), ranks_per_node=1)
        one_trainer(folder, devices=2, strategy=strategy, callbacks=[counts], max_steps=5, max_epochs=None).fit(
            TakingBatches(8), ckpt_path=path
        )
        seen.append(counts.seen)
    return seen


def test_a_step_that_takes_its_batches_by_itself_goes_on_within_an_epoch(borrow):
    assert borrow(_resumed_within_an_epoch, ranks=2) == [[[1, 2, 3, 4, 5], [3, 4, 5]]] * 2


class Phases(pl.Callback):
    """Which phase each epoch's last step was in."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.is_last_batch and not trainer.fit_loop._skip_backward:  # noqa: SLF001
            pl_module.report = [*(pl_module.report or ()), trainer.strategy.phase]


class WithPhases(Net):
    report = None


@pytest.mark.parametrize("averages", [False, True])
def test_the_cool_down_is_in_the_last_training_epoch(fit, averages):
    """Where there are statistics to collect for its average, the callback adds an epoch that does not."""
    callbacks = [StochasticWeightAveraging(0.05, swa_epoch_start=1)] if averages else []
    strategy = {"scheme": DASO(2, warmup=Epochs(1), cooldown=Epochs(1)), "ranks_per_node": 1}
    for report in fit(WithPhases(), strategy, devices=2, max_epochs=4, callbacks=[*callbacks, Phases()]):
        assert report["report"] == ["warm-up", "cycling", "cycling", "cool-down"]


class Sharing(Oracle):
    """Each rank keeps the optimizer's state of its share of the parameters."""

    def configure_optimizers(self):
        return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.Adam, lr=0.05)


def test_an_optimizer_that_shares_its_state_out_is_saved_whole(fit, tmp_path):
    saves = SaveAfterEpoch(tmp_path / "saved.ckpt")
    fit(Sharing(), {"scheme": AllReduce(), "ranks_per_node": 1}, devices=2, max_epochs=1, callbacks=[saves])
    (state,) = torch.load(tmp_path / "saved.ckpt", weights_only=True)["optimizer_states"]
    assert state["state"][0]["exp_avg"].abs().sum() > 0


class WithoutNorm(Net):
    """For whose statistics StochasticWeightAveraging would add an epoch."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.Identity()


@pytest.mark.skipif("on_train_end" not in vars(ModelCheckpoint), reason="this Lightning saves nothing then")
def test_the_last_checkpoint_holds_the_mean_of_weight_averages(fit, tmp_path):
    last = ModelCheckpoint(tmp_path, save_top_k=0, save_last=True)
    callbacks = [StochasticWeightAveraging(0.05, swa_epoch_start=1), last]
    strategy = {"scheme": PeriodicAveraging(100, at_epoch_end=False), "ranks_per_node": 1}
    reports = fit(WithoutNorm(), strategy, devices=2, max_epochs=4, callbacks=callbacks, enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]  # older SWALRs hold a function
    for name, value in reports[0]["state_dict"].items():
        assert torch.equal(saved[name], value), name


def test_timed_validation_is_refused_with_synchronous_schemes(fit):
    with pytest.raises(ProcessException, match="every rank measures by its own clock"):
        fit(Net(), {"ranks_per_node": 1}, devices=2, val_check_interval="00:00:10:00", forked=True)


class AskedToEnd(pl.Callback):
    """SLURM tells the ranks, each at another batch, that their time is nearly up; ``began`` is where fits begin."""

    def __init__(self) -> None:
        self.began: list[int] = []

    def on_train_start(self, trainer, pl_module):
        self.began.append(trainer.global_step)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.began == [0] and batch_idx == 3 + 2 * trainer.global_rank:
            os.kill(os.getpid(), signal.SIGUSR2)
        if self.began == [0] and batch_idx == 8:  # on a busy machine the news may be slower than batches are
            plane, saved = trainer.strategy._control.plane, Path(trainer.default_root_dir) / "hpc_ckpt_1.ckpt"  # noqa: SLF001
            deadline = time.monotonic() + 30
            while not plane.requeue_requested and not saved.exists() and time.monotonic() < deadline:
                time.sleep(0.001)


def _requeued(folder):
    rank = int(os.environ["LOCAL_RANK"])
    where = {"NTASKS": 2, "NTASKS_PER_NODE": 1, "PROCID": rank, "NODEID": rank, "LOCALID": 0, "JOB_ID": 7}
    os.environ["SLURM_JOB_NAME"] = "digits"
    os.environ |= {f"SLURM_{name}": str(value) for name, value in where.items()}
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    modules, asked = [], AskedToEnd()
    for callbacks in ([], [asked], [asked]):  # undisturbed; asked; and the job that was queued again
        trainer = one_trainer(
            folder,
            num_nodes=2,
            max_epochs=1,
            strategy=HierarchicalStrategy(PeriodicAveraging(4), checkpoint_replicas=True),
            plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR2)],
            callbacks=callbacks,
        )
        trainer.fit(module := Net(samples=240))
        modules.append(module.state_dict())
    return modules, asked.began, trainer.global_step


@pytest.mark.timeout(100)
def test_slurms_signal_saves_one_file_and_requeues_once(borrow, tmp_path):
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n')
    (tmp_path / "scontrol").chmod(0o755)
    for (undisturbed, disturbed, _), began, steps in borrow(_requeued, ranks=2, folder=tmp_path):
        for name, value in undisturbed.items():
            assert torch.equal(disturbed[name], value), name
        assert began == [0, torch.load(tmp_path / "hpc_ckpt_1.ckpt")["global_step"]]
        assert 4 <= began[1] < steps == 30
    assert (tmp_path / "said").read_text() == "requeue 7\n"


@pytest.mark.parametrize("level", ["intra", "inter"])
def test_waits_for_broadcast_buffers_count_with_the_gradients(level, monkeypatch):
    monkeypatch.setattr(HierarchicalStrategy, "root_device", torch.device("cpu"))
    strategy = HierarchicalStrategy(AllReduce())
    strategy.topology = SimpleNamespace(meter=Meter())
    strategy._run_or_none = SimpleNamespace(gradients=SimpleNamespace(level=level))  # noqa: SLF001
    with strategy._waiting_for_buffers():  # noqa: SLF001
        pass
    assert strategy.topology.meter.seconds.keys() == {level}
