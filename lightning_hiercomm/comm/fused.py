"""Launches of the Triton kernels of block codecs.

A function that launches a kernel returns whether it has. If it has not, the caller calculates with PyTorch: on the CPU,
without Triton, and on GPUs for which Triton does not compile the kernels. Both give the same bits (Triton before 3.6
sends float32's denormal numbers as zeros, and leaves them in the residual), so ranks may differ in this.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_hiercomm.comm.blockwise import Blockwise

_logger = logging.getLogger(__name__)

# Elements that a program, which is one warp, keeps in registers.
_TILE = 512

# Offsets inside a payload, and the second dimension of a grid, are limited by CUDA and by the kernels' integers.
_MOST_ELEMENTS = 2**30
_MOST_ROWS = 2**16 - 1


class Runtime:
    """Where kernels run; tests replace it by Triton's interpreter.

    Attributes:
        works: False after a kernel could not be compiled or started.
    """

    works = True

    def takes(self, device: torch.device) -> bool:
        """Whether kernels run on a device."""
        return device.type == "cuda" and self.works and _kernels() is not None

    def kernel(self, name: str) -> Any:
        """Return a kernel by its name."""
        return getattr(_kernels(), name)


runtime = Runtime()


def takes(codec: Blockwise, payload: Tensor, values: Tensor, chunk: int | None = None) -> bool:
    """Whether kernels calculate with these tensors."""
    if not codec.has_kernels or payload.dtype != torch.uint8 or values.dtype != torch.float32:
        return False
    if values.numel() > _MOST_ELEMENTS or not runtime.takes(values.device):
        return False
    length = chunk or values.shape[-1]
    expected = codec.payload_numel(length, torch.float32)
    return payload.shape[-1] == expected and payload.numel() >= _rows(values, length) * expected


def encode(
    codec: Blockwise, values: Tensor, payload: Tensor, chunk: int | None = None, residual: Tensor | None = None
) -> bool:
    """Encode ``values``; see :meth:`~lightning_hiercomm.comm.codec.Codec.encode`."""
    if not takes(codec, payload, values, chunk):
        return False
    chunk = chunk or values.shape[-1]
    tensors = (values, values if residual is None else residual, *_parts(payload))
    arguments = (*tensors, values.numel(), chunk, payload.shape[-1])
    options = {"TOP": codec.top, "FEEDBACK": residual is not None}
    return _launch("encode", codec, arguments, chunk, _rows(values, chunk), **options)


def decode(codec: Blockwise, payload: Tensor, out: Tensor, chunk: int | None = None) -> bool:
    """Decode ``payload`` into ``out``; see :meth:`~lightning_hiercomm.comm.codec.Codec.decode`."""
    if not takes(codec, payload, out, chunk):
        return False
    chunk = chunk or out.shape[-1]
    arguments = (*_parts(payload), out, out.numel(), chunk, payload.shape[-1])
    return _launch("decode", codec, arguments, chunk, _rows(out, chunk))


def add(codec: Blockwise, payloads: Tensor, own: Tensor, place: int) -> bool:
    """Add decoded payloads; see :meth:`~lightning_hiercomm.comm.codec.Codec.add_decoded`."""
    if not takes(codec, payloads[0], own):
        return False
    arguments = (*_parts(payloads), own, own.numel(), payloads.shape[-1], place, len(payloads))
    return _launch("add", codec, arguments, own.numel())


def add_and_encode(
    codec: Blockwise, payloads: Tensor, own: Tensor, place: int, payload: Tensor, residual: Tensor | None = None
) -> bool:
    """Encode a sum of payloads; see :meth:`~lightning_hiercomm.comm.codec.Codec.add_and_encode`."""
    if not takes(codec, payload, own) or not takes(codec, payloads[0], own):
        return False
    tensors = (*_parts(payloads), own, own if residual is None else residual, *_parts(payload))
    arguments = (*tensors, own.numel(), payloads.shape[-1], place, len(payloads))
    options = {"TOP": codec.top, "FEEDBACK": residual is not None}
    return _launch("add_and_encode", codec, arguments, own.numel(), **options)


def constants(codec: Blockwise) -> dict[str, int]:
    """Return the constants with which kernels are compiled for a codec."""
    columns = 1 << (codec.block // codec.group - 1).bit_length()
    blocks = max(1, _TILE // (codec.group * columns))
    return {"BLOCK": codec.block, "GROUP": codec.group, "BLOCKS": 1 << (blocks.bit_length() - 1), "COLUMNS": columns}


def _rows(values: Tensor, chunk: int) -> int:
    return -(-values.numel() // max(1, chunk))


def _parts(payload: Tensor) -> tuple[Tensor, Tensor]:
    return payload.view(torch.int16), payload.view(torch.int8)


def _launch(
    name: str, codec: Blockwise, arguments: tuple[Any, ...], chunk: int, rows: int = 1, **options: object
) -> bool:
    if not chunk or not rows:
        return True
    if rows > _MOST_ROWS:
        return False
    known = constants(codec)
    grid = (-(-chunk // (known["BLOCK"] * known["BLOCKS"])), rows)
    try:
        with torch.cuda.device_of(arguments[0]):
            runtime.kernel(name)[grid](*arguments, **known, **options, num_warps=1, enable_fp_fusion=False)
    except Exception as error:  # of Triton, of its compilers, or of the driver
        runtime.works = False
        _warn(f"the kernel {name!r}", error)
        return False
    return True


def _warn(what: str, error: Exception) -> None:
    _logger.warning("Triton could not run %s, so payloads are encoded by slower PyTorch operations: %s", what, error)


@cache
def _kernels() -> Any:
    """Return the kernels, or None if Triton is not installed or cannot be imported."""
    try:
        from lightning_hiercomm.comm import kernels
    except ModuleNotFoundError:
        return None
    except Exception as error:
        _warn("its kernels", error)
        return None
    return kernels
