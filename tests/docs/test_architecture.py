"""The map of the package: its picture is drawn from today's imports, and the rules that it states hold."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "lightning_hiercomm"


@pytest.fixture(scope="module")
def architecture():
    spec = importlib.util.spec_from_file_location("architecture", CHECKOUT / "docs" / "architecture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_shows_the_imports_as_they_are(architecture):
    assert architecture.PICTURE.read_text() == architecture.drawn(), "run `python docs/architecture.py`"


def test_rooms_that_import_each_other_have_no_floor(architecture):
    assert architecture.floors({"above": {"below"}, "below": set()}) == [["below"], ["above"]]
    with pytest.raises(ValueError, match="'left', 'right'"):
        architecture.floors({"above": {"left"}, "left": {"right"}, "right": {"left"}})


def test_arrows_that_a_longer_way_implies_are_left_out(architecture):
    arrows = {"above": {"middle", "below"}, "middle": {"below"}, "below": set()}
    assert architecture.direct(arrows) == {"above": {"middle"}, "middle": {"below"}, "below": set()}


def test_the_root_holds_what_a_person_imports_or_calls():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "arguments.py"}


@pytest.mark.parametrize("room", ["run", "schemes", "elastic", "batches", "nodes", "comm", "control"])
def test_below_the_trainer_nobody_imports_lightning(room):
    imported = set()
    for path in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    assert imported, "no file was read"
    assert not imported & {"lightning", "pytorch_lightning", "lightning_fabric"}


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
    architecture.floors(arrows)  # raises where folders import each other


def test_every_room_has_its_place_on_the_page(architecture):
    page = (CHECKOUT / "docs" / "architecture.md").read_text()
    for room in architecture.rooms().keys() - {"lightning_hiercomm", "__main__"}:
        assert f"`{room}" in page
