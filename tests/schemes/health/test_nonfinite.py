"""NaN and infinity are noticed before they reach another node, by every scheme, and by no message more."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import harness
import pytest
import torch
from harness import TWO_BY_TWO, Rank, on_nodes, reloaded, run_to_end
from torch.optim import SGD, Adam

from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import (
    DASO,
    AllReduce,
    DiLoCo,
    Full,
    Gossip,
    OuterOptimizer,
    ParameterSync,
    PeriodicAveraging,
    RandomPermutation,
    Replace,
    Ring,
    Scheme,
    StepsDelay,
)
from lightning_hiercomm.schemes.health.nonfinite import (
    NonfiniteError,
    describe,
    is_unfit,
    reset_nonfinite_state,
)

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

THREE = ((0,), (1,), (2,))
PAIRS = ((0, 1), (2, 3), (4, 5))
SHAPES = {"a": 3, "b": 4, "c": 2}

AVERAGING: dict[str, Callable[[], Scheme]] = {
    "periodic": lambda: PeriodicAveraging(2),
    "periodic, before the step": lambda: PeriodicAveraging(2, order="before_step"),
    "periodic, no gradients": lambda: PeriodicAveraging(2, gradients="none"),
    "daso, waiting": lambda: DASO(2, 0, warmup_epochs=0, cooldown_epochs=0, adapt=False),
    "daso, eq1": lambda: DASO(2, 1, warmup_epochs=0, cooldown_epochs=0, adapt=False),
    "daso, delta": lambda: DASO(2, 2, warmup_epochs=0, cooldown_epochs=0, adapt=False, merge="delta"),
    "daso, sharded": lambda: DASO(2, 1, warmup_epochs=0, cooldown_epochs=0, adapt=False, reducer="sharded"),
    "diloco": lambda: DiLoCo(2),
    "diloco, streaming": lambda: DiLoCo(4, fragments=2, staleness=1, keep_local=0.5),
    "noloco": lambda: ParameterSync(2, reducer=RandomPermutation(), merge=OuterOptimizer()),
    "noloco, overlapped": lambda: ParameterSync(2, reducer=RandomPermutation(), staleness=1, merge=OuterOptimizer()),
}
GOSSIPING: dict[str, Callable[[], Scheme]] = {
    "gossip": lambda: Gossip(segments=2),
    "gossip, overlapped": lambda: Gossip(segments=2, overlap=True),
    "gossip, of ranks": lambda: Gossip(segments=2, hierarchical=False),
    "gossip, push-sum": lambda: Gossip("directed_exponential", segments=2),
    "gossip, plain means": lambda: Gossip(Ring(), segments=2, push_sum=False),
    "steps_delay": lambda: StepsDelay(2, warmup_steps=2),
}
ALL = {**AVERAGING, **GOSSIPING}


def with_policy(scheme: Scheme, policy: str) -> Scheme:
    return harness.with_policy(scheme, on_nonfinite=policy)


def becomes_nonfinite(rank: Rank, steps: int, at: int, victim: int, value: float = math.nan) -> Rank:
    """Trains towards the target; at one step the victim's gradient of one element is not finite."""
    for step in range(steps):

        def gradient(x: torch.Tensor, now: bool = step == at and rank.rank == victim) -> torch.Tensor:
            flat = x - rank.target
            if now:
                flat[4] = value  # of b
            return flat

        rank.train(gradient, last=step == steps - 1)
    return rank


ill_at_four = partial(becomes_nonfinite, steps=12, at=4, victim=2)


