"""Synchronizations without non-finite ranks, compared with a plain calculation in one place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from harness import Rank, run_to_end, with_policy
from torch import Tensor
from torch.optim import SGD

from lightning_hiercomm.schemes import (
    DASO,
    DiLoCo,
    Gossip,
    Graph,
    OuterOptimizer,
    ParameterSync,
    PeriodicAveraging,
    RandomPermutation,
    Ring,
    Scheme,
)

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

LR, STEPS, NUMEL, NONFINITE_ELEMENT = 0.1, 11, 9, 4
NODES = {"3": ((0,), (1,), (2,)), "1+2+2": ((0,), (1, 2), (3, 4))}


def target_of(rank: int) -> Tensor:
    return torch.arange(NUMEL, dtype=torch.float64) * (rank + 1) - 3.0 * rank


class Plain:
    """Ranks that train in one place; at one step the gradient of one element is not finite on one of them."""

    def __init__(self, nodes: Sequence[Sequence[int]], weights: Sequence[float], at: int, victim: int) -> None:
        self.nodes = nodes
        self.ranks = range(len(weights))
        self.w = [weight / sum(weights) for weight in weights]
        self.at, self.victim = at, victim
        self.x = [torch.zeros(NUMEL, dtype=torch.float64) for _ in self.ranks]
        self.trace: list[list[Tensor]] = []

    def mean(self, values: Sequence[Tensor], ranks: Sequence[int]) -> Tensor:
        return sum(self.w[r] * values[r] for r in ranks) / sum(self.w[r] for r in ranks)

    @property
    def healthy(self) -> list[int]:
        return [r for r in self.ranks if self.x[r].isfinite().all()]

    def slopes(self, step: int, in_node: bool) -> list[Tensor]:
        slopes = [self.x[r] - target_of(r) for r in self.ranks]
        if step == self.at:
            slopes[self.victim][NONFINITE_ELEMENT] = math.nan
        of = {r: ranks for ranks in self.nodes for r in ranks}
        return [self.mean(slopes, of[r]) for r in self.ranks] if in_node else slopes

    def go(self, step: int, in_node: bool = True) -> None:
        self.x = [x - LR * slope for x, slope in zip(self.x, self.slopes(step, in_node), strict=True)]

    def synchronize(self) -> None:
        self.x = [self.mean(self.x, self.healthy)] * len(self.x)

    def run(self, step: Callable[[int], None]) -> list[list[Tensor]]:
        for number in range(1, STEPS + 1):
            step(number)
            self.trace.append([x.clone() for x in self.x])
        return self.trace


class Outer:
    """Nesterov's momentum on the way that the nodes went."""

    def __init__(self, numel: int) -> None:
        self.averaged, self.velocity = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)

    def take(self, mean: Tensor, part: slice = slice(None)) -> Tensor:
        way = self.averaged[part] - mean
        self.velocity[part] = 0.9 * self.velocity[part] + way
        self.averaged[part] = self.averaged[part] - 0.7 * (way + 0.9 * self.velocity[part])
        return self.averaged[part].clone()


def periodic(plain: Plain, in_node: bool = True) -> Callable[[int], None]:
    def step(number: int) -> None:
        plain.go(number, in_node)
        if number % 2 == 0 or number == STEPS:
            plain.synchronize()

    return step


def in_nodes(plain: Plain) -> Callable[[int], None]:
    def step(number: int) -> None:
        plain.go(number, in_node=False)
        if number % 4 == 0 or number == STEPS:
            plain.synchronize()
            return
        healthy = plain.healthy
        for ranks in plain.nodes:
            among = [r for r in ranks if r in healthy]
            if among:
                mean = plain.mean(plain.x, among)
                for r in ranks:
                    plain.x[r] = mean.clone()

    return step


def before_the_step(plain: Plain) -> Callable[[int], None]:
    def step(number: int) -> None:
        slopes, stepping = plain.slopes(number, True), list(plain.ranks)
        if number % 2 == 0 or number == STEPS:
            stepping = plain.healthy  # a replaced node has no gradient for the others' values
            plain.synchronize()
        for r in stepping:
            plain.x[r] = plain.x[r] - LR * slopes[r]

    return step


