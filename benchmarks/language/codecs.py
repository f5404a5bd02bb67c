"""Codecs between int4 and sparse2, and beyond, that the package does not have: experiments of this benchmark.

They decode to the values that a packed payload would give. Where a payload is wider here than it would have to be,
`Method.packed` has the ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_hiercomm.comm.blockwise import Blockwise, Quantized


@dataclass(frozen=True)
class SevenLevels(Quantized):
    """Integers from -3 to 3, which would take 3 bits; the payload here has 4."""

    bits: int = 4

    has_kernels: ClassVar[bool] = False

    @property
    def top(self) -> int:
        return 3


@dataclass(frozen=True)
class FiveLevels(Blockwise):
    """Integers from -2 to 2, three to a byte: ``a + 5 b + 25 c``."""

    block: int = 258

    @property
    def per_byte(self) -> int:
        return 3

    @property
    def top(self) -> int:
        return 2

    def _pack(self, elements: Tensor, packed: Tensor) -> None:
        first, second, third = elements.unbind(-2)
        torch.add(first, second, alpha=5, out=packed).add_(third, alpha=25)

    def _unpack(self, packed: Tensor, elements: Tensor) -> None:
        digits = packed.to(torch.int16).add_(62)  # none is negative, and multiplications divide them exactly
        third = digits.mul(41).bitwise_right_shift_(10)
        digits.sub_(third, alpha=25)
        second = digits.mul(13).bitwise_right_shift_(6)
        digits.sub_(second, alpha=5)
        for place, digit in enumerate((digits, second, third)):
            elements.select(-2, place).copy_(digit.sub_(2))


@dataclass(frozen=True)
class FourOfThirtyTwo(Blockwise):
    """The 4 largest of every 32 elements, a byte each: 5 bits of place, a sign, and 0, 16, 32 or 64 times the scale."""

    block: int = 512

    needs_feedback: ClassVar[bool] = True

    @property
    def per_byte(self) -> int:
        return 8

    @property
    def group(self) -> int:
        return 32

    @property
    def top(self) -> int:
        return 64

    def _pack(self, elements: Tensor, packed: Tensor) -> None:
        codes = elements.movedim(-2, -1).to(torch.int16)
        places = torch.arange(31, -1, -1, dtype=torch.int16, device=codes.device)
        keys = (codes.abs() * 32 + places).topk(4).indices  # of equal magnitudes the first
        sent = codes.gather(-1, keys)
        level = (sent.abs() >= 12).to(torch.int16) + (sent.abs() >= 23) + (sent.abs() >= 46)
        payload = keys.to(torch.int16) * 8 + level * 2 + (sent < 0)
        packed.view(torch.uint8).unflatten(-1, (4, -1)).copy_(payload.movedim(-1, -2))
        self._unpack(packed, elements)

    def _unpack(self, packed: Tensor, elements: Tensor) -> None:
        rows = packed.view(torch.uint8).unflatten(-1, (4, -1)).movedim(-2, -1).to(torch.int16)
        level = rows >> 1 & 3
        values = torch.where(level > 0, 8 << level, 0) * (1 - 2 * (rows & 1))
        elements.movedim(-2, -1).zero_().scatter_(-1, (rows >> 3).long(), values.to(elements.dtype))
