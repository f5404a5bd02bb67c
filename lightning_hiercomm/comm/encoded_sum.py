"""Sums over nodes with codecs whose payloads cannot be added: decoded, summed in float32, and encoded again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.codec import Codec, arithmetic_dtype

# Chunks of at least so many blocks are aligned to blocks; aligning shorter ones would unbalance the members.
_BLOCKS_WORTH_ALIGNING = 64


@dataclass(eq=False)
class Feedback:
    """The error-feedback residuals of one tensor: encoding errors, which are added to the next values.

    With them the running mean of decoded values tends to that of the encoded values, for any codec. Non-finite
    residuals are dropped, because they would stay forever.

    References:
        - Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
          Speech DNNs", Interspeech 2014.
        - Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.

    Args:
        sender: Residual of this member's own values.
        reducer: Residual of the chunk that this member sums; empty if sums are not encoded.
    """

    sender: Tensor
    reducer: Tensor

    def multiply(self, factor: float) -> None:
        """Scale the residuals, because later values are scaled by the same factor."""
        streams.keep_here(self.sender, self.reducer)
        self.sender.mul_(factor)
        self.reducer.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        streams.keep_here(self.sender, self.reducer)
        return {"sender": self.sender.clone(), "reducer": self.reducer.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` of a tensor of the same length, summed over as many members.

        Raises:
            ValueError: If the lengths differ.
        """
        for name, own in (("sender", self.sender), ("reducer", self.reducer)):
            if state[name].shape != own.shape:
                raise ValueError(
                    f"the saved {name} feedback has {state[name].numel()} elements, and this run's {own.numel()}:"
                    " resume with the same model and the same number of nodes"
                )
            own.copy_(state[name])


class EncodedSum:
    """Sums tensors over the members of a group, with encoded messages.

    Every member cuts its tensor ``v`` into a chunk per member. With ``C`` for encoding and decoding::

        round one    to member j:   C(v_j)              e_j := v_j + e_j - C(v_j + e_j)   with error feedback
                     at member j:   s_j = sum_m C(v_j of m)     in float32, in member order
        round two    to all:        C(s_j)              likewise, with a residual of its own

    A member sends ``2 (M - 1) / M`` of the payload, as in an all-reduce. All members, also the one that encoded it, use
    the decoded sum, so all end with the same bits.

    Two members send each other their whole tensors: as many bytes, in one round, and the sum is not rounded again.

    Args:
        codec: The codec; also one whose payloads can be added, which an all-reduce rounds at every addition.
        first: The group, for round one.
        second: The same members, for round two; a duplicate if sums are completed on another thread or stream than
            launched, see :meth:`lightning_hiercomm.nodes.topology.Topology.duplicate`.
    """

    def __init__(self, codec: Codec, first: Communicator, second: Communicator) -> None:
        self.codec = codec
        self._first = first
        self._second = second
        self._members = first.size
        self._rank = first.rank

    def feedback(self, part: Tensor) -> Feedback:
        """Return zero residuals for a tensor like this one; each repeatedly summed tensor has its own."""
        reduced = 0 if self._members <= 2 else _length(self._chunks(part.numel())[self._rank])
        dtype = arithmetic_dtype(part.dtype)
        return Feedback(part.new_zeros(part.numel(), dtype=dtype), part.new_zeros(reduced, dtype=dtype))

    @torch.no_grad()
    def launch(self, part: Tensor, feedback: Feedback | None = None) -> Callable[[], None]:
        """Start to sum a 1-D tensor, with its residuals; return a function that waits, and writes the sum to it.

        All members launch, and complete, their sums in the same order. Do not use the tensor before completion.
        """
        if self._members == 1 or part.numel() == 0:
            return lambda: None
        dtype = arithmetic_dtype(part.dtype)
        values = part if part.dtype == dtype else part.to(dtype)
        sender, reducer = (None, None) if feedback is None else (feedback.sender, feedback.reducer)
        if sender is not None:
            streams.keep_here(sender)  # allocated on the stream of training, and freed by an aborted run
        is_whole = self._members == 2
        chunks = [slice(0, part.numel())] if is_whole else self._chunks(part.numel())
        chunk = _length(chunks[0])  # no chunk is longer
        lengths = [self.codec.payload_numel(_length(chunk), part.dtype) for chunk in chunks]
        own = 0 if is_whole else self._rank
        payload_dtype = self.codec.payload_dtype(part.dtype)
        sent = part.new_empty(len(chunks), lengths[0], dtype=payload_dtype)
        received = part.new_empty(self._members - 1, lengths[own], dtype=payload_dtype)
        payloads = [row[:length] for row, length in zip(sent.unbind(), lengths, strict=True)]
        self.codec.encode(values, sent, chunk, sender)
        peers = [peer for peer in range(self._members) if peer != self._rank]
        arrived = self._first.exchange(
            [(payloads[0 if is_whole else peer], peer) for peer in peers],
            list(zip(received.unbind(), peers, strict=True)),
        )
        if sender is None:  # sent tensors may be read while they are in flight
            self.codec.decode(payloads[own], values[chunks[own]])

        @torch.no_grad()
        def complete() -> None:
            arrived.wait()
            # allocated on the launching stream
            streams.keep_here(sent, values, received, *([] if reducer is None else [reducer]))
            if is_whole:
                self.codec.add_decoded(received, values, self._rank)
            else:  # round two, in the memory of the sent chunks
                self.codec.add_and_encode(received, values[chunks[own]], self._rank, payloads[own], reducer)
                self._second.all_gather(sent.view(-1), sent[own]).wait()
                self.codec.decode(sent, values, chunk)
            if values is not part:
                part.copy_(values)

        return complete

    def _chunks(self, numel: int) -> list[slice]:
        length = -(-numel // self._members)
        if length >= _BLOCKS_WORTH_ALIGNING * self.codec.block:
            length += -length % self.codec.block
        return [slice(min(j * length, numel), min((j + 1) * length, numel)) for j in range(self._members)]


def _length(chunk: slice) -> int:
    return int(chunk.stop - chunk.start)
