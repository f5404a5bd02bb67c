"""The map of the package: its picture is drawn from today's imports, and the rules that it states hold."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "lightning_hiercomm"
PICTURES = CHECKOUT / "docs" / "pictures"


def imported(name: str):
    spec = importlib.util.spec_from_file_location(name, PICTURES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def architecture():
    return imported("architecture")


def test_picture_shows_the_imports_as_they_are(architecture):
    assert architecture.PICTURE.read_text() == architecture.drawn(), "run `python docs/pictures/architecture.py`"


def test_pictures_equal_the_output_of_their_program():
    for name, draw in imported("draw").PICTURES.items():
        assert (PICTURES / f"{name}.svg").read_text() == draw(), "run `python docs/pictures/draw.py`"


def test_the_root_module_holds_the_public_names():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "arguments.py"}


LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}


def imports_of(path: Path) -> set[str]:
    """Return the first name of what a file imports, and the first below the package itself."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {*(node.module or "").split(".")[:2]}
    return imported


@pytest.mark.parametrize("package", ["run", "schemes", "elastic", "batches", "nodes", "comm", "control"])
def test_packages_below_the_trainer_do_not_import_lightning(package):
    imported = set[str]().union(*map(imports_of, (PACKAGE / package).rglob("*.py")))
    assert imported, "no file was read"
    assert not imported & {*LIGHTNING, "_lightning"}


def test_one_module_imports_lightning():
    assert [path.name for path in PACKAGE.rglob("*.py") if imports_of(path) & LIGHTNING] == ["tree.py"]


def test_folders_of_schemes_import_each_other_in_one_direction(architecture):
    schemes = PACKAGE / "schemes"
    folders = {path.parent.name for path in schemes.glob("*/__init__.py")}
    arrows: dict[str, set[str]] = {folder: set() for folder in folders}
    for folder in folders:
        for path in (schemes / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                parts = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
                if parts[:2] == ["lightning_hiercomm", "schemes"]:
                    arrows[folder] |= {*parts[2:3]} & folders - {folder}
    assert arrows["components"], "no import was read"
    architecture.layers_of(arrows)  # raises where folders import each other


def test_paths_on_the_map_exist():
    page = (CHECKOUT / "docs" / "explanation" / "architecture.md").read_text()
    paths = {path for path in page.split("`")[1::2] if "/" in path and " " not in path}
    roots = (PACKAGE, CHECKOUT)
    assert len(paths) > 15
    assert {path for path in paths if not any((root / path).exists() for root in roots)} == set()
