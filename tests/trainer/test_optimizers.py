"""Optimizers that communicate or step in halves, and uncounted steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from problems import Oracle, Quadratic, one_trainer
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    Epochs,
    Gossip,
    HierarchicalFabricStrategy,
    HierarchicalStrategy,
    PeriodicAveraging,
    StepsDelay,
)


def outcome(folder: Path, module: pl.LightningModule, scheme: Any, ranks_per_node: int = 1, **arguments: Any) -> Any:
    """How a fit ends on this rank: its error, or an empty string; our warnings; and the weights."""
    own = {name: arguments.pop(name) for name in ("find_unused_parameters", "checkpoint_replicas") if name in arguments}
    strategy = HierarchicalStrategy(scheme, ranks_per_node=ranks_per_node, **own)
    error, path = "", arguments.pop("ckpt_path", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            one_trainer(folder, **{"devices": 2, "strategy": strategy, **arguments}).fit(module, ckpt_path=path)
        except Exception as raised:
            error = str(raised)
    said = [str(warning.message) for warning in caught if "/lightning_hiercomm/" in warning.filename]
    return error, said, torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def outcomes(borrow: Any, fits: Mapping[str, Any], ranks: int = 2) -> Iterator[tuple[str, list[Any]]]:
    """Of each fit, its name and how it ends on every rank; ``fits`` are arguments of :func:`outcome` by name."""
    reports = borrow(lambda folder: [outcome(folder, *arguments) for arguments in fits.values()], ranks=ranks)
    yield from ((name, [report[place] for report in reports]) for place, name in enumerate(fits))


# ---- optimizers that communicate ---------------------------------------------------------------------------------


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


DIFFERING = [PeriodicAveraging(3), DiLoCo(4), DASO(2, warmup=Epochs(1)), Gossip()]


def test_zero_over_all_ranks_is_refused_where_nodes_differ(borrow):
    for name, ranks in outcomes(borrow, {repr(scheme): (Sharded(), scheme) for scheme in DIFFERING}):
        for error, _, _ in ranks:
            assert "ZeroRedundancyOptimizer.step() communicates over several nodes" in error, name
            assert f"which hold different parameters with {name}. Use AllReduce()" in error
            assert "process_group=self.trainer.strategy.node_process_group" in error


@pytest.mark.parametrize(
    "scheme", [PeriodicAveraging(3), pytest.param(DiLoCo(4), marks=pytest.mark.nightly), AllReduce()], ids=repr
)
def test_zero_inside_a_node_equals_adam(borrow, scheme):
    replicas = isinstance(scheme, DiLoCo)

    def resumed(folder, over):
        """Train one epoch, and a second one from its checkpoint."""
        saves = ModelCheckpoint(folder / str(over), filename="saved")
        arguments = {"ranks_per_node": 2, "devices": 4, "callbacks": [saves], "enable_checkpointing": True}
        arguments["checkpoint_replicas"] = replicas
        saved = folder / str(over) / "saved.ckpt"
        return [
            outcome(folder, Sharded(over), scheme, **arguments, max_epochs=1),
            outcome(folder, Sharded(over), scheme, **arguments, ckpt_path=saved),
        ]

    for ours, adam in borrow(lambda folder: (resumed(folder, "node"), resumed(folder, None)), ranks=4):
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


def test_an_optimizer_that_gathers_over_nodes_is_refused(borrow):
    for error, _, _ in borrow(lambda folder: outcome(folder, Gathered(at=(3, 6)), PeriodicAveraging(2)), ranks=2):
        assert "Gathering.step() communicates over several nodes" in error


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
        self.inside = inside

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return optimizer if self.inside is None else self.inside(optimizer)


def test_a_wrapped_optimizer_trains_as_the_optimizer_itself(borrow):
    for scheme in (PeriodicAveraging(3), Gossip()):
        fits = {str(inside): (Wrapped(inside), scheme) for inside in (Wrapper, None)}
        (_, ours), (_, expected) = outcomes(borrow, fits)
        assert ours == expected
        assert ours[0][0] == ""


def test_hooks_around_the_step_may_communicate(borrow):
    schemes = {AllReduce(): (1, 2), PeriodicAveraging(2): (), StepsDelay(2, 2): ()}
    for name, ranks in outcomes(borrow, {repr(scheme): (Gathered(at), scheme) for scheme, at in schemes.items()}):
        assert [(error, said) for error, said, _ in ranks] == [("", [])] * 2, name


def test_ranks_that_train_alone_have_no_process_group_of_their_node(borrow):
    def program(folder):
        return outcome(folder, Sharded("node"), Gossip(hierarchical=False), 2)

    for error, _, _ in borrow(program, ranks=2):
        assert "every rank trains a model of its own" in error


# ---- optimizers that step in halves ------------------------------------------------------------------------------


class SAM(torch.optim.Optimizer):
    """As that of github.com/davda54/sam."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for group in self.param_groups for p in group["params"]]), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


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


