"""What crosses the network in a narrower type, and that small updates survive it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import on_nodes

from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.schemes import DASO, Epochs, PeriodicAveraging

on_both = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

SCHEMES = {
    "periodic": lambda: PeriodicAveraging(1),
    "daso, blocking": lambda: DASO(warmup=Epochs(1)),
    "daso, sharded": lambda: DASO(warmup=Epochs(1), reducer="sharded"),
    "daso, cycling": lambda: DASO(1, 1, warmup=0, cooldown=0),
    "daso, delta": lambda: DASO(1, 1, warmup=0, cooldown=0, merge="delta"),
}


def after_steps_down(scheme, wire, nodes=((0, 1), (2, 3)), steps=100, step_size=1e-3):
    """A hundred steps from 1.0 down by 0.001 on every rank; the parameters in the end and the bytes between nodes."""

    def work(rank):
        for i in range(steps):
            rank.train(1.0, last=i == steps - 1)
        rank.scheme.end_epoch(torch.tensor(1.0))
        rank.scheme.finish()
        return rank.values, rank.meter.bytes["inter"]

    inner = partial(torch.optim.SGD, lr=step_size)
    return on_nodes(work, scheme(), nodes, shapes={"x": 3}, start=1.0, inner=inner, wire=wire, epochs=10)


@on_both
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_a_hundred_small_steps_from_one_arrive_through_a_narrow_wire(name, dtype, unit):
    results = after_steps_down(SCHEMES[name], Wire(dtype))
    # Eq. 1 takes half of each step's progress back, except of the first and the last, whatever the wire
    end = 1 - (2 + 98 / 2) * 1e-3 if name == "daso, cycling" else 0.9
    # every one of the differences that travel is right to half a unit in the last place of itself
    for x, _ in results:
        assert torch.equal(x, results[0][0])
        torch.testing.assert_close(x, torch.full((3,), end), rtol=0, atol=0.1 * unit)


@on_both
@pytest.mark.parametrize("scheme", ["periodic", "daso, blocking"])
def test_sending_the_parameters_themselves_stalls_on_a_narrow_wire(scheme):
    for x, _ in after_steps_down(SCHEMES[scheme], Wire(torch.bfloat16, raw=True)):
        assert x.tolist() == [1.0] * 3


@on_both
@pytest.mark.parametrize("wire", [None, Wire(), Wire(torch.float32)])
def test_a_wire_as_wide_as_the_parameters_changes_nothing(wire):
    expected = torch.ones(3)
    for _ in range(100):
        expected -= 1e-3
    for x, _ in after_steps_down(SCHEMES["periodic"], wire):
        assert torch.equal(x, expected)


@on_both
def test_weighted_means_are_equal_through_narrow_and_wide_wires():
    def work(rank):
        with torch.no_grad():
            rank.module["x"] += 0.0 if rank.rank < 3 else 2**-12
        rank.scheme.average()
        return rank.values.tolist()

    training = {"nodes": [[0, 1, 2], [3]], "shapes": {"x": 2}, "start": 1.0}
    for wire in (Wire(), Wire(torch.bfloat16)):
        assert on_nodes(work, PeriodicAveraging(1), **training, wire=wire) == [[1 + 2**-14] * 2] * 4
