"""Cuts the parameters of a node, which its ranks may hold in shards, into fragments that are sent in turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from lightning_hiercomm.nodes.bucket import Bucket, ShardSpec, TensorSlice, filled_buckets

_UNBOUNDED = 2**62


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


class Fragments:
    """Cuts parameters into fragments, at the same elements of the whole tensors on every rank.

    Args:
        parameters: Also those with an empty shard on this rank.
        names: Names of parameters, by the tensor's ``id``.
        held: Which ranks hold them.
    """

    def __init__(self, parameters: Sequence[Tensor], names: Mapping[int, str], held: Held) -> None:
        self._parameters = parameters if held.shares else [tensor for tensor in parameters if tensor.numel()]
        self._names = names
        self._held = held

    def cut(self, into: int | Sequence[str]) -> list[list[Bucket]]:
        """Return the buckets of each fragment; see :meth:`Replica.cut`."""
        if self._held.shares:
            return self._cut_shares(into)
        if not isinstance(into, int):
            groups = self._below(into)
            return [whole_tensors(tensors, _UNBOUNDED) for tensors in groups if tensors]
        largest = max((parameter.element_size() for parameter in self._parameters), default=1)
        elements = sum(parameter.numel() * parameter.element_size() for parameter in self._parameters) / largest
        part_bytes = -int(-elements // into) * largest
        return [[bucket] for bucket in whole_tensors(self._parameters, part_bytes)]

    def _cut_shares(self, into: int | Sequence[str]) -> list[list[Bucket]]:
        """Cut by whole tensors and holders, which are equal on every rank."""
        if isinstance(into, int):
            largest = max((tensor.element_size() for tensor in self._parameters), default=1)
            whole_bytes = sum(self._held.whole(tensor) * tensor.element_size() for tensor in self._parameters)
            part_bytes = -int(-(whole_bytes / largest) // into) * largest
            parts: list[list[TensorSlice]] = []
            for dtype in dict.fromkeys(tensor.dtype for tensor in self._parameters):
                parts += self._runs(
                    [t for t in self._parameters if t.dtype == dtype], max(1, part_bytes // dtype.itemsize)
                )
        else:
            groups = [group for group in self._below(into) if group]
            parts = [[TensorSlice(tensor, 0, tensor.numel()) for tensor in tensors] for tensors in groups]
        return [self._buckets_of_part(pieces) for pieces in parts]

    def _runs(self, tensors: Sequence[Tensor], capacity: int) -> list[list[TensorSlice]]:
        """Return slices of tensors of one dtype, in fragments of ``capacity`` elements of the whole tensors."""
        total = sum(map(self._held.whole, tensors))
        parts: list[list[TensorSlice]] = [[] for _ in range(-(-total // capacity))]
        offset = 0
        for tensor in tensors:
            whole = self._held.whole(tensor)
            share = self._held.shares.get(id(tensor)) or ShardSpec("node", whole, start=0)
            if not tensor.is_contiguous():  # never cut
                parts[offset // capacity].append(TensorSlice(tensor, 0, tensor.numel()))
            else:
                for index in range(offset // capacity, -(-(offset + whole) // capacity)):
                    first, last = max(index * capacity - offset, 0), min((index + 1) * capacity - offset, whole)
                    start, end = share.run(first, last, tensor.numel())
                    parts[index].append(TensorSlice(tensor, start, end - start))
            offset += whole
        return parts

    def _buckets_of_part(self, pieces: Sequence[TensorSlice]) -> list[Bucket]:
        """Return one bucket for each kind of tensor, which may be empty on this rank."""
        buckets = []
        for held_by, tensors in self._held.grouped([piece.tensor for piece in pieces]).items():
            ids = set(map(id, tensors))
            for dtype, device in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
                held = [p for p in pieces if id(p.tensor) in ids and p.length]
                own = tuple(p for p in held if (p.tensor.dtype, p.tensor.device) == (dtype, device))
                numel = sum(piece.length for piece in own)
                buckets.append(Bucket(own, numel, dtype, device, held_by))
        return buckets

    def _below(self, modules: Sequence[str]) -> list[list[Tensor]]:
        """Return the parameters of each module, without those of a former one, then all others."""

        def is_below(name: str, module: str) -> bool:
            return name == module or name.startswith(module + ".")

        for module in modules:
            known = list(self._names.values())
            if not any(is_below(name, module) for name in known):
                names = ", ".join(known[:20]) or "not named"
                raise ValueError(
                    f"cannot cut the model into {list(modules)!r}: no parameter is in {module!r}. The parameters"
                    f" are {names}"
                )
        groups: list[list[Tensor]] = [[] for _ in range(len(modules) + 1)]
        for parameter in self._parameters:
            name = self._names.get(id(parameter), "")
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
