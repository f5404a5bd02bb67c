"""The tests must see what a user gets from ``pip install``, not the checkout they lie in."""

import json
import os
from importlib.metadata import distribution
from pathlib import Path

import pytest

import lightning_hiercomm

CHECKOUT = Path(__file__).resolve().parents[1]


def test_imports_the_installed_package():
    installed = distribution("lightning-hiercomm")
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable") and "CI" not in os.environ:
        pytest.skip("editable installation, for development only")
    imported = Path(lightning_hiercomm.__file__).resolve()
    assert imported == Path(installed.locate_file("lightning_hiercomm/__init__.py")).resolve()
    assert imported.parent != CHECKOUT / "lightning_hiercomm"


def test_ships_every_module_and_its_types():
    installed = Path(lightning_hiercomm.__file__).parent
    shipped = {path.relative_to(installed) for path in installed.rglob("*.py")}
    source = CHECKOUT / "lightning_hiercomm"
    assert shipped == {path.relative_to(source) for path in source.rglob("*.py")}
    assert (installed / "py.typed").is_file()
