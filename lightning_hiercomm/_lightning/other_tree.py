"""What happens when a program that has imported this package imports ``pytorch_lightning``, too."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, then: Callable[[ModuleType], object]) -> None:
    """Do something with a module as soon as it is imported, before whoever imports it goes on; at once, if it is.

    To import ``pytorch_lightning`` in advance would cost every program seconds, and its registry of strategies has no
    other door for packages that it does not know.

    Args:
        name: Of the module.
        then: Gets it.
    """
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Waits(name, then))


def of_second_tree(name: str) -> Callable[..., Any]:
    """What makes an instance of our class of that name for ``pytorch_lightning``; imports the class first."""

    def make(**arguments: Any) -> Any:
        return getattr(importlib.import_module("lightning_hiercomm.pytorch_lightning"), name)(**arguments)

    return make


class _Waits(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by ``import`` for every module."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_then(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = execute_and_then  # type: ignore[method-assign]
        return spec
