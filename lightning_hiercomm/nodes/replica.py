"""One optimizer's parameters, seen as flat buckets."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_hiercomm.nodes.bucket import BUCKET_BYTES, Bucket, Piece, Share, filled_buckets
from lightning_hiercomm.nodes.buffers import Buffers, Home

_UNBOUNDED = 2**62
_LATE_FORMAT = (
    "parameters got another memory format (`module.to(memory_format=...)`) after nodes had begun to share them, and got"
    " their own back: set the format before `fit`, or in `configure_model` or `setup`"
)


class Replica:
    """The tensors that agree, of one optimizer on one rank, as flat buckets.

    Every element of every tensor lies in exactly one bucket, whatever the bucket size: tensors larger than a bucket are
    cut, small ones are joined, and dtypes and devices are kept apart. The order is that of the arguments, so it is the
    same on every rank. A tensor given twice (tied weights) counts once.

    Args:
        parameters: What the optimizer trains; identical on the ranks of a node.
        buffers: Float statistics (BatchNorm) that differ on the ranks of a node.
        bucket_bytes: Upper bound of a bucket's size in bytes (at least one element). Non-contiguous tensors
            (``channels_last``) are never cut.
        named: Names of tensors, as ``module.named_parameters()`` gives them; others' names do no harm.
        shares: Of tensors that are parts of others, by the tensor's ``id``. Shares that are held by different ranks lie
            in different buckets; this rank's share may be empty.
        equal_in_node: Whether the ranks of a node hold the same parameters at every step.
        homes: Where those buffers are that layers may assign anew.

    Attributes:
        equal_in_node: As above.
        with_empty: The parameters, also those of which this rank's share is empty; as many on every rank.
        names: The names, by the tensor's ``id``.
        buckets_of_parameters: All parameters.
        buckets_of_buffers: All buffers.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        buffers: Iterable[Tensor] = (),
        bucket_bytes: int = BUCKET_BYTES,
        named: Iterable[tuple[str, Tensor]] = (),
        shares: Mapping[int, Share] | None = None,
        equal_in_node: bool = True,
        homes: Mapping[int, Home] | None = None,
    ) -> None:
        self.equal_in_node = equal_in_node
        self.with_empty = list({id(tensor): tensor for tensor in parameters}.values())
        self.parameters = [tensor for tensor in self.with_empty if tensor.numel()]
        self._buffers = Buffers([*{id(t): t for t in buffers if t.numel()}.values()], homes or {})
        self.shares = shares or {}
        self.bucket_bytes = bucket_bytes
        self.names = {id(tensor): name for name, tensor in named}
        self.buckets_of_parameters = self.in_buckets_of(bucket_bytes)
        self.buckets_of_buffers = _buckets_of_buffers(self.buffers, bucket_bytes)
        # of others there are no memory formats
        self._contiguous = [p for p in self.parameters if p.dim() in (4, 5) and p.is_contiguous()]

    def of_ranks_that_differ(self) -> Replica:
        """The same tensors, where every rank of a node trains parameters of its own."""
        homes = self._buffers.homes
        new = Replica(
            self.with_empty, self.buffers, self.bucket_bytes, (), self.shares, equal_in_node=False, homes=homes
        )
        new.names = self.names  # also of what is not trained now: parts may be named after it
        return new

    def in_buckets_of(self, nbytes: int) -> list[Bucket]:
        """The parameters in buckets of at most so many bytes, those that most ranks of the node hold first."""
        if not self.shares:
            return _buckets(self.parameters, nbytes, self.equal_in_node)
        return [
            bucket
            for held_by, tensors in self._by_holders(self.parameters).items()
            for bucket in _buckets(tensors, nbytes, self.equal_in_node, held_by=held_by)
        ]

    @property
    def buckets(self) -> list[Bucket]:
        """Those of parameters, then those of buffers."""
        return self.buckets_of_parameters + self.buckets_of_buffers

    @property
    def buffers(self) -> list[Tensor]:
        """Float statistics, as found last."""
        return self._buffers.tensors

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters, then buffers."""
        return self.parameters + self.buffers

    @property
    def device(self) -> torch.device:
        """Where the (first) tensors live; the CPU if there are none."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of the parameters, the same on every rank, whichever of them it holds."""
        return {tensor.dtype for tensor in self.with_empty}

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def whole_bytes(self) -> int:
        """Bytes of all parameters, whole, whichever rank of the node holds them."""
        return sum(self._whole(tensor) * tensor.element_size() for tensor in self.with_empty)

    def find_buffers(self) -> None:
        """Hold what layers have assigned anew in place of what they held before, and parameters as they lay before.

        They are cut into pieces that are views only of what is contiguous.
        """
        for parameter in self._contiguous:
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
                warnings.warn(_LATE_FORMAT, stacklevel=2)
        before = self.buffers
        if self._buffers.find():
            self._hold_present_buffers(before)

    def _hold_present_buffers(self, before: Sequence[Tensor]) -> None:
        names = [self.names.pop(id(buffer), None) for buffer in before]
        self.names |= {id(buffer): name for buffer, name in zip(self.buffers, names, strict=True) if name is not None}
        replaced = {id(b) for b, is_replaced in zip(self.buffers, self._buffers.replaced, strict=True) if is_replaced}
        # whoever averages these buckets knows them, and has more that is theirs
        fresh = _buckets_of_buffers(self.buffers, self.bucket_bytes)
        for bucket, of_present in zip(self.buckets_of_buffers, fresh, strict=True):
            bucket.pieces = of_present.pieces
            bucket.is_outdated = any(id(piece.tensor) in replaced for piece in bucket.pieces)

    @property
    def replaced_buffers(self) -> list[int]:
        """Places, among :attr:`buffers`, of those whose layers now hold another shape, dtype or device."""
        return [place for place, is_replaced in enumerate(self._buffers.replaced) if is_replaced]

    def give_up_buffers(self, places: Collection[int]) -> None:
        """Leave some buffers to their layers from now on; every rank must give up the same ones.

        Zeros take their place, so that buckets keep their sizes.
        """
        before = self.buffers
        self._buffers.give_up(places)
        self._hold_present_buffers(before)

    def undo_point(self) -> Callable[[], None]:
        """Remember all values, and which buffers are averaged; what is returned restores both."""
        values, undo_buffers = self.snapshot(), self._buffers.undo_point()

        def undo() -> None:
            before = self.buffers
            undo_buffers()
            self._hold_present_buffers(before)
            self.restore(values)

        return undo

    @torch.no_grad()
    def snapshot(self) -> list[Tensor]:
        """A copy of every tensor."""
        return [tensor.detach().clone() for tensor in self.tensors]

    @torch.no_grad()
    def restore(self, snapshot: Sequence[Tensor]) -> None:
        """Put back what :meth:`snapshot` returned."""
        for tensor, values in zip(self.tensors, snapshot, strict=True):
            tensor.copy_(values)

    @torch.no_grad()
    def cut(self, into: int | Sequence[str], bucket_bytes: int | None = None) -> list[list[Bucket]]:
        """The parameters in parts that may agree at different times, or with different nodes.

        Shares are cut where the whole tensors would be, so that a part is the same whoever holds how much of it; this
        rank's share of a part may then be empty. A part has one bucket for each group of holders.

        Args:
            into: A number of equal parts (never more than elements; one more per further dtype), or names of modules:
                the parameters below each are one part, all others the last one.
            bucket_bytes: Upper bound of a bucket's size in bytes. None: every part is one bucket (per dtype).

        Returns:
            The buckets of every part, in an order that is the same on every rank.

        Raises:
            ValueError: If no parameter lies below one of the modules.
        """
        if self.shares:
            parts = self._cut_shares(into)
        elif isinstance(into, int):
            largest = max((parameter.element_size() for parameter in self.parameters), default=1)
            elements = sum(parameter.numel() * parameter.element_size() for parameter in self.parameters) / largest
            part_bytes = -int(-elements // into) * largest
            parts = [[bucket] for bucket in _buckets(self.parameters, part_bytes, self.equal_in_node)]
        else:
            groups = self._below(into)
            parts = [_buckets(tensors, _UNBOUNDED, self.equal_in_node) for tensors in groups if tensors]
        if bucket_bytes is None:
            return parts
        return [[smaller for bucket in part for smaller in bucket.cut(bucket_bytes)] for part in parts]

    def _cut_shares(self, into: int | Sequence[str]) -> list[list[Bucket]]:
        """As :meth:`cut`; all that decides is the same on every rank: the whole tensors, and who holds shares."""
        if isinstance(into, int):
            largest = max((tensor.element_size() for tensor in self.with_empty), default=1)
            part_bytes = -int(-(self.whole_bytes / largest) // into) * largest
            parts: list[list[Piece]] = []
            for dtype in dict.fromkeys(tensor.dtype for tensor in self.with_empty):
                parts += self._runs(
                    [t for t in self.with_empty if t.dtype == dtype], max(1, part_bytes // dtype.itemsize)
                )
        else:
            groups = [group for group in self._below(into) if group]
            parts = [[Piece(tensor, 0, tensor.numel()) for tensor in tensors] for tensors in groups]
        return [self._buckets_of_part(pieces) for pieces in parts]

    def _runs(self, tensors: Sequence[Tensor], capacity: int) -> list[list[Piece]]:
        """Pieces of tensors of one dtype, in parts that would hold ``capacity`` elements of the whole tensors each."""
        total = sum(map(self._whole, tensors))
        parts: list[list[Piece]] = [[] for _ in range(-(-total // capacity))]
        offset = 0
        for tensor in tensors:
            whole = self._whole(tensor)
            share = self.shares.get(id(tensor)) or Share("node", whole, start=0)
            if not tensor.is_contiguous():  # never cut
                parts[offset // capacity].append(Piece(tensor, 0, tensor.numel()))
            else:
                for index in range(offset // capacity, -(-(offset + whole) // capacity)):
                    first, last = max(index * capacity - offset, 0), min((index + 1) * capacity - offset, whole)
                    start, end = share.run(first, last, tensor.numel())
                    parts[index].append(Piece(tensor, start, end - start))
            offset += whole
        return parts

    def _buckets_of_part(self, pieces: Sequence[Piece]) -> list[Bucket]:
        """One bucket for every kind of tensor of which somebody has pieces here, be it an empty one on this rank."""
        buckets = []
        for held_by, tensors in self._by_holders([piece.tensor for piece in pieces]).items():
            ids = set(map(id, tensors))
            for dtype, device in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
                held = [p for p in pieces if id(p.tensor) in ids and p.length]
                own = tuple(p for p in held if (p.tensor.dtype, p.tensor.device) == (dtype, device))
                numel = sum(piece.length for piece in own)
                buckets.append(Bucket(own, numel, dtype, device, self.equal_in_node, held_by))
        return buckets

    def _by_holders(self, tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
        """Tensors by who holds them: what the node holds first, what this rank holds alone last.

        The former's buckets have then the same place on every rank of the node, however large the latter are.
        """
        held: dict[str, list[Tensor]] = {}
        for tensor in tensors:
            held.setdefault(self._held_by(tensor), []).append(tensor)
        return {name: held[name] for name in sorted(held, key=lambda name: (name != "node", name == "rank", name))}

    def _held_by(self, tensor: Tensor) -> str:
        share = self.shares.get(id(tensor))
        return "node" if share is None else share.held_by

    def _whole(self, tensor: Tensor) -> int:
        share = self.shares.get(id(tensor))
        return tensor.numel() if share is None else share.numel

    def _below(self, modules: Sequence[str]) -> list[list[Tensor]]:
        """The parameters below each module, each parameter at the first that it lies below; then all others."""

        def is_below(name: str, module: str) -> bool:
            return name == module or name.startswith(module + ".")

        for module in modules:
            of_buffers = set(map(id, self.buffers))
            known = [name for tensor, name in self.names.items() if tensor not in of_buffers]
            if not any(is_below(name, module) for name in known):
                names = ", ".join(known[:20]) or "not named"
                raise ValueError(
                    f"cannot cut the model into {list(modules)!r}: no parameter lies below {module!r}. The parameters"
                    f" are {names}"
                )
        groups: list[list[Tensor]] = [[] for _ in range(len(modules) + 1)]
        for parameter in self.with_empty if self.shares else self.parameters:
            name = self.names.get(id(parameter), "")
            index = next((i for i, module in enumerate(modules) if is_below(name, module)), len(modules))
            groups[index].append(parameter)
        return groups

    @property
    def layout(self) -> list[str]:
        """A line for every tensor, from which the buckets follow; equal on ranks that exchange them."""
        tensors = [*self.with_empty, *self.buffers]
        names = [self.names.get(id(tensor), f"number {place}") for place, tensor in enumerate(tensors)]
        return [
            f"{name} ({self._whole(tensor)} x {str(tensor.dtype).removeprefix('torch.')}, {self._held_by(tensor)})"
            for name, tensor in zip(names, tensors, strict=True)
        ]

    def fingerprint(self) -> int:
        """64 bits that differ, almost surely, between replicas that differ in any bit."""
        digest = hashlib.blake2b(digest_size=8)
        for bucket in self.buckets:
            digest.update(bucket.pack().cpu().view(torch.uint8).numpy().tobytes())
        return int.from_bytes(digest.digest(), "little", signed=True)


def _buckets_of_buffers(buffers: Sequence[Tensor], bucket_bytes: int) -> list[Bucket]:
    """Statistics differ in a node; a counter, a flag or a table among them does not, anywhere, and is to stay so."""
    return _buckets(buffers, bucket_bytes, equal_in_node=False, keeps_equal=True)


def _buckets(
    tensors: Sequence[Tensor],
    bucket_bytes: int,
    equal_in_node: bool,
    held_by: str = "node",
    keeps_equal: bool = False,
) -> list[Bucket]:
    pieces = [Piece(tensor, 0, tensor.numel()) for tensor in tensors]
    return list(filled_buckets(pieces, bucket_bytes, equal_in_node, held_by, keeps_equal))