SCHEMES = [(PeriodicAveraging(2), 1), (PeriodicAveraging(2), 2), (DiLoCo(4), 1), (Gossip(), 1)]


@pytest.mark.parametrize(
    ("scheme", "ranks_per_node", "ways"),
    [
        (AllReduce(), 1, ("halves", "closure", "hook")),
        *(pytest.param(*each, ("closure",), marks=[pytest.mark.nightly] * (each != SCHEMES[0])) for each in SCHEMES),
    ],
    ids=repr,
)
def test_sam_follows_its_formulas(borrow, scheme, ranks_per_node, ways):
    def program(folder):
        trained = []
        for how in ("hand", *ways):
            module = Sharpness(how)
            trained.append((outcome(folder, module, scheme, ranks_per_node), module.report))
        return trained

    ranks = borrow(program, ranks=2)
    for ((_, _, expected), by_hand), *others in ranks:
        for (error, _, weights), report in others:
            assert error == ""
            assert weights == pytest.approx(expected, abs=1e-6)
            assert report == pytest.approx(by_hand, abs=1e-6)
    assert ranks[0][1][0][2] == ranks[1][1][0][2]


class TalkativeSAM(SAM):
    """Averages the gradients of its first half over all ranks, as some do where there is a process group."""

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        for p in self.param_groups[0]["params"]:
            dist.all_reduce(p.grad, dist.ReduceOp.SUM)
        super().first_step(zero_grad)


class Talkative(Sharpness):
    def configure_optimizers(self):
        return TalkativeSAM(self.parameters(), torch.optim.SGD, lr=0.1)


def test_a_half_step_that_communicates_over_nodes_is_refused(borrow):
    for error, _, _ in borrow(lambda folder: outcome(folder, Talkative("closure"), PeriodicAveraging(2)), ranks=2):
        assert "TalkativeSAM.step() communicates over several nodes" in error


def test_sam_in_halves_ends_the_run_where_nodes_differ(borrow):
    for name, ranks in outcomes(borrow, {how: (Sharpness(how), PeriodicAveraging(2)) for how in ("halves", "hook")}):
        for error, _, _ in ranks:
            assert "y changed in 16 batches without a counted optimizer step" in error, name
            assert "such as SAM, a closure: step(closure)" in error


# ---- parameters that change without a counted step ---------------------------------------------------------------


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
        return None if self.how == WAYS[0] else torch.optim.SGD(self.parameters(), lr=0.1)

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


def test_parameters_that_change_without_a_counted_step_end_the_run(borrow):
    for name, ranks in outcomes(borrow, {how: (Uncounted(how), PeriodicAveraging(2)) for how in WAYS}):
        for error, _, _ in ranks:
            assert "backbone.weight, backbone.bias, head.weight changed in 16 batches" in error, name
            assert "Step what self.optimizers() returns" in error


def test_no_scheme_takes_changes_for_steps(borrow):
    schemes = (Gossip(), StepsDelay(2, 2))
    for name, ranks in outcomes(borrow, {repr(scheme): (Uncounted("by hand"), scheme) for scheme in schemes}):
        for error, _, _ in ranks:
            assert "changed in 16 batches without a counted optimizer step" in error, name


