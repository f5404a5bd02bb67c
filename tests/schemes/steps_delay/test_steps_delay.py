"""StepsDelay, against the numbers worked by hand from SSD-SGD's Algorithms 1 and 2, and against a plain simulation."""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from harness import (
    Rank,
    needs_a_background_thread,
    on_ranks,
    place,
    run_to_end,
    steps,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import STEPS_DELAY_TABLE as TABLE
from problems import train_with_momentum as train

from lightning_hiercomm.nodes import bucket
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import Context, StepsDelay
from lightning_hiercomm.schemes.steps_delay.rules import LOCAL_RULES, LocalUpdate, dc_asgd, glu

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


def simulate(
    goals: list[torch.Tensor],
    weights: list[float],
    number: int,
    *,
    delay: int,
    warmup: int,
    lr: Callable[[int], float],
    momentum: float,
    weight_decay: float,
    hold: bool = False,
    alpha: float = 2.0,
    beta: float = 0.5,
    scale: float = 4.0,
    skipped: Collection[tuple[int, int]] = (),
) -> tuple[list[list[float]], list[float]]:
    """Algorithms 1 and 2 in one process, with a server: device weights of every node, and the server's."""
    w = torch.zeros_like(goals[0])
    mom = torch.zeros_like(w)
    devices = [w.clone() for _ in goals]
    bases: list[torch.Tensor] = []
    pre: torch.Tensor | None = None
    held = [torch.zeros_like(w) for _ in goals]
    for n in range(number):
        gradients = [
            torch.zeros_like(x) if (n, node) in skipped else x - goal
            for node, (x, goal) in enumerate(zip(devices, goals, strict=True))
        ]
        mean = sum(weight * g for weight, g in zip(weights, gradients, strict=True))
        mom = momentum * mom + mean + weight_decay * w
        w = w - lr(n) * mom
        if n < warmup:
            devices = [w.clone() for _ in goals]
            bases = [w.clone() for _ in goals]
            continue
        bases = bases or [torch.zeros_like(w) for _ in goals]
        pre = bases[0].clone() if pre is None else pre
        u = n - warmup
        guesses = [(pre - base) * (1 - momentum) / (lr(n) * delay) for base in bases]
        if hold:
            held = guesses if u % delay == 0 else held
            guesses = held
        if u > 0 and u % delay == 0:
            pre = bases[0].clone()
        bases = [
            base - ((n, node) not in skipped) * scale * lr(n) * (alpha * g + weight_decay * base + beta * guess)
            for node, (base, g, guess) in enumerate(zip(bases, gradients, guesses, strict=True))
        ]
        devices = [base.clone() for base in bases]
        if n % delay == delay - 1:
            bases = [w.clone() for _ in goals]
    return [x.flatten().tolist() for x in devices], w.flatten().tolist()


# ---- the method ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize(
    ("nodes", "targets"),
    [(((0,), (1,)), (1.0, 7.0)), (((0, 1), (2, 3)), (0.0, 2.0, 4.0, 10.0)), (((0, 1), (2,)), (0, 2, 7))],
)
def test_two_nodes_follow_the_table(nodes, targets, look):
    # with three ranks the weights make the two nodes count the same, as in the table
    weights = (1, 1, 2) if len(targets) == 3 else None
    runs = train(steps(7, look), StepsDelay(2, warmup_steps=2), nodes=nodes, targets=targets, weights=weights)
    for run in runs:
        assert [x for (x,) in run.trace] == pytest.approx([row[run.topology.node] for row in TABLE], abs=1e-9)
        assert run.values.tolist() == pytest.approx([TABLE[-1][2]], abs=1e-9)
        if look:
            assert [x for (x,) in run.looks] == pytest.approx([row[2] for row in TABLE], abs=1e-9)


