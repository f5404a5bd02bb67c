"""Which optimizers StepsDelay serves, what it gives to them, and what programs write to the weights."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import torch
from harness import Rank, on_ranks, place, steps
from problems import train_with_momentum as train

from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import Context, StepsDelay

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


def test_schedulers_and_step_hooks_see_every_step():
    def work(run: Rank) -> tuple[int, list[float]]:
        calls = itertools.count()
        run.optimizer.register_step_post_hook(lambda *_: next(calls))
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a scheduler warns if the optimizer was not stepped before it
            for _ in range(4):
                run.train(gradient=1.0)
                scheduler.step()
        run.scheme.synchronize()
        return next(calls), run.values.tolist()

    for taken, values in train(work, StepsDelay(2, 2), inner=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.0)):
        assert taken == 4
        assert values == [-(0.5 + 0.25 + 0.125 + 0.0625)]


def test_gradients_stay_visible_after_the_step():
    runs = train(steps(3), StepsDelay(1, 1), targets=(1.0, 7.0))
    assert all(run.parameters[0].grad is not None for run in runs)


def test_a_parameter_without_gradient_counts_as_zero():
    def work(run: Rank) -> Rank:
        for _ in range(2):
            run.parameters[0].grad = None if run.rank == 0 else torch.ones(1, dtype=torch.float64).to(place.device)
            run.scheme.step(lambda: run.optimizer.step())
        return run

    runs = train(work, StepsDelay(1, 2), inner=lambda p: torch.optim.SGD(p, lr=0.5))
    assert runs[0].values.tolist() == [-0.5]


class ByClosure(torch.optim.Optimizer):
    """Passes the loss to a minimizer of another package, which needs no learning rate."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure):
        return closure()


class Wrapping(torch.optim.SGD):
    """Has param groups of its own, unlike those of the optimizer that makes the steps."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.inside = torch.optim.SGD(parameters, lr=0.1)


class Releasing(torch.optim.SGD):
    """Says that it releases gradients."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.defaults["gradient_release"] = True


