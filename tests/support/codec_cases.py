"""Codecs, and what encoding does to values where the ranks of a test compute."""

from __future__ import annotations

import torch
from harness import place
from torch import Tensor

from lightning_hiercomm.comm.blockwise import LargestFour, Quantized
from lightning_hiercomm.comm.codec import AsIs, Cast, Codec

CODECS = [AsIs(), Cast(torch.bfloat16), Cast(torch.float16), Quantized(8), Quantized(4), Quantized(4, block=64)]
CODECS += [LargestFour(), LargestFour(block=48)]


def encoded(codec: Codec, values: Tensor) -> Tensor:
    return codec.encode(values.to(place.device)).cpu()


def decoded(codec: Codec, values: Tensor) -> Tensor:
    values = values.to(place.device)
    return codec.decode(codec.encode(values), torch.empty_like(values)).cpu()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
