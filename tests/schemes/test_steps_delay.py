"""StepsDelay, against the numbers worked by hand from SSD-SGD's Algorithms 1 and 2, and against a plain simulation."""

from __future__ import annotations

import io
import itertools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.replica import Replica
from lightning_hiercomm.schemes import StepsDelay
from lightning_hiercomm.schemes.gradients import NodeMean
from lightning_hiercomm.schemes.steps_delay import LocalUpdate, glu
from lightning_hiercomm.topology import Topology

Nodes = Sequence[Sequence[int]]

# device weights of the two workers after each iteration, and the server's weight
TABLE = [
    (0.04, 0.04, 0.04),
    (0.1156, 0.1156, 0.1156),
    (0.186352, 0.666352, 0.222484),
    (0.25851904, 1.22811904, 0.35441608),
    (0.4376161648, 0.8400481648, 0.5057217616),
    (0.4909268801, 1.3814075201, 0.6755085534),
    (0.7483436503, 1.1571051991, 0.8589549940),
]


@dataclass
class Run:
    """One rank in training: every parameter's loss is 0.5 |x - target|^2."""

    rank: int
    topology: Topology
    scheme: StepsDelay
    parameters: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    targets: list[torch.Tensor]
    device: list[list[float]] = field(default_factory=list)
    server: list[list[float]] = field(default_factory=list)

    def values(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.parameters]).tolist()

    def step(self, gradient: float | None = None, skip: bool = False) -> None:
        def user_step() -> None:
            for p, target in zip(self.parameters, self.targets, strict=True):
                p.grad = p.detach() - target if gradient is None else torch.full_like(p, gradient)
                NodeMean(self.topology).reduce(p.grad.view(-1)).wait()
            if not skip:
                self.optimizer.step()

        self.scheme.step(user_step)
        self.device.append(self.values())

    def look(self) -> list[float]:
        """The server's weights, as validation sees them; training goes on from where it was."""
        snapshot = self.scheme.replica.snapshot()
        self.scheme.agree()
        values = self.values()
        self.scheme.replica.restore(snapshot)
        return values


def train(
    work: Callable[[Run], Any],
    scheme: Callable[[], StepsDelay],
    *,
    nodes: Nodes = ((0,), (1,)),
    weights: Sequence[float] | None = None,
    shapes: Sequence[Sequence[int]] = ((1,),),
    dtype: torch.dtype = torch.float64,
    targets: Sequence[float] | None = None,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    wire: Wire | None = None,
    meters: dict[int, Meter] | None = None,
    bucket_bytes: int = 2**22,
) -> list[Any]:
    """Run ``work`` on every rank, between bind and finish; returns what it returns."""

    def body(rank: int, world: ThreadWorld) -> Any:
        meter = Meter()
        if meters is not None:
            meters[rank] = meter
        topology = Topology(nodes, rank, world.connect(rank, meter), meter, weights)
        generator = torch.Generator().manual_seed(rank)
        parameters = [torch.nn.Parameter(torch.zeros(tuple(shape), dtype=dtype)) for shape in shapes]
        goals = [torch.randn(tuple(shape), generator=generator, dtype=dtype) for shape in shapes]
        if targets is not None:
            goals = [torch.full_like(goal, targets[rank]) for goal in goals]
        make = optimizer or (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
        run = Run(rank, topology, scheme(), parameters, make(parameters), goals)
        try:
            run.scheme.attach(Replica(parameters, bucket_bytes=bucket_bytes), topology, run.optimizer, wire)
            run.scheme.begin_run(1, None)
            run.scheme.begin_epoch(0, {})
            result = work(run)
            run.scheme.finish()
            return result
        finally:
            run.scheme.close(timeout=0.1)

    return ThreadWorld(sum(map(len, nodes)), timeout=10).run(body)


def steps(number: int, look: bool = False) -> Callable[[Run], Run]:
    """Work that takes ``number`` steps and returns its run."""

    def work(run: Run) -> Run:
        for _ in range(number):
            run.step()
            if look:
                run.server.append(run.look())
        return run

    return work


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
) -> tuple[list[list[float]], list[float]]:
    """Algorithms 1 and 2 in one process, with a server: device weights of every node, and the server's."""
    w = torch.zeros_like(goals[0])
    mom = torch.zeros_like(w)
    devices = [w.clone() for _ in goals]
    bases: list[torch.Tensor] = []
    pre: torch.Tensor | None = None
    held = [torch.zeros_like(w) for _ in goals]
    for n in range(number):
        gradients = [x - goal for x, goal in zip(devices, goals, strict=True)]
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
            base - scale * lr(n) * (alpha * g + weight_decay * base + beta * guess)
            for base, g, guess in zip(bases, gradients, guesses, strict=True)
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
    runs = train(steps(7, look), lambda: StepsDelay(2, warmup_steps=2), nodes=nodes, targets=targets, weights=weights)
    for run in runs:
        assert [x for (x,) in run.device] == pytest.approx([row[run.topology.node] for row in TABLE], abs=1e-9)
        assert run.values() == pytest.approx([TABLE[-1][2]], abs=1e-9)
        if look:
            assert [x for (x,) in run.server] == pytest.approx([row[2] for row in TABLE], abs=1e-9)