def daso(plain: Plain, staleness: int, delta: bool) -> Callable[[int], None]:
    flying: list[tuple[int, list[Tensor]]] = []

    def step(number: int) -> None:
        plain.go(number)
        if number == STEPS:
            plain.synchronize()
            return
        leaving = [x.clone() for x in plain.x] if number % 2 else None
        if flying and flying[0][0] == number:
            _, sent = flying.pop()
            if not all(each.isfinite().all() for each in sent):
                plain.synchronize()
                return  # what would leave now, left from values that are gone
            mean, p, own = plain.mean(sent, plain.ranks), len(plain.nodes), 2 * staleness
            for r in plain.ranks:
                x = plain.x[r]
                plain.x[r] = x + mean - sent[r] if delta else (own * x + p * mean) / (own + p)
            leaving = [x.clone() for x in plain.x] if number % 2 else None
        if leaving is not None:
            flying.append((number + staleness, leaving))

    return step


def diloco(plain: Plain) -> Callable[[int], None]:
    outer = Outer(NUMEL)

    def step(number: int) -> None:
        plain.go(number)
        if number % 2 == 0:
            averaged = outer.take(plain.mean(plain.x, plain.healthy))
            plain.x = [averaged.clone() for _ in plain.ranks]

    return step


def streaming(plain: Plain) -> Callable[[int], None]:
    outer, parts = Outer(NUMEL), (slice(0, 5), slice(5, 9))
    flying: dict[int, list[Tensor]] = {}

    def step(number: int) -> None:
        plain.go(number)
        for index, part in enumerate(parts):
            due = (index + 1) * 2 % 4
            if number % 4 == due and index in flying:
                sent, healthy = flying.pop(index), list(plain.ranks)
                if not all(each.isfinite().all() for each in sent):
                    healthy = plain.healthy
                    sent = [x[part].clone() for x in plain.x]
                averaged = outer.take(plain.mean(sent, healthy), part)
                for r in plain.ranks:
                    kept = plain.x[r][part] if r in healthy else averaged
                    plain.x[r] = plain.x[r].clone()
                    plain.x[r][part] = 0.5 * kept + 0.5 * averaged
            if (number + 1) % 4 == due:
                flying[index] = [x[part].clone() for x in plain.x]

    return step


def noloco(plain: Plain, in_node: bool = True) -> Callable[[int], None]:
    outers, turn = [Outer(NUMEL) for _ in plain.nodes], iter(range(STEPS))

    def step(number: int) -> None:
        plain.go(number, in_node)
        if number % 2:
            return
        healthy, sources = plain.healthy, RandomPermutation().receive_from
        values = [plain.mean(plain.x, [r for r in ranks if r in healthy] or ranks) for ranks in plain.nodes]
        is_well = [bool(x.isfinite().all()) for x in values]
        for node, source in enumerate(sources(len(plain.nodes), next(turn), 0)):
            heard = [values[n] for n in (node, source) if is_well[n]]
            averaged = outers[node].take(sum(heard) / len(heard))
            for r in plain.nodes[node]:
                plain.x[r] = averaged.clone()

    return step


def gossip(plain: Plain, graph: Graph, push_sum: bool = True, overlap: bool = False) -> Callable[[int], None]:
    parts, nodes = (slice(0, 5), slice(5, 9)), range(len(plain.nodes))
    w = [[1.0] * len(nodes) for _ in parts]
    late: list[Tensor] = []

    def step(number: int) -> None:
        slopes = [plain.slopes(number, True)[ranks[0]] for ranks in plain.nodes]
        seen = [plain.x[ranks[0]] for ranks in plain.nodes]
        was_nonfinite = [not x.isfinite().all() for x in seen]
        if late:  # gradients of before it was added, without those of non-finite nodes
            seen = [after if bad else x + after for x, after, bad in zip(seen, late, was_nonfinite, strict=True)]
            slopes = [
                0.0 * after if bad else slope for slope, after, bad in zip(slopes, late, was_nonfinite, strict=True)
            ]
        x = [torch.cat([own[p] * w[i][n] for i, p in enumerate(parts)]) for n, own in enumerate(seen)]
        x = [own - LR * slope for own, slope in zip(x, slopes, strict=True)]
        is_well = [bool(each.isfinite().all()) for each in x]
        z = [each.clone() for each in x]
        for i, part in enumerate(parts):
            sends = graph.send_to(len(nodes), number - 1, i)
            mass = [w[i][n] / (len(sends[n]) + 1) if push_sum else 1.0 for n in nodes]
            for n in nodes:
                sources = [n, *(m for m in nodes if n in sends[m])]
                values = {m: x[m][part] / w[i][m] for m in sources if is_well[m]}
                stand_in = values[n] if is_well[n] else sum(values.values()) / len(values)
                total = sum(mass[m] for m in sources)
                z[n][part] = sum(mass[m] * values.get(m, stand_in) for m in sources) / total
            if push_sum:
                w[i] = [mass[n] + sum(mass[m] for m in nodes if n in sends[m]) for n in nodes]
        if overlap:  # until then a node goes on with what it has
            late[:] = [after if not well else after - own for own, after, well in zip(x, z, is_well, strict=True)]
            z = x
        for node, ranks in enumerate(plain.nodes):
            for r in ranks:
                plain.x[r] = z[node].clone()

    return step


