"""StepsDelay, against the numbers worked by hand from SSD-SGD's Algorithms 1 and 2, and against a plain simulation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from harness import (
    Rank,
    needs_a_background_thread,
    steps,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import STEPS_DELAY_TABLE as TABLE
from problems import train_with_momentum as train

from lightning_hiercomm.nodes import bucket
from lightning_hiercomm.schemes import StepsDelay
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


@pytest.mark.parametrize("at", [1, 3, 4, 5])  # a pull arrives in the iterations 4 and 6
def test_a_step_that_a_node_skips_leaves_out_its_own_gradient_only(at):
    def work(run: Rank) -> Rank:
        for n in range(8):
            run.train(skip=(n, run.rank) == (at, 0))
        return run

    runs = train(work, StepsDelay(2, warmup_steps=2), targets=(1.0, 7.0))
    goals = [torch.tensor([1.0], dtype=torch.float64), torch.tensor([7.0], dtype=torch.float64)]
    arguments = {"delay": 2, "warmup": 2, "lr": lambda n: 0.01, "momentum": 0.9, "weight_decay": 0.0}
    devices, _ = simulate(goals, [0.5, 0.5], 8, skipped={(at, 0)}, **arguments)
    assert [run.trace[7] for run in runs] == [pytest.approx(x, abs=1e-9) for x in devices]


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.sampled_from([((0,), (1,)), ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (2,)), ((1, 3), (0, 2))]),
    delay=st.integers(1, 4),
    warmups=st.integers(0, 2),
    number=st.integers(1, 14),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    weights=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    shapes=st.sampled_from([((1,),), ((2, 3), (5,)), ((7,), (1, 1), (3, 2, 2)), ((),)]),
    bucket_bytes=st.sampled_from([1, 8 * 5, 2**22]),
)
def test_any_run_equals_a_plain_simulation_with_a_server(
    nodes, delay, warmups, number, momentum, weight_decay, weights, shapes, bucket_bytes
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
        StepsDelay(delay, delay * warmups, local_lr_scale=4.0),
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
        if update.taken_at is not update.weights:  # a pull has arrived
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
        update = LocalUpdate(w, g, torch.tensor([taken_at]), w, 1.0, 1.0, 0.0, 0.0, 0.0, 2, 2.0, 0.5)
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


@pytest.mark.parametrize("arguments", [{}, {"local_update": "dc_asgd"}])
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