def test_a_held_global_gradient_stays_until_the_next_pull():
    runs = train(steps(6), lambda: StepsDelay(2, warmup_steps=2, hold=True), targets=(1.0, 7.0))
    assert [run.device[3][0] for run in runs] == pytest.approx([0.25144384, 1.17304384], abs=1e-9)
    goals = [torch.tensor([1.0], dtype=torch.float64), torch.tensor([7.0], dtype=torch.float64)]
    arguments = {"delay": 2, "warmup": 2, "lr": lambda n: 0.01, "momentum": 0.9, "weight_decay": 0.0}
    devices, _ = simulate(goals, [0.5, 0.5], 6, hold=True, **arguments)
    assert [run.device[5] for run in runs] == [pytest.approx(x, abs=1e-9) for x in devices]


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
    shard_on=st.sampled_from(["elements", "parameters"]),
    bucket_bytes=st.sampled_from([1, 8 * 5, 2**22]),
)
def test_any_run_equals_a_plain_simulation_with_a_server(
    nodes, delay, warmups, number, momentum, weight_decay, hold, weights, shapes, shard_on, bucket_bytes
):
    weights = weights[: sum(map(len, nodes))]

    def lr(n: int) -> float:
        return 0.01 * (1 + n) / 2

    def work(run: Run) -> Run:
        for n in range(number):
            run.optimizer.param_groups[0]["lr"] = lr(n)
            run.step()
        return run

    runs = train(
        work,
        lambda: StepsDelay(delay, delay * warmups, hold=hold, local_lr_scale=4.0, shard_on=shard_on),
        nodes=nodes,
        weights=weights,
        shapes=shapes,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0, momentum=momentum, weight_decay=weight_decay),
        bucket_bytes=bucket_bytes,
    )
    by_rank = [torch.cat([goal.flatten() for goal in run.targets]) for run in runs]
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
        assert run.device[-1] == pytest.approx(devices[run.topology.node], abs=1e-9)
        assert run.values() == pytest.approx(server, abs=1e-9)


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
def test_with_a_constant_gradient_the_guessed_global_gradient_tends_to_it(delay, arguments):
    guesses: dict[int, list[float]] = {0: [], 1: []}

    def spy(update: LocalUpdate) -> None:
        before = update.weights.clone()
        glu(update)
        direction = (before - update.weights) / update.local_learning_rate
        if update.has_arrived:
            guesses[int(threading.current_thread().name[-1])].append(
                ((direction - update.alpha * update.gradient) / update.beta)[0].item()
            )

    def work(run: Run) -> None:
        threading.current_thread().name = f"rank {run.rank}"
        for _ in range(300):
            run.step(gradient=3.0)

    train(
        work,
        lambda: StepsDelay(delay, warmup_steps=0, local_update=spy),
        optimizer=lambda p: torch.optim.SGD(p, **{"lr": 0.01, "momentum": 0.9, **arguments}),
    )
    sign = -1.0 if "maximize" in arguments else 1.0
    for seen in guesses.values():
        assert seen[-1] == pytest.approx(sign * 3.0, abs=1e-9)


