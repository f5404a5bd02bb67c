"""Codecs that only the language benchmark has."""

from __future__ import annotations

import pytest
import torch

from benchmarks.language.codecs import FiveLevels, FourOfThirtyTwo, SevenLevels

CODECS = (SevenLevels(), FiveLevels(), FourOfThirtyTwo())
LENGTHS = (1, 5, 33, 257, 2000)


def decoded(codec, values):
    return codec.decode(codec.encode(values), torch.empty_like(values))


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_feedback_keeps_what_the_payload_lost(codec, numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    sent, residual = values.clone(), torch.zeros(numel)
    payload = codec.encode(values)
    codec.encode(sent, torch.empty_like(payload), residual=residual)
    assert torch.equal(sent, decoded(codec, values))
    torch.testing.assert_close(sent + residual, values)


@pytest.mark.parametrize(("codec", "top"), [(SevenLevels(), 3), (FiveLevels(), 2)])
@pytest.mark.parametrize("numel", LENGTHS)
def test_levels_round_to_the_nearest_multiple_of_the_scale(codec, top, numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    for block, found in zip(values.split(codec.block), decoded(codec, values).split(codec.block), strict=True):
        scale = (block.abs().max() / top).bfloat16().float()
        torch.testing.assert_close(found, (block / scale).round() * scale)


def test_every_byte_of_five_levels_decodes_to_its_digits():
    digits = torch.cartesian_prod(*[torch.arange(-2.0, 3.0)] * 3)  # 125 x 3
    values = torch.cat([digits.T.flatten(), torch.tensor([])])
    codec = FiveLevels(block=375)
    assert torch.equal(decoded(codec, values), values)
    assert codec.payload_bytes(values.numel(), values.dtype) == 2 + 125 + 1


def test_four_of_32_sends_the_largest_of_each_group():
    values = torch.zeros(512)
    values[:16] = 64.0  # an element of each of the 16 groups
    values[16:32] = -32.0
    values[32:48] = 16.0
    values[48:64] = 30.0
    values[64:80] = 1.0
    expected = values.clone()
    expected[48:64] = 32.0
    expected[64:80] = 0.0
    assert torch.equal(decoded(FourOfThirtyTwo(), values), expected)
    assert FourOfThirtyTwo().payload_bytes(512, values.dtype) == 2 + 64
