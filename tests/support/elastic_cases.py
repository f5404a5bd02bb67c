"""Schemes, training and helpers for tests of elastic nodes on threads."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from elastic_threads import ElasticRank, Threads, step_at_random
from harness import Rank, on_nodes

from lightning_hiercomm import DASO, DiLoCo, PeriodicAveraging
from lightning_hiercomm.elastic import Elastic
from lightning_hiercomm.schemes import OuterOptimizer, ParameterSync, RandomPermutation, Ring, Scheme
from lightning_hiercomm.schemes.components.merges import Replace

SCHEMES = {"periodic": PeriodicAveraging(sync_every=3), "diloco": DiLoCo(sync_every=3)}
COPIED = {
    "fragments": DiLoCo(sync_every=4, fragments=2),
    "local": DiLoCo(sync_every=3, keep_local=0.5),
    "both": DiLoCo(sync_every=4, fragments=2, keep_local=0.25, outer_optimizer=partial(torch.optim.Adam, lr=0.1)),
    "parts": ParameterSync(schedule=4, fragments=2),
    "kept": ParameterSync(schedule=3, merge=Replace(0.5)),
}
"""Nodes are never equal."""
PEERS = {
    "peers": ParameterSync(schedule=2, reducer=RandomPermutation()),
    "noloco": ParameterSync(schedule=3, reducer=RandomPermutation(), merge=OuterOptimizer()),
    "ring": ParameterSync(schedule=2, reducer=Ring()),
}
"""Each node synchronizes with its neighbors in a graph of the nodes that are there."""
BLOCKING_DASO = DASO(sync_every=3, staleness=0, warmup=2, reducer="sharded", plateau=None)
ALL: dict[str, Scheme] = {**SCHEMES, **COPIED, **PEERS, "daso": BLOCKING_DASO}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


SHAPES = {"a": (7, 3), "b": (5,), "c": (40,)}
TRAINING = {"shapes": SHAPES, "targets": (0.0, 0.0, 0.0, 0.0), "bucket_bytes": 64, "inner": adam}


def threads(name: str, elastic: Elastic | None = None, **training: Any) -> Threads:
    """Nodes that train by a scheme of this name."""
    return Threads(ALL[name], elastic or Elastic(dead_after=0.5), {**TRAINING, **training})


def assert_equal(values: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


def train_stay(rank: Rank, node: int, steps: int) -> tuple[torch.Tensor, list[Any]]:
    """Train a rank that stays, by the gradients of `ElasticRank.step`; its values and their trace."""
    while rank.scheme.state.steps < steps:
        step_at_random(rank, node)
    rank.scheme.finish()
    return rank.values, rank.trace


def undisturbed(scheme: Scheme, sizes: Sequence[int], steps: int, wire: Any = None, reconnects_at: int | None = None):
    """The same run on nodes that stay and begin as the first node does.

    After ``reconnects_at`` steps they forget their error-feedback residuals, as those do that connect again.
    """
    starts = [sum(sizes[:node]) for node in range(len(sizes))]
    nodes = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def work(rank: Rank) -> tuple[torch.Tensor, list[Any]]:
        while rank.scheme.state.steps < steps:
            if rank.scheme.state.steps == reconnects_at:
                for residuals in rank.scheme.reducer._feedback:  # noqa: SLF001
                    residuals.sender.zero_()
                    residuals.reducer.zero_()
            step_at_random(rank, rank.topology.node, rank.topology.local_rank)
        rank.scheme.finish()
        return rank.values, rank.trace

    return on_nodes(work, scheme, nodes, start=1.0, wire=wire, **TRAINING)


def put(rank: Rank, state: Mapping[str, Any]) -> None:
    """Let a rank that stays go on from an elastic one's state."""
    state = copy.deepcopy(dict(state))
    with torch.no_grad():
        for parameter, values in zip(rank.parameters, state["values"], strict=True):
            parameter.copy_(values)
    rank.optimizer.load_state_dict(state["optimizer"])
    rank.scheme.follow(rank.replica())
    rank.scheme.load_state_dict(state["schedule"])
    reference = state["schedule"].get("reference")
    if reference is not None:
        tensors = rank.scheme.reference._tensors(rank.scheme.replica)  # noqa: SLF001
        rank.scheme.reference.set_values(dict(zip(map(id, tensors), reference, strict=True)))


def die_at(own: ElasticRank, moment: str, sync: int = 2) -> None:
    """Let a node die in its synchronization with that number."""
    membership, group = own.membership, own.rank.topology.inter_group
    owner, name = {
        "before the quorum": (membership.rendezvous, "form"),
        "in the exchange": (group, "_launch"),
        "before the vote": (membership.votes, "decide"),
        "after the vote": (membership, "commit"),
    }[moment]
    function, before = getattr(owner, name), moment.startswith("before")

    def call(*args: Any, **kwargs: Any) -> Any:
        if before and membership.me.progress.syncs + 1 == sync:
            own.die()
        result = function(*args, **kwargs)
        if not before and membership.me.progress.syncs + 1 >= sync:
            own.die()
        return result

    if owner is not group or own.local == 0:
        setattr(owner, name, call)
