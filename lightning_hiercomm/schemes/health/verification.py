"""Comparison of the parameters of a node's ranks, bit by bit, by checksums."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import torch
from torch import Tensor

from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology

_ROW = 1024
_ROWS_IN_CACHE, _ROWS_ELSEWHERE = 64, 8192
VerifyReplicas = Literal["off", "warn", "raise"]


class ReplicasDiffer(RuntimeError):
    """Ranks that train together hold different parameters."""


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor with lazy conjugation and negation resolved, so that its bits are visible."""
    return tensor.detach().resolve_conj().resolve_neg()


def words_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return all bits of a tensor in their order, as words (int64) and the remaining bytes (uint8)."""
    flat = plain(tensor).contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    octets = flat.view(torch.uint8)
    whole = octets.numel() // 8 * 8
    return octets[:whole].view(torch.int64), octets[whole:]


def print_of(tensor: Tensor) -> Tensor:
    """Return a 64-bit checksum of all values of a tensor and of their positions, as an int64 scalar on its device."""
    words, rest = words_of(tensor)
    in_rows = words.numel() // _ROW * _ROW
    sums = [_sum_of_rows(words[:in_rows].view(-1, _ROW))] if in_rows else []
    return _scrambled(torch.cat([*sums, words[in_rows:], rest])).sum()


def _sum_of_rows(table: Tensor) -> Tensor:
    """Return the sum of the rows of words, each with its own weight."""
    weights = _scrambled(torch.arange(len(table), device=table.device))[:, None] | 1
    at_once = _ROWS_IN_CACHE if table.device.type == "cpu" else _ROWS_ELSEWHERE
    total = table.new_zeros(_ROW)
    for rows, weight in zip(table.split(at_once), weights.split(at_once), strict=True):
        # the product drops upper bits, and 1.0 has no other ones
        total += ((rows ^ (rows >> 32)) * weight).sum(0)
    return total


def _scrambled(numbers: Tensor) -> Tensor:
    """Hash numbers and their positions to 64 bits, as the finalizer of SplitMix64 does (Steele et al. 2014)."""
    mixed = numbers + torch.arange(1, numbers.numel() + 1, device=numbers.device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return mixed ^ (mixed >> 31)


@torch.no_grad()
def first_difference(replica: Replica, topology: Topology) -> str | None:
    """Describe the first parameter that should be equal on ranks of this node and differs; None if there is none.

    Collective over the node: two numbers per parameter travel inside it. Float buffers may differ.
    """
    held: dict[str, list[Tensor]] = {}
    for parameter in replica.parameters:
        share = replica.held.shares.get(id(parameter))
        held.setdefault("node" if share is None else share.held_by, []).append(parameter)
    for held_by in sorted(held):
        group = topology.holders[held_by].group
        if group is None or group.size == 1:
            continue
        prints = torch.stack([print_of(tensor) for tensor in held[held_by]])
        bounds = torch.cat([prints, ~prints])  # ~ reverses the order without overflow: maximum and minimum
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
