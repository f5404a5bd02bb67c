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

from lightning_hiercomm.comm import fused, streams
from lightning_hiercomm.comm.spares import scratch

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_LARGEST_SAFE_PEAK = 2.0**127

# Elements that are encoded at a time, so that temporary tensors are small and stay in a CPU's cache.
_TILE_ON_CPU = 2**18
_TILE = 2**24

# Rows of at most so many blocks are padded to whole blocks, because a copy is faster than more operations.
_MOST_PADDED_BLOCKS = 64


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

    def encode(self, values: Tensor, payload: Tensor | None = None, chunk: int | None = None) -> Tensor:
        """Encode ``values``.

        Args:
            values: 1-D, or rows that are encoded separately; contiguous, of any floating type. Not changed.
            payload: The output: as many rows of :meth:`payload_numel` elements of :meth:`payload_dtype`, contiguous.
                None: a new tensor, or ``values`` itself if its type is not encoded.
            chunk: The length of chunks. None: values are not cut.

        Returns:
            The payload.
        """
        if payload is None:
            if not self.narrows(values.dtype):
                return values
            payload = self._empty_payload(values)
        for rows, chunks in self._in_rows(chunk, payload, values):
            self._encode(chunks, rows)
        return payload

    def decode(self, payload: Tensor, out: Tensor, chunk: int | None = None) -> Tensor:
        """Decode ``payload`` into ``out`` (1-D or rows, contiguous, of any floating type), and return it."""
        for rows, chunks in self._in_rows(chunk, payload, out):
            self._decode(rows, chunks)
        return out

    def encode_with_feedback(
        self, values: Tensor, residual: Tensor, payload: Tensor, chunk: int | None = None
    ) -> Tensor:
        """Encode ``residual + values``, and store the error of the payload in ``residual``.

        Args:
            values: As for :meth:`encode`, in :func:`arithmetic_dtype`. Replaced by the decoded payload.
            residual: The error of the previous payload, of the same shape and type. Replaced by the error of this
                one; non-finite elements become zero.
            payload: The output.
            chunk: The length of chunks. None: values are not cut.

        Returns:
            The payload.
        """
        for rows, chunks, errors in self._in_rows(chunk, payload, values, residual):
            self._encode_with_feedback(chunks, errors, rows)
        return payload

    def add_decoded(self, payloads: Tensor, own: Tensor, place: int) -> None:
        """Add decoded payloads to ``own``, in a fixed order.

        Args:
            payloads: One per row.
            own: 1-D and contiguous, in :func:`arithmetic_dtype`.
            place: The number of payloads that come before ``own`` in the sum.
        """
        _add_in_order(self.decode(payloads, own.new_empty(len(payloads), own.numel())), own, place)

    def add_and_encode(
        self, payloads: Tensor, own: Tensor, place: int, payload: Tensor, residual: Tensor | None = None
    ) -> None:
        """Encode the sum of decoded payloads and ``own``.

        Args:
            payloads: As for :meth:`add_decoded`.
            own: As for :meth:`add_decoded`. Its contents are undefined afterwards.
            place: As for :meth:`add_decoded`.
            payload: The output.
            residual: As for :meth:`encode_with_feedback`. None: without feedback.
        """
        self.add_decoded(payloads, own, place)
        if residual is None:
            self.encode(own, payload)
        else:
            self.encode_with_feedback(own, residual, payload)

    def _empty_payload(self, values: Tensor) -> Tensor:
        *rows, numel = values.shape
        length, dtype = self.payload_numel(numel, values.dtype), self.payload_dtype(values.dtype)
        return values.new_empty(*rows, length, dtype=dtype)

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

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        _copy(values, payload)

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        _copy(payload, out)

    def _encode_with_feedback(self, values: Tensor, residual: Tensor, payload: Tensor) -> None:
        self._encode(residual.add_(values), payload)
        self._decode(payload, values)
        drop_nonfinite(residual.sub_(values))


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


