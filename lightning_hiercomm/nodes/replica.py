"""The parameters and buffers of one optimizer, as flat buckets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_hiercomm.nodes.bucket import BUCKET_BYTES, Bucket, ShardSpec
from lightning_hiercomm.nodes.buffers import Buffers, Home
from lightning_hiercomm.nodes.fragments import Held, cut, whole_tensors

_LATE_FORMAT = (
    "`module.to(memory_format=...)` changed parameters after training had begun, and was undone: set the memory format"
    " before `fit`, or in `configure_model` or `setup`"
)


class Replica:
    """The synchronized tensors of one optimizer on one rank, as flat buckets.

    Every element is in exactly one bucket: large tensors are cut, small ones are joined, and dtypes and devices are
    separate. Buckets have the order of the arguments. A tensor given twice (tied weights) counts once.

    Args:
        parameters: Of the optimizer; identical on the ranks of a node.
        buffers: Float statistics (BatchNorm) that differ on the ranks of a node.
        bucket_bytes: Upper bound of a bucket's size. Non-contiguous tensors (``channels_last``) are never cut.
        named: Names of tensors, as ``module.named_parameters()`` gives them.
        shares: Specifications of sharded tensors, by the tensor's ``id``. This rank's shard may be empty.
        homes: Where buffers are registered that layers may replace.

    Attributes:
        held: Which ranks of the node hold each tensor.
        with_empty: The parameters, also those with an empty shard on this rank.
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
        shares: Mapping[int, ShardSpec] | None = None,
        homes: Mapping[int, Home] | None = None,
    ) -> None:
        self.with_empty = list({id(tensor): tensor for tensor in parameters}.values())
        self.parameters = [tensor for tensor in self.with_empty if tensor.numel()]
        self._buffers = Buffers([*{id(t): t for t in buffers if t.numel()}.values()], homes or {})
        self.held = Held(shares or {})
        self.bucket_bytes = bucket_bytes
        self.names = {id(tensor): name for name, tensor in named}
        # first those that all ranks of the node hold
        self.buckets_of_parameters = [
            bucket
            for held_by, tensors in self.held.grouped(self.parameters).items()
            for bucket in whole_tensors(tensors, bucket_bytes, held_by)
        ]
        self.buckets_of_buffers = _buckets_of_buffers(self.buffers, bucket_bytes)
        # only these have memory formats
        self._contiguous = [p for p in self.parameters if p.dim() in (4, 5) and p.is_contiguous()]

    @property
    def buckets(self) -> list[Bucket]:
        return self.buckets_of_parameters + self.buckets_of_buffers

    @property
    def buffers(self) -> list[Tensor]:
        """Float statistics, as of the last :meth:`find_buffers`."""
        return self._buffers.tensors

    @property
    def tensors(self) -> list[Tensor]:
        return self.parameters + self.buffers

    @property
    def device(self) -> torch.device:
        """Device of the first tensor; the CPU if there is none."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {tensor.dtype for tensor in self.with_empty}

    @property
    def numel(self) -> int:
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def whole_bytes(self) -> int:
        """Bytes of all whole parameters of the node."""
        return sum(self.held.whole(tensor) * tensor.element_size() for tensor in self.with_empty)

    def find_buffers(self) -> None:
        """Find replaced buffers, and restore the memory format of contiguous parameters.

        Raises:
            ValueError: If a buffer has another shape, dtype or device than before.
        """
        for parameter in self._contiguous:
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
                warnings.warn(_LATE_FORMAT, stacklevel=2)
        before = self.buffers
        if not self._buffers.find():
            return
        names = [self.names.pop(id(buffer), None) for buffer in before]
        self.names |= {id(buffer): name for buffer, name in zip(self.buffers, names, strict=True) if name is not None}
        # the same bucket objects: reducers hold them
        fresh = _buckets_of_buffers(self.buffers, self.bucket_bytes)
        for bucket, of_present in zip(self.buckets_of_buffers, fresh, strict=True):
            bucket.slices = of_present.slices

    def undo_point(self) -> Callable[[], None]:
        """Return a callback that restores all values."""
        return partial(self.restore, self.snapshot())

    @torch.no_grad()
    def snapshot(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.tensors]

    @torch.no_grad()
    def restore(self, snapshot: Sequence[Tensor]) -> None:
        """Restore a :meth:`snapshot`."""
        for tensor, values in zip(self.tensors, snapshot, strict=True):
            tensor.copy_(values)

    @torch.no_grad()
    def cut(self, into: int | Sequence[str], bucket_bytes: int | None = None) -> list[list[Bucket]]:
        """Return the buckets of each fragment, in the same order on every rank.

        Shards are cut where the whole tensors would be, so a bucket may be empty on this rank.

        Args:
            into: A number of equal fragments (one more per further dtype), or names of modules: the parameters of each
                are a fragment, all others the last one.
            bucket_bytes: Upper bound of a bucket's size. None: every fragment is one bucket per dtype and holders.

        Raises:
            ValueError: If a module has no parameters.
        """
        of_buffers = set(map(id, self.buffers))
        names = {tensor: name for tensor, name in self.names.items() if tensor not in of_buffers}
        parts = cut(self.with_empty, names, self.held, into)
        if bucket_bytes is None:
            return parts
        return [[smaller for bucket in part for smaller in bucket.cut(bucket_bytes)] for part in parts]

    @property
    def layout(self) -> list[str]:
        """Describe every tensor in a line; equal layouts have equal buckets."""
        tensors = [*self.with_empty, *self.buffers]
        names = [self.names.get(id(tensor), f"number {place}") for place, tensor in enumerate(tensors)]
        return [
            f"{name} ({self.held.whole(tensor)} x {str(tensor.dtype).removeprefix('torch.')}, {self.held.by(tensor)})"
            for name, tensor in zip(names, tensors, strict=True)
        ]


def _buckets_of_buffers(buffers: Sequence[Tensor], bucket_bytes: int) -> list[Bucket]:
    """Return buckets whose equal values, such as counters and tables, stay equal to the bit."""
    return whole_tensors(buffers, bucket_bytes, keeps_equal=True)
