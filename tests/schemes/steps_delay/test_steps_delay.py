"""StepsDelay, against the numbers worked by hand from SSD-SGD's Algorithms 1 and 2, and against a plain simulation."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from harness import Rank, needs_a_background_thread, steps
from problems import train_with_momentum as train

from lightning_hiercomm.nodes import bucket
from lightning_hiercomm.schemes import StepsDelay
from lightning_hiercomm.schemes.steps_delay.rules import LOCAL_RULES, LocalUpdate, dc_asgd, glu

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

TABLE = [
    (0.04, 0.04, 0.04),
    (0.1156, 0.1156, 0.1156),
    (0.186352, 0.666352, 0.222484),
    (0.25851904, 1.22811904, 0.35441608),
    (0.4376161648, 0.8400481648, 0.5057217616),
    (0.4909268801, 1.3814075201, 0.6755085534),
    (0.7483436503, 1.1571051991, 0.8589549940),
]
"""StepsDelay(2, warmup_steps=2) at targets 1 and 7: weights of the two nodes after each step, and the server's."""


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


def test_delay_compensation_acts_on_the_jump_to_the_pulled_weights_only():
    def direction(weights: float, taken_at: float) -> float:
        w, g = torch.tensor([weights]), torch.tensor([0.5])
        update = LocalUpdate(w, g, torch.tensor([taken_at]), w, torch.zeros(1), 1.0, 1.0, 0.0, 0.0, 0.0, 2, 2.0, 0.5)
        dc_asgd(update)
        return weights - w.item()

    assert direction(3.0, 3.0) == pytest.approx(0.5)
    trust = 2 / (0.05 * 0.5**2 + 1e-7) ** 0.5
    assert direction(3.0, 2.0) == pytest.approx(0.5 + trust * 0.5 * 0.5 * 1.0, rel=1e-6)


@pytest.mark.parametrize("rule", ["glu", "sgd", "dc_asgd"])
def test_a_learning_rate_of_zero_moves_nothing(rule):
    runs = train(steps(5), StepsDelay(2, 2, local_update=rule), inner=lambda p: torch.optim.SGD(p, lr=0.0))
    assert all(run.trace == [[0.0]] * 5 for run in runs)


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
