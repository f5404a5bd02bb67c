"""Triton kernels of the block codecs: one launch encodes, sums or decodes a whole bucket.

The payloads are those of :class:`~lightning_hiercomm.comm.blockwise.Blockwise`, bit for bit; the codecs document their
layout. There, every operation of PyTorch reads and writes all elements. Here, each is read once and written once.

A program is one warp. It keeps a tile of a few blocks in registers, as ``[BLOCKS, GROUP, COLUMNS]``. A column holds the
elements that are packed together, from equal parts of a block::

    codec      block   GROUP   COLUMNS   bytes of a column
    int8       256     1       256       1: q
    int4       256     2       128       1: q_0 + 16 q_1
    sparse2    512     16      32        4: 16 level + place, of the 4 largest

A short last block has fewer columns. Payloads are rows: program ``(i, j)`` has tile ``i`` of row ``j``.

Equal bits need three things:

- Divisions are rounded correctly; Triton's ``/`` is approximate.
- Products and sums are not contracted to FMAs (``enable_fp_fusion=False`` at the launch).
- Peaks and scales are compared and rounded as integers, where a NaN is larger than infinity.

Arguments of the kernels:

- ``values``, ``residual``, ``own``: float32 tensors with ``numel`` elements. ``chunk``: elements of one payload.
- ``scales``, ``codes``: the payloads as int16 (the bits of bfloat16 numbers) and as int8. ``stride``: bytes of a row.

References:
    - Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023: kernels that
      decode, sum and encode again in registers (DeepSpeed's ``dequant_reduce``).
    - Markov et al., "CGX: Adaptive System Support for Communication-Efficient Deep Learning", Middleware 2022: error
      feedback inside the kernel.
"""

from __future__ import annotations

import inspect

import triton
import triton.language as tl

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # the bits of a float32 without its sign
_EXPONENT = tl.constexpr(0x7F800000)  # those of the largest power of two that is not larger; also infinity
_NAN = tl.constexpr(0x7FC00000)
_SMALLEST_SCALE = tl.constexpr(0x00800000)
_NO_FRACTION = tl.constexpr(1.5 * 2**23)  # float32 numbers near this one are integers
_SQRT2 = tl.constexpr(2**0.5)


def _kernel(function):
    """Compile a kernel once for all lengths and addresses, because no access depends on their alignment."""
    arguments = inspect.signature(function).parameters.values()
    return triton.jit(function, do_not_specialize=[each.name for each in arguments if each.annotation is each.empty])


