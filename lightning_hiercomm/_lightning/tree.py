"""The classes of Lightning that this process uses: ``lightning`` or ``pytorch_lightning``, whose code is the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["VARIABLE", "as_shown", "check_tree", "fabric", "lr_finder", "pass_to_ranks", "pl", "wrapper"]

VARIABLE = "HIERCOMM_LIGHTNING"
_PACKAGES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}


def _chosen() -> str:
    """Return the value of the variable, else the package that is imported already, else ``lightning``."""
    named = os.environ.get(VARIABLE)
    if named is not None and named not in _PACKAGES:
        raise ImportError(f"{VARIABLE}={named!r} must be one of {', '.join(_PACKAGES)}")
    imported = [name for name, packages in _PACKAGES.items() if not sys.modules.keys().isdisjoint(packages)]
    return named or (imported[0] if len(imported) == 1 else "lightning")


_CHOSEN = _chosen()
if TYPE_CHECKING:
    import lightning.fabric as fabric
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.io import wrapper
    from lightning.pytorch.tuner import lr_finder
else:
    pl, fabric = map(import_module, _PACKAGES[_CHOSEN])
    lr_finder, wrapper = pl.tuner.lr_finder, pl.plugins.io.wrapper
((_OTHER, _OTHER_PACKAGES),) = ((name, packages) for name, packages in _PACKAGES.items() if name != _CHOSEN)
_NOTE = (
    f"lightning_hiercomm uses `{pl.__name__}` in this process. To use `{_OTHER_PACKAGES[0]}`, set {VARIABLE}={_OTHER},"
    f" or import only `{_OTHER_PACKAGES[0]}`, and before lightning_hiercomm"
)


def pass_to_ranks() -> None:
    """Make the processes that this one starts use the same classes, in whatever order they import."""
    os.environ[VARIABLE] = _CHOSEN


def as_shown(call: str) -> str:
    """Add a note to a strategy's text, which is all that a Trainer of the other classes prints when it refuses it."""
    return call if sys.modules.keys().isdisjoint(_OTHER_PACKAGES) else f"{call}  # {_NOTE}"


def check_tree(objects: Iterable[object]) -> None:
    """Raise an error for an object of the other classes."""
    for one in objects:
        roots = {base.__module__.split(".")[0] for base in type(one).__mro__}
        if _OTHER in roots and _CHOSEN not in roots:
            raise TypeError(f"{type(one).__name__} is of `{_OTHER_PACKAGES[0]}`, but {_NOTE}")