def test_plain_local_sgd_uses_nothing_of_the_server_between_pulls():
    runs = train(
        steps(4),
        lambda: StepsDelay(2, 0, local_update="sgd", local_lr_scale=0.25),
        targets=(1.0, 7.0),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5),
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
        assert [value for (value,) in runs[rank].device] == pytest.approx([row[rank] for row in trace], abs=1e-12)


def test_delay_compensation_acts_on_the_jump_to_the_pulled_weights_only():
    def direction(weights: float, taken_at: float) -> float:
        w, g = torch.tensor([weights]), torch.tensor([0.5])
        update = LocalUpdate(w, g, torch.tensor([taken_at]), w, True, 1.0, 1.0, 0.0, 0.0, 0.0, 2, 2.0, 0.5, False)
        StepsDelay(local_update="dc_asgd").rule(update)
        return weights - w.item()

    assert direction(3.0, 3.0) == pytest.approx(0.5)
    trust = 2 / (0.05 * 0.5**2 + 1e-7) ** 0.5
    assert direction(3.0, 2.0) == pytest.approx(0.5 + trust * 0.5 * 0.5 * 1.0, rel=1e-6)


@pytest.mark.parametrize("rule", ["glu", "sgd", "dc_asgd"])
def test_a_learning_rate_of_zero_moves_nothing(rule):
    runs = train(steps(5), lambda: StepsDelay(2, 2, local_update=rule), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    assert all(run.device == [[0.0]] * 5 for run in runs)


def test_on_one_node_it_is_the_users_optimizer():
    runs = train(steps(5), lambda: StepsDelay(2, 0), nodes=((0, 1),), targets=(0.0, 2.0))
    x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=0.01, momentum=0.9)
    for seen in runs[0].device:
        x.grad = x.detach() - 1
        optimizer.step()
        assert seen == [x.item()]
    assert runs[0].optimizer.state


# ---- beside training -----------------------------------------------------------------------------------------------


def test_a_step_does_not_wait_for_its_own_push_and_pull():
    may_start = [threading.Event() for _ in range(10)]

    def work(run: Run) -> Run:
        for n in range(10):
            if run.rank == 1:
                assert may_start[n].wait(5)  # node 1 begins iteration n when node 0 is done with it
            run.step()
            may_start[n].set()
        return run

    train(work, lambda: StepsDelay(2, 0))


class FailsAtThird(torch.optim.SGD):
    """An optimizer whose third step on a shard raises."""

    def step(self, closure: Any = None) -> None:
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            self.taken = getattr(self, "taken", 0) + 1
            if self.taken == 3:
                raise ArithmeticError("the third step")
        super().step()


@pytest.mark.parametrize("warmup", [0, 4])
def test_an_error_beside_training_reaches_the_training_thread(warmup):
    reached = []

    def work(run: Run) -> None:
        for n in range(6):
            try:
                run.step()
            except ArithmeticError:
                reached.append(n)
                raise

    with pytest.raises(ArithmeticError, match="the third step"):
        train(work, lambda: StepsDelay(2, warmup), optimizer=lambda p: FailsAtThird(p, lr=0.1, momentum=0.9))
    assert reached[0] == (2 if warmup else 3)  # a push may still be under way when the next one is due


@pytest.mark.parametrize("delay", [1, 2, 4])
def test_a_node_sends_half_of_an_all_reduce_and_a_kth_of_that_for_pulls(delay):
    nodes, shapes = ((0, 1), (2, 3), (4, 5)), ((8, 9), (4, 3))
    meters: dict[int, Meter] = {}
    sent = []

    def work(run: Run) -> None:
        run.scheme.settle()
        before = meters[run.rank].bytes["inter"]
        for _ in range(8):
            run.step()
        run.scheme.settle()
        sent.append((run.topology.node, meters[run.rank].bytes["inter"] - before))

    train(work, lambda: StepsDelay(delay, 0), nodes=nodes, shapes=shapes, meters=meters)
    for node in range(3):
        per_step = sum(amount for m, amount in sent if m == node) / 8
        assert per_step == pytest.approx(2 / 3 * 84 * 8 * (1 + 1 / delay))


