"""The tests must see what a user gets from ``pip install``, not the checkout they lie in."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.metadata import Metadata

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
def test_an_import_registers_names_changes_nothing_else_and_needs_no_mpi4py():
    program = """
import logging, sys
sys.modules["mpi4py"] = None  # not installed
import lightning.pytorch
from jsonargparse import ArgumentParser
def state():
    handlers = logging.getLogger("lightning_hiercomm").handlers + logging.root.handlers
    return [*sys.meta_path], handlers, ArgumentParser.error
before = state()
import lightning_hiercomm
assert state() == before
assert "hierarchical_daso" in lightning.pytorch.strategies.StrategyRegistry
lightning_hiercomm.HierarchicalStrategy()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


def test_the_version_is_written_once():
    assert distribution("lightning-hiercomm").version == lightning_hiercomm.__version__
    assert f"version: {lightning_hiercomm.__version__}\n" in (CHECKOUT / "CITATION.cff").read_text()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The wheel and the sdist, and the wheel and the sdist that are built from the unpacked sdist."""
    folder = tmp_path_factory.mktemp("built")

    def build(checkout: Path, where: str) -> tuple[Path, Path]:
        command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder / where)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
        subprocess.run(command, cwd=checkout, check=True, timeout=120, env=environment)
        (wheel,), (sdist,) = (folder / where).glob("*.whl"), (folder / where).glob("*.tar.gz")
        return wheel, sdist

    wheel, sdist = build(CHECKOUT, "first")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    again, sdist_again = build(folder / sdist.name.removesuffix(".tar.gz"), "second")
    return {"wheel": wheel, "sdist": sdist, "wheel again": again, "sdist again": sdist_again}


def sources() -> dict[str, bytes]:
    """The files of the package, by their path in the checkout."""
    files = (path for path in (CHECKOUT / "lightning_hiercomm").rglob("*") if path.is_file())
    return {str(path.relative_to(CHECKOUT)): path.read_bytes() for path in files if "__pycache__" not in path.parts}


def test_source_distribution_installs(built, tmp_path):
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(tmp_path), str(built["sdist"])]
    subprocess.run(command, check=True, timeout=120)
    installed = tmp_path / "lightning_hiercomm"
    files = (path for path in installed.rglob("*") if path.is_file())
    assert {str(path.relative_to(tmp_path)): path.read_bytes() for path in files} == sources()


def test_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == set(sources())
    assert built["wheel"].stat().st_size < 1_000_000


def test_source_distribution_holds_what_make_test_needs(built):
    with tarfile.open(built["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    folders = ("benchmarks", "docs", "examples", "tests", "tools")
    programs = {path.relative_to(CHECKOUT) for folder in folders for path in (CHECKOUT / folder).rglob("*.py")}
    needed = {".ci/run", ".ci/constraints.txt", "CHANGELOG.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"}
    assert names >= {*sources(), *map(str, programs), *needed}
    assert {name for name in names if name.startswith((".venv", ".git/")) or "__pycache__" in name} == set()
    assert built["sdist"].stat().st_size < 4_000_000


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_package_is_reproducible_from_its_source_distribution(built, target):
    assert built[target].read_bytes() == built[f"{target} again"].read_bytes()


def test_metadata_is_valid_and_its_links_work_on_the_package_index(built):
    with zipfile.ZipFile(built["wheel"]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(wheel.read(name), validate=True)
    assert metadata.description_content_type == "text/markdown"
    links = re.findall(r"\]\(([^)]+)\)", metadata.description)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    tag = f"lightning-hiercomm/lightning-hiercomm/blob/v{lightning_hiercomm.__version__}"
    local = [link.partition(f"{tag}/")[2] for link in links if tag in link]
    assert local
    assert [link for link in local if not (CHECKOUT / link).exists()] == []


def test_changelog_has_a_dated_section_of_this_version():
    (section,) = re.findall(
        rf"^## {re.escape(lightning_hiercomm.__version__)} \(\d{{4}}-\d\d-\d\d\)\n(.*?)(?=^## |\Z)",
        (CHECKOUT / "CHANGELOG.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert len(section.splitlines()) <= 40
