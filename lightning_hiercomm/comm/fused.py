"""Launches of the Triton kernels of block codecs.

Every function returns whether it has launched a kernel. If it has not, the caller calculates with PyTorch: on the CPU,
without Triton, and on GPUs for which Triton does not compile the kernels. Both give the same bits (Triton before 3.6
sends float32's denormal numbers as zeros, and leaves them in the residual), so ranks may differ in this.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

_logger = logging.getLogger(__name__)

# Elements that a program, which is one warp, keeps in registers.
_TILE = 512

# Offsets inside a payload, and the second dimension of a grid, are limited by CUDA and by the kernels' integers.
_MOST_ELEMENTS = 2**30
_MOST_ROWS = 2**16 - 1


@dataclass(frozen=True)
class Layout:
    """The form of a codec's payload, as :mod:`lightning_hiercomm.comm.kernels` describes it.

    Attributes:
        block: Elements that share a scale.
        group: Elements that are packed together.
        top: The largest code.
    """

    block: int
    group: int
    top: int


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


def takes(values: Tensor) -> bool:
    """Whether kernels calculate with a tensor."""
    return values.dtype == torch.float32 and values.numel() <= _MOST_ELEMENTS and runtime.takes(values.device)


def encode(
    layout: Layout, values: Tensor, payload: Tensor, chunk: int | None = None, residual: Tensor | None = None
) -> bool:
    """Encode ``values``; see :meth:`~lightning_hiercomm.comm.codec.Codec.encode_with_feedback`."""
    chunk = chunk or values.shape[-1]
    return _launch(
        "encode",
        layout,
        (values, values if residual is None else residual, *_parts(payload), values.numel(), chunk, payload.shape[-1]),
        chunk,
        -(-values.numel() // max(1, chunk)),
        TOP=layout.top,
        FEEDBACK=residual is not None,
    )


def decode(layout: Layout, payload: Tensor, out: Tensor, chunk: int | None = None) -> bool:
    """Decode ``payload`` into ``out``; see :meth:`~lightning_hiercomm.comm.codec.Codec.decode`."""
    chunk = chunk or out.shape[-1]
    arguments = (*_parts(payload), out, out.numel(), chunk, payload.shape[-1])
    return _launch("decode", layout, arguments, chunk, -(-out.numel() // max(1, chunk)))


def add(layout: Layout, payloads: Tensor, own: Tensor, place: int) -> bool:
    """Add decoded payloads; see :meth:`~lightning_hiercomm.comm.codec.Codec.add_decoded`."""
    arguments = (*_parts(payloads), own, own.numel(), payloads.shape[-1], place, len(payloads))
    return _launch("add", layout, arguments, own.numel())


def add_and_encode(
    layout: Layout, payloads: Tensor, own: Tensor, place: int, payload: Tensor, residual: Tensor | None = None
) -> bool:
    """Encode a sum of payloads; see :meth:`~lightning_hiercomm.comm.codec.Codec.add_and_encode`."""
    tensors = (*_parts(payloads), own, own if residual is None else residual, *_parts(payload))
    return _launch(
        "add_and_encode",
        layout,
        (*tensors, own.numel(), payloads.shape[-1], place, len(payloads)),
        own.numel(),
        TOP=layout.top,
        FEEDBACK=residual is not None,
    )


def constants(layout: Layout) -> dict[str, int]:
    """Return the constants with which kernels are compiled for a layout."""
    columns = 1 << (layout.block // layout.group - 1).bit_length()
    blocks = max(1, _TILE // (layout.group * columns))
    return {"BLOCK": layout.block, "GROUP": layout.group, "BLOCKS": 1 << (blocks.bit_length() - 1), "COLUMNS": columns}


def _parts(payload: Tensor) -> tuple[Tensor, Tensor]:
    return payload.view(torch.int16), payload.view(torch.int8)


def _launch(
    name: str, layout: Layout, arguments: tuple[Any, ...], chunk: int, rows: int = 1, **options: object
) -> bool:
    if not chunk or not rows:
        return True
    if rows > _MOST_ROWS:
        return False
    known = constants(layout)
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