def test_staleness_and_phase_tell_where_the_weights_come_from():
    def work(run: Run) -> list[tuple[str, float]]:
        seen = []
        for _ in range(8):
            seen.append((run.scheme.phase, run.scheme.scalars()["staleness"]))
            run.step()
        return seen

    (seen, _) = train(work, lambda: StepsDelay(2, 2))
    assert seen == [("warm-up", 0)] * 2 + [("delay", 0)] + [("delay", 1), ("delay", 2)] * 2 + [("delay", 1)]


# ---- the server ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (2,))])
@pytest.mark.parametrize("shard_on", ["elements", "parameters"])
def test_optimizer_state_is_shared_out_among_the_ranks(nodes, shard_on):
    held = []

    def work(run: Run) -> None:
        steps(3)(run)
        run.scheme.settle()
        shards = run.scheme.state_dict()["exchange"]["server"]
        momenta = [owned["momentum_buffer"] for shard in shards for owned in shard["optimizer"]]
        held.append((run.rank, sum(momentum.numel() for momentum in momenta)))
        assert not run.optimizer.state

    train(work, lambda: StepsDelay(1, 0, shard_on=shard_on), nodes=nodes, shapes=((6, 5), (10,), (10,), (10,)))
    owners = min(map(len, nodes)) * len(nodes)
    assert sum(numel for _, numel in held) == 60
    if shard_on == "elements":
        assert sorted(numel for _, numel in held)[-owners:] == [60 // owners] * owners


OPTIMIZERS = [
    (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), "elements"),
    (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1), "elements"),
    (lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), "parameters"),
    (lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True), "elements"),
    (
        lambda p: torch.optim.SGD([{"params": p[:1], "lr": 0.2}, {"params": p[1:], "momentum": 0.5}], lr=0.1),
        "elements",
    ),
]
if hasattr(torch.optim, "Adafactor"):
    OPTIMIZERS.append((lambda p: torch.optim.Adafactor(p, lr=0.1), "parameters"))
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS.append((lambda p: torch.optim.Muon(p, lr=0.1), "parameters"))


@pytest.mark.parametrize(("optimizer", "shard_on"), OPTIMIZERS)
@pytest.mark.parametrize("bucket_bytes", [8 * 5, 2**22])
def test_the_server_steps_as_the_users_optimizer_would_and_saves_state_in_its_layout(optimizer, shard_on, bucket_bytes):
    shapes = ((4, 3), (2, 5), (1, 1))

    def work(run: Run) -> tuple[list[float], dict[str, Any]]:
        steps(5)(run)
        return run.values(), run.scheme.optimizer_state()

    results = train(
        work,
        lambda: StepsDelay(1, 10, local_update="sgd", shard_on=shard_on),
        nodes=((0, 1), (2, 3)),
        shapes=shapes,
        dtype=torch.float64,
        optimizer=optimizer,
        bucket_bytes=bucket_bytes,
    )
    # one process with the mean gradient
    whole = [torch.nn.Parameter(torch.zeros(tuple(shape), dtype=torch.float64)) for shape in shapes]
    generators = [torch.Generator().manual_seed(rank) for rank in range(4)]
    goals = [
        sum(torch.randn(tuple(shape), generator=g, dtype=torch.float64) for g in generators) / 4 for shape in shapes
    ]
    alone = optimizer(whole)
    for _ in range(5):
        for p, goal in zip(whole, goals, strict=True):
            p.grad = p.detach() - goal
        alone.step()
    expected = alone.state_dict()
    for values, state in results:
        assert values == pytest.approx(torch.cat([p.detach().flatten() for p in whole]).tolist(), abs=1e-7)
        assert state["param_groups"] == expected["param_groups"]
        assert state["state"].keys() == expected["state"].keys()
        for index, held in expected["state"].items():
            assert state["state"][index].keys() == held.keys()
            for name, value in held.items():
                assert torch.allclose(torch.as_tensor(state["state"][index][name]), torch.as_tensor(value), atol=1e-7)


