"""The form of parameters between nodes: the codec, and whether values or differences are encoded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_hiercomm.comm.codec import AsIs, Cast, Codec, codec_named


@dataclass(frozen=True, init=False)
class Wire:
    """The encoding of traffic between nodes.

    Encoded parameters would lose updates below half a unit in the last place (in bfloat16, 1.0 - 0.001 is 1.0). By
    default nodes therefore send the difference from the last synchronized parameters, which all nodes store.

    Args:
        codec: The codec, or a floating type to cast to. None sends tensors unencoded.
        raw: Encode the parameters themselves, to reproduce papers that do so. Saves the memory of the last
            synchronized parameters, but small updates are lost.
    """

    codec: Codec
    raw: bool

    def __init__(self, codec: Codec | torch.dtype | None = None, raw: bool = False) -> None:
        chosen = AsIs() if codec is None else Cast(codec) if isinstance(codec, torch.dtype) else codec
        object.__setattr__(self, "codec", chosen)
        object.__setattr__(self, "raw", raw)

    @classmethod
    def named(cls, name: str | torch.dtype | None, raw: bool = False) -> Wire:
        """Return the wire of a name (see :func:`~lightning_hiercomm.comm.codec.codec_named`), a torch dtype, or None.

        Raises:
            ValueError: For any other name.
        """
        return cls(codec_named(name), raw)

    @property
    def is_lossy(self) -> bool:
        """Whether tensors of any type are encoded."""
        return not isinstance(self.codec, AsIs)

    def compresses(self, dtype: torch.dtype) -> bool:
        """Whether tensors of ``dtype`` are encoded in fewer bytes."""
        return self.codec.narrows(dtype)