class Blockwise(Codec):
    """Base class of codecs in which a block of elements shares a scale, and a byte holds codes of several elements.

    A payload is a tensor of bytes: the scales of all blocks as bfloat16, then all codes. Elements that share a byte
    have the same position in equal parts of a block. The length is even, so that payloads can be concatenated.

    On GPUs, each public method is one Triton kernel, if Triton is installed (:mod:`lightning_hiercomm.comm.fused`).
    """

    adds: ClassVar[bool] = False

    block: int

    @property
    def largest(self) -> float:
        return _LARGEST_SAFE_PEAK

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.uint8 if dtype.is_floating_point and dtype.itemsize > 1 else dtype

    def payload_numel(self, numel: int, dtype: torch.dtype) -> int:
        if not self.narrows(dtype):
            return numel
        return self._used_bytes(numel) + self._used_bytes(numel) % 2

    # ---- one kernel per method, where there are kernels ----------------------------------------------------------

    def encode(self, values: Tensor, payload: Tensor | None = None, chunk: int | None = None) -> Tensor:
        if payload is None and self.narrows(values.dtype):
            payload = self._empty_payload(values)
        if payload is None or not self._is_fused(payload, values, chunk):
            return super().encode(values, payload, chunk)
        if not fused.encode(self._layout, values, payload, chunk):
            super().encode(values, payload, chunk)
        return payload

    def decode(self, payload: Tensor, out: Tensor, chunk: int | None = None) -> Tensor:
        if not self._is_fused(payload, out, chunk) or not fused.decode(self._layout, payload, out, chunk):
            super().decode(payload, out, chunk)
        return out

    def encode_with_feedback(
        self, values: Tensor, residual: Tensor, payload: Tensor, chunk: int | None = None
    ) -> Tensor:
        is_fused = self._is_fused(payload, values, chunk)
        if not is_fused or not fused.encode(self._layout, values, payload, chunk, residual):
            super().encode_with_feedback(values, residual, payload, chunk)
        return payload

    def add_decoded(self, payloads: Tensor, own: Tensor, place: int) -> None:
        if not self._is_fused(payloads[0], own) or not fused.add(self._layout, payloads, own, place):
            self._add_decoded(payloads, own, place)

    def add_and_encode(
        self, payloads: Tensor, own: Tensor, place: int, payload: Tensor, residual: Tensor | None = None
    ) -> None:
        is_fused = self._is_fused(payload, own) and self._is_fused(payloads[0], own)
        if not is_fused or not fused.add_and_encode(self._layout, payloads, own, place, payload, residual):
            super().add_and_encode(payloads, own, place, payload, residual)

    @property
    def _layout(self) -> fused.Layout:
        return fused.Layout(self.block, self._group, self._top)

    def _is_fused(self, payload: Tensor, values: Tensor, chunk: int | None = None) -> bool:
        """Whether a kernel takes these tensors."""
        if payload.dtype != torch.uint8 or not fused.takes(values):
            return False
        length = chunk or values.shape[-1]
        rows = -(-values.numel() // max(1, length))
        expected = self.payload_numel(length, torch.float32)
        return payload.shape[-1] == expected and payload.numel() >= rows * expected

    # ---- with PyTorch, which is the definition of the payload ------------------------------------------------------

    def _encode_with_feedback(self, values: Tensor, residual: Tensor, payload: Tensor) -> None:
        if not self._is_quantized(payload, values):
            super()._encode_with_feedback(values, residual, payload)
            return
        for scales, codes, rows, errors in self._tiles(payload, values, residual):
            numel = rows.shape[-1]
            blocks = self._padded(errors.add_(rows))
            is_padded = numel % self.block != 0
            quotients = _scratch_like("values", blocks) if is_padded else rows.view(blocks.shape)
            peaks, multipliers, single = self._quantize(blocks, scales, codes, numel, quotients)
            blocks.sub_(quotients.copy_(single).mul_(multipliers))
            # below this bound neither the values nor their decoded payload overflow
            if streams.has(values.device) or not peaks.max().item() < _LARGEST_SAFE_PEAK:
                drop_nonfinite(blocks)
            if is_padded:
                rows.copy_(_unpadded(quotients, numel))
                errors.copy_(_unpadded(blocks, numel))
        self._zero_unused(payload, values.shape[-1])

    def _add_decoded(self, payloads: Tensor, own: Tensor, place: int) -> None:
        if not own.is_floating_point() or payloads.dtype != torch.uint8:
            super().add_decoded(payloads, own, place)
            return
        for scales, codes, rows in self._tiles(payloads, own):
            numel = rows.shape[-1]
            decoded = scratch("values", (*scales.shape[:-1], self.block), own.dtype, own.device)
            self._dequantize(scales, codes, numel, decoded)
            _add_in_order(_unpadded(decoded, numel), rows, place)

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        if not self._is_quantized(payload, values):
            super()._encode(values, payload)
            return
        for scales, codes, rows in self._tiles(payload, values):
            blocks = self._padded(rows.to(arithmetic_dtype(rows.dtype)))
            self._quantize(blocks, scales, codes, rows.shape[-1], quotients=_scratch_like("values", blocks))
        self._zero_unused(payload, values.shape[-1])

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        if not self._is_quantized(payload, out):
            super()._decode(payload, out)
            return
        dtype = arithmetic_dtype(out.dtype)
        for scales, codes, rows in self._tiles(payload, out):
            numel = rows.shape[-1]
            if out.dtype == dtype and numel % self.block == 0:
                self._dequantize(scales, codes, numel, rows.view(*scales.shape[:-1], -1))
                continue
            decoded = scratch("values", (*scales.shape[:-1], self.block), dtype, out.device)
            self._dequantize(scales, codes, numel, decoded)
            rows.copy_(_unpadded(decoded, numel))

    def _is_quantized(self, payload: Tensor, values: Tensor) -> bool:
        if payload.dtype != torch.uint8 or not values.is_floating_point():
            return False
        numel = values.shape[-1]
        expected = self.payload_numel(numel, torch.float32)
        if payload.shape != (*values.shape[:-1], expected):
            raise ValueError(
                f"with {self} the payload of {numel} elements has {expected} bytes, not {payload.shape[-1]}"
            )
        return True

    def _scale_bytes(self, numel: int) -> int:
        return 2 * -(-numel // self.block)

    def _used_bytes(self, numel: int) -> int:
        return self._scale_bytes(numel) - (-numel // self._group) * (self._group // self._per_byte)

    def _zero_unused(self, payload: Tensor, numel: int) -> None:
        used = self._used_bytes(numel)
        if used % 2:
            payload[..., used:].zero_()

    def _tiles(self, payload: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Cut payloads and their tensors into parts that fit into a processor's cache.

        Args:
            payload: One payload, or rows of payloads.
            tensors: Rows of equal length, as many as the payload has.

        Yields:
            The scales of some blocks, with one more dimension; their codes; and their elements of every tensor.
        """
        numel = tensors[0].shape[-1]
        if not numel:
            return
        start = self._scale_bytes(numel)
        scales = payload[..., :start].view(torch.bfloat16).unsqueeze(-1)
        codes = payload[..., start : self._used_bytes(numel)].view(torch.int8)
        most = _TILE_ON_CPU if payload.device.type == "cpu" else _TILE
        at_once = max(1, most * payload.shape[-1] // (self.block * payload.numel())) * self.block
        if numel <= min(at_once, _MOST_PADDED_BLOCKS * self.block):
            yield scales, codes, *tensors
            return
        whole = numel - numel % self.block
        blocks, whole_bytes = whole // self.block, whole // self._per_byte
        yield from zip(
            scales[..., :blocks, :].split(at_once // self.block, dim=-2),
            codes[..., :whole_bytes].split(at_once // self._per_byte, dim=-1),
            *(tensor[..., :whole].split(at_once, dim=-1) for tensor in tensors),
            strict=True,
        )
        if whole < numel:
            yield scales[..., blocks:, :], codes[..., whole_bytes:], *(tensor[..., whole:] for tensor in tensors)

    def _padded(self, rows: Tensor) -> Tensor:
        """Return rows as blocks: views if they consist of whole blocks, otherwise zero-padded copies."""
        *shape, numel = rows.shape
        blocks = -(-numel // self.block)
        if numel == blocks * self.block:
            return rows.view(*shape, blocks, self.block)
        padded = scratch("padded", (*shape, blocks * self.block), rows.dtype, rows.device)
        padded[..., numel:].zero_()
        padded[..., :numel].copy_(rows)
        return padded.view(*shape, blocks, self.block)

    def _quantize(
        self, values: Tensor, scales: Tensor, codes: Tensor, numel: int, quotients: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write the scales and codes of blocks of values; the last block is zero after ``numel`` elements of a row.

        Returns:
            The largest magnitude of every block, its scale in the type of the values, and a code for every element.
        """
        peaks = torch.maximum(values.amax(-1, keepdim=True), values.amin(-1, keepdim=True).neg_())
        top = peaks.new_full((), self._top)  # CUDA divides by tensors; by numbers it multiplies with a rounded 1/top
        scales.copy_((peaks / top).clamp_min_(_SMALLEST_SCALE))
        multipliers = scales.to(values.dtype)
        torch.div(values, multipliers, out=quotients).round_()
        if self._per_byte == 1 and numel % self.block == 0:
            single = codes.view(values.shape).copy_(quotients)
        else:
            single = _scratch_like("codes", values, torch.int8).copy_(quotients)
            for packed, elements in self._bytes(codes, single, numel):
                self._pack(elements, packed)
        return peaks, multipliers, single

    def _dequantize(self, scales: Tensor, codes: Tensor, numel: int, out: Tensor) -> None:
        """Decode blocks into ``out``, which has an :func:`arithmetic_dtype`; ``numel`` is the elements of a row."""
        if self._per_byte == 1 and numel % self.block == 0:
            single = codes.view(out.shape)
        else:
            single = _scratch_like("codes", out, torch.int8)
            for packed, elements in self._bytes(codes, single, numel):
                self._unpack(packed, elements)
        out.copy_(single).mul_(scales.to(out.dtype))

    def _bytes(self, codes: Tensor, single: Tensor, numel: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield bytes of whole blocks, then of a short one, and the elements of each byte, in one more dimension."""
        whole, rest = numel // self.block, numel % self.block
        if whole:
            blocks = single[..., :whole, :] if rest else single
            packed = codes[..., : whole * self.block // self._per_byte] if rest else codes
            yield packed.view(*blocks.shape[:-1], -1), blocks.unflatten(-1, (self._group, -1))
        if rest:
            groups = -(-rest // self._group)
            last = single[..., whole, : groups * self._group]
            yield codes[..., -groups * (self._group // self._per_byte) :], last.unflatten(-1, (self._group, -1))

    @property
    @abstractmethod
    def _per_byte(self) -> int:
        """Number of elements that one byte encodes."""

    @property
    def _group(self) -> int:
        """Elements that are packed together; a block has a multiple of this number."""
        return self._per_byte

    @property
    @abstractmethod
    def _top(self) -> int:
        """The largest code of one element."""

    @abstractmethod
    def _pack(self, elements: Tensor, packed: Tensor) -> None:
        """Write int8 codes to bytes.

        ``elements`` has those of a group in the last dimension but one, and is replaced by the unpacked bytes.
        """

    @abstractmethod
    def _unpack(self, packed: Tensor, elements: Tensor) -> None:
        """Write the codes of all elements."""


@dataclass(frozen=True)
class Quantized(Blockwise):
    """Integers of 8 or 4 bits, with one scale for each block of elements.

    With ``top`` = 127 (8 bits) or 7 (4 bits), a block ``v`` becomes::

        scale = bfloat16(max|v| / top)      q = round(v / scale)      decoded: q scale

    Both roundings are to nearest, ties to even. A bfloat16 is within 1/256 of the number it rounds, so
    ``max|v| / scale`` is within 0.5 of ``top``. Hence codes never overflow, no element is off by more than half a
    scale, and the largest has the code ``top``: encoding decoded float32 or float64 values again changes no bit.

    The smallest scale is 2⁻¹²⁶, float32's smallest normal number, so zeros and denormal numbers need no special case.
    A block with a NaN or an infinity, or too large for a bfloat16 scale, decodes to non-finite values only. The largest
    finite values of a type may become infinite.

    With 4 bits a byte is ``q_i + 16 q_j`` of elements at the same position in the first and the second half of a block.

    References:
        - Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
        - Douillard et al., "Streaming DiLoCo with overlapping communication", 2025 (outer gradients of 4 bits).

    Args:
        bits: 8 or 4.
        block: Elements that share a scale; an even number.
    """

    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ValueError(f"bits={self.bits!r}: a code has 8 bits or 4")
        if self.block < 2 or self.block % 2:
            raise ValueError(f"block={self.block!r}: a block has an even number of elements")

    @property
    def _per_byte(self) -> int:
        return 8 // self.bits

    @property
    def _top(self) -> int:
        return 127 if self.bits == 8 else 7

    def _pack(self, elements: Tensor, packed: Tensor) -> None:
        low = elements.select(-2, 0)
        if self.bits == 8:
            packed.copy_(low)
        else:
            torch.add(low, elements.select(-2, 1), alpha=16, out=packed)

    def _unpack(self, packed: Tensor, elements: Tensor) -> None:
        low = elements.select(-2, 0)
        if self.bits == 8:
            low.copy_(packed)
        else:
            high = elements.select(-2, 1)
            torch.bitwise_right_shift(packed + 8, 4, out=high)
            torch.sub(packed, high, alpha=16, out=low)


@dataclass(frozen=True)
class LargestFour(Blockwise):
    """The 4 largest of every 16 elements, each as a sign and a power of two; the others stay in the residual.

    Scales and rounding are those of :class:`Quantized` with ``top`` = 64. The magnitude of a sent code is then rounded
    to a power of two::

        |q|       0    1    2    3..5    6..11    12..22    23..45    46..64
        level     0    1    2    3       4        5         6         7
        decoded   0    1    2    4       8        16        32        64        times the sign and the scale

    A byte is ``16 * level + place``: the level with the sign of ``q``, and the place of the element in its group. A
    block of ``n`` elements has ``n / 16`` groups; group ``j`` has elements ``j``, ``j + n / 16``, and so on. The bytes
    of the largest elements of all groups come first, then those of the second largest. Of equal magnitudes, the one at
    the lower place counts as larger. These are 2 bits for each element: a sixteenth of float32.

    Large gradients arrive at once, small ones accumulate in the residual and arrive later. Other quantizers with 2 bits
    for each element clip or delay large gradients, and trained worse (``benchmarks/studies/two_bits.py``). This codec
    requires error feedback, and values that may arrive late, which parameters may not.

    References:
        - Aji & Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017 (sends the largest).
        - Stich et al., "Sparsified SGD with Memory", NeurIPS 2018 (convergence with error feedback).
        - Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv 2508.15706 (the largest
          of every chunk, quantized, with error feedback).

    Args:
        block: Elements that share a scale; a multiple of 16.
    """

    block: int = 512

    needs_feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.block < self._group or self.block % self._group:
            raise ValueError(f"block={self.block!r}: a block has a multiple of {self._group} elements")

    @property
    def _per_byte(self) -> int:
        return 4

    @property
    def _group(self) -> int:
        return 16

    @property
    def _top(self) -> int:
        return 64

    # torch's comparisons and masks of small integers are ten times slower than additions and clamps, and operations on
    # short rows are slow, so the places of a group come first

    def _pack(self, elements: Tensor, packed: Tensor) -> None:
        codes = elements.movedim(-2, 0).contiguous().to(torch.int16)  # a copy that also converts is slow
        # ordered by magnitude, then by place; the last bit is the sign
        keys = codes.abs().mul_(32).add_(30 - 2 * _places(codes)).sub_(codes >> 15)
        top = _four_largest(keys)
        levels = _round_to_power(top >> 5).view(torch.int32).bitwise_right_shift_(23).sub_(126).clamp_min_(0)
        signs = 1 - 2 * (top & 1)
        places = 15 - (top >> 1 & 15)
        packed.unflatten(-1, (4, -1)).copy_(torch.add(places, levels.mul_(signs), alpha=16).movedim(0, -2))
        is_sent = keys.sub_(top[3] - 1).clamp_(0, 1)
        elements.copy_(_round_to_power(codes.mul_(is_sent)).to(torch.int8).movedim(0, -2))

    def _unpack(self, packed: Tensor, elements: Tensor) -> None:
        rows = packed.unflatten(-1, (4, -1)).movedim(-2, 0).contiguous()
        values = _powers(rows >> 4)
        places = _places(elements.movedim(-2, 0))
        others = scratch("others", (4, *places.shape[:1], *rows.shape[1:]), torch.int8, rows.device)
        torch.sub((rows & 15).unsqueeze(1), places, out=others).abs_().clamp_max_(1).mul_(values.unsqueeze(1))
        total = others[0].add_(others[1]).add_(others[2]).add_(others[3])
        # int8 wraps around, and so does the difference
        elements.copy_(torch.sub(values.sum(0, dtype=torch.int8), total, out=total).movedim(0, -2))


def _four_largest(keys: Tensor) -> Tensor:
    """Return the 4 largest of 16 rows, elementwise, in descending order: sorts fours, and merges them twice."""
    a, b, c, d = keys.unflatten(0, (4, 4)).unbind(1)  # of all fours at once
    (a, b), (c, d) = _ordered(a, b), _ordered(c, d)
    (a, c), (b, d) = _ordered(a, c), _ordered(b, d)
    b, c = _ordered(b, c)
    for half in (2, 1):
        one, other = [row[:half] for row in (a, b, c, d)], [row[half:] for row in (d, c, b, a)]
        a, b, c, d = map(torch.maximum, one, other)
        (a, c), (b, d) = _ordered(a, c), _ordered(b, d)
        (a, b), (c, d) = _ordered(a, b), _ordered(c, d)
    return torch.cat((a, b, c, d))


def _ordered(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return torch.maximum(one, other), torch.minimum(one, other)


def _round_to_power(codes: Tensor) -> Tensor:
    """Return codes as float32, rounded to 0 or the nearest power of two by the logarithm."""
    scaled = codes.to(torch.float32).mul_(math.sqrt(2))
    scaled.view(torch.int32).bitwise_and_(-(2**23))  # clears the mantissa
    return scaled


def _places(codes: Tensor) -> Tensor:
    """Return the places of a group's elements, which are in the first dimension."""
    return torch.arange(len(codes), dtype=torch.int8, device=codes.device).view(-1, *[1] * (codes.dim() - 1))


def _powers(levels: Tensor) -> Tensor:
    """Return 0 at level 0, 1 at 1, 2 at 2, 4 at 3 and so on, with the sign of the level."""
    powers = torch.bitwise_left_shift(torch.ones_like(levels), levels.abs()).bitwise_right_shift_(1)
    return powers.abs_().mul_(levels.sign())  # 1 << 7 is -128, and -64 after the shift to the right


_NAMED: dict[str, Codec] = {
    "float32": Cast(torch.float32),
    "bfloat16": Cast(torch.bfloat16),
    "float16": Cast(torch.float16),
    "int8": Quantized(8),
    "int4": Quantized(4),
    "sparse2": LargestFour(),
}


def codec_named(name: str | torch.dtype | None) -> Codec:
    """Return the codec of the argument ``wire_dtype``.

    Args:
        name: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"int8"``, ``"int4"``, ``"sparse2"``, a torch
            dtype of such a name, or None to send tensors unencoded.

    Raises:
        ValueError: For any other name.
    """
    if name is None:
        return AsIs()
    codec = _NAMED.get(str(name).removeprefix("torch."))
    if codec is None:
        raise ValueError(f"wire_dtype={name!r} is not a payload type; use one of {', '.join(_NAMED)}, or None")
    return codec


@cache
def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type for calculations with values of the floating ``dtype``: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _scratch_like(role: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return scratch(role, tensor.shape, dtype or tensor.dtype, tensor.device)


def _unpadded(blocks: Tensor, numel: int) -> Tensor:
    """Return the first ``numel`` elements of rows that are cut into blocks."""
    return blocks.view(*blocks.shape[:-2], -1)[..., :numel]


def drop_nonfinite(residual: Tensor) -> Tensor:
    """Replace non-finite elements by zeros, in place."""
    return residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _add_in_order(decoded: Tensor, own: Tensor, place: int) -> None:
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