def test_a_small_model_travels_in_several_sections_that_follow_each_other():
    def numels(run: Run) -> list[int]:
        assert run.scheme._server is not None
        return [section.bucket.numel for section in run.scheme._server.sections]

    shapes, scheme = ((1024, 1024), (1,)), partial(StepsDelay, 1, 10, local_update="sgd")
    (cut,) = set(map(tuple, train(numels, scheme, nodes=((0,), (1,)), shapes=shapes)))
    assert len(cut) >= 8
    assert sum(cut) == 1024 * 1024 + 1
    (small,) = set(map(tuple, train(numels, scheme, nodes=((0,), (1,)), shapes=((10, 10),))))
    assert small == (100,)


@pytest.mark.parametrize("shard_on", ["elements", "parameters"])
def test_a_plain_checkpoint_resumes_on_another_number_of_ranks(shard_on):
    shapes, saved = ((4, 3), (7,)), {}

    def adamw(p: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(p, lr=0.1)

    def first(run: Run) -> None:
        for _ in range(4):
            run.step(gradient=1.0 + run.topology.node)
        state, values = run.scheme.optimizer_state(), run.look()
        if run.rank == 0:
            saved.update(optimizer=state, values=values)

    def resumed(run: Run) -> list[float]:
        with torch.no_grad():
            flat = torch.tensor(saved["values"], dtype=torch.float64)
            for p, values in zip(run.parameters, flat.split([12, 7]), strict=True):
                p.copy_(values.view(p.shape))
        run.scheme.attach(Replica(run.parameters), run.topology, run.optimizer)
        run.optimizer.load_state_dict(saved["optimizer"])
        run.scheme.load_state_dict({**run.scheme.state_dict(), "steps": 4, "exchange": None})
        run.scheme.begin_run(1, None)
        for _ in range(3):
            run.step(gradient=1.5)
        return run.values()

    def scheme() -> StepsDelay:
        return StepsDelay(1, 100, local_update="sgd", shard_on=shard_on)

    train(first, scheme, nodes=((0, 1), (2, 3)), shapes=shapes, optimizer=adamw)
    results = train(resumed, scheme, nodes=((0,), (1,), (2,)), shapes=shapes, optimizer=adamw)
    whole = [torch.nn.Parameter(torch.zeros(tuple(shape), dtype=torch.float64)) for shape in shapes]
    alone = adamw(whole)
    for _ in range(7):
        for p in whole:
            p.grad = torch.full_like(p, 1.5)
        alone.step()
    assert results[0] == pytest.approx(torch.cat([p.detach().flatten() for p in whole]).tolist(), abs=1e-12)


@pytest.mark.parametrize("rule", ["glu", "sgd", "dc_asgd"])
@pytest.mark.parametrize("wire", [None, Wire(torch.bfloat16)])
def test_a_run_resumed_from_its_state_goes_on_to_the_bit(rule, wire):
    arguments: dict[str, Any] = {
        "nodes": ((0, 1), (2, 3)),
        "shapes": ((3, 3), (2,)),
        "dtype": torch.float32,
        "wire": wire,
        "bucket_bytes": 4 * 5,
    }

    def scheme() -> StepsDelay:
        return StepsDelay(2, 2, local_update=rule, hold=rule == "glu")

    saved: dict[tuple[int, int], bytes] = {}

    def first(run: Run) -> Run:
        for at in range(1, 6):
            run.step()
            run.scheme.settle()
            file = io.BytesIO()
            torch.save({"values": run.scheme.replica.snapshot(), "scheme": run.scheme.state_dict()}, file)
            saved[run.rank, at] = file.getvalue()
        return steps(3)(run)

    def resumed(run: Run, at: int) -> Run:
        state = torch.load(io.BytesIO(saved[run.rank, at]), weights_only=True)
        run.scheme.replica.restore(state["values"])
        run.scheme.load_state_dict(state["scheme"])
        run.scheme.begin_run(1, None)
        return steps(8 - at)(run)

    whole = train(first, scheme, **arguments)
    for at in range(1, 6):
        pieces = train(partial(resumed, at=at), scheme, **arguments)
        for piece, run in zip(pieces, whole, strict=True):
            assert piece.device == run.device[at:]
            assert piece.values() == run.values()


def test_a_resume_with_another_delay_goes_on_from_weights_not_gradients():
    saved: dict[int, Any] = {}

    def first(run: Run) -> None:
        steps(6)(run)  # between two pulls, but at one if the delay were 3
        run.scheme.settle()
        saved[run.rank] = run.scheme.replica.snapshot(), run.scheme.state_dict()

    def resumed(run: Run) -> Run:
        values, state = saved[run.rank]
        run.scheme.replica.restore(values)
        run.scheme.load_state_dict(state)
        return steps(1)(run)

    train(first, lambda: StepsDelay(4, 0), targets=(100.0, 100.0))
    for run in train(resumed, lambda: StepsDelay(3, 0), targets=(100.0, 100.0)):
        assert 0 < run.device[0][0] < 40  # the gradients were about -100


def test_a_narrow_wire_loses_no_small_updates():
    runs = train(
        lambda run: [run.step(gradient=1.0) for _ in range(100)] and run,
        lambda: StepsDelay(2, 200),
        nodes=((0, 1), (2, 3)),
        dtype=torch.float32,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
        wire=Wire(torch.bfloat16),
    )
    for run in runs:
        assert run.values() == pytest.approx([-0.1], abs=1e-6)
        # every node holds the same, within what one difference of the last pull rounds away
        assert run.device[-1] == runs[0].device[-1]
        assert run.device[-1] == pytest.approx([-0.1], abs=1e-5)


def test_parameters_that_join_later_leave_the_others_state_alone():
    def work(run: Run) -> tuple[list[float], dict[str, Any]]:
        late = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        steps(4)(run)
        run.scheme.agree()
        run.parameters.append(late)
        run.targets.append(torch.zeros(3, dtype=torch.float64))
        run.optimizer.add_param_group({"params": [late]})
        run.scheme.attach(Replica(run.parameters), run.topology, run.optimizer)
        steps(2)(run)
        return run.values(), run.scheme.optimizer_state()

    results = train(work, lambda: StepsDelay(2, 8), shapes=((5,),), targets=(1.0, 7.0))
    x = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=0.01, momentum=0.9)
    for _ in range(6):
        x.grad = x.detach() - 4
        optimizer.step()
    for values, state in results:
        assert values == pytest.approx([*x.tolist(), 0, 0, 0], abs=1e-12)
        assert torch.allclose(state["state"][0]["momentum_buffer"], optimizer.state[x]["momentum_buffer"])
        assert state["state"][1]["momentum_buffer"].tolist() == [0, 0, 0]


