"""Predicted memory is what the schemes hold when they run."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from types import FunctionType, MethodType, ModuleType

import pytest
import torch
from harness import Rank, on_nodes
from pairwise import selected
from torch import Tensor

from lightning_hiercomm.comm.base import Communicator, Handle
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.planning.cluster import Cluster, Link, Workload
from lightning_hiercomm.planning.predict.cost import predict
from lightning_hiercomm.planning.predict.schemes import Payload, own_bytes, state_bytes
from lightning_hiercomm.schemes import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, StepsDelay

NUMEL = 2**18
MODEL = 4 * NUMEL
WORKLOAD = Workload.of_step(NUMEL, 0.1, state_per_parameter=1)
CLUSTER = Cluster(2, 2, Link(1e9), Link(1e9))
SCHEMES = {
    "periodic": lambda: PeriodicAveraging(4),
    "daso": lambda: DASO(4, 2, warmup_epochs=0, cooldown_epochs=0),
    "daso, sharded": lambda: DASO(4, 2, warmup_epochs=0, cooldown_epochs=0, reducer="sharded"),
    "daso, delta": lambda: DASO(4, 2, warmup_epochs=0, cooldown_epochs=0, merge="delta"),
    "steps_delay": lambda: StepsDelay(4, warmup_steps=0),
    "steps_delay, held": lambda: StepsDelay(4, warmup_steps=0, hold=True),
    "steps_delay, compensated": lambda: StepsDelay(4, warmup_steps=0, local_update="dc_asgd"),
    "gossip": lambda: Gossip(overlap=True),
    "diloco": lambda: DiLoCo(4),
    "diloco, outer Adam": lambda: DiLoCo(4, torch.optim.Adam),
    "diloco, plain outer SGD": lambda: DiLoCo(4, partial(torch.optim.SGD, lr=1.0)),
    "diloco, streaming": lambda: DiLoCo(4, fragments=2, staleness=1),
}


def storages(tensors) -> dict[int, int]:
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def tensors_of(root: object) -> list[Tensor]:
    """All that can be reached from an object, but not through what belongs to the ranks-as-threads."""
    found, seen, waiting = [], set(), [root]
    strangers = (str, bytes, int, float, type, ModuleType, threading.Thread, Communicator, Topology, ThreadWorld)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, strangers):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple | set | deque):
            waiting += value
        elif isinstance(value, FunctionType):
            waiting += [cell.cell_contents for cell in value.__closure__ or ()]
        elif isinstance(value, MethodType):
            waiting.append(value.__self__)
        elif not (isinstance(value, Handle) and hasattr(value, "_borrowed")):
            waiting += vars(value).values() if hasattr(value, "__dict__") else ()
    return found


def most_held(scheme, wire) -> float:
    """Models' worth of memory that a scheme holds on a rank after the worst of its steps."""

    def train(rank: Rank) -> float:
        most = 0
        for _ in range(9):
            rank.train()
            users = [*rank.parameters, *(p.grad for p in rank.parameters), *tensors_of(dict(rank.optimizer.state))]
            own = storages(tensors_of(rank.scheme))
            most = max(most, sum(own[where] for where in own.keys() - storages(users).keys()))
        rank.scheme.state.settle()
        return most / MODEL

    inner = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    shapes = dict.fromkeys("abcd", NUMEL // 4)  # as many as ranks: whole tensors are shared out without padding
    return max(on_nodes(train, scheme, ((0, 1), (2, 3)), shapes=shapes, wire=wire, inner=inner, epochs=10))


CASES = [
    (name, wire)
    for name in SCHEMES
    for wire in (None, "bfloat16", "int8")
    if wire != "int8" or not name.startswith("steps_delay")  # whose gradients are not quantised
]


@pytest.mark.parametrize(("name", "wire"), selected(CASES))
def test_predicted_memory_is_that_of_a_scheme(name, wire):
    is_served = name.startswith("steps_delay")
    scheme = SCHEMES[name]()
    predicted = own_bytes(scheme, CLUSTER, WORKLOAD, Payload.named(wire, WORKLOAD)) / MODEL
    if is_served:  # holds its share of the optimizer's state itself
        predicted += state_bytes(scheme, CLUSTER, WORKLOAD) / MODEL
    if (
        getattr(scheme, "staleness", None) == 0
    ):  # buckets that only the synchronization itself holds: all of so small a model
        in_flight = 1 + (Payload.named(wire, WORKLOAD).ratio / 2 * (2 if wire == "int8" else 1) if wire else 0)
        predicted -= in_flight
    # besides, up to 4096 elements of each bucket in flight are kept to tell how far apart the nodes are
    assert most_held(scheme, wire) == pytest.approx(predicted, abs=0.02)


def test_predicted_memory_includes_residuals_of_gradients():
    def train(rank: Rank) -> float:
        for _ in range(2):
            rank.train()
        return sum(storages(tensors_of(rank.gradients)).values()) / MODEL

    held = max(on_nodes(train, AllReduce(), ((0, 1), (2, 3)), shapes={"a": NUMEL}, wire="int8", epochs=10))
    payload, as_it_is = (Payload.named(wire, WORKLOAD) for wire in ("int8", None))
    more = own_bytes(AllReduce(), CLUSTER, WORKLOAD, payload) - own_bytes(AllReduce(), CLUSTER, WORKLOAD, as_it_is)
    sent_and_received = 2 * payload.ratio / 2  # of a rank's half of the model, while it is on its way
    assert held == pytest.approx(more / MODEL - sent_and_received, abs=0.02)


def test_predicted_memory_is_the_sum_of_its_parts():
    scheme = PeriodicAveraging(4)
    own = own_bytes(scheme, CLUSTER, WORKLOAD, Payload.named(None, WORKLOAD))
    assert predict(scheme, CLUSTER, WORKLOAD).memory_bytes == 3 * MODEL + own


def test_steps_delay_shards_optimizer_state():
    assert state_bytes(StepsDelay(4), CLUSTER, WORKLOAD) == MODEL / 4
    assert state_bytes(None, CLUSTER, WORKLOAD) == MODEL
