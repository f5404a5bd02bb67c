"""A scheme is built once, follows other parameters, and is closed: nothing grows, and nothing is left behind."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from harness import Rank, attached, on_nodes, on_ranks, place, steps
from torch import nn
from torch.utils._pytree import tree_leaves
from zoo import ZOO

from lightning_hiercomm.comm.base import Communicator, Connect
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes import Context, DiLoCo, Gossip
from lightning_hiercomm.trainer.settings import Settings

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

NAMES = [
    *("all_reduce", "periodic", "daso", "streaming", "steps_delay"),
    *("gossip, overlapped", "noloco"),
]


class Counting:
    """Connects as another does, and counts the groups."""

    def __init__(self, connect: Connect) -> None:
        self.connect = connect
        self.groups = 0

    def __call__(self, groups: Sequence[Sequence[int]], level: str) -> Communicator | None:
        self.groups += 1
        return self.connect(groups, level)


@pytest.mark.parametrize("name", NAMES)
def test_50_unfreezes_open_no_group_and_start_no_thread(name):
    def work(topology: Topology) -> tuple[int, int, int]:
        with attached(topology, ZOO[name], shapes=[(3,)]) as rank:
            scheme = rank.scheme
            for _ in range(4):
                rank.train(1.0)
            groups, backgrounds = topology.connect.groups, len(scheme.backgrounds)
            for unfrozen in range(50):
                if unfrozen < 2:
                    rank.module[f"unfrozen {unfrozen}"] = nn.Parameter(torch.zeros(2, device=place.device))
                    rank.optimizer.add_param_group({"params": rank.parameters[-1:]})
                scheme.synchronize()
                scheme.follow(rank.replica())
                for _ in range(3):
                    rank.train(1.0)
            scheme.finish()
            return topology.connect.groups - groups, len(scheme.backgrounds) - backgrounds, len(topology.duplicates)

    before = {*threading.enumerate()}  # some of another test may just end
    for groups, backgrounds, duplicates in on_ranks(work, connect=Counting):
        assert (groups, backgrounds) == (0, 0)
        assert duplicates <= 3
    assert {*threading.enumerate()} <= before


def test_gossip_uses_weights_set_after_new_parameters():
    def work(rank: Rank) -> list[list[float]]:
        rank.scheme.follow(rank.replica())
        rank.topology.set_weights([1.0, 3.0])
        for _ in range(2):
            rank.train(-1.0)
        return rank.trace

    # a node of weight W counts M W of its update: 1/2 and 3/2, mixed half and half
    scheme = Gossip(fragments=1)
    assert on_nodes(work, scheme, inner=partial(torch.optim.SGD, lr=1.0)) == [[[1.0], [2.0]]] * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_state_stays_as_it_is_while_training_goes_on_from_it(name):
    def first(rank: Rank) -> dict[str, Any]:
        return steps(5)(rank).state()

    states = on_nodes(first, ZOO[name], shapes={"x": 5})
    before = copy.deepcopy(states)

    def then(rank: Rank) -> None:
        rank.load(states[rank.rank])
        steps(9)(rank)

    on_nodes(then, ZOO[name], shapes={"x": 5})
    for was, now in zip(tree_leaves(before), tree_leaves(states), strict=True):
        assert torch.equal(was, now) if isinstance(was, torch.Tensor) else was == now


@pytest.mark.parametrize("name", ["all_reduce", "gossip", "steps_delay", "streaming"])
def test_optimizer_state_averaging_without_effect_is_refused(name):
    with pytest.raises(ValueError, match="average_optimizer_state=True does nothing with"):
        Settings(ZOO[name], average_optimizer_state=True)
    for other in ("periodic", "daso"):
        Settings(ZOO[other], average_optimizer_state=True)


@pytest.mark.parametrize("wire", [None, "bfloat16", "int8", "int4"])
def test_closing_a_topology_closes_its_duplicates(wire):
    def work(topology: Topology) -> list[bool]:
        x = nn.Parameter(torch.zeros(3, device=place.device))
        context = Context(Replica([x]), topology, torch.optim.SGD([x], lr=1.0), Wire(wire))
        scheme = DiLoCo(2, staleness=1).build(context)
        scheme.close()
        topology.close()
        return [topology.is_closed, *(duplicate.is_closed for duplicate in topology.duplicates)]

    for closed in on_ranks(work, connect=Counting):
        assert all(closed)
