"""What programs reach through ``trainer.model`` under DDP is there on every layout of nodes."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import fit_here
from lightning.pytorch.strategies import DDPStrategy
from problems import SHORT_SCHEMES, Quadratic, one_trainer
from torch.nn.parallel import DistributedDataParallel

from lightning_hiercomm import HierarchicalStrategy, PeriodicAveraging

pytestmark = pytest.mark.pooled
STEPS = 4


class Accumulates(Quadratic):
    """Steps after every second batch; the first of the two is not to be reduced."""

    def __init__(self, through: str = "trainer.model") -> None:
        super().__init__(2 * STEPS)
        self.automatic_optimization = False
        self.through = through
        self.report: Any = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        ends = batch_idx % 2 == 1
        model = self.trainer.model if self.through == "trainer.model" else self.trainer.strategy.model
        with nullcontext() if ends or not self.through else model.no_sync():
            self.manual_backward(self.loss(batch[0]) / 2)
        if ends:
            self.report.append(self.head.weight.grad.flatten().tolist())
            optimizer.step()
            optimizer.zero_grad()


def weights(module: pl.LightningModule) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in module.parameters()]


def _accumulated(folder, ranks, sizes, names=tuple(SHORT_SCHEMES)):
    """By scheme, whether both ways to DDP do the same, after a comparison with a run without no_sync."""
    found = {}
    for name in names:
        ends = []
        for module in (Accumulates(""), Accumulates(), Accumulates("strategy.model")):
            fit_here(folder, module, SHORT_SCHEMES[name], devices=ranks, ranks_per_node=sizes, max_epochs=1)
            ends.append((module.report, weights(module)))
        torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)
        found[name] = ends[1] == ends[2]
    return found


@pytest.mark.parametrize("sizes", [1, pytest.param(2, marks=pytest.mark.nightly)], ids=["2x1", "1x2"])
def test_no_sync_accumulates_on_nodes_of_any_size(borrow, sizes):
    assert borrow(lambda folder: _accumulated(folder, 2, sizes), ranks=2) == [dict.fromkeys(SHORT_SCHEMES, True)] * 2


def test_no_sync_accumulates_in_a_run_of_one_rank(tmp_path):
    assert _accumulated(tmp_path, 1, 1, ["periodic"]) == {"periodic": True}


@pytest.mark.parametrize("argument", ["static_graph", "find_unused_parameters"])
def test_manual_steps_on_nodes_of_one_rank_take_ddps_arguments(tmp_path, argument):
    module, plain = Accumulates(), Accumulates()
    for each, arguments in ((module, {argument: True}), (plain, {})):
        fit_here(tmp_path, each, PeriodicAveraging(2), devices=1, max_epochs=1, **arguments)
    assert (module.report, weights(module)) == (plain.report, weights(plain))


def _as_ddp(folder):
    """Gradients and weights of the ranks of one-rank nodes, and of plain DDP."""
    found = []
    for strategy in (HierarchicalStrategy("all_reduce", ranks_per_node=1), DDPStrategy()):
        module = Accumulates()
        one_trainer(folder, devices=2, max_epochs=1, strategy=strategy).fit(module)
        found.append((module.report, weights(module)))
    return found


def test_no_sync_gradients_are_reduced_as_ddp_reduces_them(borrow):
    for ours, ddp in borrow(_as_ddp, ranks=2):
        assert ours == ddp


class AccumulatesByTrainer(Accumulates):
    """The same steps in automatic optimization, where Lightning keeps DDP from reducing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.report.append(self.head.weight.grad.flatten().tolist())


def _with_feedback(folder):
    found = []
    for wire in ("int8", "int4"):
        for module, arguments in ((Accumulates(), {}), (AccumulatesByTrainer(), {"accumulate_grad_batches": 2})):
            fit_here(folder, module, "all_reduce", wire_dtype=wire, **arguments)
            found.append((wire, module.report, weights(module)))
    return found


def test_narrow_wires_send_gradients_accumulated_in_no_sync_once(borrow):
    for found in borrow(_with_feedback, ranks=2):
        assert found[0] == found[1]
        assert found[2] == found[3]
        assert found[0][2] != found[2][2], "wires differ"


def _hook(state: Any, bucket: Any) -> Any:
    raise NotImplementedError


class Reads(Quadratic):
    """Reports what it finds in ``trainer.model``; ``freeze`` says which layer is frozen until the third batch."""

    def __init__(self, freeze: str = "") -> None:
        super().__init__(STEPS)
        self.freeze = freeze
        if freeze:
            self.get_submodule(freeze).requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.freeze and batch_idx == 2:
            self.requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        model = self.trainer.model
        with model.no_sync():
            inside = model.require_backward_grad_sync
        with model.join():
            pass
        with pytest.raises(ValueError, match="one communication hook, and the hierarchical strategy averages"):
            model.register_comm_hook(None, _hook)
        self.report = {
            "is DDP": isinstance(model, DistributedDataParallel),
            "module": model.module is self,
            "keys": [*model.state_dict()] == [f"module.{name}" for name in self.state_dict()],
            "parameters": [id(p) for p in model.parameters()] == [id(p) for p in self.parameters()],
            "syncs": (model.require_backward_grad_sync, inside),
            "arguments": (model.find_unused_parameters, model.static_graph, model.gradient_as_bucket_view),
            "device": str(model.device),
            "ids": model.device_ids,
            "copy": type(copy.deepcopy(model)).__name__,
            "forward": torch.equal(model(batch[0][:, :3]), self(batch[0][:, :3])),
        }
        if model.process_group.size() == 1:
            assert model.backbone is self.backbone
            with pytest.raises(AttributeError, match="'Reads' object has no attribute 'missing'"):
                model.missing  # noqa: B018
            assert type(pickle.loads(pickle.dumps(model))) is Reads
        return super().training_step(batch, batch_idx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def _read(folder, sizes):
    found = []
    for name, freeze, finds_unused in (
        ("periodic", "", False),
        ("periodic", "head", True),
        ("all_reduce", "head", False),
    ):
        own = {"ranks_per_node": sizes, "find_unused_parameters": finds_unused}
        trainer = fit_here(folder, module := Reads(freeze), SHORT_SCHEMES[name], max_epochs=1, **own)
        found.append((name, finds_unused, module.report))
        assert trainer.model is module
    return found


def test_programs_find_the_same_ddp_on_every_layout(borrow):
    one_rank_nodes, one_node = (borrow(lambda folder, sizes=sizes: _read(folder, sizes), ranks=2) for sizes in (1, 2))
    for name, finds_unused, report in one_rank_nodes[0]:
        expected = dict.fromkeys(("is DDP", "module", "keys", "parameters", "forward"), True)
        expected |= {"syncs": (True, False), "arguments": (finds_unused, False, False)}
        assert report == {**expected, "device": "cpu", "ids": None, "copy": "Reads"}, name
    assert one_rank_nodes == one_node