# ---- with the user's optimizer -------------------------------------------------------------------------------------


def test_schedulers_and_step_hooks_see_every_step():
    def work(run: Run) -> tuple[int, list[float]]:
        calls = itertools.count()
        run.optimizer.register_step_post_hook(lambda *_: next(calls))
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a scheduler warns if the optimizer was not stepped before it
            for _ in range(4):
                run.step(gradient=1.0)
                scheduler.step()
        run.scheme.agree()
        return next(calls), run.values()

    for taken, values in train(
        work, lambda: StepsDelay(2, 2), optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.0)
    ):
        assert taken == 4
        assert values == [-(0.5 + 0.25 + 0.125 + 0.0625)]


def test_a_node_whose_step_was_skipped_sends_zeros_and_stays_in_step():
    def work(run: Run) -> Run:
        for n in range(6):
            run.step(gradient=1.0, skip=run.rank == 0 and n in (0, 3))
        return run

    plain_sgd = lambda p: torch.optim.SGD(p, lr=0.5)  # noqa: E731
    runs = train(work, lambda: StepsDelay(2, 2, local_update="sgd", local_lr_scale=1.0), optimizer=plain_sgd)
    assert runs[0].device[0] == [-0.25]  # warm-up: half of the gradient arrived
    assert runs[0].device[3] == runs[0].device[2]
    assert runs[0].values() == runs[1].values() == [-(0.5 * 4 + 0.25 * 2)]


