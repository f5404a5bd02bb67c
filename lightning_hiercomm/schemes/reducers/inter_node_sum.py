"""Sums over an inter-node process group, with any codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.codec import Codec
from lightning_hiercomm.comm.encoded_sum import EncodedSum, Feedback
from lightning_hiercomm.comm.wide_sum import is_short, wide_sum


class InterNodeSum:
    """Sums parts between nodes: uncompressed or cast by all-reduce, other codecs by an :class:`EncodedSum`.

    An all-reduce rounds a cast sum at every addition. In bfloat16 the error is 0.2 % of the update between two
    synchronizations with 2 nodes, 0.3 % with 8 and 0.8 % with 64. Int8 has 0.6 % with any number (``python -m
    benchmarks.studies.sums``). So cast sums use the faster all-reduce.

    Args:
        codec: The codec.
        first: The inter-node process group of this rank; None on a rank that is in none.
        second: The same ranks by another communicator, for sums that are completed on another thread than launched.
    """

    def __init__(self, codec: Codec, first: Communicator | None, second: Communicator | None = None) -> None:
        self._codec = codec
        self._group, self._second = first, second or first
        self._encoded = None if codec.adds or first is None else EncodedSum(codec, first, second or first)

    def feedback(self, part: Tensor) -> Feedback | None:
        """Return an empty error-feedback residual for a part like this one; None if the codec needs none."""
        return None if self._encoded is None else self._encoded.feedback(part)

    def launch(
        self,
        part: Tensor,
        feedback: Feedback | None = None,
        waiting: bool = False,
        weights: Sequence[float] | None = None,
        keeps_equal: bool = False,
    ) -> Callable[[], None]:
        """Start to sum a part.

        Args:
            part: 1-D. Do not use it before completion.
            feedback: The error-feedback residual of this part.
            waiting: See :meth:`~lightning_hiercomm.comm.base.Communicator.all_reduce`.
            weights: Of the nodes. Unencoded 16-bit values are then summed by :func:`wide_sum`. None: all weights are
                1, and the sum is calculated in the values' own type, as for gradients.
            keeps_equal: Whether the mean of equal values must equal them, so that they are sent unencoded.

        Returns:
            A function that waits, and writes the sum to ``part``.
        """
        if self._group is None or self._second is None:
            return lambda: None
        weight = 1.0 if weights is None else weights[self._group.rank]
        if keeps_equal or not self._codec.narrows(part.dtype):
            if weights is not None and (keeps_equal or is_short(part.dtype)):
                return wide_sum(self._group, self._second, part, weights)
            return self._group.all_reduce(part, waiting=waiting, weight=weight).wait
        if weight != 1.0:
            part.mul_(weight)  # before encoding, which then rounds once
        if self._encoded is not None:
            return self._encoded.launch(part, feedback)
        payload = self._codec.encode(part)
        summed = self._group.all_reduce(payload, waiting=waiting)

        def complete() -> None:
            summed.wait()
            streams.keep_here(payload)  # allocated on the launching stream
            self._codec.decode(payload, part)

        return complete
