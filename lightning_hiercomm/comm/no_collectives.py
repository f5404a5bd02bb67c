"""A guard for code of the user that must not communicate."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class NoCollectives(TorchDispatchMode):
    """Raises an error before a collective of ``torch.distributed`` starts; for the thread that enters it.

    Args:
        message: Text of the error.

    Raises:
        RuntimeError: Inside, where a collective starts.
    """

    def __init__(self, message: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._message = message

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(self._message)
        return func(*args, **(kwargs or {}))