@pytest.mark.pairwise
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("nodes", [THREE, PAIRS], ids=["3", "2+2+2"])
@pytest.mark.parametrize("scheme", ALL)
def test_a_non_finite_node_is_excluded_and_recovers(scheme, nodes, value):
    work = partial(becomes_nonfinite, steps=12, at=4, victim=2, value=value)
    ranks = run_to_end(work, with_policy(ALL[scheme](), "skip"), nodes, shapes=SHAPES, inner=partial(SGD, lr=0.1))
    for rank in ranks:
        assert rank.values.isfinite().all()
        assert rank.values.min() > 0.0  # all have learned since
        assert rank.values.max() <= 10.0
    nonfinite_node = next(ranks_ for ranks_ in nodes if 2 in ranks_)
    assert all(ranks[rank].scheme.state.nonfinite >= (rank == 2) for rank in nonfinite_node)


BY_NIGHT = pytest.mark.nightly
ON_A_DEVICE = partial(run_to_end, shapes=SHAPES, inner=partial(SGD, lr=0.1))


@pytest.mark.parametrize("nodes", [TWO_BY_TWO, pytest.param(PAIRS, marks=BY_NIGHT)], ids=["2+2", "2+2+2"])
@pytest.mark.parametrize("scheme", ALL)
def test_nonfinite_node_is_healed_on_a_device_without_waiting(scheme, nodes, fake_device):
    for rank in ON_A_DEVICE(ill_at_four, with_policy(ALL[scheme](), "skip"), nodes):
        assert rank.values.isfinite().all()
        assert rank.values.min() > 0.0
        assert rank.values.max() <= 10.0


@BY_NIGHT  # by day it changes no bit on the CPU, and streams give the CPU's bits
@pytest.mark.parametrize("nodes", [TWO_BY_TWO, PAIRS], ids=["2+2", "2+2+2"])
@pytest.mark.parametrize("scheme", ALL)
def test_looking_changes_no_bit_there(scheme, nodes, fake_device):
    healthy = partial(becomes_nonfinite, steps=7, at=-1, victim=-1)
    looked_at, trusted = (
        [rank.trace for rank in ON_A_DEVICE(healthy, with_policy(ALL[scheme](), policy), nodes)]
        for policy in ("skip", "ignore")
    )
    assert looked_at == trusted


@pytest.mark.parametrize("scheme", sorted(ALL.keys() - {"steps_delay"}))
def test_nan_reaches_all_nodes_when_checks_are_off(scheme):
    ranks = run_to_end(ill_at_four, with_policy(ALL[scheme](), "ignore"), THREE, shapes=SHAPES)
    assert all(rank.values.isnan().any() for rank in ranks)


@pytest.mark.parametrize("scheme", {**ALL, "all_reduce": AllReduce})
def test_the_first_bad_parameter_is_named_where_it_raises(scheme):
    scheme = AllReduce() if scheme == "all_reduce" else ALL[scheme]()
    with pytest.raises(NonfiniteError, match=r"rank \d \(node \d\).* parameter b \(1 of 4 elements\)"):
        run_to_end(ill_at_four, with_policy(scheme, "raise"), PAIRS, shapes=SHAPES, timeout=5)


@pytest.mark.parametrize("nodes", [THREE, PAIRS], ids=["3", "2+2+2"])
@pytest.mark.parametrize("scheme", {**ALL, "all_reduce": AllReduce})
def test_looking_sends_nothing_and_changes_no_bit(scheme, nodes):
    def train(policy: str) -> list[tuple[list[list[float]], dict[str, float]]]:
        own = AllReduce() if scheme == "all_reduce" else ALL[scheme]()
        work = partial(becomes_nonfinite, steps=11, at=-1, victim=-1)
        ranks = run_to_end(work, with_policy(own, policy), nodes, shapes=SHAPES, targets=None, start=-0.0)
        counted = [{k: v for k, v in rank.meter.snapshot().items() if "seconds" not in k} for rank in ranks]
        return list(zip([rank.trace for rank in ranks], counted, strict=True))

    assert train("ignore") == train("skip")