def test_changes_need_no_counted_step_where_nodes_do_not_differ(borrow):
    fits = {how: (Uncounted(how), AllReduce()) for how in ("counted", *WAYS)}
    (_, expected), *others = outcomes(borrow, fits)
    for name, ranks in others:
        for (error, _, weights), (_, _, right) in zip(ranks, expected, strict=True):
            assert error == "", name
            assert weights == pytest.approx(right, abs=1e-6), name


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


# ---- gradients that are not averaged ------------------------------------------------------------------------------


class Plain(Quadratic):
    """Two optimizers; some backward passes are plain ones, which average nothing.

    Args:
        how: Which.
    """

    def __init__(self, how):
        super().__init__()
        self.automatic_optimization = False
        self.how = how

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in (self.backbone, self.head)]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.zero_grad()
        losses = [self.loss(batch[0], layer) for layer in (self.backbone, self.head)]
        if self.how in ("all", "averages itself"):
            sum(losses).backward()
        elif self.how == "second":
            self.manual_backward(sum(losses))
            first.step()
            self.zero_grad()
            self.loss(batch[0], self.head).backward()
        else:
            self.manual_backward(sum(losses))
            self.clip_gradients(first, 0.1, "norm")
        if self.how == "averages itself":
            for p in self.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        if self.how != "second":
            first.step()
        second.step()


def test_gradients_that_ranks_should_share_and_do_not_are_named(borrow):
    for name, ranks in outcomes(borrow, {how: (Plain(how), AllReduce()) for how in ("all", "second")}):
        assert [error for error, _, _ in ranks] == ["", ""]
        assert [len(said) for _, said, _ in ranks] == [1, 0], name
        said = ranks[0][1][0]
        assert "SGD stepped with gradients that ranks 0, 1 should share, but that were not averaged" in said
        assert "call self.manual_backward(loss) instead of loss.backward()" in said


def test_gradients_that_are_averaged_in_any_way_are_right(borrow):
    ways = ("clips", "averages itself")
    layouts = ((AllReduce(), 1), (PeriodicAveraging(2), 2))
    fits = {f"{how}, {layout}": (Plain(how), *layout) for how in ways for layout in layouts}
    for name, ranks in outcomes(borrow, {**fits, "one rank per node": (Plain("all"), PeriodicAveraging(2), 1)}):
        said = [(error, [text for text in said if "one node" not in text]) for error, said, _ in ranks]
        assert said == [("", [])] * 2, name


def test_ranks_of_a_node_that_do_not_share_gradients_are_named(borrow):
    def program(folder):
        return outcome(folder, Plain("all"), PeriodicAveraging(2), 2, devices=4)

    said = [said for _, said, _ in borrow(program, ranks=4)]
    assert [len(each) for each in said] == [1, 0, 1, 0]
    assert "ranks 2, 3 should share" in said[2][0]


# ---- communication hooks -----------------------------------------------------------------------------------------


class Hooked(Quadratic):
    """Registers a communication hook of torch's besides the strategy's, as it would with DDP."""

    def on_fit_start(self):
        self.trainer.model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def test_a_communication_hook_of_the_program_is_refused_on_every_layout(borrow):
    for _, ranks in outcomes(borrow, {str(sizes): (Hooked(), AllReduce(), sizes) for sizes in (1, 2)}):
        for error, _, _ in ranks:
            assert error.startswith("register_comm_hook(")
            assert "FP16_COMPRESS" in error
            assert "DDP has one communication hook, and the hierarchical strategy averages gradients by it" in error
            assert "wire_dtype" in error


@pytest.mark.parametrize("strategy", [HierarchicalStrategy, HierarchicalFabricStrategy])
@pytest.mark.parametrize("argument", ["ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"])
def test_a_communication_hook_is_no_argument_of_the_strategy(strategy, argument):
    with pytest.raises(ValueError, match=rf"{argument} cannot be set: {strategy.__name__} owns .* `wire_dtype`"):
        strategy(**{argument: default_hooks.bf16_compress_hook})


@pytest.mark.parametrize("strategy", [HierarchicalStrategy, HierarchicalFabricStrategy])
def test_mixed_precision_of_ddp_is_no_argument_of_the_strategy(strategy):
    strategy(mixed_precision=None)  # as LightningCLI fills it in
    with pytest.raises(ValueError, match=rf"{strategy.__name__} owns. Use precision='bf16-mixed'"):
        strategy(mixed_precision=object())


