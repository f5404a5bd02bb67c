"""Ranks of a node that differ, if only by a bit, are detected at the next synchronization."""

from __future__ import annotations

import logging
from collections.abc import Callable

import harness
import pytest
import torch
from harness import Rank, on_nodes, on_ranks, place, run_to_end

from lightning_hiercomm.nodes.bucket import ShardSpec
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, Scheme, StepsDelay
from lightning_hiercomm.schemes.health.verification import ReplicasDiffer, first_difference, print_of

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

PAIRS = ((0, 1), (2, 3))
SHAPES = {"a": 3, "b": (2, 2), "c": 2}

SCHEMES: dict[str, Callable[[], Scheme]] = {
    "all_reduce": AllReduce,
    "periodic": lambda: PeriodicAveraging(2),
    "daso": lambda: DASO(2, 1, warmup_epochs=0, cooldown_epochs=0, adapt=False),
    "diloco": lambda: DiLoCo(2),
    "diloco, streaming": lambda: DiLoCo(4, fragments=2, staleness=1),
    "gossip": lambda: Gossip(segments=2),
    "steps_delay": lambda: StepsDelay(2, warmup_steps=0),
}


def diverges(rank: Rank) -> Rank:
    """Rank 3 has another last bit in one value of b after the third step."""
    for step in range(10):
        rank.train(0.0)
        if rank.rank == 3 and step == 2:
            with torch.no_grad():
                rank.parameters[1].view(torch.int32)[1, 0] ^= 1
    rank.scheme.end_epoch(None)
    return rank


def with_policy(scheme: Scheme, policy: str) -> Scheme:
    return harness.with_policy(scheme, verify_replicas=policy)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_verification_raises_with_rank_and_parameter(scheme):
    with pytest.raises(ReplicasDiffer, match=r"rank 3 of node 1 \(ranks 2, 3\) holds other values of b than its node"):
        run_to_end(diverges, with_policy(SCHEMES[scheme](), "raise"), PAIRS, shapes=SHAPES, targets=None, timeout=5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_verification_warns_once(scheme, caplog):
    with caplog.at_level(logging.WARNING, "lightning_hiercomm"):
        run_to_end(diverges, with_policy(SCHEMES[scheme](), "warn"), PAIRS, shapes=SHAPES, targets=None)
    assert sum("holds other values of b" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_that_do_not_differ_may_train_and_nothing_else_crosses_nodes(scheme):
    def train(policy: str) -> list[tuple[list[list[float]], float]]:
        def work(rank: Rank) -> Rank:
            for _ in range(11):
                rank.train()
            return rank

        ranks = run_to_end(work, with_policy(SCHEMES[scheme](), policy), PAIRS, shapes=SHAPES, targets=None)
        return [(rank.trace, rank.meter.snapshot()["inter_bytes"]) for rank in ranks]

    assert train("raise") == train("off")


def test_checks_are_off_by_default():
    on_nodes(diverges, PeriodicAveraging(2), PAIRS, shapes=SHAPES, targets=None)


def test_only_ranks_that_should_hold_the_same_are_compared():
    """As in a sharded model: the first parameter is a shard of its own on every rank, the second is whole on both."""

    def work(topology):
        shard = torch.full((3,), float(topology.rank), device=place.device)
        whole = torch.ones(2, device=place.device)
        replica = Replica([shard, whole], named=[("whole", whole)], shares={id(shard): ShardSpec("rank", 6, 0)})
        alike = first_difference(replica, topology)
        whole[0] += topology.rank == 2
        return alike, first_difference(replica, topology)

    results = on_ranks(work, PAIRS)
    assert [alike for alike, _ in results] == [None] * 4
    assert [different is None for _, different in results] == [True, True, False, False]
    assert "holds other values of whole" in results[2][1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 2, 7, 4097])
def test_a_print_depends_on_every_bit(numel, dtype):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(place.device, dtype)
    before = int(print_of(values))
    assert int(print_of(values.clone())) == before
    for element in {0, numel // 2, numel - 1}:
        for byte in range(dtype.itemsize):
            other = values.clone()
            other.view(torch.uint8)[element * dtype.itemsize + byte] ^= 1
            assert int(print_of(other)) != before


def test_prints_of_views_and_of_other_memory_formats():
    whole = torch.arange(8.0, device=place.device)
    assert int(print_of(whole[1:4])) == int(print_of(whole[1:4].clone()))
    image = torch.randn(2, 3, 4, 5).to(place.device, memory_format=torch.channels_last)
    assert int(print_of(image)) == int(print_of(image.clone()))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):  # one 1.0 at each place of two rows and a piece
        one_hot = torch.eye(1, 1024 * 8 // dtype.itemsize * 2 + 5, dtype=dtype, device=place.device)[0]
        prints = {int(print_of(one_hot.roll(at))) for at in range(0, one_hot.numel(), 7)}
        assert len(prints) == len(range(0, one_hot.numel(), 7))
    table = torch.eye(2, 1024, dtype=torch.float64, device=place.device)
    assert int(print_of(table)) != int(print_of(table.flip(0)))
    turned = torch.randn(3, dtype=torch.complex64, device=place.device)
    assert int(print_of(turned.conj())) == int(print_of(turned.conj().resolve_conj())) != int(print_of(turned))
    assert int(print_of(torch.empty(0, device=place.device))) == 0
    assert int(print_of(torch.tensor(1.0, device=place.device))) != 0
