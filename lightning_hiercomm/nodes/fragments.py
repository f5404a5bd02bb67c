"""Cuts the parameters of a node, which its ranks may hold in shards, into fragments that are sent in turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from lightning_hiercomm.nodes.bucket import Bucket, ShardSpec, TensorSlice, filled_buckets


class Held:
    """Which ranks of a node hold each tensor.

    Args:
        shares: Specifications of sharded tensors, by the tensor's ``id``. All others are held by the whole node.
    """

    def __init__(self, shares: Mapping[int, ShardSpec]) -> None:
        self.shares = shares

    def by(self, tensor: Tensor) -> str:
        share = self.shares.get(id(tensor))
        return "node" if share is None else share.held_by

    def whole(self, tensor: Tensor) -> int:
        """Return the number of elements of the whole tensor."""
        share = self.shares.get(id(tensor))
        return tensor.numel() if share is None else share.numel

    def grouped(self, tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
        """Group tensors by holders, those of the node first: their buckets have equal indices on all of its ranks."""
        held: dict[str, list[Tensor]] = {}
        for tensor in tensors:
            held.setdefault(self.by(tensor), []).append(tensor)
        return {name: held[name] for name in sorted(held, key=lambda name: (name != "node", name == "rank", name))}


def cut(
    parameters: Sequence[Tensor], names: Mapping[int, str], held: Held, into: int | Sequence[str]
) -> list[list[Bucket]]:
    """Cut parameters into fragments, at the same elements of the whole tensors on every rank.

    Args:
        parameters: Also those with an empty shard on this rank.
        names: Names of parameters, by the tensor's ``id``.
        held: Which ranks hold them.
        into: See :meth:`Replica.cut`.

    Returns:
        The buckets of each fragment.
    """
    if not held.shares:
        parameters = [tensor for tensor in parameters if tensor.numel()]
    if not isinstance(into, int):
        groups = [
            [TensorSlice(tensor, 0, tensor.numel()) for tensor in group] for group in _below(into, parameters, names)
        ]
        return [_buckets_of_part(pieces, held) for pieces in groups if pieces]
    largest = max((parameter.element_size() for parameter in parameters), default=1)
    whole_bytes = sum(held.whole(tensor) * tensor.element_size() for tensor in parameters)
    part_bytes = -int(-(whole_bytes / largest) // into) * largest
    if not held.shares:
        return [[bucket] for bucket in whole_tensors(parameters, part_bytes)]
    # by whole tensors and holders, which are equal on every rank
    parts: list[list[TensorSlice]] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in parameters):
        parts += _runs([t for t in parameters if t.dtype == dtype], held, max(1, part_bytes // dtype.itemsize))
    return [_buckets_of_part(pieces, held) for pieces in parts]


def _runs(tensors: Sequence[Tensor], held: Held, capacity: int) -> list[list[TensorSlice]]:
    """Return slices of tensors of one dtype, in fragments of ``capacity`` elements of the whole tensors."""
    total = sum(map(held.whole, tensors))
    parts: list[list[TensorSlice]] = [[] for _ in range(-(-total // capacity))]
    offset = 0
    for tensor in tensors:
        whole = held.whole(tensor)
        share = held.shares.get(id(tensor)) or ShardSpec("node", whole, start=0)
        if not tensor.is_contiguous():  # never cut
            parts[offset // capacity].append(TensorSlice(tensor, 0, tensor.numel()))
        else:
            for index in range(offset // capacity, -(-(offset + whole) // capacity)):
                first, last = max(index * capacity - offset, 0), min((index + 1) * capacity - offset, whole)
                start, end = share.run(first, last, tensor.numel())
                parts[index].append(TensorSlice(tensor, start, end - start))
        offset += whole
    return parts


def _buckets_of_part(pieces: Sequence[TensorSlice], held: Held) -> list[Bucket]:
    """Return one bucket for each kind of tensor, which may be empty on this rank."""
    buckets = []
    for held_by, tensors in held.grouped([piece.tensor for piece in pieces]).items():
        ids = set(map(id, tensors))
        for dtype, device in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
            whole = [p for p in pieces if id(p.tensor) in ids and p.length]
            own = tuple(p for p in whole if (p.tensor.dtype, p.tensor.device) == (dtype, device))
            buckets.append(Bucket(own, sum(piece.length for piece in own), dtype, device, held_by))
    return buckets


def _below(modules: Sequence[str], parameters: Sequence[Tensor], names: Mapping[int, str]) -> list[list[Tensor]]:
    """Return the parameters of each module, without those of a former one, then all others."""

    def is_below(name: str, module: str) -> bool:
        return name == module or name.startswith(module + ".")

    known = list(names.values())
    for module in modules:
        if not any(is_below(name, module) for name in known):
            raise ValueError(
                f"cannot cut the model into {list(modules)!r}: no parameter is in {module!r}. The parameters"
                f" are {', '.join(known[:20]) or 'not named'}"
            )
    groups: list[list[Tensor]] = [[] for _ in range(len(modules) + 1)]
    for parameter in parameters:
        name = names.get(id(parameter), "")
        index = next((i for i, module in enumerate(modules) if is_below(name, module)), len(modules))
        groups[index].append(parameter)
    return groups


def whole_tensors(
    tensors: Sequence[Tensor],
    bucket_bytes: int,
    held_by: str = "node",
    keeps_equal: bool = False,
) -> list[Bucket]:
    """Fill buckets of at most ``bucket_bytes`` with whole tensors."""
    pieces = [TensorSlice(tensor, 0, tensor.numel()) for tensor in tensors]
    return filled_buckets(pieces, bucket_bytes, held_by, keeps_equal)