def test_a_held_global_gradient_stays_until_the_next_pull():
    runs = train(steps(6), StepsDelay(2, warmup_steps=2, hold=True), targets=(1.0, 7.0))
    assert [run.trace[3][0] for run in runs] == pytest.approx([0.25144384, 1.17304384], abs=1e-9)
    goals = [torch.tensor([1.0], dtype=torch.float64), torch.tensor([7.0], dtype=torch.float64)]
    arguments = {"delay": 2, "warmup": 2, "lr": lambda n: 0.01, "momentum": 0.9, "weight_decay": 0.0}
    devices, _ = simulate(goals, [0.5, 0.5], 6, hold=True, **arguments)
    assert [run.trace[5] for run in runs] == [pytest.approx(x, abs=1e-9) for x in devices]


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("at", [1, 3, 4, 5])  # a pull arrives in the iterations 4 and 6
def test_a_step_that_a_node_skips_leaves_out_its_own_gradient_only(at, hold):
    def work(run: Rank) -> Rank:
        for n in range(8):
            run.train(skip=(n, run.rank) == (at, 0))
        return run

    runs = train(work, StepsDelay(2, warmup_steps=2, hold=hold), targets=(1.0, 7.0))
    goals = [torch.tensor([1.0], dtype=torch.float64), torch.tensor([7.0], dtype=torch.float64)]
    arguments = {"delay": 2, "warmup": 2, "lr": lambda n: 0.01, "momentum": 0.9, "weight_decay": 0.0}
    devices, _ = simulate(goals, [0.5, 0.5], 8, hold=hold, skipped={(at, 0)}, **arguments)
    assert [run.trace[7] for run in runs] == [pytest.approx(x, abs=1e-9) for x in devices]


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.sampled_from([((0,), (1,)), ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (2,)), ((1, 3), (0, 2))]),
    delay=st.integers(1, 4),
    warmups=st.integers(0, 2),
    number=st.integers(1, 14),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    hold=st.booleans(),
    weights=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    shapes=st.sampled_from([((1,),), ((2, 3), (5,)), ((7,), (1, 1), (3, 2, 2)), ((),)]),
    bucket_bytes=st.sampled_from([1, 8 * 5, 2**22]),
)
def test_any_run_equals_a_plain_simulation_with_a_server(
    nodes, delay, warmups, number, momentum, weight_decay, hold, weights, shapes, bucket_bytes
):
    weights = weights[: sum(map(len, nodes))]

    def lr(n: int) -> float:
        return 0.01 * (1 + n) / 2

    def work(run: Rank) -> Rank:
        for n in range(number):
            run.optimizer.param_groups[0]["lr"] = lr(n)
            run.train()
        return run

    runs = train(
        work,
        StepsDelay(delay, delay * warmups, hold=hold, local_lr_scale=4.0),
        nodes=nodes,
        weights=weights,
        shapes=shapes,
        inner=lambda p: torch.optim.SGD(p, lr=1.0, momentum=momentum, weight_decay=weight_decay),
        bucket_bytes=bucket_bytes,
    )
    by_rank = [run.target for run in runs]
    node_weights = [sum(weights[r] for r in ranks) for ranks in nodes]
    goals = [
        sum(weights[r] * by_rank[r] for r in ranks) / total for ranks, total in zip(nodes, node_weights, strict=True)
    ]
    devices, server = simulate(
        goals,
        [total / sum(weights) for total in node_weights],
        number,
        delay=delay,
        warmup=delay * warmups,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        hold=hold,
    )
    for run in runs:
        assert run.trace[-1] == pytest.approx(devices[run.topology.node], abs=1e-9)
        assert run.values.tolist() == pytest.approx(server, abs=1e-9)


@pytest.mark.parametrize(
    ("delay", "arguments"),
    [
        (1, {}),
        (3, {}),
        (2, {"nesterov": True}),
        (2, {"dampening": 0.5}),
        (2, {"momentum": 0.0}),
        (2, {"maximize": True}),
    ],
)
def test_with_a_constant_gradient_the_guessed_global_gradient_tends_to_it(monkeypatch, delay, arguments):
    guesses: dict[int, list[float]] = {0: [], 1: []}

    def spy(update: LocalUpdate) -> None:
        before = update.weights.clone()
        glu(update)
        direction = (before - update.weights) / update.local_learning_rate
        if update.has_arrived:
            guesses[int(threading.current_thread().name[-1])].append(
                ((direction - update.alpha * update.gradient) / update.beta)[0].item()
            )

    def work(run: Rank) -> None:
        threading.current_thread().name = f"rank {run.rank}"
        for _ in range(300):
            run.train(gradient=3.0)

    monkeypatch.setitem(LOCAL_RULES, "glu", spy)
    train(
        work,
        StepsDelay(delay, warmup_steps=0),
        inner=lambda p: torch.optim.SGD(p, **{"lr": 0.01, "momentum": 0.9, **arguments}),
    )
    sign = -1.0 if "maximize" in arguments else 1.0
    for seen in guesses.values():
        assert seen[-1] == pytest.approx(sign * 3.0, abs=1e-9)


