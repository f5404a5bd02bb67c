"""Every scheme with every payload: the bytes, the same bits on all ranks, and numbers as good as the payload allows."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim import SGD
from zoo import CYCLING, ZOO

from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.schemes import (
    DASO,
    AllReduce,
    DiLoCo,
    Epochs,
    Gossip,
    ParameterSync,
    PeriodicAveraging,
    RandomPermutation,
    Ring,
)

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

SEVENS = {"a": 7, "b": 5, "c": 11}
WIRES = [None, "bfloat16", "float16", "int8", "int4"]
FRACTION = {None: 1.0, "bfloat16": 1 / 2, "float16": 1 / 2, "int8": 1 / 4, "int4": 1 / 8}
TWO_OF_TWO, UNEQUAL, THREE = ((0, 1), (2, 3)), ((0, 1, 2), (3,), (4, 5)), ((0,), (1,), (2,))


def target_of(rank):
    return torch.randn(23, generator=torch.Generator().manual_seed(rank))


def training(rank, epochs=1, steps=8):
    """Epochs on rank r's loss ``0.5 (x - target_r)^2``; all values after each step and each epoch's end."""
    target = target_of(rank.rank)
    seen = []
    for _ in range(epochs):
        rank.scheme.begin_epoch(rank.scheme.state.epoch + 1)
        for step in range(steps):
            rank.train(lambda x: x - target, last=step == steps - 1)
            seen.append(rank.values)
        rank.scheme.end_epoch(torch.tensor(1.0))
        seen.append(rank.values)
    return seen


def trained(rank):
    """The values at the end of a run of three epochs."""
    training(rank, epochs=3)
    rank.scheme.finish()
    return rank.values


@pytest.mark.pairwise
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("nodes", [TWO_OF_TWO, ((0,), (1,), (2,), (3,)), ((0, 1), (2,), (3,))], ids=str)
@pytest.mark.parametrize(
    ("scheme", "models_per_step"),
    [
        (AllReduce(), lambda m: 2 * (m - 1) / m),
        (PeriodicAveraging(4), lambda m: 2 * (m - 1) / m / 4),
        (DASO(2, 1, **CYCLING), lambda m: 2 * (m - 1) / m / 2),
        (DASO(4, 2, reducer="sharded", **CYCLING), lambda m: 2 * (m - 1) / m / 4),
        (DiLoCo(4, fragments=2, staleness=1), lambda m: 2 * (m - 1) / m / 4),
        (Gossip(), lambda m: 1.0),
        (ParameterSync(4, reducer=RandomPermutation()), lambda m: 1 / 4),
        (ParameterSync(4, reducer=Ring()), lambda m: min(2, m - 1) / 4),
    ],
    ids=["all_reduce", "periodic", "daso", "sharded", "diloco", "gossip", "NoLoCo", "ring"],
)
def test_a_step_costs_the_bytes_of_the_formula(on_nodes, scheme, models_per_step, nodes, wire):
    numel, steps = 98_304, 8  # whole blocks of codes on three and on four nodes

    def work(rank):
        for measured in (False, True):
            before = rank.meter.snapshot()["inter_bytes"]
            for _ in range(steps):
                rank.train(torch.ones_like)
            rank.scheme.state.settle()
            if measured:
                sent = torch.tensor(rank.meter.snapshot()["inter_bytes"] - before)
                rank.topology.intra.all_reduce(sent).wait()
        return sent.item() / steps

    expected = 4 * numel * models_per_step(len(nodes)) * FRACTION[wire]
    every_node = {round(sent) for sent in on_nodes(work, scheme, nodes, shapes={"x": numel}, wire=wire)}
    for sent in every_node:
        assert 0.999 * expected <= sent <= 1.02 * expected


@pytest.mark.pairwise
@pytest.mark.parametrize("wire", ["int8", "int4"])
@pytest.mark.parametrize(
    "scheme",
    [PeriodicAveraging(2), DASO(2, 1, merge="delta", reducer="sharded", **CYCLING), DiLoCo(2, partial(SGD, lr=1.0))],
    ids=["periodic", "daso", "diloco"],
)
@pytest.mark.parametrize("nodes", [TWO_OF_TWO, THREE], ids=str)
def test_error_feedback_delivers_rounding_errors_later(on_nodes, scheme, wire, nodes):
    """A long run with constant gradients is taken as far as by exact numbers: what is missing is that of one round."""
    gradient = torch.randn(23, generator=torch.Generator().manual_seed(5))

    def work(rank):
        for _ in range(120):
            rank.train(lambda x: gradient * (1 + rank.node))
        return rank.averaged()

    exact = on_nodes(work, scheme, nodes, shapes=SEVENS)[0]
    arrived = on_nodes(work, scheme, nodes, shapes=SEVENS, wire=wire)[0]
    a_round = 2 * 0.1 * gradient.abs().max() * len(nodes) * 2
    assert (arrived - exact).abs().max() <= 2 * a_round / (127 if wire == "int8" else 7)


@pytest.mark.parametrize("scheme", [Gossip(), ParameterSync(4, reducer=Ring())], ids=["gossip", "ring"])
def test_peers_that_send_parameters_refuse_a_wire_that_drops_most(on_nodes, scheme):
    with pytest.raises(
        ValueError, match="peers exchange parameters, and wire_dtype='sparse2' would drop most of them:"
    ):
        on_nodes(training, scheme, TWO_OF_TWO, shapes=SEVENS, wire="sparse2")


@pytest.mark.parametrize("name", ["all_reduce", "periodic", "daso, sharded delta", "diloco"])
def test_the_largest_of_each_group_end_on_the_same_bits_everywhere(on_nodes, name):
    arguments = {"shapes": SEVENS, "bucket_bytes": 40}
    narrow = on_nodes(trained, ZOO[name], UNEQUAL, wire="sparse2", **arguments)
    exact = on_nodes(trained, ZOO[name], UNEQUAL, **arguments)
    assert all(torch.equal(values, narrow[0]) for values in narrow)
    assert 0 < (narrow[0] - exact[0]).abs().max() < exact[0].abs().max()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("scheme", ["periodic", "daso, waiting", "diloco", "gossip"])
def test_float_buffers_travel_as_they_are(on_nodes, scheme, wire):
    """A variance or a counter next to a larger number must not be rounded by the larger one's scale."""

    def work(rank):
        (buffer,) = rank.scheme.replica.buffers
        for step in range(8):
            buffer.copy_(torch.tensor([0.01 * 0.5**step, 50.0 + rank.node, step + 1.0]))
            rank.train(0.0, last=step == 7)
        rank.scheme.end_epoch(torch.tensor(1.0))
        rank.scheme.finish()
        return buffer

    for buffer in on_nodes(work, ZOO[scheme], THREE, wire=wire, buffer=torch.zeros(3)):
        torch.testing.assert_close(buffer, torch.tensor([0.01 * 0.5**7, 51.0, 8.0]), rtol=1e-6, atol=0)


