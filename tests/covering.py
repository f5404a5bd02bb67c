"""Which cells of a large product `make test` runs: the rule, in one place. The nightly job runs all of them.

Most defects show in one value of one factor (a scheme, a payload, a launcher), nearly all others where two values meet.
So a product with three factors or more becomes a set of its cells in which every two values that ever meet do meet; one
with two factors, where that is all of it, a set in which every value occurs. ``@pytest.mark.covering`` marks such a
product; every other cell of it becomes ``nightly``.

``python -m tests.covering`` in a checkout prints what is in the set, and what waits for the night.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

Cell = Mapping[str, Hashable]
Wanted = Sequence[tuple[str, ...]]


def cover(cells: Sequence[Cell], wanted: Wanted) -> list[int]:
    """The numbers of few cells in which everything is met that is met in all of them.

    Greedy: the next cell is the one with the most that is new, and of several the one whose values were used least;
    always the same for the same cells.

    Args:
        cells: Their values by factor.
        wanted: Factors whose values are to meet in all ways that exist: ``[("scheme", "wire"), ("nodes",)]``.
    """
    met = [{(names, *(cell[name] for name in names)) for names in wanted} for cell in cells]
    missing = set().union(*met)
    used: Counter[tuple[str, Hashable]] = Counter()
    chosen = []
    while missing:
        news = [len(each & missing) for each in met]
        uses = [sum(used[each] for each in cell.items()) for cell in cells]
        best = min(range(len(cells)), key=[*zip((-new for new in news), uses, strict=True)].__getitem__)
        chosen.append(best)
        missing -= met[best]
        used.update(cells[best].items())
    return sorted(chosen)


def usual(factors: Iterable[str]) -> Wanted:
    """All pairs of three factors or more; every value of two, or of one."""
    names = sorted(factors)
    return [*combinations(names, 2)] if len(names) > 2 else [(name,) for name in names]


def leave_to_the_night(items: Sequence[pytest.Item]) -> None:
    """Mark as ``nightly`` the cells of products marked ``covering`` that are not in their covering sets."""
    products: dict[tuple[Path, str, object], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering") and hasattr(item, "callspec"):
            # what a CPU shows must not be left to the GPU that another cell would need, and the other way round
            products[item.path, item.originalname, item.callspec.params.get("device")].append(item)
    for product in products.values():
        cells = [_cell(item) for item in product]
        spare_others(product, cover(cells, usual(cells[0])))


def asked(request: pytest.FixtureRequest, *names: str) -> set[tuple[Any, ...]]:
    """The values of parameters in those tests of a fixture's module that will run: no others need be computed."""
    own = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    values = [item.callspec.params for item in own]
    return {tuple(each[name] for name in names) for each in values if {*names} <= {*each}}


def leaving_to_the_night(cells: Iterable[tuple[Hashable, ...]]) -> list[Any]:
    """Parameters for ``parametrize`` that are cells of a product without a product: all values in `make test`."""
    cells = [*cells]
    named = [{str(place): value for place, value in enumerate(cell)} for cell in cells]
    chosen = cover(named, usual(named[0]))
    by_night = [pytest.param(*cell, marks=pytest.mark.nightly) for cell in cells]
    return [cells[number] if number in chosen else by_night[number] for number in range(len(cells))]


def spare_others(items: Sequence[pytest.Item], chosen: Sequence[int]) -> None:
    """Mark as ``nightly`` all but some items."""
    for number in {*range(len(items))} - {*chosen}:
        items[number].add_marker(pytest.mark.nightly)


def _cell(item: pytest.Function) -> dict[str, Hashable]:
    """Which values meet, as objects; names that are parametrized together are one factor, called by the first."""
    marker = item.get_closest_marker("covering")
    assert marker is not None
    values = item.callspec.params
    later = {name for names in _lists_of_names(item) for name in names[1:]}
    names = [name for name in marker.args or values if name in values and name not in later and name != "device"]
    return {name: id(values[name]) for name in names}


def _lists_of_names(item: pytest.Item) -> Iterable[tuple[str, ...]]:
    for marker in item.iter_markers("parametrize"):
        names = marker.args[0]
        yield tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the whole of every product, and the longest runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is left to the nightly job, but for tests that are named on the command line."""
    leave_to_the_night(items)
    spared = [item for item in items if item.get_closest_marker("nightly")]
    if spared and not config.getoption("--nightly") and not any("::" in argument for argument in config.args):
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=spared)
    long_ones_first(items)


def long_ones_first(items: list[pytest.Item]) -> None:
    """Move files to the front by how many of their tests say that they are long, and by how many they have.

    pytest's workers take file after file: with a long one at the end, one works and the others have nothing left.
    """
    tests = Counter(item.path for item in items)
    long_tests = Counter(item.path for item in items if item.get_closest_marker("long"))
    items.sort(key=lambda item: (-long_tests[item.path], -tests[item.path]))


class _Listing:
    """Prints how many cells of every test are run when."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        counts: dict[str, Counter[bool]] = defaultdict(Counter)
        for item in session.items:
            counts[item.nodeid.partition("[")[0]][item.get_closest_marker("nightly") is not None] += 1
        for name, count in counts.items():
            if count[True]:
                print(f"{count[False]:4} of {count.total():4}  {name}")
        total = sum(counts.values(), Counter())
        print(f"{total[False]:4} of {total.total():4}  in all")


if __name__ == "__main__":
    folder = str(Path(__file__).parent)
    arguments = ["--collect-only", "--nightly", "-qqq", *(sys.argv[1:] or [folder])]
    sys.exit(pytest.main(arguments, plugins=[_Listing()]))
