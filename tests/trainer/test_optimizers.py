"""Optimizers that communicate or step in halves, and uncounted steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fits import outcome, outcomes
from lightning.pytorch.callbacks import ModelCheckpoint
from problems import Oracle, Quadratic
from pytorch_optimizer import SAM
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_hiercomm import AllReduce, Gossip, PeriodicAveraging, StepsDelay


class Sharded(Quadratic):
    """Adam, perhaps with its state sharded over the default process group or over the node's."""

    def __init__(self, over: str | None = "world") -> None:
        super().__init__()
        self.over = over

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
        first = outcome(folder, Sharded(over), scheme, **arguments, max_epochs=1)
        return first, outcome(folder, Sharded(over), scheme, **arguments, ckpt_path=folder / str(over) / "saved.ckpt")

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

    def __init__(self, at=()):
        super().__init__()
        self.at = at

    def configure_optimizers(self):
        return Gathering(self.parameters(), self.at)

    def on_before_optimizer_step(self, optimizer):
        norm = self.head.bias.grad.norm()
        dist.all_reduce(norm)
        self.log("norm", norm, sync_dist=True)

    def on_after_backward(self):
        dist.barrier()


class Sharpness(Oracle):
    """Trained by SAM, in halves, by a closure, or in halves in the hook that steps; or by hand, in the same way.

    Args:
        how: ``"halves"``, ``"closure"``, ``"hook"`` or ``"hand"``.
    """

    def __init__(self, how):
        super().__init__(8)
        self.how = how
        self.automatic_optimization = how == "hook"
        self.y = torch.nn.Parameter(torch.tensor([3.0, -1.0]))

    def loss(self):
        target = self.targets[self.global_rank]
        return 0.5 * (self.x - target).square().sum() + 0.25 * (self.y + target).square().square().sum() / 100

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return self.loss()
        optimizer = self.optimizers()
        self.manual_backward(self.loss())
        if self.how == "halves":
            optimizer.first_step(zero_grad=True)
            self.manual_backward(self.loss())
            optimizer.second_step(zero_grad=True)
        elif self.how == "closure":
            optimizer.step(closure=lambda: self.manual_backward(self.loss()))
            optimizer.zero_grad()
        else:
            norm = torch.cat([p.grad for p in self.parameters()]).norm()
            old = [p.detach().clone() for p in self.parameters()]
            with torch.no_grad():
                for p in self.parameters():
                    p.add_(p.grad * (0.05 / (norm + 1e-12)))
            optimizer.zero_grad()
            self.manual_backward(self.loss())
            with torch.no_grad():
                for p, value in zip(self.parameters(), old, strict=True):
                    p.copy_(value)
            optimizer.step()
            optimizer.zero_grad()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        optimizer.first_step(zero_grad=True)
        optimizer_closure()
        optimizer.second_step(zero_grad=True)

    def configure_optimizers(self):
        if self.how == "hand":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return SAM(self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("scheme", "ways"), [(AllReduce(), ("halves", "closure", "hook")), (PeriodicAveraging(2), ("closure",))]
)
def test_sam_follows_its_formulas(borrow, scheme, ways):
    def program(folder):
        trained = []
        for how in ("hand", *ways):
            module = Sharpness(how)
            trained.append((outcome(folder, module, scheme), module.report))
        return trained

    ranks = borrow(program, ranks=2)
    for ((_, _, expected), by_hand), *others in ranks:
        for (error, _, weights), report in others:
            assert error == ""
            assert weights == pytest.approx(expected, abs=1e-6)
            assert report == pytest.approx(by_hand, abs=1e-6)
    assert ranks[0][1][0][2] == ranks[1][1][0][2]


class Uncounted(Quadratic):
    """Changes its parameters in every batch without the step that is counted, or with it.

    Args:
        how: In which way.
    """

    def __init__(self, how):
        super().__init__(steps=8)
        self.automatic_optimization = False
        self.how = how

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
UNCOUNTED = ["changed in 16 batches without a counted optimizer step"]
OVER_NODES = "step() communicates over several nodes"
PROGRAMS = {
    **{
        f"ZeRO over all ranks, {scheme!r}": (
            (Sharded(), scheme),
            [
                f"ZeroRedundancyOptimizer.{OVER_NODES}",
                f"which hold different parameters with {scheme!r}. Use AllReduce()",
                "process_group=self.trainer.strategy.node_process_group",
            ],
        )
        for scheme in (PeriodicAveraging(3), Gossip())
    },
    "gathers in some steps": ((Gathered(at=(3, 6)), PeriodicAveraging(2)), [f"Gathering.{OVER_NODES}"]),
    "ZeRO over a node of ranks that train alone": (
        (Sharded("node"), Gossip(hierarchical=False), 2),
        ["every rank trains a model of its own"],
    ),
    **{
        f"SAM in {how}": (
            (Sharpness(how), PeriodicAveraging(2)),
            ["y changed in 16 batches without a counted optimizer step", "such as SAM, a closure: step(closure)"],
        )
        for how in ("halves", "hook")
    },
    **{
        f"parameters changed {how}": (
            (Uncounted(how), PeriodicAveraging(2)),
            [
                "backbone.weight, backbone.bias, head.weight changed in 16 batches",
                "Step what self.optimizers() returns",
            ],
        )
        for how in WAYS
    },
    "parameters changed by hand, gossip": ((Uncounted("by hand"), Gossip()), UNCOUNTED),
    "parameters changed by hand, steps_delay": ((Uncounted("by hand"), StepsDelay(2, 2)), UNCOUNTED),
}


@pytest.mark.parametrize(("fit", "messages"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_step_that_no_scheme_can_follow_ends_the_run_with_the_remedy(borrow, fit, messages):
    for error, _, _ in borrow(lambda folder: outcome(folder, *fit), ranks=2):
        assert [text for text in messages if text not in error] == []


def test_hooks_around_the_step_may_communicate(borrow):
    schemes = {AllReduce(): (1, 2), PeriodicAveraging(2): (), StepsDelay(2, 2): ()}
    for name, ranks in outcomes(borrow, {repr(scheme): (Gathered(at), scheme) for scheme, at in schemes.items()}):
        assert [(error, said) for error, said, _ in ranks] == [("", [])] * 2, name


def test_changes_need_no_counted_step_where_nodes_do_not_differ(borrow):
    fits = {how: (Uncounted(how), AllReduce()) for how in ("counted", *WAYS)}
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
    """Trained by an optimizer inside something else, if that is given."""

    def __init__(self, inside=None):
        super().__init__()
        self.inside = inside or (lambda optimizer: optimizer)

    def configure_optimizers(self):
        return self.inside(torch.optim.SGD(self.parameters(), lr=0.1))


def test_a_wrapped_optimizer_trains_as_the_optimizer_itself(borrow):
    fits = {str(each): (Wrapped(each), PeriodicAveraging(3)) for each in (Wrapper, None)}
    (_, ours), (_, expected) = outcomes(borrow, fits)
    assert ours == expected
    assert ours[0][0] == ""


class Quiet(Quadratic):
    """Initializes its parameters in the first batch, accumulates gradients over 20 batches, and clamps after each."""

    def __init__(self):
        super().__init__(steps=20)
        self.automatic_optimization = False

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
    for error, said, _ in borrow(lambda folder: outcome(folder, Quiet(), PeriodicAveraging(2)), ranks=2):
        assert (error, said) == ("", [])
