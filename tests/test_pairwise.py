"""The selection of cells that `make test` runs of a product of parameters."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairwise import select

FACTORS = {"scheme": "abcdefg", "wire": "vwxyz", "nodes": (1, 2, 3), "order": (False, True)}
CELLS = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
INCOMPLETE = [cell for cell in CELLS if (cell["scheme"], cell["wire"]) != ("a", "z")]


def pairs(cells):
    return {(one, two, cell[one], cell[two]) for cell in cells for one, two in combinations(FACTORS, 2)}


@pytest.mark.parametrize("cells", [CELLS, INCOMPLETE], ids=["complete", "incomplete"])
def test_few_cells_cover_all_pairs_of_values(cells):
    chosen = select(cells)
    assert pairs(cells[number] for number in chosen) == pairs(cells)
    assert 34 <= len(chosen) <= 42  # seven by five, or one less
    assert chosen == select(cells)


PRODUCT = """
import pytest

@pytest.mark.pairwise
@pytest.mark.parametrize("scheme", "abc")
@pytest.mark.parametrize(("wire", "loss"), [("v", 1), ("w", 2), ("x", 3)])
def test_of_two_factors(scheme, wire, loss):
    pass

@pytest.mark.pairwise
@pytest.mark.parametrize("scheme", "abc")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_of_one_factor_on_two_devices(scheme, device):
    pass

@pytest.mark.nightly
def test_that_takes_long():
    pass

@pytest.mark.long("why")
def test_long():
    pass
"""


class Collected:
    """A plugin that keeps the names of tests that would run."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.name for item in session.items]


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (["."], 11),
        ([".", "--nightly"], 18),
        ([".", "--nightly", "-m", "nightly"], 7),
        (["test_product.py::test_that_takes_long"], 1),
    ],
    ids=["usual", "all", "nightly", "named"],
)
def test_cells_that_are_not_selected_run_nightly_or_by_name(tmp_path, monkeypatch, arguments, number):
    (tmp_path / "test_a.py").write_text("def test_short(): pass")
    (tmp_path / "test_product.py").write_text(PRODUCT)
    monkeypatch.chdir(tmp_path)
    collected = Collected()
    quietly = ["--collect-only", "-q", "--import-mode=importlib", "-p", "pairwise", "-p", "no:cacheprovider"]
    pytest.main([*quietly, *arguments], [collected])
    assert len(collected.names) == number
    assert "test_short" not in collected.names[:-1]  # the file with a long test is first
