"""The tests must see what a user gets from ``pip install``, not the checkout they lie in."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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


@pytest.mark.long("another process imports Lightning")
def test_an_import_registers_names_and_changes_nothing_else():
    program = """
import logging, sys
import lightning.pytorch
from jsonargparse import ArgumentParser
def state():
    handlers = logging.getLogger("lightning_hiercomm").handlers + logging.root.handlers
    return [*sys.meta_path], handlers, ArgumentParser.error
before = state()
import lightning_hiercomm
assert state() == before
assert "hierarchical_daso" in lightning.pytorch.strategies.StrategyRegistry
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


def test_the_version_is_written_once():
    assert distribution("lightning-hiercomm").version == lightning_hiercomm.__version__
    assert f"version: {lightning_hiercomm.__version__}\n" in (CHECKOUT / "CITATION.cff").read_text()


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_wheel_and_source_distribution_build_and_install(tmp_path, target):
    def python(*arguments):
        subprocess.run([sys.executable, "-m", *arguments], cwd=CHECKOUT, check=True, timeout=120)

    python("hatchling", "build", "--target", target, "--directory", str(tmp_path))
    (archive,) = tmp_path.iterdir()
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "--quiet"]
    python("pip", "install", *offline, "--target", str(tmp_path / "installed"), str(archive))
    installed, source = tmp_path / "installed" / "lightning_hiercomm", CHECKOUT / "lightning_hiercomm"
    shipped = {path.relative_to(installed): path.read_bytes() for path in installed.rglob("*") if path.is_file()}
    assert shipped == {
        path.relative_to(source): path.read_bytes()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_ci_tests_the_oldest_versions_that_we_allow():
    workflow = (CHECKOUT / ".github" / "workflows" / "tests.yml").read_text()
    for requirement in map(Requirement, distribution("lightning-hiercomm").requires):
        if requirement.name in ("lightning", "torch"):
            (oldest,) = (bound.version for bound in requirement.specifier if bound.operator == ">=")
            assert re.search(rf" {requirement.name}=={re.escape(oldest)}(\.\*)?\s", workflow)
