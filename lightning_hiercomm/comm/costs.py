"""Bytes that one member of a group sends in a collective, by the textbook; used by the meter and by predictions.

``members`` is the size of the group; ``whole`` is the size in bytes of the largest tensor of a member.
"""

from __future__ import annotations


def all_reduce(members: int, whole: float) -> float:
    """Return the cost of a ring all-reduce: ``2 (n - 1) / n`` of the tensor."""
    return 2 * (members - 1) / members * whole


def reduce_scatter(members: int, whole: float) -> float:
    """Return the cost of a reduce-scatter: ``(n - 1) / n``."""
    return (members - 1) / members * whole


def all_gather(members: int, whole: float) -> float:
    """Return the cost of an all-gather: ``(n - 1) / n``."""
    return (members - 1) / members * whole


def broadcast(members: int, whole: float) -> float:
    """Return the cost of a broadcast: the source sends the tensor once; other ranks count nothing."""
    return whole if members > 1 else 0.0


def exchange(members: int, whole: float) -> float:
    """Return the cost of a message to one other member."""
    return whole if members > 1 else 0.0
