"""Our modules that touch Lightning, a second time: for ``pytorch_lightning``, from the same source files.

``lightning.pytorch`` and ``pytorch_lightning`` are one code base in two packages, hence two trees of classes. So are
these modules: ``lightning_hiercomm.pytorch_lightning.trainer.strategy`` is ``strategy.py`` again, its import statements
pointing to the other tree. Nothing else is changed, so lines, tracebacks and ``inspect`` show the file itself. What
never touches Lightning (schemes, communicators, replicas, batches) exists once.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

_PACKAGE = "lightning_hiercomm"
_SECOND = f"{_PACKAGE}.pytorch_lightning"
_FOLDER = Path(__file__).resolve().parents[1]
_OTHER_TREE = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


class SecondTreeFinder(MetaPathFinder):
    """Finds ``lightning_hiercomm.pytorch_lightning.x`` where ``lightning_hiercomm.x`` touches Lightning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by ``import`` when no file was found under that name."""
        if not fullname.startswith(f"{_SECOND}."):
            return None
        name = _PACKAGE + fullname.removeprefix(_SECOND)
        if name in touching_lightning():
            file = _files()[name]
            return importlib.util.spec_from_file_location(
                fullname,
                file,
                loader=_SecondTreeLoader(fullname, str(file)),
                submodule_search_locations=[] if file.name == "__init__.py" else None,
            )
        if any(touching.startswith(f"{name}.") for touching in touching_lightning()):
            return ModuleSpec(fullname, None, is_package=True)  # a folder in which only some modules touch Lightning
        return None


class _SecondTreeLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        # SourceFileLoader's own would find the first tree's bytecode, which it caches by file name
        path = self.get_filename(fullname)
        tree = _PointToSecondTree().visit(ast.parse(self.get_data(path), path))
        return compile(tree, path, "exec", dont_inherit=True)


class _PointToSecondTree(ast.NodeTransformer):
    """Import the other tree's Lightning, and our own modules for it."""

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for alias in node.names:
            second = _second(alias.name)
            if second != alias.name and alias.asname is None:
                raise ImportError(f"`import {alias.name}` binds a name that means another tree: give it one with `as`")
            alias.name = second
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.ImportFrom]:
        # one statement per name: `from package import a, b` may mean a module of the second tree and one of both
        return [
            ast.copy_location(ast.ImportFrom(_home(node.module or "", alias.name), [alias], node.level), node)
            for alias in node.names
        ]


def _home(module: str, name: str) -> str:
    """Where the second tree imports ``name`` from that the first imports from ``module``."""
    as_module = f"{module}.{name}"
    return _second(as_module).removesuffix(f".{name}") if _second(as_module) != as_module else _second(module)


def _second(module: str) -> str:
    if module == "lightning":
        raise ImportError(
            "import from `lightning.pytorch` or `lightning.fabric`: `lightning` itself has no second tree"
        )
    for first, second in _OTHER_TREE.items():
        if module == first or module.startswith(f"{first}."):
            return second + module.removeprefix(first)
    return _SECOND + module.removeprefix(_PACKAGE) if module in touching_lightning() else module


@cache
def touching_lightning() -> frozenset[str]:
    """Our modules that import Lightning, or one of ours that does. Read from the sources."""
    imports = {name: set(_imported_modules(ast.parse(file.read_bytes(), str(file)))) for name, file in _files().items()}
    touching = {name for name, others in imports.items() if any(other.split(".")[0] == "lightning" for other in others)}
    while more := {name for name, others in imports.items() if others & touching} - touching:
        touching |= more
    return frozenset(touching)


@cache
def _files() -> Mapping[str, Path]:
    """Our modules by name; neither the package itself, which only names what there is, nor this folder."""
    files = {}
    for file in sorted(_FOLDER.rglob("*.py")):
        parts = file.relative_to(_FOLDER).with_suffix("").parts
        name = ".".join([_PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)])
        if name != _PACKAGE and not f"{name}.".startswith(f"{_SECOND}."):
            files[name] = file
    return files


def _imported_modules(tree: ast.Module) -> Iterator[str]:
    """Names of what is imported; ``from a import b`` may mean a module ``a.b`` or something in ``a``, so both."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
