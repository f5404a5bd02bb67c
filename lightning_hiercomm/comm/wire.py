"""What a tensor looks like on the wire between nodes, and whether it is the tensor or its difference that travels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_hiercomm.comm.codec import AsIs, Cast, Codec, codec_named


@dataclass(frozen=True, init=False)
class Wire:
    """The form of inter-node traffic.

    Parameters must not simply be encoded: an update below half a unit in the last place is then lost (in bfloat16,
    1.0 - 0.001 is 1.0). So by default what travels is the *difference* from the last synchronized parameters, which
    both ends know exactly.

    Args:
        codec: What is made of a tensor, or a floating type to cast it to. None sends tensors as they are.
        raw: Encode the parameters themselves. Cheaper in memory (no copy of the last synchronized values), but small
            updates stall; for reproducing papers that do so.
    """

    codec: Codec
    raw: bool

    def __init__(self, codec: Codec | torch.dtype | None = None, raw: bool = False) -> None:
        chosen = AsIs() if codec is None else Cast(codec) if isinstance(codec, torch.dtype) else codec
        object.__setattr__(self, "codec", chosen)
        object.__setattr__(self, "raw", raw)

    @classmethod
    def named(cls, name: str | torch.dtype | None, raw: bool = False) -> Wire:
        """Make a wire from a name (see :func:`~lightning_hiercomm.comm.codec.codec_named`), a torch dtype, or None.

        Raises:
            ValueError: For any other name.
        """
        return cls(codec_named(name), raw)

    @property
    def is_lossy(self) -> bool:
        """Whether anything at all travels in another form."""
        return not isinstance(self.codec, AsIs)

    def compresses(self, dtype: torch.dtype) -> bool:
        """Whether a tensor of ``dtype`` travels in another, narrower form."""
        return self.codec.narrows(dtype)
