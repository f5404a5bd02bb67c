"""Codecs in which a block of elements shares a scale."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_hiercomm.comm import fused, streams
from lightning_hiercomm.comm.codec import Codec, add_in_order, arithmetic_dtype, drop_nonfinite
from lightning_hiercomm.comm.spares import scratch

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_LARGEST_SAFE_PEAK = 2.0**127

# Elements that are encoded at a time, so that temporary tensors are small and stay in a CPU's cache.
_TILE_ON_CPU = 2**18
_TILE = 2**24


class Blockwise(Codec):
    """Base class of codecs in which a block of elements shares a scale, and a byte holds codes of several elements.

    A payload is a tensor of bytes: the scales of all blocks as bfloat16, then all codes. Elements that share a byte
    have the same position in equal parts of a block. The length is even, so that payloads can be concatenated.

    On GPUs, each public method is one Triton kernel, if Triton is installed (:mod:`lightning_hiercomm.comm.fused`).
    """

    adds: ClassVar[bool] = False

    has_kernels: ClassVar[bool] = False
    """Whether :mod:`lightning_hiercomm.comm.kernels` implements the codec."""

    block: int

    @property
    @abstractmethod
    def top(self) -> int:
        """The largest code of one element."""

    @property
    @abstractmethod
    def per_byte(self) -> int:
        """Number of elements that one byte encodes."""

    @property
    def group(self) -> int:
        """Elements that are packed together; a block has a multiple of this number."""
        return self.per_byte

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

    def _encode_rows(self, values: Tensor, payload: Tensor, chunk: int | None, residual: Tensor | None) -> None:
        if not fused.encode(self, values, payload, chunk, residual):
            super()._encode_rows(values, payload, chunk, residual)

    def decode(self, payload: Tensor, out: Tensor, chunk: int | None = None) -> Tensor:
        return out if fused.decode(self, payload, out, chunk) else super().decode(payload, out, chunk)

    def add_decoded(self, payloads: Tensor, own: Tensor, place: int) -> None:
        if fused.add(self, payloads, own, place):
            return
        if not own.is_floating_point() or payloads.dtype != torch.uint8:
            super().add_decoded(payloads, own, place)
            return
        for scales, codes, blocks in self._tiles(payloads, own):
            decoded = scratch("values", (*scales.shape[:-1], blocks.shape[-1]), own.dtype, own.device)
            add_in_order(self._dequantize(scales, codes, decoded), blocks, place)

    def add_and_encode(
        self, payloads: Tensor, own: Tensor, place: int, payload: Tensor, residual: Tensor | None = None
    ) -> None:
        if not fused.add_and_encode(self, payloads, own, place, payload, residual):
            super().add_and_encode(payloads, own, place, payload, residual)

    # ---- with PyTorch, which is the definition of the payload ------------------------------------------------------

    def _encode(self, values: Tensor, payload: Tensor, residual: Tensor | None = None) -> None:
        if not self._is_quantized(payload, values):
            super()._encode(values, payload, residual)
            return
        for scales, codes, blocks, *errors in self._tiles(payload, values, *([] if residual is None else [residual])):
            if not errors:
                wanted = blocks.to(arithmetic_dtype(blocks.dtype))
                self._quantize(wanted, scales, codes, quotients=_scratch_like("values", wanted))
                continue
            wanted = errors[0].add_(blocks)
            peaks, multipliers, single = self._quantize(wanted, scales, codes, quotients=blocks)
            wanted.sub_(blocks.copy_(single).mul_(multipliers))
            # below this bound neither the values nor their decoded payload overflow
            if streams.has(values.device) or not peaks.max().item() < _LARGEST_SAFE_PEAK:
                drop_nonfinite(wanted)
        payload[..., self._used_bytes(values.shape[-1]) :].zero_()

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        if not self._is_quantized(payload, out):
            super()._decode(payload, out)
            return
        dtype = arithmetic_dtype(out.dtype)
        for scales, codes, blocks in self._tiles(payload, out):
            if out.dtype == dtype:
                self._dequantize(scales, codes, blocks)
            else:
                blocks.copy_(self._dequantize(scales, codes, _scratch_like("values", blocks, dtype)))

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

    def _used_bytes(self, numel: int) -> int:
        return 2 * -(-numel // self.block) - (-numel // self.group) * (self.group // self.per_byte)

    def _tiles(self, payload: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Cut payloads and their tensors into blocks, which fit into a processor's cache; a short block comes last.

        Args:
            payload: One payload, or rows of payloads.
            tensors: Rows of equal length.

        Yields:
            The scales of some blocks, their codes, and their elements of every tensor. The last two dimensions are the
            blocks, and what each of them has.
        """
        numel = tensors[0].shape[-1]
        if not numel:
            return
        whole, rest = divmod(numel, self.block)
        start = 2 * (whole + bool(rest))
        scales = payload[..., :start].view(torch.bfloat16).unsqueeze(-1)
        codes = payload[..., start : self._used_bytes(numel)].view(torch.int8)
        most = _TILE_ON_CPU if payload.device.type == "cpu" else _TILE
        at_once = max(1, most * payload.shape[-1] // (self.block * payload.numel()))

        def tile(first: int, last: int) -> tuple[Tensor, ...]:
            elements = slice(first * self.block, last * self.block)
            own_bytes = slice(elements.start // self.per_byte, elements.stop // self.per_byte)
            parts = (codes[..., own_bytes], *(tensor[..., elements] for tensor in tensors))
            return scales[..., first:last, :], *(part.unflatten(-1, (last - first, -1)) for part in parts)

        for first in range(0, whole, at_once):
            yield tile(first, min(first + at_once, whole))
        if rest:
            yield tile(whole, whole + 1)

    def _quantize(
        self, values: Tensor, scales: Tensor, codes: Tensor, quotients: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write the scales and codes of blocks of values; ``quotients`` is overwritten.

        Returns:
            The largest magnitude of every block, its scale in the type of the values, and a code for every element.
        """
        peaks = torch.maximum(values.amax(-1, keepdim=True), values.amin(-1, keepdim=True).neg_())
        top = peaks.new_full((), self.top)  # CUDA divides by tensors; by numbers it multiplies with a rounded 1/top
        scales.copy_((peaks / top).clamp_min_(_SMALLEST_SCALE))
        multipliers = scales.to(values.dtype)
        torch.div(values, multipliers, out=quotients).round_()
        if self.per_byte == 1:
            return peaks, multipliers, codes.copy_(quotients)
        whole, numel = self._unpacked(codes), values.shape[-1]
        single = whole
        if numel < whole.shape[-1]:  # a short block is padded to a multiple of the group
            whole[..., numel:].zero_()
            single = whole[..., :numel]
        single.copy_(quotients)
        self._pack(whole.unflatten(-1, (self.group, -1)), codes)
        return peaks, multipliers, single

    def _dequantize(self, scales: Tensor, codes: Tensor, out: Tensor) -> Tensor:
        """Decode blocks into ``out``, which has an :func:`arithmetic_dtype`, and return it."""
        single = codes
        if self.per_byte > 1:
            single = self._unpacked(codes)
            self._unpack(codes, single.unflatten(-1, (self.group, -1)))
        return out.copy_(single[..., : out.shape[-1]]).mul_(scales.to(out.dtype))

    def _unpacked(self, codes: Tensor) -> Tensor:
        """Return memory for the codes of all elements in some bytes."""
        return scratch("codes", (*codes.shape[:-1], codes.shape[-1] * self.per_byte), torch.int8, codes.device)

    @abstractmethod
    def _pack(self, elements: Tensor, packed: Tensor) -> None:
        """Write int8 codes to bytes; called if a byte has several elements.

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

    has_kernels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ValueError(f"bits={self.bits!r}: a code has 8 bits or 4")
        if self.block < 2 or self.block % 2:
            raise ValueError(f"block={self.block!r}: a block has an even number of elements")

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    @property
    def top(self) -> int:
        return 127 if self.bits == 8 else 7

    def _pack(self, elements: Tensor, packed: Tensor) -> None:
        low, high = elements.unbind(-2)
        torch.add(low, high, alpha=16, out=packed)

    def _unpack(self, packed: Tensor, elements: Tensor) -> None:
        low, high = elements.unbind(-2)
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
    has_kernels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.block < self.group or self.block % self.group:
            raise ValueError(f"block={self.block!r}: a block has a multiple of {self.group} elements")

    @property
    def per_byte(self) -> int:
        return 4

    @property
    def group(self) -> int:
        return 16

    @property
    def top(self) -> int:
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


def _scratch_like(role: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return scratch(role, tensor.shape, dtype or tensor.dtype, tensor.device)
