"""Checksums of tensors depend on every bit and on its place."""

from __future__ import annotations

import pytest
import torch
from harness import place

from lightning_hiercomm.nodes.checksums import print_of

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 2, 7, 4097])
def test_a_print_depends_on_every_bit(numel, dtype):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(place.device, dtype)
    before = int(print_of(values))
    assert int(print_of(values.clone())) == before
    for element in {0, numel // 2, numel - 1}:
        for byte in range(dtype.itemsize):
            other = values.clone()
            other.view(torch.uint8)[element * dtype.itemsize + byte] ^= 1
            assert int(print_of(other)) != before


def test_one_element_of_a_strided_view_has_the_print_of_its_value():
    strided = torch.arange(2.0, device=place.device)[1::2]
    assert strided.stride() == (2,)
    assert int(print_of(strided)) == int(print_of(torch.ones(1, device=place.device)))


def test_prints_of_views_and_of_other_memory_formats():
    whole = torch.arange(8.0, device=place.device)
    assert int(print_of(whole[1:4])) == int(print_of(whole[1:4].clone()))
    image = torch.randn(2, 3, 4, 5).to(place.device, memory_format=torch.channels_last)
    assert int(print_of(image)) == int(print_of(image.clone()))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):  # one 1.0 at each place of two rows and a piece
        one_hot = torch.eye(1, 1024 * 8 // dtype.itemsize * 2 + 5, dtype=dtype, device=place.device)[0]
        prints = {int(print_of(one_hot.roll(at))) for at in range(0, one_hot.numel(), 7)}
        assert len(prints) == len(range(0, one_hot.numel(), 7))
    table = torch.eye(2, 1024, dtype=torch.float64, device=place.device)
    assert int(print_of(table)) != int(print_of(table.flip(0)))
    turned = torch.randn(3, dtype=torch.complex64, device=place.device)
    assert int(print_of(turned.conj())) == int(print_of(turned.conj().resolve_conj())) != int(print_of(turned))
    assert int(print_of(torch.empty(0, device=place.device))) == 0
    assert int(print_of(torch.tensor(1.0, device=place.device))) != 0
