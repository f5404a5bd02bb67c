"""Select the cells of a product of parameters that `make test` runs; ``pytest --nightly`` runs all of them.

Most defects depend on one value of one parameter. So ``@pytest.mark.pairwise`` keeps cells in which every value
appears, or all combinations within each of its ``groups`` of parameters; ``on_push`` keeps the values that it is given.
The other cells are ``nightly``. A test that is named on the command line runs with all its cells.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

Cell = Mapping[str, Hashable]


def select(cells: Sequence[Cell], groups: Iterable[tuple[str, ...]] = ()) -> list[int]:
    """Return the indices of few cells in which all values that meet within a group of factors do meet.

    Greedy: the next cell has the most new values, then the least used ones. Default groups: each factor by itself.
    """
    names = sorted(cells[0]) if cells else []
    groups = [*groups] or [(name,) for name in names]
    met = [{(group, *(cell[name] for name in group)) for group in groups} for cell in cells]
    missing = set().union(*met)
    used: Counter[tuple[str, Hashable]] = Counter()
    chosen = []
    while missing:
        uses = [sum(used[each] for each in cell.items()) for cell in cells]
        best = min(range(len(cells)), key=lambda i: (-len(met[i] & missing), uses[i]))
        chosen.append(best)
        missing -= met[best]
        used.update(cells[best].items())
    return sorted(chosen)


def selected(cells: Iterable[tuple[Hashable, ...]]) -> list[Any]:
    """Return parameters for ``parametrize`` of an incomplete product; those that are not selected are ``nightly``."""
    cells = [*cells]
    by_name = [{str(place): value for place, value in enumerate(cell)} for cell in cells]
    chosen = select(by_name)
    return [pytest.param(*cell, marks=[pytest.mark.nightly] * (i not in chosen)) for i, cell in enumerate(cells)]


def on_push(values: Iterable[Hashable], *kept: Hashable) -> list[Any]:
    """Return parameters for ``parametrize``; all but the kept ones are ``nightly``."""
    return [pytest.param(value, marks=[pytest.mark.nightly] * (value not in kept)) for value in values]


def mark_nightly(items: Sequence[pytest.Item], chosen: Iterable[int]) -> None:
    """Mark all but the chosen items as ``nightly``."""
    for number in {*range(len(items))} - {*chosen}:
        items[number].add_marker(pytest.mark.nightly)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the whole of every product, and the longest runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect nightly tests, and sort files: with a long one at the end, one worker would run and the others wait."""
    products: dict[tuple[Path, str, object], list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise"):  # on each device by itself: not every machine has both
            products[item.path, item.originalname, item.callspec.params.get("device")].append(item)
    for product in products.values():
        groups = product[0].get_closest_marker("pairwise").kwargs.get("groups", ())
        mark_nightly(product, select([_cell(item) for item in product], groups))
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    if nightly and not config.getoption("--nightly") and not any("::" in argument for argument in config.args):
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
    tests = Counter(item.path for item in items)
    long_tests = Counter(item.path for item in items if item.get_closest_marker("long"))
    items.sort(key=lambda item: (-long_tests[item.path], -tests[item.path]))


def _cell(item: Any) -> Cell:
    """Return an item's values, as objects; names that are parametrized together are one factor, called by the first."""
    lists = [marker.args[0] for marker in item.iter_markers("parametrize")]
    later = {name.strip() for names in lists for name in (names.split(",") if isinstance(names, str) else names)[1:]}
    names = {*(item.get_closest_marker("pairwise").args or item.callspec.params)} - later - {"device"}
    return {name: id(value) for name, value in item.callspec.params.items() if name in names}
