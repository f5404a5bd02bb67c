"""Tensors of a device that works in streams, moved by way of the host: what arrives, in which order, and who waits."""

from __future__ import annotations

import itertools
from functools import partial
from itertools import pairwise

import harness
import pytest
import torch
from fake_streams import FakeDevice, FakeEvent
from harness import TWO_BY_TWO, Rank, attached, on_ranks
from problems import Oracle
from zoo import CYCLING, ZOO

from lightning_hiercomm import Transport
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.staged import StagedCommunicator
from lightning_hiercomm.schemes import DASO, PeriodicAveraging, Scheme

NAMES = ["all_reduce", "periodic", "daso", "stale", "streaming", "gossip, overlapped"]


def staging(connect):
    """Between nodes, moves pass through the host."""

    def connect_staged(groups, level):
        over_gloo = connect(groups, level)
        return (
            StagedCommunicator(over_gloo, over_gloo.meter) if over_gloo is not None and level == "inter" else over_gloo
        )

    return connect_staged


def trained(topology, scheme: Scheme, wire: str | None, look=lambda rank: None):
    training = {"shapes": {"a": 7, "b": 12}, "bucket_bytes": 40, "targets": None, "wire": wire}
    with attached(topology, scheme, **training, inner=partial(torch.optim.SGD, lr=0.1)) as rank:
        looks = []
        for step in range(8):
            rank.train(last=step == 7)
            looks.append(look(rank))
        rank.scheme.finish()
        return [*rank.trace, rank.values.tolist()], looks


@pytest.mark.pairwise
@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_staged_tensors_arrive_unchanged_and_in_order(name, wire, fake_device: FakeDevice):
    staged = on_ranks(partial(trained, scheme=ZOO[name], wire=wire), TWO_BY_TWO, connect=staging, waits_on_host=True)
    direct = on_ranks(partial(trained, scheme=ZOO[name], wire=wire), TWO_BY_TWO)
    assert staged == direct


def test_the_host_waits_for_an_exchange_only_at_its_merge(fake_device: FakeDevice):
    def look(rank: Rank) -> tuple[list[str], float]:
        *waits, _ = fake_device.waits  # the last one writes down the trace
        fake_device.waits.clear()
        return waits, rank.meter.seconds.get("inter", 0.0)  # of threads, too, for which the host waits

    # leaves after steps 1 and 5, is merged after steps 3 and 7
    scheme = DASO(4, 2, **CYCLING)
    work = partial(trained, scheme=scheme, wire=None, look=look)
    for _, looks in on_ranks(work, TWO_BY_TWO, connect=staging, waits_on_host=True):
        for step, ((_, before), (waits, seconds)) in enumerate(
            pairwise(looks[:-1]), start=2
        ):  # the last one synchronizes
            assert waits == (["an event"] if step in (3, 7) else [])
            assert (seconds > before) == (step in (3, 7))


def test_processes_synchronize_over_gloo_as_over_torch(fit):
    def traces(inter_node):
        strategy = {"scheme": PeriodicAveraging(2), "transport": Transport(inter_node=inter_node)}
        return [report["report"] for report in fit(Oracle(), strategy)]

    assert traces("gloo") == traces("torch")


def moved(topology) -> list[float]:
    inter = topology.inter
    tensor, whole, part = torch.full((4,), 1.0 + topology.rank), torch.zeros(4), torch.zeros(2)
    inter.all_gather(whole, tensor[:2].clone()).wait()
    inter.reduce_scatter(part, tensor.clone()).wait()
    inter.all_reduce(tensor).wait()
    inter.broadcast(scalar := torch.tensor(float(topology.rank)), source=1).wait()
    return [tensor[0].item(), *whole.tolist(), *part.tolist(), scalar.item(), *inter.all_gather_object("x")]


MOVED = [4.0, 1.0, 1.0, 3.0, 3.0, 4.0, 4.0, 2.0, "x", "x"]


def test_cpu_tensors_are_not_staged():
    results = on_ranks(moved, TWO_BY_TWO, connect=staging, waits_on_host=True)
    assert results[0] == results[2] == MOVED
    assert harness.place.device.type == "cpu"


def test_inference_mode_tensors_are_staged(fake_device: FakeDevice):
    """Validation averages in it, and the thread that moves it is not in that mode by itself."""
    results = on_ranks(torch.inference_mode()(moved), TWO_BY_TWO, connect=staging, waits_on_host=True)
    assert results[0] == results[2] == MOVED


def test_waiting_for_tensors_of_the_cpu_is_exposed_time_of_the_run():
    """The meter of the gloo communicator is not read."""

    def separately(connect):
        def connect_staged(groups, level):
            return StagedCommunicator(connect(groups, level), Meter())

        return connect_staged

    def work(topology) -> bool:
        topology.inter.all_reduce(torch.ones(4)).wait()
        return topology.inter.meter.seconds.get("inter", 0.0) > 0

    assert on_ranks(work, ((0,), (1,)), connect=separately) == [True, True]


class Noted:
    """A communicator inside a node that notes which moves are launched, in which order."""

    def __init__(self, communicator, number: int, launched: list[tuple[int, str]]) -> None:
        self._communicator, self._number, self._launched = communicator, number, launched

    def __getattr__(self, name: str):
        if name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "exchange"):
            self._launched.append((self._number, name))
        return getattr(self._communicator, name)


def test_ranks_of_a_node_launch_its_collectives_in_one_order(fake_device, monkeypatch):
    """nccl wants that of communicators that share a device, in any case, and of a rank without an inter-node group."""
    monkeypatch.setattr(FakeEvent, "query", lambda event: next(answers))
    answers = itertools.cycle([False, True, True])

    def noting(connect):
        launched: list[tuple[int, str]] = []
        made = itertools.count()
        staged = staging(connect)

        def connect_and_note(groups, level):
            communicator = staged(groups, level)
            return Noted(communicator, next(made), launched) if level == "intra" else communicator

        return connect_and_note

    def work(topology) -> list[tuple[int, str]]:
        trained(topology, ZOO["stale"], wire=None)
        return topology.intra._launched  # noqa: SLF001

    launched = on_ranks(work, ((0, 1, 2), (3, 4)), connect=noting, waits_on_host=True)
    assert launched[0] == launched[1] == launched[2]
    assert launched[3] == launched[4]
    assert launched[0]
