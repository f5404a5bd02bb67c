"""Optimizers that communicate or step in halves, and uncounted steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fits import outcome, outcomes, weights_of
from lightning.pytorch.callbacks import ModelCheckpoint
from problems import Manual, Oracle, Quadratic
from pytorch_optimizer import SAM
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_hiercomm import AllReduce, PeriodicAveraging, StepsDelay


class Sharded(Quadratic):
    """Adam, perhaps with its state sharded ``over`` the default process group or the node's."""

    over: str | None = "world"

    def configure_optimizers(self):
        if self.over is None:
            return torch.optim.Adam(self.parameters(), lr=0.05)
        group = self.trainer.strategy.node_process_group if self.over == "node" else None
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, process_group=group, lr=0.05)


@pytest.mark.parametrize(
    ("over", "scheme"), [("node", PeriodicAveraging(3)), ("node", AllReduce()), ("world", AllReduce())], ids=repr
)
def test_zero_equals_adam_where_ranks_hold_equal_parameters(borrow, over, scheme):
    def resumed(folder, over):
        """Train one epoch, and a second one from its checkpoint."""
        saves = ModelCheckpoint(folder / str(over), filename="saved")
        arguments = {"ranks_per_node": 2, "devices": 4, "callbacks": [saves], "enable_checkpointing": True}
        first = outcome(folder, Sharded(over=over), scheme, **arguments, max_epochs=1)
        path = folder / str(over) / "saved.ckpt"
        return first, outcome(folder, Sharded(over=over), scheme, **arguments, ckpt_path=path)

    for ours, adam in borrow(lambda folder: (resumed(folder, over), resumed(folder, None)), ranks=4):
        for (error, said, weights), (_, _, expected) in zip(ours, adam, strict=True):
            assert (error, said) == ("", [])
            assert weights == pytest.approx(expected, abs=1e-6)


class Gathering(torch.optim.SGD):
    """Exchanges its parameters with all ranks in some steps, as distributed Muon and Shampoo do."""

    def __init__(self, parameters, at):
        super().__init__(parameters, lr=0.1)
        self.at, self.steps = at, 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        self.steps += 1
        if self.steps in self.at:
            first = self.param_groups[0]["params"][0]
            dist.all_gather([torch.empty_like(first) for _ in range(dist.get_world_size())], first)
        return loss


class Gathered(Quadratic):
    """Trained by :class:`Gathering`; its hooks communicate, too, but not in the optimizer."""

    at = ()

    def configure_optimizers(self):
        return Gathering(self.parameters(), self.at)

    def on_before_optimizer_step(self, optimizer):
        norm = self.head.bias.grad.norm()
        dist.all_reduce(norm)
        self.log("norm", norm, sync_dist=True)

    def on_after_backward(self):
        dist.barrier()


