"""A sum over nodes whose payloads do not add: parts are exchanged, decoded, summed in float32, encoded, gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.codec import Codec, arithmetic_dtype

# Chunks of at least so many blocks end where a block ends; aligning shorter ones would unbalance the members' shares.
_BLOCKS_WORTH_ALIGNING = 64


@dataclass(eq=False)
class Feedback:
    """What encoding has kept back of one part so far, to be added the next time (error feedback).

    With it the running mean of what arrives tends to that of what was sent, however coarse the codec. A residue that is
    not finite is dropped: it would never leave.

    References:
        - Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
          Speech DNNs", Interspeech 2014.
        - Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.

    Args:
        sender: Of this member's own values: as many elements as the part.
        reducer: Of the sums that this member makes: as many as its chunk; none where sums are not encoded.
    """

    sender: Tensor
    reducer: Tensor

    def clear(self) -> None:
        """Forget what was kept back."""
        self.sender.zero_()
        self.reducer.zero_()

    def multiply(self, factor: float) -> None:
        """What is summed from now on is so many times as large."""
        streams.keep_here(self.sender, self.reducer)  # perhaps made on the stream of an exchange
        self.sender.mul_(factor)
        self.reducer.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        """Copies of both."""
        streams.keep_here(self.sender, self.reducer)  # perhaps made on the stream of an exchange
        return {"sender": self.sender.clone(), "reducer": self.reducer.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` (of a part of the same length, over as many members).

        Raises:
            ValueError: If the lengths differ.
        """
        for name, own in (("sender", self.sender), ("reducer", self.reducer)):
            if state[name].shape != own.shape:
                raise ValueError(
                    f"the saved {name}'s feedback has {state[name].numel()} elements, this one {own.numel()}:"
                    " it is of another part, or of another number of nodes"
                )
            own.copy_(state[name])


