"""What moves cost in bytes, by the textbook: the meter counts with it, and planning predicts with it.

Every function gives the bytes that one member of a group of ``members`` puts on the wire; ``whole`` is the size in
bytes of the tensor that all members end up with, or began with.
"""

from __future__ import annotations


def all_reduce(members: int, whole: float) -> float:
    """Return the cost of a ring all-reduce: ``2 (n - 1) / n`` of the tensor."""
    return 2 * (members - 1) / members * whole


def reduce_scatter(members: int, whole: float) -> float:
    """Half an all-reduce: ``(n - 1) / n``."""
    return (members - 1) / members * whole


def all_gather(members: int, whole: float) -> float:
    """The other half: ``(n - 1) / n``."""
    return (members - 1) / members * whole


def broadcast(members: int, whole: float) -> float:
    """Return the cost of a broadcast: the source sends the tensor once; other ranks count nothing."""
    return whole if members > 1 else 0.0


def exchange(members: int, whole: float) -> float:
    """What goes to one other member goes once."""
    return whole if members > 1 else 0.0
