"""The form of parameters between nodes: the codec, and whether values or differences are encoded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_hiercomm.comm.blockwise import LargestFour, Quantized
from lightning_hiercomm.comm.codec import AsIs, Cast, Codec

_NAMED: dict[str, Codec] = {
    "float32": Cast(torch.float32),
    "bfloat16": Cast(torch.bfloat16),
    "float16": Cast(torch.float16),
    "int8": Quantized(8),
    "int4": Quantized(4),
    "sparse2": LargestFour(),
}


def codec_named(name: str | torch.dtype | None) -> Codec:
    """Return the codec of the argument ``wire_dtype``.

    Args:
        name: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"int8"``, ``"int4"``, ``"sparse2"``, a torch
            dtype of such a name, or None to send tensors unencoded.

    Raises:
        ValueError: For any other name.
    """
    if name is None:
        return AsIs()
    codec = _NAMED.get(str(name).removeprefix("torch."))
    if codec is None:
        raise ValueError(f"wire_dtype={name!r} is not a payload type; use one of {', '.join(_NAMED)}, or None")
    return codec


@dataclass(frozen=True, init=False)
class Wire:
    """The encoding of traffic between nodes.

    Encoded parameters would lose updates below half a unit in the last place (in bfloat16, 1.0 - 0.001 is 1.0). By
    default nodes therefore send the difference from the last synchronized parameters, which all nodes store.

    Args:
        codec: The codec, or its name, see :func:`codec_named`. None sends tensors unencoded.
        raw: Encode the parameters themselves, to reproduce papers that do so. Saves the memory of the last
            synchronized parameters, but small updates are lost.

    Raises:
        ValueError: For an unknown name.
    """

    codec: Codec
    raw: bool

    def __init__(self, codec: Codec | str | torch.dtype | None = None, raw: bool = False) -> None:
        object.__setattr__(self, "codec", codec if isinstance(codec, Codec) else codec_named(codec))
        object.__setattr__(self, "raw", raw)

    @property
    def is_lossy(self) -> bool:
        """Whether tensors of any type are encoded."""
        return not isinstance(self.codec, AsIs)
