"""Codecs: how tensors are encoded between nodes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor


class Codec(ABC):
    """Base class of codecs: immutable configurations without tensors, equal on sender and receiver.

    A payload decodes to the same bits on every rank and device. So a sender that decodes its own payload has exactly
    the values of every receiver.

    With ``chunk``, methods cut a 1-D tensor into chunks of so many elements, which are encoded separately. Every chunk
    has a row of the payload, also the last one, which may be shorter.
    """

    adds: ClassVar[bool]
    """Whether an all-reduce may sum payloads without decoding them."""

    needs_feedback: ClassVar[bool] = False
    """Whether the codec drops most values, so that it requires an error-feedback residual."""

    block: int = 1
    """Elements that are encoded together. Tensors that are cut at multiples of it decode to the same values."""

    @property
    def largest(self) -> float:
        """The largest absolute value that is safe: payloads, and their weighted means, decode to finite values."""
        return math.inf

    @abstractmethod
    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of the payload of values of ``dtype``."""

    def narrows(self, dtype: torch.dtype) -> bool:
        """Whether tensors of ``dtype`` are encoded."""
        return self.payload_dtype(dtype) != dtype

    def payload_numel(self, numel: int, dtype: torch.dtype) -> int:
        """Return the number of elements of the payload of ``numel`` values of ``dtype``."""
        return numel

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of the payload of ``numel`` values of ``dtype``."""
        return self.payload_numel(numel, dtype) * self.payload_dtype(dtype).itemsize

    def encode(
        self,
        values: Tensor,
        payload: Tensor | None = None,
        chunk: int | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Encode ``values``, or with error feedback ``residual + values``.

        Args:
            values: 1-D, or rows that are encoded separately; contiguous, of any floating type. Not changed without a
                residual. With one they are in :func:`arithmetic_dtype`, and replaced by the decoded payload.
            payload: The output: as many rows of :meth:`payload_numel` elements of :meth:`payload_dtype`, contiguous.
                None: a new tensor, or ``values`` itself if its type is not encoded.
            chunk: The length of chunks. None: values are not cut.
            residual: The error of the previous payload, of the same shape and type as the values. Replaced by the error
                of this one; non-finite elements become zero.

        Returns:
            The payload.
        """
        if payload is None:
            if not self.narrows(values.dtype):
                return values
            *rows, numel = values.shape
            length, dtype = self.payload_numel(numel, values.dtype), self.payload_dtype(values.dtype)
            payload = values.new_empty(*rows, length, dtype=dtype)
        self._encode_rows(values, payload, chunk, residual)
        return payload

    def decode(self, payload: Tensor, out: Tensor, chunk: int | None = None) -> Tensor:
        """Decode ``payload`` into ``out`` (1-D or rows, contiguous, of any floating type), and return it."""
        for rows, chunks in self._in_rows(chunk, payload, out):
            self._decode(rows, chunks)
        return out

    def add_decoded(self, payloads: Tensor, own: Tensor, place: int) -> None:
        """Add decoded payloads to ``own``, in a fixed order.

        Args:
            payloads: One per row.
            own: 1-D and contiguous, in :func:`arithmetic_dtype`.
            place: The number of payloads that come before ``own`` in the sum.
        """
        add_in_order(self.decode(payloads, own.new_empty(len(payloads), own.numel())), own, place)

    def add_and_encode(
        self, payloads: Tensor, own: Tensor, place: int, payload: Tensor, residual: Tensor | None = None
    ) -> None:
        """Encode the sum of decoded payloads and ``own``.

        Args:
            payloads: As for :meth:`add_decoded`.
            own: As for :meth:`add_decoded`. Its contents are undefined afterwards.
            place: As for :meth:`add_decoded`.
            payload: The output.
            residual: As for :meth:`encode`.
        """
        self.add_decoded(payloads, own, place)
        self.encode(own, payload, residual=residual)

    def _encode_rows(self, values: Tensor, payload: Tensor, chunk: int | None, residual: Tensor | None) -> None:
        tensors = [values] if residual is None else [values, residual]
        for rows, chunks, *errors in self._in_rows(chunk, payload, *tensors):
            self._encode(chunks, rows, *errors)

    def _in_rows(self, chunk: int | None, payload: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield payloads and tensors: the chunks of equal length as rows, then a shorter one."""
        if chunk is None:
            yield payload, *tensors
            return
        numel = tensors[0].numel()
        rows, rest = divmod(numel, chunk)
        if rows:
            yield payload[:rows], *(tensor[: numel - rest].view(rows, chunk) for tensor in tensors)
        if rest:
            length = self.payload_numel(rest, tensors[0].dtype)
            yield payload[rows, :length], *(tensor[numel - rest :] for tensor in tensors)

    def _encode(self, values: Tensor, payload: Tensor, residual: Tensor | None = None) -> None:
        if residual is None:
            _copy(values, payload)
            return
        _copy(residual.add_(values), payload)
        _copy(payload, values)
        drop_nonfinite(residual.sub_(values))

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        _copy(payload, out)


@dataclass(frozen=True)
class AsIs(Codec):
    """Sends tensors in their own type, unencoded."""

    adds: ClassVar[bool] = True

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


@dataclass(frozen=True)
class Cast(Codec):
    """Rounds wider tensors to ``dtype``. Values that are too large for float16 become infinite, which is detected.

    Args:
        dtype: ``torch.bfloat16``, ``torch.float16`` or ``torch.float32``.
    """

    dtype: torch.dtype

    adds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype={self.dtype} is not a floating type; cast to torch.bfloat16 or torch.float16")

    @property
    def largest(self) -> float:
        return torch.finfo(self.dtype).max

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if dtype.is_floating_point and self.dtype.itemsize < dtype.itemsize else dtype


@cache
def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type for calculations with values of the floating ``dtype``: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def drop_nonfinite(residual: Tensor) -> Tensor:
    """Replace non-finite elements by zeros, in place."""
    return residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def add_in_order(decoded: Tensor, own: Tensor, place: int) -> None:
    """Add the rows of ``decoded`` to ``own``, ``place`` of them before it."""
    before, after = decoded[:place], decoded[place:]
    if place:
        total = before[0]
        for row in before[1:]:
            total.add_(row)
        torch.add(total, own, out=own)  # in this order, because of two NaNs the first one's bits stay
    for row in after:
        own.add_(row)


def _copy(source: Tensor, target: Tensor) -> None:
    if source.shape != target.shape:
        raise ValueError(f"{source.numel()} elements do not go into {target.numel()}")
    target.copy_(source)
