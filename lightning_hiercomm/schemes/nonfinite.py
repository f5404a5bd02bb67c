"""Detection of values that are NaN, infinite, or too large to be sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lightning_hiercomm.comm.codec import Codec
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology

Unfit = tuple[str | None, str | None]
"""The first tensor of a rank that is non-finite, and the first that is too large for the wire, if there are any."""

_ADVICE = "Lower the learning rate, clip gradients, or look for the batch with Trainer(detect_anomaly=True)."
_WIDER = "Use a wider wire_dtype, such as 'bfloat16', or leave wire_dtype out."


class NonfiniteError(RuntimeError):
    """Parameters or gradients are NaN, infinite, or too large to be sent."""

    @classmethod
    def of(cls, found: Mapping[int, Unfit], topology: Topology, step: int, codec: Codec) -> NonfiniteError:
        """Return the error that names ranks and tensors.

        Args:
            found: The unfit tensors, by rank.
            topology: All ranks.
            step: Optimizer steps so far.
            codec: Encodes the tensors between nodes.
        """
        node_of = {rank: node for node, ranks in enumerate(topology.nodes) for rank in ranks}

        def listed(which: int) -> str:
            of_ranks = {rank: unfit[which] for rank, unfit in found.items() if unfit[which]}
            return "; ".join([f"rank {rank} (node {node_of[rank]}): {what}" for rank, what in of_ranks.items()][:8])

        when = f"after {step} optimizer steps"
        if nonfinite := listed(0):
            return cls(f"{when} these are NaN or infinite: {nonfinite}. {_ADVICE}")
        if too_large := listed(1):
            return cls(f"{when} these are too large for {codec}: {too_large}. {_WIDER}")
        return cls(f"{when} some values were NaN, infinite or too large for {codec} when they were sent. {_ADVICE}")


@torch.no_grad()
def is_unfit(tensors: Iterable[Tensor], largest: float = math.inf) -> Tensor:
    """Return an int64 scalar: 1 if an element is not finite, or larger than ``largest``; otherwise 0.

    It reads every tensor once, and does not wait for the device.
    """
    bounds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            bounds.setdefault(real.dtype, []).extend(real.aminmax())
    if not bounds:
        return torch.zeros((), dtype=torch.int64)
    found = [~(torch.stack(each).abs() <= min(largest, torch.finfo(dtype).max)).all() for dtype, each in bounds.items()]
    return torch.stack(found).any().to(torch.int64)  # a NaN is not less than anything


def values_of(buckets: Iterable[Bucket]) -> Iterator[Tensor]:
    """Iterate over all values of some buckets, without a copy where a bucket holds a whole tensor."""
    for bucket in buckets:
        for piece in bucket.slices:
            tensor = piece.tensor.detach()
            yield tensor if piece.covers_tensor() else tensor.view(-1)[piece.start :][: piece.length]


def find_unfit(replica: Replica, largest: Mapping[int, float], gradients: bool = False) -> Unfit:
    """Describe a replica's first non-finite tensor (or gradient), and the first that is too large.

    Args:
        replica: The tensors.
        largest: The largest absolute values that can be sent, by the tensor's ``id``; no limit for others.
        gradients: Whether to check the tensors' gradients.
    """
    return _describe(replica, {}, gradients), _describe(replica, largest, gradients)


def _describe(replica: Replica, largest: Mapping[int, float], gradients: bool) -> str | None:
    for index, tensor in enumerate(replica.tensors):
        checked = tensor.grad if gradients else tensor.detach()
        if checked is None:
            continue
        fits = checked.isfinite() & (checked.abs() <= largest.get(id(tensor), math.inf))
        bad = int(checked.numel() - fits.sum().item())
        if bad:
            kind = "parameter" if index < len(replica.parameters) else "buffer"
            name = replica.names.get(id(tensor), f"number {index} of shape {tuple(tensor.shape)}")
            whose = "the gradient of " if gradients else ""
            return f"{whose}{kind} {name} ({bad} of {checked.numel()} elements)"
    return None