def test_plain_local_sgd_uses_nothing_of_the_server_between_pulls():
    runs = train(
        steps(4),
        StepsDelay(2, 0, local_update="sgd", local_lr_scale=0.25),
        targets=(1.0, 7.0),
        inner=lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5),
    )
    x, server = 0.0, 0.0
    trace, base = [], 0.0
    for n in range(4):
        gradients = [x - 1, (trace[n - 1][1] if n else 0.0) - 7]
        server -= 0.1 * (sum(gradients) / 2 + 0.5 * server)
        others = base if n % 2 == 0 else (trace[n - 1][1] if n else 0.0)
        mine = base if n % 2 == 0 else x
        x = mine - 0.025 * (gradients[0] + 0.5 * mine)
        trace.append((x, others - 0.025 * (gradients[1] + 0.5 * others)))
        if n % 2 == 1:
            base = server
    for rank in range(2):
        assert [value for (value,) in runs[rank].trace] == pytest.approx([row[rank] for row in trace], abs=1e-12)


def test_delay_compensation_acts_on_the_jump_to_the_pulled_weights_only():
    def direction(weights: float, taken_at: float) -> float:
        w, g = torch.tensor([weights]), torch.tensor([0.5])
        update = LocalUpdate(w, g, torch.tensor([taken_at]), w, True, 1.0, 1.0, 0.0, 0.0, 0.0, 2, 2.0, 0.5, False)
        dc_asgd(update)
        return weights - w.item()

    assert direction(3.0, 3.0) == pytest.approx(0.5)
    trust = 2 / (0.05 * 0.5**2 + 1e-7) ** 0.5
    assert direction(3.0, 2.0) == pytest.approx(0.5 + trust * 0.5 * 0.5 * 1.0, rel=1e-6)


@pytest.mark.parametrize("rule", ["glu", "sgd", "dc_asgd"])
def test_a_learning_rate_of_zero_moves_nothing(rule):
    runs = train(steps(5), StepsDelay(2, 2, local_update=rule), inner=lambda p: torch.optim.SGD(p, lr=0.0))
    assert all(run.trace == [[0.0]] * 5 for run in runs)


def test_on_one_node_it_is_the_users_optimizer():
    runs = train(steps(5), StepsDelay(2, 0), nodes=((0, 1),), targets=(0.0, 2.0))
    x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=0.01, momentum=0.9)
    for seen in runs[0].trace:
        x.grad = x.detach() - 1
        optimizer.step()
        assert seen == [x.item()]
    assert runs[0].optimizer.state


@pytest.mark.parametrize("arguments", [{}, {"hold": True}, {"local_update": "dc_asgd"}])
def test_chunk_size_of_rules_changes_no_bit(monkeypatch, arguments):
    def run(cache_before: int, cache_after: int) -> list[tuple[list[list[float]], dict[str, float]]]:
        sizes = iter((cache_before, cache_after))

        def work(run: Rank) -> tuple[list[list[float]], dict[str, float]]:
            for _ in range(5):
                run.train()
            return run.state()

        def resumed(run: Rank) -> tuple[list[list[float]], dict[str, float]]:
            run.load(states[run.rank])
            for _ in range(6):
                run.train()
            return run.trace, run.scheme.scalars()

        options = {"shapes": {"a": (7, 3), "b": (2,), "c": (5, 4)}, "targets": None}
        monkeypatch.setattr(bucket, "CACHE_SIZED", next(sizes))
        states = train(work, StepsDelay(2, 2, **arguments), **options)
        monkeypatch.setattr(bucket, "CACHE_SIZED", next(sizes))
        return train(resumed, StepsDelay(2, 2, **arguments), **options)

    whole = run(2**20, 2**20)
    assert run(40, 40) == run(40, 2**20) == run(2**20, 16) == whole


# ---- in parallel with training -------------------------------------------------------------------------------------


def test_a_step_does_not_wait_for_its_own_push_and_pull():
    needs_a_background_thread()
    may_start = [threading.Event() for _ in range(10)]

    def work(run: Rank) -> Rank:
        for n in range(10):
            if run.rank == 1:
                assert may_start[n].wait(5)  # node 1 begins iteration n when node 0 is done with it
            run.train()
            may_start[n].set()
        return run

    train(work, StepsDelay(2, 0))


class FailsAtThird(torch.optim.SGD):
    """An optimizer whose third step on a shard raises, once training has begun."""

    is_training = False

    def step(self, closure: Any = None) -> None:
        if self.is_training and any(p.grad is not None for group in self.param_groups for p in group["params"]):
            self.taken = getattr(self, "taken", 0) + 1
            if self.taken == 3:
                raise ArithmeticError("the third step")
        super().step()