class Optimistic(torch.optim.Optimizer):
    """Steps with ``2 g - g'``, where g' is the gradient of the step before, which it keeps itself, not a copy."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    before = self.state[parameter].get("before", parameter.grad)
                    parameter.sub_(2 * parameter.grad - before, alpha=group["lr"])
                    self.state[parameter]["before"] = parameter.grad


def test_an_optimizer_of_a_users_own_may_keep_a_gradient():
    """As on one device, whose weights follow from the mean target 4: gradients w - 4, so -4, -3.6, ..."""
    runs = train(steps(4), StepsDelay(2, warmup_steps=4, local_update="sgd"), targets=(1.0, 7.0), inner=Optimistic)
    weight, before = 0.0, -4.0
    for _ in range(4):
        weight, before = weight - 0.1 * (2 * (weight - 4) - before), weight - 4
    assert [run.values.item() for run in runs] == pytest.approx([weight] * 2)


def lookahead(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    wrapping: torch.optim.Optimizer = pytest.importorskip("pytorch_optimizer").Lookahead(optimizer)
    return wrapping


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        (lambda p: torch.optim.Adam(p), {}, "local_update='sgd'"),
        (lambda p: torch.optim.LBFGS(p), {"local_update": "sgd"}, "LBFGS"),
        (lambda p: ByClosure(p), {"local_update": "sgd"}, "ByClosure, which evaluates the loss several times"),
        (lambda p: lookahead(torch.optim.SGD(p, lr=0.1)), {"local_update": "sgd"}, "Lookahead, which wraps another"),
        (lambda p: Wrapping(p), {"local_update": "sgd"}, "Wrapping, which wraps another"),
        (lambda p: torch.optim.SparseAdam(p), {"local_update": "sgd"}, "SparseAdam.* does not support dense gradients"),
        (lambda p: Releasing(p), {}, "make it without gradient_release"),
    ],
)
@pytest.mark.parametrize("nodes", [((0,),), ((0,), (1,))])
def test_optimizers_it_cannot_serve_are_refused_with_the_way_out(nodes, optimizer, arguments, message):
    def bind(topology: Topology) -> None:
        x = torch.nn.Parameter(torch.zeros(1))
        StepsDelay(**arguments).build(Context(Replica([x]), topology, optimizer([x])))

    with pytest.raises(ValueError, match=message):
        on_ranks(bind, nodes)


def test_parameters_that_share_memory_are_refused_with_the_way_to_tie_them():
    def bind(topology: Topology) -> None:
        one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        other.data = one.data
        StepsDelay().build(Context(Replica([one, other]), topology, torch.optim.SGD([one, other], lr=0.1)))

    with pytest.raises(ValueError, match="share memory"):
        on_ranks(bind, [[0], [1]])


@pytest.mark.parametrize("nodes", [((0,),), ((0,), (1,))])
def test_two_optimizers_of_one_parameter_are_refused_with_the_reason(nodes):
    def bind(topology: Topology) -> None:
        module = torch.nn.Linear(2, 1)
        optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in (module.parameters(), [module.bias])]
        TrainingRun(StepsDelay(), Replicas(module, optimizers), topology)

    with pytest.raises(ValueError, match=r"optimizers 0 and 1 train bias. StepsDelay has a server for each optimizer"):
        on_ranks(bind, nodes)


def test_fused_scaling_is_refused():
    def scaled(run: Rank) -> None:
        run.optimizer.found_inf = torch.zeros(1)
        run.train()

    with pytest.raises(ValueError, match="fused=False"):
        train(scaled, StepsDelay(1, 0))


def test_weights_written_before_the_first_step_train_as_initial_ones_do():
    def work(run: Rank) -> list[list[float]]:
        with torch.no_grad():
            run.parameters[0].fill_(5.0)
        for _ in range(5):
            run.train()
        return run.trace

    assert train(work, StepsDelay(2, 0), start=0.0) == train(work, StepsDelay(2, 0), start=5.0)


def test_sparse_gradients_train_as_dense_ones_do():
    def work(run: Rank, is_sparse: bool) -> Rank:
        for step in range(6):
            gradient = torch.zeros(6, 2, dtype=torch.float64)
            gradient[step % 3 + run.rank] = 1.0 + run.rank
            gradient = gradient.to(place.device)
            run.parameters[0].grad = gradient.to_sparse(1) if is_sparse else gradient
            run.scheme.step(lambda: run.optimizer.step())
        return run

    dense = train(lambda run: work(run, False), StepsDelay(2, 2), shapes={"table": (6, 2)})
    sparse = train(lambda run: work(run, True), StepsDelay(2, 2), shapes={"table": (6, 2)})
    assert torch.equal(sparse[0].values, dense[0].values)


@pytest.mark.parametrize(
    ("rule", "momentum", "expected"),
    [("glu", 0.9, 4.0), ("glu", 0.0, 0.4), ("glu", 0.5, 0.8), ("sgd", 0.9, 0.25), ("dc_asgd", 0.9, 1.0)],
)
def test_the_local_learning_rate_fits_the_rule_and_the_momentum(rule, momentum, expected):
    scheme = StepsDelay(2, 0, local_update=rule)
    assert scheme.local_scale({"lr": 0.1, "momentum": momentum}) == pytest.approx(expected)


def test_dampening_has_no_effect_without_momentum(on_nodes):
    def work(rank):
        return [rank.train(1.0).item() for _ in range(8)], rank.averaged().item()

    def dampened_by(dampening):
        return functools.partial(torch.optim.SGD, lr=0.1, dampening=dampening)

    plain, dampened = (
        on_nodes(work, StepsDelay(2, warmup_steps=0), ((0,), (1,)), start=0.0, inner=dampened_by(d)) for d in (0.0, 1.0)
    )
    assert plain == dampened
