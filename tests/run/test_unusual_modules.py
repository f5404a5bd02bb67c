"""Modules and optimizers that are rare, and easy to get wrong."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from pairwise import on_push
from problems import Quadratic, same_bits
from torch import nn
from torch.multiprocessing.spawn import ProcessException

from lightning_hiercomm import AllReduce, DiLoCo, Gossip, PeriodicAveraging

pytestmark = pytest.mark.pooled


class Searching(Quadratic):
    """How often LBFGS evaluates the loss depends on the loss."""

    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.report = 0

    def training_step(self, batch, batch_idx):
        def closure():
            self.report += 1
            # not quadratic, or a single step leads to the minimum
            return self.loss(batch[0]) + 0.1 * sum(p.square().square().sum() for p in self.parameters())

        if self.automatic_optimization:
            return closure()

        def closure_with_gradients():
            optimizer.zero_grad()
            loss = closure()
            self.manual_backward(loss)
            return loss

        optimizer = self.optimizers()
        return optimizer.step(closure_with_gradients)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=20, line_search_fn="strong_wolfe")


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_a_line_search_inside_a_node_equals_one_device(fit, automatic):
    ours = fit(Searching(automatic), {"scheme": PeriodicAveraging(2)}, devices=2, precision="64-true")
    (one,) = fit(Searching(automatic), "auto", devices=1, precision="64-true", forked=True)
    assert ours[0]["report"] == ours[1]["report"]
    for name, expected in one["state_dict"].items():
        torch.testing.assert_close(ours[0]["state_dict"][name], expected)


@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(2)], ids=["all_reduce", "periodic"])
def test_nodes_may_evaluate_the_loss_unequally_often(fit, scheme):
    reports = fit(Searching(), {"scheme": scheme}, max_epochs=2)
    same_bits(reports)
    counts = [report["report"] for report in reports]
    assert counts[0] == counts[1]
    assert counts[2] == counts[3]
    assert (counts[0] == counts[2]) == (scheme.gradients == "world")


class RecordsLosses(torch.optim.SGD):
    """Must have a closure, and remembers what it returns."""

    def step(self, closure):
        self.losses = [*getattr(self, "losses", ()), closure().item()]
        super().step()


class Telling(Quadratic):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.report = [*(self.report or ()), loss.item()]
        return loss

    def on_train_end(self):
        self.report = self.report, self.trainer.optimizers[0].losses

    def configure_optimizers(self):
        return RecordsLosses(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
def test_no_wire_rounds_the_loss_by_which_an_optimizer_decides(fit, wire):
    reports = [report["report"] for report in fit(Telling(), {"scheme": AllReduce(), "wire_dtype": wire})]
    for own, loss in zip(zip(*(own for own, _ in reports), strict=True), reports[0][1], strict=True):
        assert loss == pytest.approx(sum(own) / len(own), rel=1e-6)


class PartlyUsed(Quadratic):
    def training_step(self, batch, batch_idx):
        return self.loss(batch[0], self.head)


@pytest.mark.parametrize("scheme", on_push([AllReduce(), PeriodicAveraging(2)], PeriodicAveraging(2)), ids=repr)
def test_a_module_with_unused_parameters_names_the_argument_it_needs(fit, scheme):
    remedy = r"has parameters that were not used.* `strategy=HierarchicalStrategy\(find_unused_parameters=True\)`"
    with pytest.raises(ProcessException, match=remedy) as raised:
        fit(PartlyUsed(), {"scheme": scheme}, forked=True)
    assert "training_step: backbone.weight, backbone.bias." in str(raised.value)
    assert "DDPStrategy" not in str(raised.value)
    same_bits(fit(PartlyUsed(), {"scheme": scheme, "find_unused_parameters": True}))


class Adapted(Quadratic):
    """Saves a part of itself by itself, as programs with adapters do, and may end a save with an error."""

    def __init__(self) -> None:
        super().__init__(steps=6)
        self.register_buffer("mean", torch.zeros(2))

    def training_step(self, batch, batch_idx):
        self.mean.lerp_(batch[0][:, :2].mean(0), 0.5)
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["adapter"] = {"head": self.head.state_dict(), "parts": [self.mean, ("weight", self.head.weight)]}


class Looks(pl.Callback):
    """Saves after every batch, and sees that this moves nothing."""

    def __init__(self) -> None:
        self.saved = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        before = {name: value.clone() for name, value in pl_module.state_dict().items()}
        path = trainer.strategy.broadcast(f"{trainer.default_root_dir}/{trainer.global_step}.ckpt")
        trainer.save_checkpoint(path)
        assert all(torch.equal(value, before[name]) for name, value in pl_module.state_dict().items())
        self.saved.append(path)

    def on_fit_end(self, trainer, pl_module):
        pl_module.report = self.saved


@pytest.mark.parametrize("scheme", on_push([AllReduce(), PeriodicAveraging(4), DiLoCo(3)], DiLoCo(3)), ids=repr)
def test_a_module_that_saves_itself_saves_the_averaged_model(fit, scheme):
    own = fit(Adapted(), {"scheme": scheme}, callbacks=[Looks()])
    for path in own[0]["report"]:
        saved = torch.load(path, weights_only=True)
        expected, adapter = saved["state_dict"], saved["adapter"]
        assert torch.equal(adapter["head"]["weight"], expected["head.weight"])
        assert torch.equal(adapter["head"]["bias"], expected["head.bias"])
        assert torch.equal(adapter["parts"][0], expected["mean"])
        assert torch.equal(adapter["parts"][1][1], expected["head.weight"])
        assert isinstance(adapter["parts"][1][1], nn.Parameter)
    assert len(own[0]["report"]) == 6


class Packed(torch.Tensor):
    """Float numbers made of a tensor of codes, without memory of its own, as the state of 8-bit optimizers."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # noqa: SLF001

    def __init__(self, codes):
        self.codes = codes

    def __tensor_flatten__(self):
        return ["codes"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, *_):
        return cls(tensors["codes"])

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments, keywords=None):
        if function is torch.ops.aten.detach.default:
            return cls(arguments[0].codes)
        raise NotImplementedError(f"{function} of {cls.__name__}")


class PackedMomentum(torch.optim.SGD):
    def step(self, closure):
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            before = self.state[parameter].get("momentum")
            momentum = parameter.grad if before is None else 0.5 * before.codes.float() + parameter.grad
            self.state[parameter]["momentum"] = Packed(momentum.half())
            parameter.data.sub_(momentum, alpha=0.1)
        return loss


class TrainedByPacked(Quadratic):
    def configure_optimizers(self):
        return PackedMomentum(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "scheme", on_push([AllReduce(), PeriodicAveraging(3), Gossip(), DiLoCo(3)], Gossip()), ids=repr
)
def test_a_checkpoint_holds_optimizer_state_without_memory_of_its_own(fit, scheme):
    own = fit(TrainedByPacked(), {"scheme": scheme, "ranks_per_node": 1}, devices=2, callbacks=[Looks()])
    for path in own[0]["report"]:
        (state,) = torch.load(path, weights_only=False)["optimizer_states"]
        assert all(type(each["momentum"]) is Packed for each in state["state"].values())
    assert len(own[0]["report"]) == 4


def test_optimizer_state_without_a_mean_is_refused(fit):
    settings = {"scheme": PeriodicAveraging(2), "ranks_per_node": 1, "average_optimizer_state": True}
    with pytest.raises(ProcessException, match="PackedMomentum stores momentum as Packed, which has no mean: leave"):
        fit(TrainedByPacked(), settings, devices=2, forked=True)
