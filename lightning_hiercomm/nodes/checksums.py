"""Checksums of tensors that depend on every bit."""

from __future__ import annotations

import torch
from torch import Tensor

_ROW = 1024
_ROWS_IN_CACHE, _ROWS_ELSEWHERE = 64, 8192


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor with lazy conjugation and negation resolved, so that its bits are visible."""
    return tensor.detach().resolve_conj().resolve_neg()


def print_of(tensor: Tensor) -> Tensor:
    """Return a 64-bit checksum of all values of a tensor and of their positions, as an int64 scalar on its device."""
    flat = plain(tensor).contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8 or flat.stride(0) != 1:  # of one element it may be any number
        flat = flat.clone(memory_format=torch.contiguous_format)
    octets = flat.view(torch.uint8)
    whole = octets.numel() // 8 * 8
    words, rest = octets[:whole].view(torch.int64), octets[whole:]
    in_rows = words.numel() // _ROW * _ROW
    sums = [_sum_of_rows(words[:in_rows].view(-1, _ROW))] if in_rows else []
    return _scrambled(torch.cat([*sums, words[in_rows:], rest])).sum()


def _sum_of_rows(table: Tensor) -> Tensor:
    """Return the sum of the rows of words, each with its own weight."""
    weights = _scrambled(torch.arange(len(table), device=table.device))[:, None] | 1
    at_once = _ROWS_IN_CACHE if table.device.type == "cpu" else _ROWS_ELSEWHERE
    total = table.new_zeros(_ROW)
    for rows, weight in zip(table.split(at_once), weights.split(at_once), strict=True):
        # the product drops upper bits, and 1.0 has no other ones
        total += ((rows ^ (rows >> 32)) * weight).sum(0)
    return total


def _scrambled(numbers: Tensor) -> Tensor:
    """Hash numbers and their positions to 64 bits, as the finalizer of SplitMix64 does (Steele et al. 2014)."""
    mixed = numbers + torch.arange(1, numbers.numel() + 1, device=numbers.device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return mixed ^ (mixed >> 31)