def test_healed_node_gets_the_exact_mean_and_a_fresh_optimizer():
    def work(rank: Rank) -> torch.Tensor:
        before = None
        for step in range(4):
            gradient = float(rank.rank + 1 + step)
            rank.train(math.nan if step == 2 and rank.rank == 1 else gradient)
            if step == 2:
                before = rank.values
        moments = [state["exp_avg"].isfinite().all() for state in rank.optimizer.state.values()]
        counts = {int(state["step"]) for state in rank.optimizer.state.values()}
        return before, rank.values, all(moments), counts, rank.scheme.state.nonfinite

    scheme = with_policy(PeriodicAveraging(4), "skip")
    inner = partial(Adam, lr=0.1)
    results = on_nodes(work, scheme, THREE, weights=[1, 2, 3], shapes=SHAPES, dtype=torch.float64, inner=inner)
    values = [result[1] for result in results]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])
    # Adam's steps of constant gradients: all go alike, so the healthy ones and their mean are where the healthy were
    torch.testing.assert_close(values[1], torch.full_like(values[1], values[0][0]))
    assert [result[2] for result in results] == [True] * 3
    assert [result[3] for result in results] == [{4}, {0}, {4}]
    assert [result[4] for result in results] == [1, 1, 1]


@pytest.mark.parametrize(
    ("gradients", "nodes", "weights", "bad", "mean"),
    [("node", THREE, [1, 5, 3], math.nan, 2 * 3 / 4), ("none", TWO_BY_TWO, None, math.inf, (0 + 2 + 3) / 3)],
    ids=["a node", "a rank that shares no gradients"],
)
def test_the_mean_and_its_weights_are_those_of_the_healthy(gradients, nodes, weights, bad, mean):
    def work(rank: Rank) -> float:
        rank.train(bad if rank.rank == 1 else -float(rank.rank))
        return rank.values[0].item()

    scheme = with_policy(PeriodicAveraging(1, gradients=gradients), "skip")
    values = on_nodes(work, scheme, nodes, weights=weights, dtype=torch.float64, inner=partial(SGD, lr=1.0))
    assert values == [pytest.approx(mean)] * len(values)


@pytest.mark.parametrize("inner", [partial(SGD, lr=0.1, momentum=0.9), partial(Adam, lr=0.1)], ids=["SGD", "Adam"])
@pytest.mark.parametrize("averaging", [PeriodicAveraging(2), DiLoCo(2, partial(SGD, lr=1.0))], ids=["mean", "outer"])
def test_averaged_optimizer_state_excludes_non_finite_nodes(averaging, inner):
    def work(rank: Rank, victim: int) -> tuple[list[float], dict[str, float]]:
        trace = [rank.train(math.nan if (step, rank.rank) == (1, victim) else 1.0).item() for step in range(6)]
        return trace[1::2], {name: float(value) for name, value in rank.optimizer.state[rank.parameters[0]].items()}

    scheme = harness.with_policy(averaging, on_nonfinite="skip", average_optimizer_state=True)
    training = {"nodes": THREE, "inner": inner, "dtype": torch.float64, "buffer": torch.ones(2)}
    # all have the same gradients, so excluding a node changes nothing
    healthy, *_ = on_nodes(partial(work, victim=-1), scheme, **training)
    for trace, state in on_nodes(partial(work, victim=2), scheme, **training):
        assert trace == pytest.approx(healthy[0])
        assert state == pytest.approx(healthy[1])


def test_healed_node_counts_in_the_next_exchange():
    def work(rank: Rank, victim: int) -> list[float]:
        own = -1.0 if rank.rank == 2 else 0.0
        return [rank.train(math.nan if (step, rank.rank) == (1, victim) else own).item() for step in range(12)]

    scheme = with_policy(ParameterSync(2, reducer=Full(), merge="delta", staleness=2), "skip")
    healthy, with_nonfinite = (
        on_nodes(partial(work, victim=victim), scheme, THREE, start=0.0, inner=partial(SGD, lr=1.0))
        for victim in (-1, 2)
    )
    for undisturbed, healed in zip(healthy, with_nonfinite, strict=True):  # at the fifth step, as if it began there
        assert healed[4:] == pytest.approx(undisturbed[:8])