@_kernel
def encode(
    values,
    residual,
    scales,
    codes,
    numel,
    chunk,
    stride,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    TOP: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEEDBACK: tl.constexpr,
):
    """Encode ``values``, or with feedback ``residual + values``.

    With feedback, ``values`` become the decoded payload, and ``residual`` its error.
    """
    row = tl.program_id(1).to(tl.int64)
    length = tl.minimum(chunk, numel - row * chunk).to(tl.int32)
    values += row * chunk
    at, inside = _elements(length, BLOCK, GROUP, BLOCKS, COLUMNS)
    wanted = tl.load(values + at, mask=inside, other=0.0)
    if FEEDBACK:
        residual += row * chunk
        wanted = tl.load(residual + at, mask=inside, other=0.0) + wanted
    scales += row * (stride // 2)
    codes += row * stride
    decoded = _encode(wanted, scales, codes, length, BLOCK, GROUP, TOP, BLOCKS, COLUMNS)
    if FEEDBACK:
        tl.store(values + at, decoded, mask=inside)
        tl.store(residual + at, _finite(wanted - decoded), mask=inside)


@_kernel
def decode(
    scales,
    codes,
    out,
    numel,
    chunk,
    stride,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Decode all rows into ``out``."""
    row = tl.program_id(1).to(tl.int64)
    length = tl.minimum(chunk, numel - row * chunk).to(tl.int32)
    at, inside = _elements(length, BLOCK, GROUP, BLOCKS, COLUMNS)
    decoded = _decode(scales + row * (stride // 2), codes + row * stride, length, BLOCK, GROUP, BLOCKS, COLUMNS)
    tl.store(out + row * chunk + at, decoded, mask=inside)


@_kernel
def add(
    scales,
    codes,
    own,
    numel,
    stride,
    place,
    rows,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add ``rows`` decoded payloads of the same elements to ``own``, ``place`` of them before it."""
    at, inside = _elements(numel, BLOCK, GROUP, BLOCKS, COLUMNS)
    total = _sum(scales, codes, own, numel, stride, place, rows, BLOCK, GROUP, BLOCKS, COLUMNS)
    tl.store(own + at, total, mask=inside)


@_kernel
def add_and_encode(
    scales,
    codes,
    own,
    residual,
    new_scales,
    new_codes,
    numel,
    stride,
    place,
    rows,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    TOP: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEEDBACK: tl.constexpr,
):
    """Encode the sum that :func:`add` calculates; with feedback, as :func:`encode` does."""
    at, inside = _elements(numel, BLOCK, GROUP, BLOCKS, COLUMNS)
    wanted = _sum(scales, codes, own, numel, stride, place, rows, BLOCK, GROUP, BLOCKS, COLUMNS)
    if FEEDBACK:
        wanted = tl.load(residual + at, mask=inside, other=0.0) + wanted
    decoded = _encode(wanted, new_scales, new_codes, numel, BLOCK, GROUP, TOP, BLOCKS, COLUMNS)
    if FEEDBACK:
        tl.store(residual + at, _finite(wanted - decoded), mask=inside)


# ---- one tile -------------------------------------------------------------------------------------------------------


@triton.jit
def _columns(length, BLOCK: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the number of every block of this tile, of its elements, and of its columns."""
    block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS))[:, None, None]
    elements = tl.minimum(tl.maximum(length - block * BLOCK, 0), BLOCK)
    return block, elements, (elements + GROUP - 1) // GROUP


@triton.jit
def _elements(length, BLOCK: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the position of every element of the tile in its chunk of ``length``, and which of them exist."""
    block, elements, columns = _columns(length, BLOCK, GROUP, BLOCKS)
    column = tl.arange(0, COLUMNS)[None, None, :]
    in_block = tl.arange(0, GROUP)[None, :, None] * columns + column
    return block * BLOCK + in_block, (column < columns) & (in_block < elements)


@triton.jit
def _bytes(length, BLOCK: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the position of the first byte of every column in a payload, the step to its next, and which exist."""
    block, _, columns = _columns(length, BLOCK, GROUP, BLOCKS)
    column = tl.arange(0, COLUMNS)[None, None, :]
    start = 2 * tl.cdiv(length, BLOCK) + block * (BLOCK // GROUP * _bytes_of(GROUP))
    return start + column, columns, column < columns


@triton.jit
def _bytes_of(GROUP: tl.constexpr):
    """Return the bytes of a column."""
    return 4 if GROUP == 16 else 1


@triton.jit
def _encode(
    wanted,
    scales,
    codes,
    length,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    TOP: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write a payload, and return its decoded values."""
    block, _, _ = _columns(length, BLOCK, GROUP, BLOCKS)
    peak = tl.max(tl.max(wanted.to(tl.int32, bitcast=True) & _MAGNITUDE, 2, keep_dims=True), 1, keep_dims=True)
    bits = tl.div_rn(peak.to(tl.float32, bitcast=True), tl.full(peak.shape, TOP, tl.float32)).to(tl.int32, bitcast=True)
    bits = tl.minimum(tl.maximum(bits, _SMALLEST_SCALE), _NAN)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest bfloat16, ties to even
    tl.store(scales + block, bits.to(tl.int16), mask=block * BLOCK < length)
    scale = (bits << 16).to(tl.float32, bitcast=True)

    quotient = tl.div_rn(wanted, tl.broadcast_to(scale, wanted.shape))
    quotient = tl.where(quotient == quotient, quotient, 0.0)
    code = ((quotient + _NO_FRACTION) - _NO_FRACTION).to(tl.int32)  # ties to even
    at, step, exists = _bytes(length, BLOCK, GROUP, BLOCKS, COLUMNS)
    member = tl.arange(0, GROUP)[None, :, None]
    if GROUP == 16:
        # unique in a column, ordered by magnitude, then by place; the last bit is the sign
        keys = 32 * tl.abs(code) + 2 * (15 - member) + (code < 0).to(tl.int32)
        for largest in tl.static_range(4):
            key = tl.max(keys, 1, keep_dims=True)
            keys = tl.where(keys == key, -1, keys)
            level = tl.maximum((_power_bits(key >> 5) >> 23) - 126, 0)
            byte = 16 * tl.where((key & 1) == 1, -level, level) + (15 - ((key >> 1) & 15))
            tl.store(codes + at + largest * step, byte.to(tl.int8), mask=exists)
        power = _power_bits(tl.abs(code)).to(tl.float32, bitcast=True).to(tl.int32)
        code = tl.where(keys < 0, tl.where(code < 0, -power, power), 0)
    else:
        byte = tl.sum(code << (4 * member), 1, keep_dims=True)
        tl.store(codes + at, byte.to(tl.int8), mask=exists)
    used = 2 * tl.cdiv(length, BLOCK) + tl.cdiv(length, GROUP) * _bytes_of(GROUP)
    is_last = tl.program_id(0) == (length - 1) // (BLOCK * BLOCKS)
    tl.store(codes + used, 0, mask=is_last & (used % 2 == 1))
    return code.to(tl.float32) * scale


@triton.jit
def _decode(
    scales,
    codes,
    length,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the decoded values of a payload."""
    block, _, _ = _columns(length, BLOCK, GROUP, BLOCKS)
    bits = tl.load(scales + block, mask=block * BLOCK < length, other=0).to(tl.int32)
    at, step, exists = _bytes(length, BLOCK, GROUP, BLOCKS, COLUMNS)
    member = tl.arange(0, GROUP)[None, :, None]
    byte = tl.load(codes + at, mask=exists, other=0).to(tl.int32)
    if GROUP == 16:
        code = _sent_to(member, byte)
        for largest in tl.static_range(1, 4):
            code += _sent_to(member, tl.load(codes + at + largest * step, mask=exists, other=0).to(tl.int32))
    elif GROUP == 2:
        high = (byte + 8) >> 4
        code = tl.where(member == 1, high, byte - 16 * high)
    else:
        code = byte
    return code.to(tl.float32) * (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _sum(
    scales,
    codes,
    own,
    numel,
    stride,
    place,
    rows,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the sum of decoded payloads and ``own``, in the order of the members."""
    at, inside = _elements(numel, BLOCK, GROUP, BLOCKS, COLUMNS)
    stride = stride.to(tl.int64)
    total = tl.full([BLOCKS, GROUP, COLUMNS], -0.0, tl.float32)  # adding to it changes no bit
    for row in range(place):
        start = row * stride
        total += _decode(scales + start // 2, codes + start, numel, BLOCK, GROUP, BLOCKS, COLUMNS)
    total += tl.load(own + at, mask=inside, other=0.0)
    for row in range(place, rows):
        start = row * stride
        total += _decode(scales + start // 2, codes + start, numel, BLOCK, GROUP, BLOCKS, COLUMNS)
    return total


# ---- one element ----------------------------------------------------------------------------------------------------


@triton.jit
def _finite(error):
    """Return the error, or 0 if it is not finite."""
    is_finite = (error.to(tl.int32, bitcast=True) & _MAGNITUDE) < _EXPONENT
    return tl.where(is_finite, error, 0.0)


@triton.jit
def _power_bits(magnitude):
    """Return the bits, as float32, of an integer that is rounded to the nearest power of two by its logarithm."""
    return (magnitude.to(tl.float32) * _SQRT2).to(tl.int32, bitcast=True) & _EXPONENT


@triton.jit
def _sent_to(member, byte):
    """Return the code that a byte of the sparse codec holds for every member of its group."""
    level = byte >> 4
    power = (1 << tl.abs(level)) >> 1
    return tl.where(member == (byte & 15), tl.where(level < 0, -power, power), 0)