class EncodedSum:
    """Sums a part over the members of a group, with every message encoded.

    Every member cuts its part ``v`` into a chunk per member, and, with ``C`` for encoding and decoding::

        round one    to member j:   C(v_j)              e_j := v_j + e_j - C(v_j + e_j)   with feedback
                     at member j:   s_j = sum_m C(v_j of m)     in float32, in member order
        round two    to everyone:   C(s_j)              likewise, with a feedback of its own

    A member sends ``2 (M - 1) / M`` of the part's payload, as an all-reduce would. Everyone, the member that made it,
    too, takes the sum as it was decoded, so all end with the same bits, whenever what arrives.

    Two members send each other their parts whole: as many bytes in one round, and the sum is not rounded again.

    Args:
        codec: What travels. Also those whose payloads add: in an all-reduce they are rounded at every addition.
        first: Carries round one. The members of the group, in group order.
        second: Carries round two; a communicator of its own if sums are completed on another thread (or, on CUDA,
            stream) than launched, see :meth:`lightning_hiercomm.nodes.topology.Topology.duplicate`.
    """

    def __init__(self, codec: Codec, first: Communicator, second: Communicator) -> None:
        self.codec = codec
        self._first = first
        self._second = second
        self._members = first.size
        self._rank = first.rank

    def feedback(self, part: Tensor) -> Feedback:
        """A feedback that holds nothing yet, for a part like this one; one for every part that is summed repeatedly."""
        reduced = 0 if self._members <= 2 else _length(self._chunks(part.numel())[self._rank])
        dtype = arithmetic_dtype(part.dtype)
        return Feedback(part.new_zeros(part.numel(), dtype=dtype), part.new_zeros(reduced, dtype=dtype))

    @torch.no_grad()
    def launch(self, part: Tensor, feedback: Feedback | None = None) -> Callable[[], None]:
        """Send a part on its way. All members launch their parts, and complete them, in the same order.

        Args:
            part: 1-D and contiguous; as long, and of the same type, on every member. It belongs to the sum until that
                is completed.
            feedback: What was kept back of this part so far.

        Returns:
            A function that waits, and leaves the sum in ``part``. With one member nothing moves, and nothing changes.
        """
        if self._members == 1 or part.numel() == 0:
            return lambda: None
        dtype = arithmetic_dtype(part.dtype)
        values = part if part.dtype == dtype else part.to(dtype)
        if feedback is not None:
            streams.keep_here(feedback.sender)  # training made what was loaded, and a run that breaks off gives it back
        is_whole = self._members == 2
        chunks = [slice(0, part.numel())] if is_whole else self._chunks(part.numel())
        lengths = [self.codec.payload_numel(_length(chunk), part.dtype) for chunk in chunks]
        own = 0 if is_whole else self._rank
        payload_dtype = self.codec.payload_dtype(part.dtype)
        sent = part.new_empty(len(chunks), lengths[0], dtype=payload_dtype)  # no chunk is longer than the first
        received = part.new_empty(self._members - 1, lengths[own], dtype=payload_dtype)
        payloads = [
            row if length == lengths[0] else row[:length] for row, length in zip(sent.unbind(), lengths, strict=True)
        ]
        self._encode(values, chunks, sent, feedback)
        peers = [peer for peer in range(self._members) if peer != self._rank]
        arrived = self._first.exchange(
            [(payloads[0 if is_whole else peer], peer) for peer in peers],
            list(zip(received.unbind(), peers, strict=True)),
        )
        if feedback is None:  # tensors in flight that are only sent may be read
            self.codec.decode(payloads[own], values[chunks[own]])

        @torch.no_grad()
        def complete() -> None:
            arrived.wait()
            kept_back = () if feedback is None else (feedback.reducer,)
            streams.keep_here(sent, values, received, *kept_back)  # made on the stream that launched
            self.codec.add_decoded(received, values[chunks[own]], self._rank)
            if not is_whole:
                self._share(values, chunks, sent, feedback)
            if values is not part:
                part.copy_(values)

        return complete

    def _encode(self, values: Tensor, chunks: Sequence[slice], sent: Tensor, feedback: Feedback | None) -> None:
        """Round one's payloads; with feedback, ``values`` become what these decode to."""
        if feedback is None:
            for chunk, payload in self._rows(values, chunks, sent):
                self.codec.encode(chunk, payload)
            return
        kept_back = self._rows(feedback.sender, chunks, sent)
        for (chunk, payload), (residual, _) in zip(self._rows(values, chunks, sent), kept_back, strict=True):
            self.codec.encode_with_feedback(chunk, residual, payload)

    def _share(self, values: Tensor, chunks: Sequence[slice], sent: Tensor, feedback: Feedback | None) -> None:
        """Round two: gather everyone's sum where the chunks were that were sent, and decode all to ``values``."""
        own = values[chunks[self._rank]]
        payload = sent[self._rank, : self.codec.payload_numel(own.numel(), own.dtype)]
        if feedback is None:
            self.codec.encode(own, payload)
        else:
            self.codec.encode_with_feedback(own, feedback.reducer, payload)
        self._second.all_gather(sent.view(-1), sent[self._rank]).wait()
        for chunk, payload in self._rows(values, chunks, sent):
            self.codec.decode(payload, chunk)

    def _rows(self, flat: Tensor, chunks: Sequence[slice], sent: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The chunks of a tensor with their payloads: all of the first one's length as rows, then a shorter one."""
        length = _length(chunks[0])
        rows = flat.numel() // length
        whole = rows * length
        yield flat[:whole].view(rows, length), sent[:rows]
        if whole < flat.numel():
            rest = flat[whole:]
            yield rest, sent[rows, : self.codec.payload_numel(rest.numel(), rest.dtype)]

    def _chunks(self, numel: int) -> list[slice]:
        """Every member's chunk; none is longer than the first."""
        length = -(-numel // self._members)
        if length >= _BLOCKS_WORTH_ALIGNING * self.codec.block:
            length += -length % self.codec.block
        return [slice(min(j * length, numel), min((j + 1) * length, numel)) for j in range(self._members)]


def _length(chunk: slice) -> int:
    return int(chunk.stop - chunk.start)
