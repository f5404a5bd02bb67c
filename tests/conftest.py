"""Settings that pytest needs before it collects tests; only workers import the fixtures, support/shared_fixtures.py."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

gc.disable()  # imported modules and collected tests stay; shared_fixtures.py enables it again
_TESTS = Path(__file__).parent
_STARTUP = str(_TESTS / "startup")
os.environ["OMP_NUM_THREADS"] = "1"  # or Lightning raises the number again
os.environ.update(OMPI_MCA_btl="^ofi")  # it sleeps for a second when Lightning checks for MPI
os.environ["PYTHONPATH"] = os.pathsep.join([_STARTUP, *filter(None, [os.environ.get("PYTHONPATH")])])
# pytest's importlib mode adds no folder
sys.path += [_STARTUP, str(_TESTS), str(_TESTS / "support"), str(_TESTS.parent / "tools")]
from pairwise import pytest_addoption, pytest_collection_modifyitems  # noqa: E402, F401  # hooks; found only now


def pytest_configure(config: pytest.Config) -> None:
    """Import shared_fixtures.py, and with it torch, except in the process that only distributes tests to workers."""
    if config.getoption("dist", "no") == "no" or config.getoption("collectonly"):
        config.pluginmanager.import_plugin("shared_fixtures")
    else:
        gc.enable()


def pytest_report_header() -> str:
    return "GPU: tests of tensors also run on it, if torch can use one"