@pytest.mark.parametrize("warmup", [0, 4])
def test_a_background_error_reaches_the_training_thread(monkeypatch, warmup):
    needs_a_background_thread()
    reached = []
    monkeypatch.setattr(FailsAtThird, "is_training", False)

    def work(run: Rank) -> None:
        FailsAtThird.is_training = True
        for n in range(6):
            try:
                run.train()
            except ArithmeticError:
                reached.append(n)
                raise

    with pytest.raises(ArithmeticError, match="the third step"):
        train(work, StepsDelay(2, warmup), inner=lambda p: FailsAtThird(p, lr=0.1, momentum=0.9))
    assert reached[0] == (2 if warmup else 3)  # a push may still be under way when the next one is due


@pytest.mark.parametrize("delay", [1, 2, 4])
def test_a_node_sends_half_of_an_all_reduce_and_a_kth_of_that_for_pulls(delay):
    nodes, shapes = ((0, 1), (2, 3), (4, 5)), ((8, 9), (4, 3))
    sent = []

    def work(run: Rank) -> None:
        run.scheme.state.settle()
        before = run.meter.bytes["inter"]
        for _ in range(8):
            run.train()
        run.scheme.state.settle()
        sent.append((run.topology.node, run.meter.bytes["inter"] - before))

    train(work, StepsDelay(delay, 0), nodes=nodes, shapes=shapes)
    for node in range(3):
        per_step = sum(amount for m, amount in sent if m == node) / 8
        assert per_step == pytest.approx(2 / 3 * 84 * 8 * (1 + 1 / delay))


def test_staleness_and_phase_show_the_source_of_the_weights():
    def work(run: Rank) -> list[tuple[str, float, float]]:
        seen = []
        for _ in range(8):
            scalars = run.scheme.scalars()
            seen.append((run.scheme.phase, scalars["sync_every"], scalars["staleness"]))
            run.train()
        return seen

    (seen, _) = train(work, StepsDelay(2, 2))
    delayed = [("delay", 2, staleness) for staleness in (0, 1, 2, 1, 2, 1)]
    assert seen == [("warm-up", 1, 0)] * 2 + delayed


