"""What a tensor looks like on the wire between nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Wire:
    """The payload type of inter-node traffic.

    Parameters must not simply be cast: an update below half a unit in the last place is then lost (in bfloat16,
    1.0 - 0.001 is 1.0). So by default what travels is the *difference* from the last agreed parameters, which both
    ends know exactly.

    Args:
        dtype: None sends tensors as they are.
        raw: Cast the parameters themselves. Cheaper in memory (no copy of the last agreed values), but small updates
            stall; for reproducing papers that do so.
    """

    dtype: torch.dtype | None = None
    raw: bool = False

    @classmethod
    def named(cls, name: str | torch.dtype | None, raw: bool = False) -> Wire:
        """Make a wire from ``"float32"``, ``"bfloat16"``, ``"float16"``, the torch dtype, or None.

        Raises:
            ValueError: For any other name.
        """
        if name is None:
            return cls()
        dtype = _DTYPES.get(str(name).removeprefix("torch."))
        if dtype is None:
            raise ValueError(f"wire_dtype={name!r} is not a payload type; use one of {', '.join(_DTYPES)}, or None")
        return cls(dtype, raw)

    def compresses(self, dtype: torch.dtype) -> bool:
        """Whether a tensor of ``dtype`` travels in another, narrower type."""
        return self.dtype is not None and self.dtype.itemsize < dtype.itemsize
