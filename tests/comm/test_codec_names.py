"""Names and sizes of codecs, and what they refuse."""

from __future__ import annotations

import pickle

import pytest
import torch
from codec_cases import CODECS
from harness import place

from lightning_hiercomm.comm.blockwise import LargestFour, Quantized
from lightning_hiercomm.comm.codec import AsIs, Cast
from lightning_hiercomm.comm.wire import codec_named


@pytest.mark.parametrize(
    ("codec", "share"),
    [(Quantized(8), 1 / 4), (Quantized(4), 1 / 8), (LargestFour(), 1 / 16), (Cast(torch.bfloat16), 1 / 2)],
)
@pytest.mark.parametrize("numel", [10_000, 11_000_001])
def test_payloads_are_within_two_per_cent_of_a_fraction_of_float32(codec, share, numel):
    assert 1 <= codec.payload_bytes(numel, torch.float32) / (4 * numel * share) < 1.02


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("numel", [0, 5, 257])
def test_the_payload_has_the_predicted_bytes(codec, dtype, numel):
    values = torch.ones(numel, dtype=dtype)
    payload = codec.encode(values.to(place.device))
    assert payload.device == place.device
    assert payload.is_contiguous()
    assert payload.dim() == 1
    assert payload.dtype == codec.payload_dtype(dtype)
    assert payload.numel() == codec.payload_numel(numel, dtype)
    assert payload.numel() * payload.element_size() == codec.payload_bytes(numel, dtype)
    assert (payload.dtype != dtype) == codec.narrows(dtype)


def test_only_wider_floats_are_narrowed():
    assert Cast(torch.bfloat16).narrows(torch.float32)
    assert not Cast(torch.bfloat16).narrows(torch.float16)
    assert Cast(torch.float32).narrows(torch.float64)
    assert not Cast(torch.float32).narrows(torch.float32)
    assert not AsIs().narrows(torch.float64)
    assert Quantized(8).narrows(torch.bfloat16)
    assert not Quantized(8).narrows(torch.int64)


def test_bytes_travel_as_they_are_whatever_floats_do():
    values = torch.arange(200, dtype=torch.uint8)
    payload = Quantized(8).encode(values, torch.zeros_like(values))
    assert torch.equal(Quantized(8).decode(payload, torch.zeros_like(values)), values)


def test_unencoded_tensors_are_not_copied_on_the_same_device():
    values, elsewhere = torch.ones(3), torch.zeros(3)
    assert AsIs().encode(values) is values
    assert AsIs().decode(values, values) is values
    assert AsIs().encode(values, elsewhere) is elsewhere
    assert elsewhere.tolist() == [1.0] * 3


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_codec_is_a_value(codec):
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert len({codec, pickle.loads(pickle.dumps(codec))}) == 1
    assert codec.adds == (not isinstance(codec, Quantized | LargestFour))


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        (None, AsIs()),
        ("float32", Cast(torch.float32)),
        ("bfloat16", Cast(torch.bfloat16)),
        (torch.bfloat16, Cast(torch.bfloat16)),
        ("torch.float16", Cast(torch.float16)),
        ("int8", Quantized(8)),
        ("int4", Quantized(4)),
        ("sparse2", LargestFour()),
    ],
)
def test_codecs_have_names(name, codec):
    assert codec_named(name) == codec


@pytest.mark.parametrize("name", ["int7", "fp8", torch.int64, 8])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(
        ValueError, match=r"wire_dtype=.* one of float32, bfloat16, float16, int8, int4, sparse2, or None"
    ):
        codec_named(name)


def test_invalid_codecs_are_refused():
    with pytest.raises(ValueError, match="bits=5"):
        Quantized(5)
    with pytest.raises(ValueError, match="block=7"):
        Quantized(4, block=7)
    with pytest.raises(ValueError, match="block=24: a block has a multiple of 16 elements"):
        LargestFour(block=24)
    with pytest.raises(ValueError, match=r"dtype=torch\.int8"):
        Cast(torch.int8)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_payload_of_another_length_is_refused(codec):
    payload = codec.encode(torch.ones(300))
    with pytest.raises(ValueError, match="elements"):
        codec.decode(payload, torch.empty(260))
    with pytest.raises(ValueError, match="elements"):
        codec.encode(torch.ones(1), payload)