@pytest.mark.parametrize("scheme", ["noloco", "noloco, overlapped"])
def test_a_node_with_only_non_finite_peers_recovers_later(scheme):
    def work(rank: Rank) -> Rank:  # of three nodes in a ring one exchanges with the other non-finite one only
        return becomes_nonfinite(rank, steps=14, at=1, victim=rank.rank if rank.rank != 1 else -1)

    for rank in run_to_end(work, with_policy(ALL[scheme](), "skip"), THREE, shapes=SHAPES, inner=partial(SGD, lr=0.1)):
        assert torch.tensor(rank.trace[-1]).isfinite().all()
        assert 0.0 < rank.values.min() <= rank.values.max() <= 10.0


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_an_optimizers_state_that_is_not_finite_stays_its_ranks_own(policy):
    def work(rank: Rank) -> float:
        for step in range(4):  # whose square is infinite, but no parameter is
            rank.train(1e22 if (step, rank.rank) == (1, 1) else 1.0)
        return float(rank.optimizer.state[rank.parameters[0]]["exp_avg_sq"])

    scheme = harness.with_policy(PeriodicAveraging(2), on_nonfinite=policy, average_optimizer_state=True)
    own = [math.isfinite(state) for state in on_nodes(work, scheme, THREE, inner=partial(Adam, lr=0.1))]
    assert own == [True, False, True]


@pytest.mark.parametrize("staleness", [0, 1])
def test_outer_parameters_and_momentum_are_those_of_the_healthy(staleness):
    """The others train as if the non-finite node were absent, except for the time of their exchanges."""

    def work(rank: Rank, nonfinite: bool) -> tuple[torch.Tensor, torch.Tensor]:
        for step in range(4):
            constant = -1.0 if step != 1 else 0.0  # so that it does not matter when
            rank.train(math.nan if nonfinite and step == 1 and rank.rank == 2 else constant * (rank.rank + 1))
        outer = rank.scheme.reference.outer.optimizer
        buffers = [state["momentum_buffer"] for state in outer.state.values()]
        return rank.scheme.exchanger.reducer.references[0].clone(), buffers[0].clone()

    scheme = with_policy(ParameterSync(2, merge=OuterOptimizer(), staleness=staleness), "skip")
    training = {"shapes": SHAPES, "dtype": torch.float64, "inner": partial(SGD, lr=1.0)}
    with_nonfinite = on_nodes(partial(work, nonfinite=True), scheme, THREE, **training)
    assert all(torch.equal(with_nonfinite[0][i], each[i]) for each in with_nonfinite for i in (0, 1))
    assert with_nonfinite[0][0].isfinite().all()
    if staleness == 0:  # first round: the healthy went 1 and 2; second: the same and what the third did from there
        healthy_mean, velocity = 1.5 * 1, 0.0
        expected, moved = 0.0, []
        first = -healthy_mean
        velocity = first
        expected -= 0.7 * (first + 0.9 * velocity)
        moved.append(expected)
        second = -(1 + 2 + 3) / 3 * 2
        velocity = 0.9 * velocity + second
        expected -= 0.7 * (second + 0.9 * velocity)
        torch.testing.assert_close(with_nonfinite[0][0], torch.full_like(with_nonfinite[0][0], expected))
        torch.testing.assert_close(with_nonfinite[0][1], torch.full_like(with_nonfinite[0][1], velocity))