class Sharpness(Oracle):
    """Trained by SAM ``how``: in ``"halves"``, by a ``"closure"``, or in halves in the ``"hook"`` that steps."""

    def __init__(self, how):
        super().__init__(8, how=how, automatic_optimization=how == "hook")
        self.y = torch.nn.Parameter(torch.tensor([3.0, -1.0]))

    def loss(self, target):
        return 0.5 * (self.x - target).square().sum() + 0.25 * (self.y + target).square().square().sum() / 100

    def training_step(self, batch, batch_idx):
        target = self.targets[self.global_rank]
        if self.automatic_optimization:
            return self.loss(target)
        optimizer = self.optimizers()
        self.manual_backward(self.loss(target))
        if self.how == "halves":
            optimizer.first_step(zero_grad=True)
            self.manual_backward(self.loss(target))
            optimizer.second_step(zero_grad=True)
        else:
            optimizer.step(closure=lambda: self.manual_backward(self.loss(target)))
            optimizer.zero_grad()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        optimizer.first_step(zero_grad=True)
        optimizer_closure()
        optimizer.second_step(zero_grad=True)

    def configure_optimizers(self):
        return SAM(self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def test_sam_of_two_nodes_goes_down_the_mean_of_their_losses(borrow):
    alone = Sharpness("closure")
    optimizer = alone.configure_optimizers()
    for _ in range(2 * alone.steps):
        for half in (optimizer.first_step, optimizer.second_step):
            sum(alone.loss(target) for target in alone.targets[:2]).div(2).backward()
            half(zero_grad=True)

    def program(folder):
        return [outcome(folder, Sharpness(how), AllReduce()) for how in ("halves", "closure", "hook")]

    for ways in borrow(program, ranks=2):
        for error, _, weights in ways:
            assert error == ""
            assert weights == pytest.approx(weights_of(alone), abs=1e-6)


class Uncounted(Manual):
    """Changes its parameters in every batch without the step that is counted, or with it: ``how``."""

    def configure_optimizers(self):
        return None if self.how == "by hand, without optimizer" else torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        self.zero_grad()
        self.manual_backward(self.loss(batch[0]))
        if self.how == "counted":
            self.optimizers().step()
        elif self.how == "behind Lightning's back":
            self.optimizers(use_pl_optimizer=False).step()

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        if self.how.startswith("by hand"):
            for p in self.parameters():
                p -= 0.1 * p.grad


WAYS = ["by hand, without optimizer", "behind Lightning's back"]
OVER_NODES = "step() communicates over several nodes"
PROGRAMS = {
    "ZeRO over all ranks": (
        (Sharded(), PeriodicAveraging(3)),
        [
            f"ZeroRedundancyOptimizer.{OVER_NODES}",
            "which hold different parameters with PeriodicAveraging(sync_every=3). Use AllReduce()",
            "process_group=self.trainer.strategy.node_process_group",
        ],
    ),
    "gathers in some steps": ((Gathered(at=(3, 6)), PeriodicAveraging(2)), [f"Gathering.{OVER_NODES}"]),
    **{
        f"SAM in {how}": (
            (Sharpness(how), PeriodicAveraging(2)),
            ["y changed in 16 batches without a counted optimizer step", "such as SAM, a closure: step(closure)"],
        )
        for how in ("halves", "hook")
    },
    **{
        f"parameters changed {how}": (
            (Uncounted(8, how=how), PeriodicAveraging(2)),
            [
                "backbone.weight, backbone.bias, head.weight changed in 16 batches",
                "Step what self.optimizers() returns",
            ],
        )
        for how in WAYS
    },
    "parameters changed by hand, steps_delay": (
        (Uncounted(8, how="by hand"), StepsDelay(2, 2)),
        ["changed in 16 batches without a counted optimizer step"],
    ),
}


@pytest.mark.parametrize(("fit", "messages"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_step_that_no_scheme_can_follow_ends_the_run_with_the_remedy(borrow, fit, messages):
    for error, _, _ in borrow(lambda folder: outcome(folder, *fit), ranks=2):
        assert [text for text in messages if text not in error] == []


def test_hooks_around_the_step_may_communicate(borrow):
    schemes = {AllReduce(): (1, 2), PeriodicAveraging(2): (), StepsDelay(2, 2): ()}
    for name, ranks in outcomes(borrow, {repr(scheme): (Gathered(at=at), scheme) for scheme, at in schemes.items()}):
        assert [(error, said) for error, said, _ in ranks] == [("", [])] * 2, name


def test_changes_need_no_counted_step_where_nodes_do_not_differ(borrow):
    fits = {how: (Uncounted(8, how=how), AllReduce()) for how in ("counted", *WAYS)}
    (_, expected), *others = outcomes(borrow, fits)
    for name, ranks in others:
        for (error, _, weights), (_, _, right) in zip(ranks, expected, strict=True):
            assert error == "", name
            assert weights == pytest.approx(right, abs=1e-6), name


class Wrapper:
    """No torch.optim.Optimizer, but used like one."""

    def __init__(self, optimizer):
        self.inner = optimizer

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)

    def step(self, closure=None):
        return self.inner.step(closure)


class Wrapped(Quadratic):
    """Trained by an optimizer inside something else."""

    def configure_optimizers(self):
        return Wrapper(super().configure_optimizers())


def test_a_wrapped_optimizer_trains_as_the_optimizer_itself(borrow):
    fits = {str(module): (module, PeriodicAveraging(3)) for module in (Wrapped(), Quadratic())}
    (_, ours), (_, expected) = outcomes(borrow, fits)
    assert ours == expected
    assert ours[0][0] == ""


class Quiet(Manual):
    """Initializes its parameters in the first batch, accumulates gradients over 20 batches, and clamps after each."""

    def training_step(self, batch, batch_idx):
        if self.global_step == batch_idx == 0:
            with torch.no_grad():
                self.backbone.weight.mul_(1.5)
        self.manual_backward(self.loss(batch[0]))
        if batch_idx == 19:
            self.optimizers().step()
            self.optimizers().zero_grad()

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        for p in self.parameters():
            p.clamp_(-0.2, 0.2)


def test_a_program_may_clamp_while_it_accumulates_gradients(borrow):
    for error, said, _ in borrow(lambda folder: outcome(folder, Quiet(20), PeriodicAveraging(2)), ranks=2):
        assert (error, said) == ("", [])