def test_gradients_stay_visible_after_the_step():
    runs = train(steps(3), lambda: StepsDelay(1, 1), targets=(1.0, 7.0))
    assert all(run.parameters[0].grad is not None for run in runs)


def test_a_parameter_without_gradient_counts_as_zero():
    def work(run: Run) -> Run:
        for _ in range(2):
            run.parameters[0].grad = None if run.rank == 0 else torch.ones(1, dtype=torch.float64)
            run.scheme.step(lambda: run.optimizer.step())
        return run

    runs = train(work, lambda: StepsDelay(1, 2), optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    assert runs[0].values() == [-0.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delay": 0}, "delay=0"),
        ({"delay": 3, "warmup_steps": 500}, "such as 498 or 501"),
        ({"warmup_steps": -4}, "warmup_steps=-4"),
        ({"local_lr_scale": 0.0}, "local_lr_scale=0.0"),
        ({"local_update": "adam"}, "local_update='adam'"),
        ({"shard_on": "rows"}, "shard_on='rows'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        StepsDelay(**arguments)


class LARS(torch.optim.SGD):
    """Only the name matters here."""


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        (lambda p: torch.optim.Adam(p), {}, "local_update='sgd'"),
        (lambda p: LARS(p, lr=0.1), {}, "local_update='sgd'"),
        (lambda p: LARS(p, lr=0.1), {"local_update": "sgd"}, "shard_on='parameters'"),
        (lambda p: torch.optim.LBFGS(p), {"local_update": "sgd"}, "LBFGS"),
        (None, {}, "needs the optimizer"),
    ],
)
@pytest.mark.parametrize("nodes", [((0,),), ((0,), (1,))])
def test_optimizers_it_cannot_serve_are_refused_with_the_way_out(nodes, optimizer, arguments, message):
    def bind(rank: int, world: ThreadWorld) -> None:
        meter = Meter()
        x = torch.nn.Parameter(torch.zeros(1))
        topology = Topology(nodes, rank, world.connect(rank, meter), meter)
        StepsDelay(**arguments).attach(Replica([x]), topology, optimizer([x]) if optimizer else None)

    with pytest.raises(ValueError, match=message):
        ThreadWorld(len(nodes)).run(bind)


@pytest.mark.parametrize("arguments", [{"local_update": "sgd"}, {"local_update": glu}, {"local_update": "dc_asgd"}])
def test_adam_is_served_once_the_local_rule_is_named(arguments):
    runs = train(steps(4), lambda: StepsDelay(2, 0, **arguments), optimizer=lambda p: torch.optim.Adam(p, lr=0.1))
    assert runs[0].values() == runs[1].values() != [0.0]


def test_sparse_gradients_and_fused_scaling_are_refused():
    def sparse(run: Run) -> None:
        run.parameters[0].grad = torch.zeros(1, dtype=torch.float64).to_sparse()
        run.scheme.step(lambda: run.optimizer.step())

    def scaled(run: Run) -> None:
        run.optimizer.found_inf = torch.zeros(1)
        run.step()

    for work, message in ((sparse, "sparse"), (scaled, "fused=False")):
        with pytest.raises(ValueError, match=message):
            train(work, lambda: StepsDelay(1, 0))


# ---- over real processes -------------------------------------------------------------------------------------------


class Scalar(pl.LightningModule):
    """Rank r minimises 0.5 (x - a_r)^2 from 0; ``report`` is x after each batch, and as validation saw it."""

    def __init__(self, targets: Sequence[float], batches: int = 7) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(1))
        self.targets, self.batches = targets, batches
        self.report: tuple[list[float], list[float]] = ([], [])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (0.5 * (self.x - self.targets[self.global_rank]) ** 2).sum()

    def on_train_batch_end(self, *_: object) -> None:
        self.report[0].append(self.x.item())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.report[1].append(self.x.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(self.batches * self.trainer.world_size, 1))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(self.trainer.world_size, 1))


