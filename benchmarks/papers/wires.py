"""Means over the nodes of many runs at once, as they are after a codec has encoded what travels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lightning_hiercomm.comm.codec import AsIs, Cast, Codec
from lightning_hiercomm.comm.wire import codec_named

_BLOCKS_WORTH_ALIGNING = 64  # as in lightning_hiercomm.comm.encoded_sum


def decoded(values: Tensor, codec: Codec, chunks: int = 1) -> Tensor:
    """Encode and decode the last dimension, cut into chunks as :class:`~lightning_hiercomm.comm.encoded_sum.EncodedSum`
    cuts a tensor into one chunk per member.

    Args:
        values: Any shape; every row is encoded by itself.
        codec: Encodes the values.
        chunks: Number of chunks; a block of the codec never crosses from one to the next.
    """
    numel = values.shape[-1]
    length = -(-numel // chunks)
    if length >= _BLOCKS_WORTH_ALIGNING * codec.block:
        length += -length % codec.block
    padded = length + -length % codec.block  # a block of zeros and values has the scale of the values alone
    rows = functional.pad(values, (0, chunks * length - numel)).unflatten(-1, (chunks, length))
    rows = functional.pad(rows, (0, padded - length))
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    codec.decode(codec.encode(rows.flatten()), result.view(-1))
    return result[..., :length].flatten(-2)[..., :numel]


class NodeMean:
    """The mean over nodes that each send their values through a codec.

    Codecs whose payloads add (bfloat16) are rounded at every addition, as an all-reduce does. Others are summed as
    :class:`~lightning_hiercomm.comm.encoded_sum.EncodedSum` does it: with error feedback of the values that a node
    sends and, with more than two nodes, of the sums that a node returns.

    Args:
        codec: Encodes what travels.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._sender: Tensor | None = None
        self._reducer: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """The mean of runs x nodes x elements: runs x 1 x elements."""
        nodes, codec = values.shape[1], self._codec
        if not codec.narrows(values.dtype):
            return values.mean(1, keepdim=True)
        parts = values / nodes
        if codec.adds:
            payloads = parts.to(codec.payload_dtype(values.dtype)).unbind(1)
            total = payloads[0].clone()
            for payload in payloads[1:]:
                total += payload
            return total.to(values.dtype).unsqueeze(1)
        self._sender, sent = self._encoded(self._sender, parts, nodes if nodes > 2 else 1)
        total = sent.sum(1, keepdim=True)
        if nodes > 2:
            self._reducer, total = self._encoded(self._reducer, total, nodes)
        return total

    def _encoded(self, residual: Tensor | None, values: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
        """The new residual, and the decoded values."""
        wanted = values.clone() if residual is None else residual.add_(values)
        sent = decoded(wanted, self._codec, chunks)
        return wanted.sub_(sent).nan_to_num_(0.0, 0.0, 0.0), sent


class ParameterMean:
    """The mean of the nodes' parameters; the differences from the last mean travel.

    Args:
        codec: Encodes the differences. Without a narrower type the parameters themselves are averaged.
        initial: Runs x nodes x parameters, equal on all nodes.
    """

    def __init__(self, codec: Codec, initial: Tensor) -> None:
        self._mean = NodeMean(codec)
        self._last = initial[:, :1].clone() if codec.narrows(initial.dtype) else None

    def __call__(self, weights: Tensor) -> Tensor:
        """The mean over the nodes: runs x 1 x parameters."""
        if self._last is None:
            return self._mean(weights)
        self._last = self._last + self._mean(weights - self._last)
        return self._last


class StateMean:
    """The mean of a tensor of the nodes' optimizers, as
    :class:`~lightning_hiercomm.schemes.optimizer_average.OptimizerStateMean` takes it.

    Args:
        codec: Encodes the differences from the last mean; the first one is taken of the tensors as they are.
        of_squares: No element is negative: roots travel, and none falls below half of the last one.
    """

    def __init__(self, codec: Codec, of_squares: bool) -> None:
        self._codec, self._mean, self._of_squares = codec, NodeMean(codec), of_squares
        self._last: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Return the mean over the nodes: runs x 1 x parameters."""
        is_first = self._last is None
        if is_first or not self._codec.narrows(values.dtype):
            mean = values.mean(1, keepdim=True)
            self._last = mean.sqrt() if self._of_squares else mean
            return mean
        assert self._last is not None
        sent = values.sqrt() if self._of_squares else values
        mean = self._last + self._mean(sent - self._last)
        self._last = torch.maximum(mean, self._last / 2) if self._of_squares else mean
        return self._last.square() if self._of_squares else self._last


def wire_named(name: str | None) -> Codec:
    """The codec of a ``wire_dtype``; float32 travels as it is."""
    codec = codec_named(name)
    return AsIs() if isinstance(codec, Cast) and codec.dtype == torch.float32 else codec
