"""The rule by which `make test` leaves cells of large products to the night."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

import pytest
from covering import cover, long_ones_first, usual

FACTORS = {"scheme": "abcdefg", "wire": "vwxyz", "nodes": (1, 2, 3), "order": (False, True)}
CELLS = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]


def met(cells):
    return {(one, two, cell[one], cell[two]) for cell in cells for one, two in combinations(FACTORS, 2)}


def test_every_two_values_meet_in_few_cells():
    chosen = [CELLS[number] for number in cover(CELLS, usual(FACTORS))]
    assert met(chosen) == met(CELLS)
    assert 35 <= len(chosen) <= 42  # seven by five at least


def test_what_never_meets_need_not():
    cells = [cell for cell in CELLS if (cell["scheme"], cell["wire"]) != ("a", "z")]
    chosen = [cells[number] for number in cover(cells, usual(FACTORS))]
    assert met(chosen) == met(cells)


@pytest.mark.parametrize(("factors", "number"), [(("scheme", "wire"), 7), (("nodes",), 3)])
def test_of_two_factors_every_value_occurs(factors, number):
    cells = [dict(zip(factors, values, strict=True)) for values in product(*(FACTORS[name] for name in factors))]
    chosen = [cells[each] for each in cover(cells, usual(factors))]
    assert len(chosen) == number
    for name in factors:
        assert {cell[name] for cell in chosen} == {*FACTORS[name]}


def test_the_same_cells_are_chosen_every_time():
    assert cover(CELLS, usual(FACTORS)) == cover(CELLS, usual(FACTORS))


PRODUCT = """
import pytest

@pytest.mark.covering
@pytest.mark.parametrize("scheme", "abc")
@pytest.mark.parametrize(("wire", "loss"), [("v", 1), ("w", 2), ("x", 3)])
def test_of_two_factors(scheme, wire, loss):
    pass

@pytest.mark.covering
@pytest.mark.parametrize("scheme", "abc")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_of_one_factor_on_two_devices(scheme, device):
    pass

@pytest.mark.nightly
def test_that_takes_long():
    pass
"""


QUIETLY = ["--collect-only", "-q", "--import-mode=importlib", "-p", "covering", "-p", "no:cacheprovider"]


class Collected:
    """A plugin that keeps the names of tests that would run."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.name for item in session.items]


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (["test_product.py"], 9),
        (["test_product.py", "--nightly"], 16),
        (["test_product.py", "--nightly", "-m", "nightly"], 7),
        (["test_product.py::test_that_takes_long"], 1),
    ],
    ids=["usual", "all", "nightly", "named"],
)
def test_make_test_runs_the_covering_set_and_the_night_or_who_names_a_test_the_rest(
    tmp_path, monkeypatch, arguments, number
):
    (tmp_path / "test_product.py").write_text(PRODUCT)
    monkeypatch.chdir(tmp_path)
    collected = Collected()
    pytest.main([*QUIETLY, *arguments], [collected])
    assert len(collected.names) == number


def test_files_whose_tests_are_long_come_first_then_those_with_most_and_tests_stay_in_their_order():
    class Item(SimpleNamespace):
        def get_closest_marker(self, name):
            return self.is_long and name == "long"

    told = [("a", False), ("b", False), ("b", True), ("c", False), ("d", True), ("d", True), ("e", False), ("e", False)]
    items = [Item(path=path, is_long=is_long, number=number) for number, (path, is_long) in enumerate(told)]
    long_ones_first(items)
    assert [item.number for item in items] == [4, 5, 1, 2, 6, 7, 0, 3]