TWO, FOUR = (1.0, 7.0), (0.0, 2.0, 4.0, 10.0)
DOUBLE = {"precision": "64-true", "num_sanity_val_steps": 0}


@pytest.mark.parametrize("targets", [TWO, FOUR])
def test_real_processes_follow_the_table_and_validate_on_the_servers_weights(fit, targets):
    strategy = {"scheme": StepsDelay(2, warmup_steps=2), "ranks_per_node": len(targets) // 2}
    reports = fit(Scalar(targets), strategy, devices=len(targets), val_check_interval=1, **DOUBLE)
    for rank, report in enumerate(reports):
        trace, seen = report["report"]
        assert trace == pytest.approx([row[rank * 2 // len(targets)] for row in TABLE], abs=1e-9)
        assert seen == pytest.approx([row[2] for row in TABLE], abs=1e-9)
        assert report["state_dict"]["x"].item() == pytest.approx(TABLE[-1][2], abs=1e-9)


def test_a_checkpoint_resumes_under_plain_ddp_and_on_other_nodes_with_its_momentum(fit, tmp_path):
    path = tmp_path / "delay.ckpt"

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.save_checkpoint(path)

    scheme = StepsDelay(2, warmup_steps=2)
    without = {"limit_val_batches": 0, **DOUBLE}
    fit(Scalar(FOUR, batches=6), {"scheme": scheme}, callbacks=[Save()], **without)
    saved = torch.load(path, weights_only=True)
    weight, momentum = TABLE[5][2], -100 * 0.1697867918
    assert saved["state_dict"]["x"].item() == pytest.approx(weight, abs=1e-9)
    assert saved["optimizer_states"][0]["state"][0]["momentum_buffer"].tolist() == pytest.approx([momentum], abs=1e-7)

    resume = {"fit_arguments": {"ckpt_path": path}, "max_epochs": 2, **without}
    ddp = fit(Scalar(TWO, batches=1), DDPStrategy(start_method="fork"), devices=2, **resume)
    moved = weight - 0.01 * (0.9 * momentum + weight - 4)
    assert ddp[0]["report"][0] == pytest.approx([moved], abs=1e-7)  # Lightning loads weights as float32

    others = fit(Scalar((4.0, 1.0, 7.0), batches=1), {"scheme": scheme, "ranks_per_node": 1}, devices=3, **resume)
    assert others[0]["state_dict"]["x"].item() == pytest.approx(moved, abs=1e-7)
    # the exchange starts anew: nothing has been pulled yet, so the first local step has no global gradient
    for report, target in zip(others, (4.0, 1.0, 7.0), strict=True):
        assert report["report"][0] == pytest.approx([weight - 0.04 * 2 * (weight - target)], abs=1e-7)


@pytest.mark.parametrize(
    ("rule", "momentum", "expected"),
    [("glu", 0.9, 4.0), ("glu", 0.0, 0.4), ("glu", 0.5, 0.8), ("sgd", 0.9, 0.25), ("dc_asgd", 0.9, 1.0)],
)
def test_the_local_learning_rate_fits_the_rule_and_the_momentum(rule, momentum, expected):
    scheme = StepsDelay(2, 0, local_update=rule)
    assert scheme._local_scale({"lr": 0.1, "momentum": momentum}) == pytest.approx(expected)


def test_a_plain_sgd_module_trains_with_the_defaults():
    # 16 times too long local steps made it diverge: momentum 0 wants a scale of 0.4, not the paper's 4
    def work(run: Run) -> float:
        for _ in range(60):
            run.step()
        return max(abs(value) for value in run.values())

    (largest, _) = train(work, lambda: StepsDelay(4, 0), optimizer=lambda p: torch.optim.SGD(p, lr=0.4), targets=(1, 3))
    assert largest < 5