# ---- with the user's optimizer -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delay": 0}, "delay=0"),
        ({"delay": 3, "warmup_steps": 500}, "such as 498 or 501"),
        ({"warmup_steps": -4}, "warmup_steps=-4"),
        ({"local_lr_scale": 0.0}, "local_lr_scale=0.0"),
        ({"local_update": "adam"}, "local_update='adam'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        StepsDelay(**arguments)


class Normalizing(torch.optim.SGD):
    """Divides each gradient by its norm."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad /= p.grad.norm()
        return super().step(closure)


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
        (lambda p: Normalizing(p, lr=0.1), {"local_update": "sgd"}, "Normalizing.* depends on all.* another scheme"),
        (lambda p: torch.optim.LBFGS(p), {"local_update": "sgd"}, "LBFGS"),
        (lambda p: ByClosure(p), {"local_update": "sgd"}, "ByClosure, which evaluates the loss several times"),
        (lambda p: lookahead(torch.optim.SGD(p, lr=0.1)), {"local_update": "sgd"}, "Lookahead, which wraps another"),
        (lambda p: Wrapping(p), {"local_update": "sgd"}, "Wrapping, which wraps another"),
        (lambda p: torch.optim.SparseAdam(p), {"local_update": "sgd"}, "SparseAdam.* does not support dense gradients"),
        (lambda p: Releasing(p), {}, "make it without gradient_release"),
        (None, {}, "needs the optimizer"),
    ],
)
@pytest.mark.parametrize("nodes", [((0,),), ((0,), (1,))])
def test_optimizers_it_cannot_serve_are_refused_with_the_way_out(nodes, optimizer, arguments, message):
    def bind(topology: Topology) -> None:
        x = torch.nn.Parameter(torch.zeros(1))
        StepsDelay(**arguments).build(Context(Replica([x]), topology, optimizer([x]) if optimizer else None))

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


@pytest.mark.parametrize("arguments", [{"local_update": "sgd"}, {"local_update": "dc_asgd"}])
def test_adam_is_served_once_the_local_rule_is_named(arguments):
    runs = train(steps(4), StepsDelay(2, 0, **arguments), inner=lambda p: torch.optim.Adam(p, lr=0.1))
    assert runs[0].values.tolist() == runs[1].values.tolist() != [0.0]


def test_fused_scaling_is_refused():
    def scaled(run: Rank) -> None:
        run.optimizer.found_inf = torch.zeros(1)
        run.train()

    with pytest.raises(ValueError, match="fused=False"):
        train(scaled, StepsDelay(1, 0))


def test_sparse_gradients_train_as_dense_ones_do_after_one_warning():
    def work(run: Rank, is_sparse: bool) -> Rank:
        for step in range(6):
            gradient = torch.zeros(6, 2, dtype=torch.float64)
            gradient[step % 3 + run.rank] = 1.0 + run.rank
            gradient = gradient.to(place.device)
            run.parameters[0].grad = gradient.to_sparse(1) if is_sparse else gradient
            run.scheme.step(lambda: run.optimizer.step())
        return run

    dense = train(lambda run: work(run, False), StepsDelay(2, 2), shapes={"table": (6, 2)})
    with pytest.warns(UserWarning, match="makes the sparse gradients of table dense") as caught:
        sparse = train(lambda run: work(run, True), StepsDelay(2, 2), shapes={"table": (6, 2)})
    assert len(caught) == 1
    assert torch.equal(sparse[0].values, dense[0].values)


@pytest.mark.parametrize(
    ("rule", "momentum", "expected"),
    [("glu", 0.9, 4.0), ("glu", 0.0, 0.4), ("glu", 0.5, 0.8), ("sgd", 0.9, 0.25), ("dc_asgd", 0.9, 1.0)],
)
def test_the_local_learning_rate_fits_the_rule_and_the_momentum(rule, momentum, expected):
    scheme = StepsDelay(2, 0, local_update=rule)
    assert scheme.local_scale({"lr": 0.1, "momentum": momentum}) == pytest.approx(expected)


def test_a_plain_sgd_module_trains_with_the_defaults():
    # 16 times too long local steps made it diverge: momentum 0 wants a scale of 0.4, not the paper's 4
    def work(run: Rank) -> float:
        for _ in range(60):
            run.train()
        return max(abs(value) for value in run.values.tolist())

    (largest, _) = train(work, StepsDelay(4, 0), inner=lambda p: torch.optim.SGD(p, lr=0.4), targets=(1, 3))
    assert largest < 5


# ---- what is written outside of the step ----------------------------------------------------------------------------


@pytest.mark.parametrize("through_data", [True, False])
@pytest.mark.parametrize("nodes", [((0,), (1,)), ((0, 1), (2,))])
def test_training_continues_from_weights_written_in_warm_up(nodes, through_data):
    def write(parameters: list[torch.Tensor], step: int) -> None:
        with torch.no_grad():
            for parameter in parameters:
                values = parameter.data if through_data else parameter
                values.clamp_(-0.5, 0.5)
                if step == 3:
                    values.fill_(0.25)

    def work(rank: Rank) -> Rank:
        for step in range(6):
            rank.train()
            write(rank.parameters, step)
            rank.averaged()
        return rank

    inner = {"inner": lambda parameters: torch.optim.SGD(parameters, lr=0.125, momentum=0.5)}
    scheme = StepsDelay(2, warmup_steps=8)
    arguments = {"nodes": nodes, "targets": (0.0, 4.0, 8.0), "shapes": ((3,), (2, 2)), "dtype": torch.float64}
    runs = run_to_end(work, scheme, **arguments, **inner)

    plain = [torch.zeros(7, dtype=torch.float64, requires_grad=True)]
    optimizer = torch.optim.SGD(plain, lr=0.125, momentum=0.5)
    goal = {2: 2.0, 3: 4.0}[sum(map(len, nodes))]
    for step in range(6):
        plain[0].grad = plain[0].detach() - goal
        optimizer.step()
        write(plain, step)
        for run in runs:
            assert run.looks[step] == pytest.approx(plain[0].tolist(), abs=1e-12)
    for run in runs:
        assert run.trace[2][0] > 0.5  # there was something to clamp
        assert run.values.tolist() == pytest.approx(plain[0].tolist(), abs=1e-12)


def test_dampening_has_no_effect_without_momentum(on_nodes):
    def work(rank):
        return [rank.train(1.0).item() for _ in range(8)], rank.averaged().item()

    def dampened_by(dampening):
        return functools.partial(torch.optim.SGD, lr=0.1, dampening=dampening)

    plain, dampened = (
        on_nodes(work, StepsDelay(2, warmup_steps=0), ((0,), (1,)), start=0.0, inner=dampened_by(d)) for d in (0.0, 1.0)
    )
    assert plain == dampened