# ---- the same on Fabric ------------------------------------------------------------------------------------------


def on_fabric(borrow, work, scheme, ranks_per_node=1, ranks=2):
    """The error, our warnings and the weights with which a loop on Fabric ends, on each rank."""

    def program(_):
        strategy = HierarchicalFabricStrategy(scheme, ranks_per_node=ranks_per_node)
        fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
        error = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                module = fabric.launch(work, strategy)
                strategy.finish()
            except RuntimeError as raised:
                error = str(raised)
        for run in strategy.runs:
            run.close(timeout=20.0)
        strategy.topology.close()
        said = [str(warning.message) for warning in caught if "/lightning_hiercomm/" in warning.filename]
        return error, said, [] if error else torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()

    return borrow(program, ranks=ranks)


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def batches(fabric):
    generator = torch.Generator().manual_seed(fabric.global_rank)
    return torch.randn(16, 4, 3, generator=generator)


def loop(optimizer_of, step=None):
    def work(fabric, strategy):
        module = layers()
        model, optimizer = fabric.setup(module, optimizer_of(module, strategy))
        for x in batches(fabric):
            optimizer.zero_grad()
            fabric.backward(model(x).square().mean())
            if step is None:
                optimizer.step()
            else:
                step(fabric, model, optimizer, x)
        return module

    return work


def sgd(module, strategy=None):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def zero(module, strategy=None):
    group = strategy and strategy.node_process_group
    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, process_group=group, lr=0.05)


def test_zero_on_fabric_is_refused_over_nodes_and_right_inside_one(borrow):
    for error, _, _ in on_fabric(borrow, loop(lambda module, _: zero(module)), PeriodicAveraging(2)):
        assert "ZeroRedundancyOptimizer.step() communicates over several nodes" in error
    ours = on_fabric(borrow, loop(zero), PeriodicAveraging(2), 2, ranks=4)
    adam = on_fabric(
        borrow, loop(lambda m, _: torch.optim.Adam(m.parameters(), 0.05)), PeriodicAveraging(2), 2, ranks=4
    )
    for (error, said, weights), (_, _, expected) in zip(ours, adam, strict=True):
        assert (error, said) == ("", [])
        assert weights == pytest.approx(expected, abs=1e-6)


def test_on_fabric_zero_over_the_node_is_saved_whole(borrow, tmp_path):
    def work(fabric, strategy):
        module = layers()
        model, optimizer = fabric.setup(module, zero(module, strategy))
        fabric.backward(model(batches(fabric)[0]).sum())
        optimizer.step()
        fabric.save(tmp_path / "saved.ckpt", {"model": model, "optimizer": optimizer})
        return module

    for error, said, _ in on_fabric(borrow, work, PeriodicAveraging(2), 2, ranks=4):
        assert (error, said) == ("", [])
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["optimizer"]
    assert sorted(saved["state"]) == [0, 1, 2, 3]


def sam(module, strategy=None):
    return SAM(module.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def halves(fabric, model, optimizer, x):
    optimizer.first_step(zero_grad=True)
    fabric.backward(model(x).square().mean())
    optimizer.second_step(zero_grad=True)


def closure(fabric, model, optimizer, x):
    optimizer.step(closure=lambda: fabric.backward(model(x).square().mean()))


@torch.no_grad()
def by_hand(fabric, model, optimizer, x):
    for p in model.parameters():
        p -= 0.1 * p.grad


def test_on_fabric_changes_without_a_counted_step_end_the_run(borrow):
    for optimizer, step in ((sgd, by_hand), (sam, halves)):
        for error, _, _ in on_fabric(borrow, loop(optimizer, step), PeriodicAveraging(2)):
            assert "changed in 16 batches without a counted optimizer step" in error
        for error, said, _ in on_fabric(borrow, loop(optimizer, step), AllReduce()):
            assert (error, said) == ("", [])
    for error, said, _ in on_fabric(borrow, loop(sam, closure), PeriodicAveraging(2)):
        assert (error, said) == ("", [])
