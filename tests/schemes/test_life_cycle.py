"""A scheme is built once, follows other parameters, and is closed: nothing grows, and nothing is left behind."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from harness import Rank, on_nodes, on_ranks, place
from harness import steps as steps_of_a_rank
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_hiercomm.comm.base import Communicator, Connect
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import (
    DASO,
    AllReduce,
    Context,
    DiLoCo,
    Gossip,
    ParameterSync,
    PeriodicAveraging,
    RandomPermutation,
    RunningScheme,
    Scheme,
    StepsDelay,
)
from lightning_hiercomm.trainer.settings import Settings

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

SCHEMES: dict[str, Callable[[], Scheme]] = {
    "all_reduce": AllReduce,
    "periodic": lambda: PeriodicAveraging(2),
    "daso": lambda: DASO(2, 1, warmup=0, cooldown=0),
    "diloco": lambda: DiLoCo(4, fragments=2, staleness=1),
    "steps_delay": lambda: StepsDelay(2, warmup_steps=0),
    "gossip": lambda: Gossip(fragments=2, overlap=True),
    "gossip, flat": lambda: Gossip(fragments=2, hierarchical=False),
    "synchronization by graph": lambda: ParameterSync(2, reducer=RandomPermutation()),
}


class Counting:
    """Connects as another does, and counts the groups."""

    def __init__(self, connect: Connect) -> None:
        self.connect = connect
        self.groups = 0

    def __call__(self, groups: Sequence[Sequence[int]], level: str) -> Communicator | None:
        self.groups += 1
        return self.connect(groups, level)


def steps(scheme: RunningScheme[Scheme], optimizer: torch.optim.Optimizer, number: int) -> None:
    def step() -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    for _ in range(number):
        scheme.step(step)


@pytest.mark.parametrize("name", SCHEMES)
def test_50_unfreezes_open_no_group_and_start_no_thread(name):
    def work(topology: Topology) -> tuple[int, int, int]:
        parameters = [nn.Parameter(torch.zeros(3, device=place.device))]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scheme = SCHEMES[name]().build(Context(Replica(parameters), topology, optimizer))
        scheme.begin_run(1, None)
        scheme.begin_epoch(0, dict)
        steps(scheme, optimizer, 4)
        groups, backgrounds = topology.connect.groups, len(scheme.backgrounds)
        for _ in range(50):
            unfrozen = nn.Parameter(torch.zeros(2, device=place.device))
            if len(parameters) < 3:
                parameters.append(unfrozen)
                optimizer.add_param_group({"params": [unfrozen]})
            scheme.synchronize()
            scheme.follow(Replica(parameters))
            steps(scheme, optimizer, 3)
        scheme.finish()
        return topology.connect.groups - groups, len(scheme.backgrounds) - backgrounds, len(topology.duplicates)

    before = {*threading.enumerate()}  # some of another test may just end
    for groups, backgrounds, duplicates in on_ranks(work, connect=Counting):
        assert (groups, backgrounds) == (0, 0)
        assert duplicates <= 3
    assert {*threading.enumerate()} <= before


@pytest.mark.parametrize("name", sorted(SCHEMES.keys() - {"all_reduce"}))
def test_nodes_that_follow_a_new_parameter_set_synchronize_all_of_it(name):
    def work(topology: Topology) -> list[float]:
        parameters = [nn.Parameter(torch.zeros(3, device=place.device))]
        optimizer = torch.optim.SGD(parameters, lr=0.1 * (1 + topology.node))
        scheme = SCHEMES[name]().build(Context(Replica(parameters), topology, optimizer))
        scheme.begin_run(1, None)
        scheme.begin_epoch(0, dict)
        steps(scheme, optimizer, 3)
        parameters.append(nn.Parameter(torch.zeros(2, device=place.device)))
        optimizer.add_param_group({"params": parameters[-1:]})
        scheme.synchronize()
        scheme.follow(Replica(parameters))
        steps(scheme, optimizer, 3)
        scheme.finish()
        return torch.cat([parameter.detach() for parameter in parameters]).tolist()

    results = on_ranks(work, connect=Counting)
    assert results[0] == results[1] == results[2] == results[3]
    assert all(value < 0 for value in results[0])


def test_flat_gossip_uses_weights_set_after_new_parameters():
    def work(topology: Topology) -> list[float]:
        x = nn.Parameter(torch.zeros(1, device=place.device))
        optimizer = torch.optim.SGD([x], lr=1.0)
        scheme = Gossip(fragments=1, hierarchical=False).build(Context(Replica([x]), topology, optimizer))
        scheme.follow(Replica([x]))
        topology.set_weights([1.0, 3.0])

        def step() -> None:
            x.grad = torch.tensor([-1.0], device=place.device)
            optimizer.step()

        seen = []
        for _ in range(2):
            scheme.step(step)
            seen.append(x.item())
        scheme.close()
        return seen

    # a node of weight W counts M W of its update: 1/2 and 3/2, mixed half and half
    assert on_ranks(work, [[0], [1]]) == [[1.0, 2.0]] * 2


@pytest.mark.parametrize("name", SCHEMES)
def test_validation_after_a_resume_equals_the_one_before_the_save(name):
    def first(rank: Rank) -> tuple[list[float], dict[str, Any]]:
        steps_of_a_rank(5)(rank)
        return rank.averaged().tolist(), rank.state()

    found = on_nodes(first, SCHEMES[name](), shapes={"x": 5})

    def then(rank: Rank) -> list[float]:
        rank.load(found[rank.rank][1])
        return rank.averaged().tolist()

    assert on_nodes(then, SCHEMES[name](), shapes={"x": 5}) == [look for look, _ in found]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_state_stays_as_it_is_while_training_goes_on_from_it(name):
    def first(rank: Rank) -> dict[str, Any]:
        return steps_of_a_rank(5)(rank).state()

    states = on_nodes(first, SCHEMES[name](), shapes={"x": 5})
    before = copy.deepcopy(states)

    def then(rank: Rank) -> None:
        rank.load(states[rank.rank])
        steps_of_a_rank(9)(rank)

    on_nodes(then, SCHEMES[name](), shapes={"x": 5})
    for was, now in zip(tree_leaves(before), tree_leaves(states), strict=True):
        assert torch.equal(was, now) if isinstance(was, torch.Tensor) else was == now


def test_two_optimizers_share_one_gradient_path():
    def work(topology: Topology, count: int) -> int:
        layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(count)).to(place.device)
        optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in layers]
        run = TrainingRun(AllReduce(), Replicas(layers, optimizers), topology)
        run.gradients.reduce(torch.ones(4, device=place.device)).wait()
        run.close(timeout=5.0)
        return topology.connect.groups

    one, two = (on_ranks(partial(work, count=count), [[0], [1]], connect=Counting) for count in (1, 2))
    assert one == two


@pytest.mark.parametrize("skips", [0, 1])
def test_node_that_skips_a_step_still_synchronizes(skips):
    def work(topology: Topology) -> list[float]:
        x = nn.Parameter(torch.zeros(1, device=place.device))
        optimizer = torch.optim.SGD([x], lr=1.0)
        scheme = PeriodicAveraging(2, order="before_step").build(Context(Replica([x]), topology, optimizer))
        scheme.begin_epoch(0, dict)
        seen = []
        for t in range(1, 5):

            def step(t: int = t) -> None:
                x.grad = torch.tensor([-1.0 - 2 * topology.rank], device=place.device)
                if not (t == 2 and topology.rank == skips):  # as a gradient scaler does
                    optimizer.step()

            scheme.step(step)
            seen.append(x.item())
        scheme.close()
        return seen

    # 1, 3 average to 2, from which only the node that does not skip goes on; the next average is in step 4
    first = 2.0 if skips == 0 else 3.0
    second = 5.0 if skips == 0 else 2.0
    mean = (first + 1 + second + 3) / 2
    assert on_ranks(work, [[0], [1]]) == [[1, first, first + 1, mean + 1], [3, second, second + 3, mean + 3]]


@pytest.mark.parametrize("name", ["all_reduce", "gossip", "steps_delay", "diloco"])
def test_optimizer_state_averaging_without_effect_is_refused(name):
    with pytest.raises(ValueError, match="average_optimizer_state=True does nothing with"):
        settings(SCHEMES[name]())
    settings(SCHEMES["periodic"]())
    settings(SCHEMES["daso"]())


def settings(scheme: Scheme) -> Settings:
    return Settings(scheme, average_optimizer_state=True)


@pytest.mark.parametrize("wire", [None, "bfloat16", "int8", "int4"])
def test_closing_a_topology_closes_its_duplicates(wire):
    def work(topology: Topology) -> list[bool]:
        x = nn.Parameter(torch.zeros(3, device=place.device))
        context = Context(Replica([x]), topology, torch.optim.SGD([x], lr=1.0), Wire.named(wire))
        scheme = DiLoCo(2, staleness=1).build(context)
        scheme.close()
        topology.close()
        return [topology.is_closed, *(duplicate.is_closed for duplicate in topology.duplicates)]

    for closed in on_ranks(work, connect=Counting):
        assert all(closed)
