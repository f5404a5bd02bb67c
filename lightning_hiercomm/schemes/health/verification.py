"""Whether the ranks of a node still hold the same parameters, as they should: compared bit by bit, for a few bytes."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import torch
from torch import Tensor

from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology

VerifyReplicas = Literal["off", "warn", "raise"]


class ReplicasDiffer(RuntimeError):
    """Ranks that train together hold different parameters."""


def print_of(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits, eight bytes at a time: an int64 scalar, in one read of the tensor.

    It differs whenever one value does. (Differences of several values could cancel out, for one step.)
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    octets = flat.view(torch.uint8)
    whole = octets.numel() // 8 * 8
    return octets[:whole].view(torch.int64).sum() + octets[whole:].sum()


@torch.no_grad()
def first_difference(replica: Replica, topology: Topology) -> str | None:
    """The first parameter of which ranks of this node that should hold the same do not, for people; None if all do.

    Collective over the node: two numbers per parameter travel inside it. Float buffers may differ.
    """
    held: dict[str, list[Tensor]] = {}
    for parameter in replica.parameters:
        share = replica.shares.get(id(parameter))
        held.setdefault("node" if share is None else share.held_by, []).append(parameter)
    for held_by in sorted(held):
        group = topology.holders[held_by].group
        if group is None or group.size == 1:
            continue
        prints = torch.stack([print_of(tensor) for tensor in held[held_by]])
        bounds = torch.cat([prints, ~prints])  # for ~ turns the order round, and never overflows
        group.all_reduce(bounds, op="max").wait()
        differs = bounds[: prints.numel()] != ~bounds[prints.numel() :]
        if not bool(differs.any()):
            continue
        places = differs.nonzero().flatten().tolist()
        first = held[held_by][places[0]]
        values = group.all_gather_object(int(prints[places[0]]))
        usual, _ = Counter(values).most_common(1)[0]
        others = [str(rank) for rank, value in zip(group.ranks, values, strict=True) if value != usual]
        name = replica.names.get(id(first), f"a parameter of shape {tuple(first.shape)}")
        more = f" (and of {len(places) - 1} more parameters)" if len(places) > 1 else ""
        return (
            f"rank {', '.join(others)} of node {topology.node} (ranks {', '.join(map(str, group.ranks))}) holds other"
            f" values of {name}{more} than its node"
        )
    return None
