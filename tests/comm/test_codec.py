"""What encoding does to values: exact small cases, a calculation in plain Python, and what must hold for any values."""

from __future__ import annotations

import math
import struct
from concurrent.futures import ThreadPoolExecutor

import harness
import pytest
import torch
from codec_cases import CODECS, decoded, encoded, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_hiercomm.comm.blockwise as blockwise
from lightning_hiercomm.comm.blockwise import LargestFour, Quantized
from lightning_hiercomm.comm.codec import Cast

SPARSE = [LargestFour(), LargestFour(block=16), LargestFour(block=48)]
QUANTIZED = [Quantized(8), Quantized(4), Quantized(8, block=2), Quantized(4, block=6)]
LENGTHS = [0, 1, 2, 3, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1025]

numbers = st.floats(min_value=-(1.75 * 2.0**127), max_value=1.75 * 2.0**127, width=32)
"""Finite in float32 however their scale is rounded; with denormal numbers and both zeros."""
vectors = st.one_of(
    st.lists(numbers, max_size=40),
    st.tuples(st.lists(numbers, min_size=1, max_size=9), st.sampled_from(LENGTHS)).map(
        lambda pair: (pair[0] * (pair[1] // len(pair[0]) + 1))[: pair[1]]
    ),
)


on_both = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


def same_numbers(a, b):
    """Whether bits are equal, except those of NaN, which a CPU and a GPU choose differently."""
    if a.is_floating_point() and torch.equal(a.isnan(), b.isnan()):
        a, b = a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0)
    return same_bits(a, b)


@on_both
def test_eight_bits_are_a_scale_and_codes_rounded_to_even():
    codec = Quantized(8, block=4)
    values = torch.tensor([127.0, -1.0, 0.5, 1.5, -254.0, 3.0])  # scales 1 and 2
    payload = encoded(codec, values)
    assert payload.tolist() == [0x80, 0x3F, 0x00, 0x40, 127, 255, 0, 2, 256 - 127, 2]
    assert decoded(codec, values).tolist() == [127.0, -1.0, 0.0, 2.0, -254.0, 4.0]


@on_both
def test_four_bits_put_a_block_s_halves_into_the_halves_of_bytes():
    codec = Quantized(4, block=4)
    values = torch.tensor([7.0, -7.0, 1.0, 2.5, -14.0, 6.0, 2.0])  # scales 1 and 2; an odd last block
    payload = encoded(codec, values)
    codes = [7 + 16 * 1, -7 + 16 * 2, -7 + 16 * 1, 3]
    assert payload.tolist() == [0x80, 0x3F, 0x00, 0x40, *(code % 256 for code in codes)]
    assert decoded(codec, values).tolist() == [7.0, -7.0, 1.0, 2.0, -14.0, 6.0, 2.0]


@on_both
def test_the_four_largest_of_sixteen_travel_as_powers_of_two():
    codec = LargestFour(block=32)
    values = torch.zeros(32 + 3)
    # group 0 of two: the elements 0, 2, 4, ...; scale 1
    values[[0, 2, 4, 6, 8, 30]] = torch.tensor([64.0, 5.0, -23.0, 0.4, 1.0, -2.0])
    values[[1, 3]] = torch.tensor([45.0, -46.0])  # group 1
    values[32:] = torch.tensor([0.0, -128.0, 12.0])  # a short block, scale 2: one group
    expected = torch.zeros(32 + 3)
    expected[[0, 2, 4, 30]] = torch.tensor([64.0, 4.0, -32.0, -2.0])
    expected[[1, 3]] = torch.tensor([32.0, -64.0])
    expected[32:] = torch.tensor([0.0, -128.0, 16.0])
    first = [16 * 7 + 0, -16 * 7 + 1, -16 * 6 + 2, 16 * 6 + 0, 16 * 3 + 1, 2, -16 * 2 + 15, 3]
    last = [-16 * 7 + 1, 16 * 4 + 2, 0, 3]
    payload = encoded(codec, values)
    assert payload.tolist() == [0x80, 0x3F, 0x00, 0x40, *(code % 256 for code in first + last)]
    assert decoded(codec, values).tolist() == expected.tolist()


def float32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def bfloat16(x):
    """The nearest bfloat16 of a float32, ties to even, from its bits."""
    bits = struct.unpack("I", struct.pack("f", x))[0]
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return struct.unpack("f", struct.pack("I", bits))[0]


def quantized_in_plain_python(values, bits, block):
    top = {8: 127, 4: 7}[bits]
    result = []
    for start in range(0, len(values), block):
        own = values[start : start + block]
        scale = bfloat16(max(float32(max(abs(v) for v in own) / top), 2.0**-126))
        result += [scale * round(float32(v / scale)) for v in own]
    return result


_POWERS = ((0, 0), (1, 1), (2, 2), (4, 5), (8, 11), (16, 22), (32, 45))
"""Each with the largest code that is rounded to it."""


def largest_in_plain_python(values, block):
    result = []
    for start in range(0, len(values), block):
        own = values[start : start + block]
        scale = bfloat16(max(float32(max(abs(v) for v in own) / 64), 2.0**-126))
        codes = [round(float32(v / scale)) for v in own]
        groups = -(-len(own) // 16)
        for j in range(groups):
            in_order = sorted(range(j, len(own), groups), key=lambda i: (-abs(codes[i]), i))
            for i in in_order[4:]:
                codes[i] = 0
        for code in codes:
            power = next((power for power, most in _POWERS if abs(code) <= most), 64)
            result.append(scale * math.copysign(power, code))
    return result


@on_both
@pytest.mark.parametrize("codec", [*QUANTIZED, *SPARSE], ids=str)
@given(values=vectors)
@settings(deadline=None)
def test_values_decode_as_in_a_loop_over_blocks(codec, values):
    if isinstance(codec, LargestFour):
        expected = largest_in_plain_python(values, codec.block)
    else:
        expected = quantized_in_plain_python(values, codec.bits, codec.block)
    assert decoded(codec, torch.tensor(values, dtype=torch.float32)).tolist() == expected


@on_both
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("codec", [*QUANTIZED, *SPARSE], ids=str)
@given(values=vectors)
@settings(deadline=None, max_examples=40)
def test_encoding_decoded_values_again_changes_no_bit(codec, dtype, values):
    once = decoded(codec, torch.tensor(values, dtype=dtype))
    assert same_bits(decoded(codec, once), once)


@on_both
@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_any_length_fits_its_payload_and_neither_side_s_neighbours_change(codec, numel):
    device = harness.place.device
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(device)
    before, room = values.clone(), codec.payload_numel(numel, values.dtype)
    payloads = torch.full((room + 4,), 7).to(device, codec.payload_dtype(values.dtype))
    payload = codec.encode(values, payloads[2 : room + 2])
    assert payloads[[0, 1, -2, -1]].tolist() == [7] * 4
    assert same_bits(payload, codec.encode(values))
    outs = torch.full((numel + 2,), 7.0, device=device)
    out = codec.decode(payload, outs[1:-1])
    assert outs[[0, -1]].tolist() == [7.0, 7.0]
    if not codec.needs_feedback:
        torch.testing.assert_close(out, values, rtol=0.01, atol=0.3 if not codec.adds else 0)
    assert same_bits(values, before)


@on_both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", QUANTIZED, ids=str)
def test_other_floats_are_quantised_as_float32_ones_and_rounded_back(codec, dtype):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert same_bits(encoded(codec, values), encoded(codec, values.float()))
    assert same_bits(decoded(codec, values), decoded(codec, values.float()).to(dtype))


@on_both
@pytest.mark.parametrize("tile", [2**18, 1024])
@pytest.mark.parametrize("numel", [3, 255, 256, 600, 5 * 256, 70 * 256 + 7])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_row_is_encoded_and_decoded_like_a_tensor_of_its_own(codec, numel, tile, monkeypatch):
    monkeypatch.setattr(blockwise, "_TILE_ON_CPU", tile)
    rows = torch.randn(3, numel, generator=torch.Generator().manual_seed(numel))
    payload = encoded(codec, rows)
    assert all(same_bits(own, encoded(codec, row)) for own, row in zip(payload, rows, strict=True))
    assert all(same_bits(own, decoded(codec, row)) for own, row in zip(decoded(codec, rows), rows, strict=True))


@on_both
@pytest.mark.parametrize("bad", [None, float("nan"), float("-inf"), 3.4e38, -0.0])
@pytest.mark.parametrize("numel", [3, 600, 5 * 256, 70 * 256 + 7])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_feedback_leaves_the_decoded_values_and_the_finite_error(codec, numel, bad):
    device, generator = harness.place.device, torch.Generator().manual_seed(numel)
    values, residual = torch.randn(2, numel, generator=generator), torch.randn(2, numel, generator=generator)
    if bad is not None:
        values[1, numel // 2] = bad
    wanted = values + residual
    error = (wanted - decoded(codec, wanted)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    payload = torch.empty_like(codec.encode(wanted.to(device))) if codec.narrows(torch.float32) else wanted.to(device)
    values, residual = values.to(device), residual.to(device)
    codec.encode(values, payload, residual=residual)
    assert same_numbers(payload.cpu(), encoded(codec, wanted))
    assert same_numbers(values.cpu(), decoded(codec, wanted))
    assert same_bits(residual.cpu(), error)


@on_both
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("numel", [3, 600, 70 * 256 + 7])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_decoded_payloads_are_added_in_the_order_that_is_asked_for(codec, numel, place):
    rows = torch.randn(4, numel, generator=torch.Generator().manual_seed(numel)) * torch.tensor([[1e4], [1], [1], [1]])
    others = [row for i, row in enumerate(rows) if i != place]
    own = rows[place].clone().to(harness.place.device)
    codec.add_decoded(codec.encode(torch.stack(others).to(own.device)), own, place)
    first, *rest = (row if i == place else decoded(codec, row) for i, row in enumerate(rows))
    for row in rest:
        first = first + row
    assert same_bits(own.cpu(), first)


def test_memory_of_inference_mode_serves_training_afterwards():
    def work():
        values, residual = torch.ones(700), torch.zeros(700)
        codec = Quantized(4)
        return codec.encode(values, codec.encode(values), residual=residual)

    def in_a_thread_of_its_own():
        with torch.inference_mode():
            before = work().tolist()
        return before == work().tolist()

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(in_a_thread_of_its_own).result(30)


@on_both
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 3, 255])
@pytest.mark.parametrize("codec", [Quantized(8), Quantized(4), LargestFour()], ids=str)
def test_a_non_finite_value_makes_only_its_block_non_finite(bad, place, codec):
    block = codec.block
    for start, length in ((block, block), (2 * block, 3)):
        values = torch.ones(2 * block + 3)
        values[start + min(place, length - 1)] = bad
        out = decoded(codec, values)
        assert out[:start].isfinite().all()
        assert out[start + length :].isfinite().all()
        assert not out[start : start + block].isfinite().any()


@on_both
def test_values_beyond_every_scale_do_not_decode_to_finite_ones():
    values = torch.tensor([1e300, 1.0], dtype=torch.float64)
    assert not decoded(Quantized(8), values).isfinite().any()


@on_both
def test_the_largest_numbers_stay_seen():
    largest = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, 1.0])
    for codec in (Quantized(8), Quantized(4)):
        out = decoded(codec, largest)
        assert (out[:2].abs() > 3.3e38).all()  # or infinite


@on_both
def test_values_too_large_for_float16_become_infinite():
    out = decoded(Cast(torch.float16), torch.tensor([1e5, -1e5, float("nan"), 1.0]))
    assert out[:2].tolist() == [float("inf"), float("-inf")]
    assert out[2].isnan()
    assert out[3] == 1