@pytest.mark.parametrize("optimizer", [None, partial(Adam, lr=0.5)], ids=["SGD", "Adam"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_outer_optimizer_steps_once_with_a_nonfinite_node_on_a_device(fake_device, staleness, optimizer):
    def work(rank: Rank, victim: int) -> list[float]:  # all nodes go the same way, so excluding a node changes nothing
        return [rank.train(math.nan if step == 3 and rank.rank == victim else -1.0).item() for step in range(6)]

    scheme = with_policy(ParameterSync(2, merge=OuterOptimizer(optimizer), staleness=staleness), "skip")
    healthy, with_nonfinite = (
        on_nodes(partial(work, victim=victim), scheme, THREE, start=0.0, inner=partial(SGD, lr=1.0))
        for victim in (-1, 2)
    )
    assert with_nonfinite[0] == pytest.approx(healthy[0])
    assert with_nonfinite[2][-1] == pytest.approx(healthy[2][-1])


@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
def test_healed_node_keeps_no_local_share_and_nodes_still_converge(wire):
    def work(rank: Rank) -> list[float]:
        rank.train(math.nan if rank.rank == 2 else -rank.rank)
        first = rank.values.item()
        for _ in range(20):
            rank.train(0.0)
        return [first, rank.values.item()]

    scheme = with_policy(ParameterSync(1, merge=Replace(keep_local=0.5)), "skip")
    seen = on_nodes(work, scheme, THREE, start=10.0, wire=wire, dtype=torch.float64, inner=partial(SGD, lr=1.0))
    healthy_mean = (10 + 11) / 2
    assert [first for first, _ in seen] == pytest.approx([(10 + 10.5) / 2, (11 + 10.5) / 2, healthy_mean])
    assert [last for _, last in seen] == pytest.approx([healthy_mean] * 3, rel=1e-5)


@pytest.mark.parametrize("scheme", AVERAGING)
@pytest.mark.parametrize(("wire", "dtype", "far"), [("float16", torch.float32, 1e6), ("int8", torch.float64, 1e300)])
def test_values_too_large_for_the_wire_are_sent_unencoded_or_raise(scheme, wire, dtype, far):
    def work(rank: Rank) -> Rank:
        for step in range(5):
            rank.train(-far if step == 0 and rank.node == 1 else 0.0, last=step == 4)
        return rank

    training = {"shapes": SHAPES, "dtype": dtype, "wire": wire, "inner": partial(SGD, lr=1.0)}
    ranks = run_to_end(work, with_policy(AVERAGING[scheme](), "skip"), PAIRS, **training)
    assert all(rank.values.isfinite().all() for rank in ranks)
    if scheme.startswith(("periodic", "daso")):
        assert torch.stack([rank.values for rank in ranks]).mean() == pytest.approx(far / 3, rel=0.5)
    if "noloco" not in scheme:
        with pytest.raises(NonfiniteError, match=r"all parameters are finite, but some may be too large for "):
            run_to_end(work, with_policy(AVERAGING[scheme](), "raise"), PAIRS, timeout=5, **training)


def test_where_looking_would_mean_to_wait_the_server_takes_zeros(fake_device):
    test_gradients_too_large_for_the_wire_reach_the_server_only_unchecked("skip")


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
def test_gradients_too_large_for_the_wire_reach_the_server_only_unchecked(policy):
    def work(rank: Rank) -> Rank:
        for step in range(6):
            rank.train(1e6 if step == 3 and rank.node == 1 else 0.1)
        return rank

    scheme = with_policy(StepsDelay(2, warmup_steps=0), policy)
    train = partial(
        run_to_end, work, scheme, PAIRS, shapes=SHAPES, wire="float16", timeout=5, inner=partial(SGD, lr=0.1)
    )
    if policy == "raise":
        with pytest.raises(NonfiniteError, match="gradients are finite, but not their sum"):
            train()
    else:
        for rank in train():
            assert rank.values.abs().max() < 1.0 if policy == "skip" else not rank.values.isfinite().any()


def test_statistics_that_are_not_finite_stay_where_they_are():
    def work(rank: Rank) -> torch.Tensor:
        if rank.rank == 1:
            rank.module.buffer[0] = math.nan
        rank.train()
        return rank.module.buffer.clone()

    scheme = with_policy(PeriodicAveraging(1), "skip")
    buffers = on_nodes(work, scheme, PAIRS, shapes=SHAPES, buffer=torch.ones(2))
    assert all(torch.equal(buffer, torch.ones(2)) for buffer in buffers)


@pytest.mark.parametrize("scheme", ["periodic", "daso, eq1", "diloco", "gossip"])
def test_validation_uses_the_mean_of_the_finite_nodes(scheme):
    def work(rank: Rank) -> torch.Tensor:
        rank.train()
        rank.scheme.state.unsynchronized_steps = 1
        with torch.no_grad():
            if rank.rank == 1:
                rank.parameters[0][0] = math.nan
        return rank.averaged()

    looks = on_nodes(work, with_policy(AVERAGING.get(scheme, GOSSIPING.get(scheme))(), "skip"), THREE, shapes=SHAPES)
    assert all(torch.equal(look, looks[0]) and look.isfinite().all() for look in looks)


@pytest.mark.parametrize("scheme", ["periodic", "daso, eq1", "diloco", "gossip"])
def test_averaging_leaves_a_nonfinite_nodes_optimizer_until_it_is_healed(scheme):
    def work(rank: Rank) -> None:
        rank.train(math.nan if rank.rank == 1 else 1.0)
        rank.scheme.state.unsynchronized_steps = 1
        with torch.no_grad():  # what gossip has healed at once is non-finite again
            rank.parameters[0][0] = math.nan if rank.rank == 1 else 1.0
            rank.optimizer.state[rank.parameters[0]]["exp_avg"][0] = math.nan if rank.rank == 1 else 1.0
        before = reloaded(rank.optimizer.state_dict())
        rank.averaged()
        assert repr(reloaded(rank.optimizer.state_dict())) == repr(before)
        rank.scheme.synchronize()
        rank.scheme.follow(rank.replica())  # as when parameters are unfrozen
        state = rank.optimizer.state[rank.parameters[0]]
        assert all(values.isfinite().all() for values in (*state.values(), rank.values))
        assert state["step"] == (0 if rank.rank == 1 else 1)

    own = {**AVERAGING, **GOSSIPING}[scheme]()
    on_nodes(work, with_policy(own, "skip"), THREE, shapes=SHAPES, inner=Adam)


def test_all_nodes_non_finite_raises_under_every_policy():
    work = partial(becomes_nonfinite, steps=4, at=1, victim=0)

    def all_become_nonfinite(rank: Rank) -> Rank:
        return work(rank, victim=rank.rank)

    with pytest.raises(NonfiniteError, match="No node is left whose parameters are finite"):
        run_to_end(all_become_nonfinite, with_policy(PeriodicAveraging(2), "skip"), THREE, shapes=SHAPES, timeout=5)


# ---- the pieces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_tensors_that_are_not_finite_are_unfit(dtype):
    values = torch.tensor([0.0, -0.0, 1.5, -3.0], dtype=dtype)
    assert is_unfit([values, torch.zeros(0, dtype=dtype)]) == 0
    for bad in (math.nan, math.inf, -math.inf):
        nonfinite = values.clone()
        nonfinite[2] = bad
        assert is_unfit([values, nonfinite]) == 1


def test_nothing_is_fit():
    assert is_unfit([]) == 0


def test_tensors_of_several_dtypes_are_checked_each_in_its_own_range():
    wide, narrow = torch.tensor([1e300], dtype=torch.float64), torch.ones(2)
    assert is_unfit([wide, narrow]) == 0
    assert is_unfit([wide * 1e300, narrow]) == 1
    assert is_unfit([wide, narrow * math.nan]) == 1


@pytest.mark.parametrize(("value", "unfit"), [(4.0, 0), (-4.0, 0), (4.5, 1), (-4.5, 1)])
def test_values_beyond_the_largest_are_unfit(value, unfit):
    assert is_unfit([torch.tensor([0.0, value]), torch.ones(1, dtype=torch.float64)], largest=4.0) == unfit


def test_finite_values_whose_sum_overflows_are_fit():
    large = torch.full((4,), 3e38)
    assert is_unfit([large]) == 0
    assert describe(Replica([large])) is None

    def work(rank: Rank) -> torch.Tensor:
        rank.train(-3e38 if rank.rank == 0 else -1e38)
        return rank.values

    for scheme in (PeriodicAveraging(1), Gossip(segments=1)):
        values = on_nodes(work, with_policy(scheme, "raise"), ((0,), (1,)), shapes=SHAPES, inner=partial(SGD, lr=1.0))
        for value in values:
            torch.testing.assert_close(value, torch.full_like(value, 2e38))


def test_only_the_state_of_non_finite_parameters_is_reset():
    nonfinite, well = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Adam([nonfinite, well])
    nonfinite.grad, well.grad = torch.tensor([math.nan, 1.0]), torch.ones(2)
    optimizer.step()
    counts = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    for parameter, mean in zip(counts, (math.inf, 1.0), strict=True):  # in a number of Python's, as some optimizers do
        optimizer.state[parameter] = {"step": 3, "mean": torch.tensor([mean, 1.0])}
    reset_nonfinite_state(optimizer)
    assert [optimizer.state[parameter]["step"] for parameter in counts] == [0, 3]
    assert optimizer.state[nonfinite]["step"] == 0
    assert torch.equal(optimizer.state[nonfinite]["exp_avg_sq"], torch.zeros(2))
    assert optimizer.state[well]["step"] == 1
    assert optimizer.state[well]["exp_avg"].all()


def test_a_node_non_finite_at_sending_resumes_bit_for_bit():
    scheme = with_policy(AVERAGING["noloco, overlapped"](), "skip")
    arguments = {"nodes": THREE, "shapes": SHAPES, "inner": partial(SGD, lr=0.1)}

    def saving(rank: Rank) -> tuple[dict, torch.Tensor]:
        becomes_nonfinite(rank, steps=5, at=4, victim=2)
        state = rank.state()
        return state, becomes_nonfinite(rank, steps=4, at=-1, victim=2).values

    saved = on_nodes(saving, scheme, **arguments)
    assert [state["scheme"]["pending"][0]["is_nonfinite"] for state, _ in saved] == [False, False, True]

    def resuming(rank: Rank) -> torch.Tensor:
        rank.load(saved[rank.rank][0])
        return becomes_nonfinite(rank, steps=4, at=-1, victim=2).values

    for (_, whole), resumed in zip(saved, on_nodes(resuming, scheme, **arguments), strict=True):
        assert whole.isfinite().all()
        assert torch.equal(whole, resumed)


def test_node_excluded_for_wire_overflow_resumes_to_the_bit():
    scheme = with_policy(ParameterSync(2, merge=OuterOptimizer(), staleness=1), "skip")
    arguments = {"nodes": TWO_BY_TWO, "shapes": SHAPES, "inner": partial(SGD, lr=1.0), "wire": "float16"}

    def train(rank: Rank, steps: int) -> torch.Tensor:
        for _ in range(steps):
            far = torch.full((9,), -1.0)
            far[0] = -1e6 * rank.node  # in the shard of the first inter-node group
            rank.train(lambda _, far=far: far)
        return rank.values

    def saving(rank: Rank) -> tuple[dict, torch.Tensor]:
        train(rank, 3)
        return rank.state(), train(rank, 3)

    saved = on_nodes(saving, scheme, **arguments)

    def resuming(rank: Rank) -> torch.Tensor:
        rank.load(saved[rank.rank][0])
        return train(rank, 3)

    for (_, whole), resumed in zip(saved, on_nodes(resuming, scheme, **arguments), strict=True):
        assert torch.equal(whole, resumed)
