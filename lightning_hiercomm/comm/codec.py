"""What a tensor looks like between nodes: as it is, in a narrower type, or quantised block by block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny

# Elements that are encoded at a time: what lies between two operations stays in a CPU's cache, and is small.
_TILE_ON_CPU = 2**18
_TILE = 2**24


class Codec(ABC):
    """A payload type of traffic between nodes.

    A codec is a configuration: it holds no tensors, never changes, compares by value and can be pickled. Both ends
    hold equal ones. What a payload decodes to depends on its bits alone, so a sender that decodes its own payload
    learns exactly what every receiver gets, on whatever device.

    Parameters must not be encoded themselves: an update below half a unit in the last place is then lost (in bfloat16,
    1.0 - 0.001 is 1.0). Encode their *difference* from values that both ends know.
    """

    adds: ClassVar[bool]
    """Whether payloads of several nodes may be summed as they are, so that they can ride an all-reduce."""

    @property
    def block(self) -> int:
        """Elements that are encoded together: what is cut at multiples of it decodes to the same, fastest."""
        return 1

    @abstractmethod
    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type of the payload of values of ``dtype``."""

    def narrows(self, dtype: torch.dtype) -> bool:
        """Whether a tensor of ``dtype`` travels in another form."""
        return self.payload_dtype(dtype) != dtype

    def payload_numel(self, numel: int, dtype: torch.dtype) -> int:
        """The elements of the payload of ``numel`` values of ``dtype``."""
        return numel

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The bytes of the payload of ``numel`` values of ``dtype``."""
        return self.payload_numel(numel, dtype) * self.payload_dtype(dtype).itemsize

    def encode(self, values: Tensor, payload: Tensor | None = None) -> Tensor:
        """Make the payload of ``values``.

        Args:
            values: 1-D and contiguous, of any floating type. Not changed.
            payload: Where to write it: 1-D and contiguous, :meth:`payload_numel` elements of :meth:`payload_dtype`.
                None makes a tensor, or returns ``values`` itself if it travels as it is: leave it alone meanwhile.

        Returns:
            The payload.
        """
        if payload is None:
            if not self.narrows(values.dtype):
                return values
            payload = values.new_empty(
                self.payload_numel(values.numel(), values.dtype), dtype=self.payload_dtype(values.dtype)
            )
        self._encode(values, payload)
        return payload

    def decode(self, payload: Tensor, out: Tensor) -> Tensor:
        """Write the values that ``payload`` holds to ``out``.

        Args:
            payload: What :meth:`encode` made of as many values as ``out`` has.
            out: 1-D and contiguous, of any floating type.

        Returns:
            ``out``.
        """
        self._decode(payload, out)
        return out

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        _copy(values, payload)

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        _copy(payload, out)


@dataclass(frozen=True)
class AsIs(Codec):
    """Tensors travel as they are."""

    adds: ClassVar[bool] = True

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


@dataclass(frozen=True)
class Cast(Codec):
    """Wider tensors travel rounded to ``dtype``; what float16 cannot hold becomes infinite, and is seen.

    Args:
        dtype: ``torch.bfloat16``, ``torch.float16`` or ``torch.float32``.
    """

    dtype: torch.dtype

    adds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype={self.dtype} is not a floating type; cast to torch.bfloat16 or torch.float16")

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if dtype.is_floating_point and self.dtype.itemsize < dtype.itemsize else dtype


@dataclass(frozen=True)
class Quantized(Codec):
    """Blocks of elements share a scale and travel as small integers (Dettmers et al. 2022; 4 bits: Streaming DiLoCo).

    With ``top`` = 127 (8 bits) or 7 (4 bits), a block ``v`` becomes::

        scale = bfloat16(max|v| / top)      q = round(v / scale)      decoded: q scale

    Both roundings are to nearest, ties to even. A bfloat16 is within 1/256 of the number it rounds, so
    ``max|v| / scale`` is within 0.5 of ``top``: codes never overflow, no element is off by more than half a scale, and
    the largest has the code ``top``, so encoding decoded float32 or float64 values again changes no bit. Scales rounded
    up would not promise the last; float32 scales would put 4 bits 3.1 % over 1/8 of float32, where bfloat16 ones cost
    1.6 % (8 bits over 1/4: 0.8 %).

    The smallest scale is 2⁻¹²⁶, float32's smallest normal number: blocks of zeros and of smaller numbers need no case
    of their own, and no device's way with denormal numbers matters. A NaN or an infinity makes its block's scale one,
    as does what no bfloat16 can scale, and no element of such a block decodes to a finite value, for 0 times infinity
    is none. The largest finite values of a type may become infinite.

    A payload is one tensor of bytes: first all scales, then all codes. With 4 bits a byte is ``q_i + 16 q_j`` of
    elements as far into the first and the second half of a block. Its length is even, so that several may be laid one
    behind the other.

    References:
        - Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
        - Douillard et al., "Streaming DiLoCo with overlapping communication", 2025 (outer gradients of 4 bits).

    Args:
        bits: 8 or 4.
        block: Elements that share a scale; an even number.
    """

    bits: int = 8
    block: int = 256

    adds: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ValueError(f"bits={self.bits!r}: a code has 8 bits or 4")
        if self.block < 2 or self.block % 2:
            raise ValueError(f"block={self.block!r}: a block has an even number of elements")

    def payload_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.uint8 if dtype.is_floating_point and dtype.itemsize > 1 else dtype

    def payload_numel(self, numel: int, dtype: torch.dtype) -> int:
        if not self.narrows(dtype):
            return numel
        return self._used_bytes(numel) + self._used_bytes(numel) % 2

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        if not self._is_quantized(payload, values):
            super()._encode(values, payload)
            return
        for rows, scales, codes in self._tiles(values, payload):
            self._encode_rows(rows, scales, codes)
        payload[self._used_bytes(values.numel()) :].zero_()

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        if not self._is_quantized(payload, out):
            super()._decode(payload, out)
            return
        for rows, scales, codes in self._tiles(out, payload):
            self._decode_rows(scales, codes, rows)

    def _is_quantized(self, payload: Tensor, values: Tensor) -> bool:
        if payload.dtype != torch.uint8 or not values.is_floating_point():
            return False
        expected = self.payload_numel(values.numel(), torch.float32)
        if payload.numel() != expected:
            raise ValueError(
                f"with {self} the payload of {values.numel()} elements has {expected} bytes, not {payload.numel()}"
            )
        return True

    def _scale_bytes(self, numel: int) -> int:
        return 2 * -(-numel // self.block)

    def _used_bytes(self, numel: int) -> int:
        return self._scale_bytes(numel) - (-numel * self.bits // 8)

    def _tiles(self, values: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows of values (one a block), their scales, and rows of their codes; a short last block comes by itself."""
        if not values.numel():
            return
        start = self._scale_bytes(values.numel())
        scales = payload[:start].view(torch.bfloat16)
        codes = payload[start : self._used_bytes(values.numel())].view(torch.int8)
        blocks = values.numel() // self.block
        whole, whole_codes = blocks * self.block, blocks * self.block * self.bits // 8
        at_once = max(1, (_TILE_ON_CPU if values.device.type == "cpu" else _TILE) // self.block)
        if blocks:
            yield from zip(
                values[:whole].view(blocks, -1).split(at_once),
                scales[:blocks].split(at_once),
                codes[:whole_codes].view(blocks, -1).split(at_once),
                strict=True,
            )
        if whole < values.numel():
            yield values[None, whole:], scales[blocks:], codes[None, whole_codes:]

    def _encode_rows(self, values: Tensor, scales: Tensor, codes: Tensor) -> None:
        values = values.to(arithmetic_dtype(values.dtype))
        peaks = torch.maximum(values.amax(1), values.amin(1).neg_())
        top = peaks.new_full((), self._top)  # by a number CUDA does not divide: it multiplies by what 1/top rounds to
        scales.copy_(peaks.div_(top).clamp_min_(_SMALLEST_SCALE))
        quotients = torch.div(values, scales.to(values.dtype).unsqueeze(1)).round_()
        if self.bits == 8:
            codes.copy_(quotients)
            return
        half = codes.shape[1]  # an odd last block has one more low than high halves of bytes
        low, high = quotients[:, :half], quotients[:, half:]
        low[:, : high.shape[1]].add_(high, alpha=16)
        codes.copy_(low)

    def _decode_rows(self, scales: Tensor, codes: Tensor, out: Tensor) -> None:
        dtype = arithmetic_dtype(out.dtype)
        values = out if out.dtype == dtype else torch.empty_like(out, dtype=dtype)
        if self.bits == 8:
            values.copy_(codes)
        else:
            half = codes.shape[1]
            values[:, :half].copy_((codes << 4) >> 4)
            values[:, half:].copy_(((codes + 8) >> 4)[:, : values.shape[1] - half])
        values.mul_(scales.to(dtype).unsqueeze(1))
        if values is not out:
            out.copy_(values)

    @property
    def _top(self) -> int:
        return 127 if self.bits == 8 else 7


_NAMED: dict[str, Codec] = {
    "float32": Cast(torch.float32),
    "bfloat16": Cast(torch.bfloat16),
    "float16": Cast(torch.float16),
    "int8": Quantized(8),
    "int4": Quantized(4),
}


def codec_named(name: str | torch.dtype | None) -> Codec:
    """The codec that a person names in the argument ``wire_dtype``.

    Args:
        name: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"int8"``, ``"int4"``, a torch dtype of such a name, or
            None for tensors as they are.

    Raises:
        ValueError: For any other name.
    """
    if name is None:
        return AsIs()
    codec = _NAMED.get(str(name).removeprefix("torch."))
    if codec is None:
        raise ValueError(f"wire_dtype={name!r} is not a payload type; use one of {', '.join(_NAMED)}, or None")
    return codec


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type to calculate in with values of the floating ``dtype``: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _copy(source: Tensor, target: Tensor) -> None:
    if source.shape != target.shape:
        raise ValueError(f"{source.numel()} elements do not go into {target.numel()}")
    target.copy_(source)
