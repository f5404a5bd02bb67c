"""On a device that works in streams nothing is used out of order, and the host waits for no more than it has to know.

Shown on the CPU with ``fake_streams.py``, which says what it finds.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import harness
import pytest
import torch
from fake_streams import FakeDevice
from harness import TWO_BY_TWO, Rank, on_nodes
from pairwise import selected
from zoo import CYCLING, ZOO

from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.schemes import DASO, AllReduce, DiLoCo, ParameterSync, PeriodicAveraging, StepsDelay

ANY_NODES = ((0, 1, 2), (3, 4))
SHAPES = {"a": 7, "b": 5, "c": 11}
NAMES = [
    *("all_reduce", "periodic", "daso", "daso, sharded delta", "diloco", "streaming"),
    *("gossip", "gossip, overlapped", "noloco, overlapped", "steps_delay"),
]
WIRES = {"as it is": None, "bfloat16": "bfloat16", "int8": "int8"}
train = partial(on_nodes, shapes=SHAPES, targets=None, bucket_bytes=40, inner=partial(torch.optim.SGD, lr=0.1))


def trained(rank: Rank) -> list[list[float]]:
    for step in range(8):
        rank.train(last=step == 7)
    rank.scheme.finish()
    return [*rank.trace, rank.values.tolist()]


def of_four_ranks(name: str, wire: str, nodes: harness.Nodes = TWO_BY_TWO) -> list[list[list[float]]]:
    return train(trained, ZOO[name], nodes, wire=WIRES[wire])


CASES = [(name, wire) for name in NAMES for wire in WIRES if (name, wire) != ("steps_delay", "int8")]


@pytest.mark.parametrize(("name", "wire"), selected(CASES))
def test_streams_are_ordered_and_give_the_bits_of_the_cpu(name, wire, request):
    nodes = ANY_NODES if name in ("all_reduce", "daso, sharded delta") else TWO_BY_TWO
    on_cpu = of_four_ranks(name, wire, nodes)
    request.getfixturevalue("fake_device")
    assert of_four_ranks(name, wire, nodes) == on_cpu


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("periodic", {"dtype": torch.bfloat16}),
        ("daso, sharded delta", {"dtype": torch.bfloat16}),
        (
            "steps_delay",
            {"inner": partial(torch.optim.SGD, lr=torch.tensor(0.1))},
        ),  # the server's stream keeps the rate
    ],
)
def test_sums_of_16_bits_and_a_learning_rate_on_the_device_are_ordered_too(name, more, request):
    def of_three_nodes() -> list[list[list[float]]]:
        return train(trained, ZOO[name], ((0, 1), (2,), (3,)), **more)

    on_cpu = of_three_nodes()
    request.getfixturevalue("fake_device")
    assert of_three_nodes() == on_cpu


def waits_of(device: FakeDevice, rank: Rank, steps: int) -> list[list[str]]:
    """For what the host has waited in each step, after a few that begin all."""
    waits = []
    for step in range(4 + steps):
        device.waits.clear()
        rank.train()
        if step >= 4:
            *by_the_scheme, _ = device.waits  # the last one writes down the trace
            waits.append([what.split(" of ")[0] for what in by_the_scheme])
    device.waits.clear()
    return waits


@pytest.mark.parametrize("bucket_bytes", [4096, 40], ids=["one bucket", "many"])
@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        # an exchange leaves after every fourth step, and is merged one step later: the host reads what has arrived,
        # waits for nothing else, and once, however many buckets there are
        pytest.param(DASO(4, 1, **CYCLING), [[], ["an event"], [], []], id="daso"),
        pytest.param(ParameterSync(4, staleness=1), [[], [], [], ["an event"]], id="parameter_sync"),
        # training waits for the exchange anyway
        pytest.param(PeriodicAveraging(4), [[], [], [], ["training"]], id="periodic"),
        pytest.param(DiLoCo(4), [[], [], [], ["training"]], id="diloco"),
    ],
)
def test_the_host_reads_once_for_an_exchange_and_not_at_all_between_two(fake_device, scheme, expected, bucket_bytes):
    work = partial(waits_of, fake_device, steps=8)
    for waits in train(work, scheme, bucket_bytes=bucket_bytes, nodes=TWO_BY_TWO):
        assert waits == [*expected, *expected]


@pytest.mark.parametrize(
    ("scheme", "wire"),
    [
        pytest.param(DASO(4, 3, **CYCLING), "bfloat16", id="the last reference"),
        pytest.param(DiLoCo(4, torch.optim.Adam, fragments=2, staleness=1), None, id="the outer optimizer's state"),
        pytest.param(ParameterSync(2, staleness=1), "int8", id="what the wire has kept back"),
        pytest.param(AllReduce(), "int8", id="what the gradients' wire has kept back"),
        pytest.param(StepsDelay(2, warmup_steps=0), None, id="the server's state"),
    ],
)
def test_a_run_that_breaks_off_gives_back_nothing_that_a_stream_still_uses(fake_device, scheme, wire):
    def until(step: int, states: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        def work(rank: Rank) -> dict[str, Any]:
            if states is not None:
                rank.load(copy.deepcopy(states[rank.rank]))  # an optimizer takes tensors as they are
            while rank.scheme.state.steps < step:
                rank.train()
            return rank.state() if states is None else {}

        inner = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        return on_nodes(work, scheme, ((0, 1), (2,), (3,)), shapes=SHAPES, targets=None, inner=inner, wire=wire)

    saved = until(5)
    for step in (6, 11):  # an exchange is on its way
        until(step, saved)
    until(1)  # whose tensors may lie where the others were


@pytest.mark.parametrize("name", ["gossip", "gossip, overlapped", "noloco, overlapped"])
def test_exchanges_are_announced_before_the_first_one(name, monkeypatch):
    announced, used = set(), set()
    exchange = Communicator.exchange

    def announced_exchange(own, *moves):
        assert own in announced or own.level != "inter"
        used.add(own)
        return exchange(own, *moves)

    monkeypatch.setattr(Communicator, "expect_exchanges", lambda own: announced.add(own))
    monkeypatch.setattr(Communicator, "exchange", announced_exchange)
    train(trained, ZOO[name], TWO_BY_TWO)
    assert len(used) >= 2
