"""Detects writes to parameters outside of the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hiercomm.nodes.checksums import words_of

_SUMS = 256
_FRACTION = 8
"""One of so many parameters is compared at each step even if no write was counted."""


class WriteDetector:
    """Detects writes to parameters between two steps, by checksums of their bits.

    A write through the parameter advances its version counter, and then all parameters are compared. A write through
    ``parameter.data`` does not: at each step an eighth of the parameters is compared, another one each time.

    Args:
        parameters: What is trained.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._steps = 0
        self._shown: list[Tensor] | None = None
        self._written = torch.tensor(False)
        self.remember()

    def remember(self) -> None:
        """The parameters hold the values of a step."""
        self._steps += 1
        self._left = [_sums_of_bits(parameter) for parameter in self._parameters]
        self._shown = None
        self._counts = self._counted()

    def remember_shown(self) -> None:
        """The parameters hold the server's weights, until the values of the step are restored."""
        self._shown = [_sums_of_bits(parameter) for parameter in self._parameters]

    def compare(self, all_parameters: bool = False) -> None:
        """Look for a write since the last step; the result is not waited for."""
        everything = all_parameters or self._counts != self._counted() or len(self._parameters) <= _FRACTION
        first, stride = (0, 1) if everything else (self._steps % _FRACTION, _FRACTION)
        bits = [_sums_of_bits(parameter) for parameter in self._parameters[first::stride]]
        if not bits:
            return
        written = _differ(bits, self._left[first::stride])
        if self._shown is not None:
            written &= _differ(bits, self._shown[first::stride])
        self._written = self._written | written

    @property
    def has_found_any(self) -> bool:
        """Whether a write was found since the beginning."""
        return bool(self._written)

    def _counted(self) -> list[tuple[int, int]]:
        counted = (parameter for parameter in self._parameters if not parameter.is_inference())
        return [(parameter._version, parameter.data_ptr()) for parameter in counted]


def _differ(bits: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    return (torch.cat(list(bits)) != torch.cat(list(others))).any()


def _sums_of_bits(tensor: Tensor) -> Tensor:
    """Return some sums of neighbouring 64-bit words of a tensor, in one read of it, and the words that are left over.

    Not of 32-bit words, because half of a thousand numbers has the same sum as all of them. A permutation of
    neighbours in one sum is not detected.
    """
    words, rest = words_of(tensor)
    in_sums = words.numel() // _SUMS * _SUMS
    sums = [words[:in_sums].view(_SUMS, -1).sum(1)] if in_sums else []
    return torch.cat([*sums, words[in_sums:], rest.long()])