def _cycling(staleness: int, **more: str) -> Scheme:
    return DASO(2, staleness, warmup_epochs=0, cooldown_epochs=0, adapt=False, **more)


Case = tuple[Callable[[], Scheme], Callable[[Plain], Callable[[int], None]]]
WEIGHED: dict[str, Case] = {
    "periodic": (lambda: PeriodicAveraging(2), periodic),
    "periodic, before the step": (lambda: PeriodicAveraging(2, order="before_step"), before_the_step),
    "periodic, no gradients": (lambda: PeriodicAveraging(2, gradients="none"), partial(periodic, in_node=False)),
    "periodic, in nodes, too": (lambda: PeriodicAveraging(4, gradients="none", node_sync_every=1), in_nodes),
    "daso, eq1": (lambda: _cycling(1), partial(daso, staleness=1, delta=False)),
    "daso, eq1, sharded": (lambda: _cycling(2, reducer="sharded"), partial(daso, staleness=2, delta=False)),
    "daso, delta": (lambda: _cycling(2, merge="delta"), partial(daso, staleness=2, delta=True)),
    "diloco": (lambda: DiLoCo(2), diloco),
    "diloco, streaming": (lambda: DiLoCo(4, fragments=2, staleness=1, keep_local=0.5), streaming),
}
CASES: dict[str, Case] = {
    **WEIGHED,
    "noloco": (lambda: ParameterSync(2, reducer=RandomPermutation(), merge=OuterOptimizer()), noloco),
    "noloco, no gradients": (
        lambda: ParameterSync(2, reducer=RandomPermutation(), merge=OuterOptimizer(), gradients="none"),
        partial(noloco, in_node=False),
    ),
    "gossip": (lambda: Gossip(segments=2), partial(gossip, graph=RandomPermutation())),
    "gossip, overlapped": (
        lambda: Gossip(segments=2, overlap=True),
        partial(gossip, graph=RandomPermutation(), overlap=True),
    ),
    "gossip, push-sum": (lambda: Gossip(segments=2, fair=None), partial(gossip, graph=RandomPermutation(None))),
    "gossip, ring": (lambda: Gossip("ring", segments=2), partial(gossip, graph=Ring())),
    "gossip, plain means": (
        lambda: Gossip(segments=2, fair=None, push_sum=False),
        partial(gossip, graph=RandomPermutation(None), push_sum=False),
    ),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("at", [2, 3, 8])
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("scheme", CASES)
def test_nodes_continue_without_a_non_finite_one_as_calculated(scheme, nodes, at):
    make, step_of = CASES[scheme]
    weights = [1.0 + 0.5 * rank if scheme in WEIGHED else 1.0 for rank in range(sum(map(len, NODES[nodes])))]
    if scheme not in WEIGHED:  # nodes count alike there
        weights = [1.0 / len(ranks) for ranks in NODES[nodes] for _ in ranks]
    plain = Plain(NODES[nodes], weights, at, victim=2)
    expected = plain.run(step_of(plain))

    def work(rank: Rank) -> Tensor:
        for number in range(1, STEPS + 1):

            def gradient(x: Tensor, now: bool = (number, rank.rank) == (at, 2)) -> Tensor:
                slope = x - target_of(rank.rank)
                if now:
                    slope[NONFINITE_ELEMENT] = math.nan
                return slope

            rank.train(gradient, last=number == STEPS)
        rank.scheme.end_epoch(None)
        return torch.tensor(rank.trace, dtype=torch.float64)

    arguments = {"shapes": {"a": 3, "b": 4, "c": 2}, "dtype": torch.float64, "inner": partial(SGD, lr=LR)}
    found = run_to_end(work, with_policy(make(), on_nonfinite="skip"), NODES[nodes], weights=weights, **arguments)
    for rank, trace in enumerate(found):
        own = torch.stack([values[rank] for values in expected])
        torch.testing.assert_close(trace[:-1], own[:-1], rtol=0, atol=1e-10, equal_nan=True)
