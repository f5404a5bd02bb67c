"""How far apart the nodes are is known from what arrives, and costs no traffic."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import place

from lightning_hiercomm.comm import streams
from lightning_hiercomm.schemes import (
    DASO,
    AllReduce,
    DiLoCo,
    Gossip,
    ParameterSync,
    PeriodicAveraging,
    RandomPermutation,
    StepsDelay,
)
from lightning_hiercomm.schemes.reducers.disagreement import Disagreement, sample

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

SHAPES = {"a": 700, "b": 500, "c": 1100}
CYCLING = {"warmup": 0, "cooldown": 0}
NODES = ((0, 1), (2, 3), (4, 5))


def training(rank, steps=8):
    """Nodes diverge by known amounts; the values before each synchronization, and the estimate after it."""
    generator = torch.Generator().manual_seed(rank.node)
    seen = []
    for _ in range(steps):
        way = torch.randn(2300, generator=generator)
        before = rank.values
        rank.train(lambda x: way)  # noqa: B023
        seen.append((before - 0.1 * way, rank.scheme.scalars().get("disagreement")))
    return seen


@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
@pytest.mark.parametrize("nodes", [((0,), (1,)), NODES, ((0, 1, 2), (3,))], ids=str)
@pytest.mark.parametrize(
    ("scheme", "merged_after"),
    [
        (PeriodicAveraging(4), 4),
        (DASO(1, 0, reducer="sharded", **CYCLING), 4),
        (DiLoCo(4), 4),
        (DiLoCo(4, fragments=2), 4),
        (ParameterSync(4, merge="delta"), 4),
    ],
    ids=["periodic", "daso", "diloco", "fragments", "delta"],
)
def test_disagreement_is_the_relative_distance_before_the_merge(on_nodes, scheme, merged_after, nodes, wire):
    results = on_nodes(training, scheme, nodes, shapes=SHAPES, wire=wire, bucket_bytes=4000)
    world = len(results)
    for ranks in nodes:
        own = [results[rank][merged_after - 1] for rank in ranks]
        mean = sum(results[rank][merged_after - 1][0] for rank in range(world)) / world
        node = sum(values for values, _ in own) / len(own)
        expected = ((node - mean).norm() / mean.norm()).item()
        for _, found in own[: min(map(len, nodes))]:
            # a rank knows of its own part; of two fragments one was merged two steps ago, less far apart
            assert found == pytest.approx(expected, rel=0.2 if scheme.fragments == 1 else 0.4)


@pytest.mark.parametrize(
    "scheme",
    [
        DASO(2, 1, **CYCLING),
        DiLoCo(4, staleness=2),
        ParameterSync(2, reducer=RandomPermutation()),
        Gossip(),
        StepsDelay(2, warmup_steps=0),
    ],
    ids=["daso", "diloco", "peers", "gossip", "steps_delay"],
)
def test_every_scheme_reports_its_disagreement(on_nodes, scheme):
    found = [value for seen in on_nodes(training, scheme, NODES, shapes=SHAPES) for value in [seen[-1][1]]]
    assert all(0.005 < value < 2 for value in found if value is not None)
    assert sum(value is not None for value in found) >= 3

    def together(rank):
        for _ in range(6):
            rank.train(torch.ones_like)
        return rank.scheme.scalars().get("disagreement")

    still = on_nodes(together, scheme, NODES, shapes=SHAPES)
    if isinstance(scheme, StepsDelay):  # whose nodes run ahead of the server all alike
        assert all(0 < value < 2 for value in still)
    else:
        assert all(value == pytest.approx(0, abs=1e-6) for value in still if value is not None)


@pytest.mark.parametrize("scheme", [AllReduce(), DiLoCo(100), PeriodicAveraging(100)], ids=["all_reduce", "d", "p"])
def test_disagreement_is_none_before_the_first_sync(on_nodes, scheme):
    assert [seen[-1][1] for seen in on_nodes(partial(training, steps=3), scheme, NODES, shapes=SHAPES)] == [None] * 6


@pytest.mark.parametrize("lengths", [[10], [4096, 1, 4095], [1, 5000, 2, 9999], [3] * 5000])
def test_samples_of_parts_are_the_sample_of_the_whole(lengths):
    whole = torch.arange(float(sum(lengths)), device=place.device)
    begins = [sum(lengths[:place]) for place in range(len(lengths))]
    parts = [sample(part, begin, len(whole)) for part, begin in zip(whole.split(lengths), begins, strict=True)]
    assert torch.equal(torch.cat(parts), sample(whole))


def test_a_sample_is_small_and_evenly_spaced():
    assert sample(torch.arange(10.0)).tolist() == list(range(10))
    assert sample(torch.arange(2.0**20)).numel() == 4096
    assert sample(torch.empty(0)).numel() == 0
    one = Disagreement()
    one.compare(0, *(torch.tensor([value], device=place.device) for value in (3.0, 4.0)), of=1)
    one.compare(1, *(torch.empty(0, device=place.device) for _ in range(2)), of=0)
    streams.synchronize(place.device)  # what is still on its way does not count
    assert one.relative() == 0.25
    one.forget()
    assert one.relative() is None


def test_complex_numbers_are_as_far_apart_as_they_lie_in_the_plane():
    """The square of a distance along the imaginary axis was negative, and its root no number that can be logged."""
    one = Disagreement()
    one.compare(0, *(torch.tensor([value], device=place.device) for value in (3 + 6j, 3 + 4j)), of=1)
    streams.synchronize(place.device)
    assert one.relative() == pytest.approx(2 / 5)
    one.compare(1, *(torch.tensor([value], device=place.device) for value in (9.0, 5.0)), of=1)
    streams.synchronize(place.device)
    assert one.relative() == pytest.approx((20 / 50) ** 0.5)


def test_every_bucket_counts_by_its_size_and_not_by_its_sample():
    generator = torch.Generator().manual_seed(0)
    large, small = (torch.randn(numel, generator=generator).to(place.device) for numel in (2**20, 5000))
    one, pairs = Disagreement(), [(1.001 * large, large), (1.3 * small, small)]
    for index, (own, others) in enumerate(pairs):
        one.compare(index, sample(own), sample(others), of=own.numel())
    distance = sum(float((own - others).square().sum()) for own, others in pairs)
    norm = sum(float(others.square().sum()) for _, others in pairs)
    assert one.relative() == pytest.approx((distance / norm) ** 0.5, rel=0.05)