STEPPING = {
    "periodic": PeriodicAveraging(1),
    "daso, blocking": DASO(warmup=Epochs(1)),
    "daso, sharded": DASO(warmup=Epochs(1), reducer="sharded"),
    "daso, cycling": DASO(1, 1, **CYCLING),
    "daso, delta": DASO(1, 1, merge="delta", **CYCLING),
}


def after_steps_down(on_nodes, name, wire):
    """Take a hundred steps from 1.0 down by 0.001 on every rank; the parameters in the end."""

    def work(rank):
        for i in range(100):
            rank.train(1.0, last=i == 99)
        rank.scheme.end_epoch(torch.tensor(1.0))
        rank.scheme.finish()
        return rank.values

    inner = partial(SGD, lr=1e-3)
    return on_nodes(work, STEPPING[name], TWO_OF_TWO, shapes={"x": 3}, inner=inner, wire=wire, epochs=10)


@pytest.mark.parametrize("name", STEPPING)
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_a_hundred_small_steps_from_one_arrive_through_a_narrow_wire(on_nodes, name, dtype, unit):
    results = after_steps_down(on_nodes, name, Wire(dtype))
    # Eq. 1 takes half of each step's progress back, except of the first and the last, whatever the wire
    end = 1 - (2 + 98 / 2) * 1e-3 if name == "daso, cycling" else 0.9
    # every one of the differences that travel is right to half a unit in the last place of itself
    for x in results:
        assert torch.equal(x, results[0])
        torch.testing.assert_close(x, torch.full((3,), end), rtol=0, atol=0.1 * unit)


@pytest.mark.parametrize("name", ["periodic", "daso, blocking"])
def test_sending_the_parameters_themselves_stalls_on_a_narrow_wire(on_nodes, name):
    for x in after_steps_down(on_nodes, name, Wire(torch.bfloat16, raw=True)):
        assert x.tolist() == [1.0] * 3


@pytest.mark.parametrize("wire", [None, Wire(), Wire(torch.float32)])
def test_a_wire_as_wide_as_the_parameters_changes_nothing(on_nodes, wire):
    expected = torch.ones(3)
    for _ in range(100):
        expected -= 1e-3
    for x in after_steps_down(on_nodes, "periodic", wire):
        assert torch.equal(x, expected)


def test_weighted_means_are_equal_through_narrow_and_wide_wires(on_nodes):
    def work(rank):
        with torch.no_grad():
            rank.module["x"] += 0.0 if rank.rank < 3 else 2**-12
        rank.scheme.average()
        return rank.values.tolist()

    for wire in (Wire(), Wire(torch.bfloat16)):
        means = on_nodes(work, PeriodicAveraging(1), ((0, 1, 2), (3,)), shapes={"x": 2}, wire=wire)
        assert means == [[1 + 2**-14] * 2] * 4
