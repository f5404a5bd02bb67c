"""Checksums of parameters, to find those that were written to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_hiercomm.comm.dtensor import local
from lightning_hiercomm.nodes.checksums import print_of


class Checksums:
    """One checksum of what this rank holds of each parameter, at the time of the call."""

    @torch.no_grad()
    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._values = {name: int(print_of(local(parameter))) for name, parameter in parameters.items()}

    def changed_since(self, earlier: Checksums, names: Iterable[str] | None = None) -> list[str]:
        """Return the names of parameters whose values differ from those of earlier checksums.

        Args:
            earlier: The checksums to compare with.
            names: The parameters to compare. Default: all that either of the two has.
        """
        compared = {**self._values, **earlier._values} if names is None else names
        return [name for name in compared if self._values.get(name) != earlier._values.get(name)]
