"""The compatibility suite: every scheme takes every test; docs/reference/compatibility.md has the results as a table.

A new scheme is tested by being registered. If it deliberately leaves the trajectory of plain SGD on the mean of the
replicas, its row in ``EXACT`` says how to switch that off: then training on 2 nodes of 2 ranks must give the
parameters of training on one device. What a scheme does to the trajectory on purpose is tested in ``tests/schemes``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from pairwise import mark_nightly, select
from problems import one_trainer, report_of, same_bits

from lightning_hiercomm import HierarchicalStrategy
from lightning_hiercomm.schemes import SCHEMES, Scheme

EXACT: dict[str, dict[str, Any]] = {
    "periodic": {"sync_every": 3},
    "daso": {"sync_every": 2, "warmup": 0, "cooldown": 0, "merge": "delta"},
    "steps_delay": {"delay": 2, "warmup_steps": 0, "local_update": "sgd", "local_lr_scale": 1.0},
    "gossip": {"fragments": 2},
    "diloco": {"sync_every": 1, "outer_optimizer": partial(torch.optim.SGD, lr=1.0)},
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "feature(name, note='', refused=False): the row of the documentation's compatibility matrix"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most cells of this suite to the nightly job: a push runs every test once, and every scheme in each file."""
    own = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in own:
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.pooled)
    of_schemes = [item for item in own if scheme_of(item) and not item.get_closest_marker("nightly")]
    mark_nightly(of_schemes, select([_cell(item) for item in of_schemes], COVERED))


COVERED = [("test",), ("file", "scheme")]


def _cell(item: pytest.Item) -> dict[str, str]:
    return {"test": _without_scheme(item), "file": item.path.name, "scheme": scheme_of(item)}


@pytest.fixture(params=list(SCHEMES))
def scheme_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def scheme_arguments(scheme_name: str) -> dict[str, Any]:
    return EXACT.get(scheme_name, {})


@pytest.fixture
def scheme(scheme_name: str, scheme_arguments: dict[str, Any]) -> Scheme:
    return SCHEMES[scheme_name](**scheme_arguments)


Reports = list[dict[str, Any]]
Make = Callable[[], pl.LightningModule]
Follows = Callable[..., tuple[Reports, dict[str, Any]]]


class Together:
    """Runs of a test under several schemes, in one launch: to start the ranks takes longer than most fits.

    The first scheme's test runs those of all schemes that were selected. Where that fails each is launched by itself,
    so that an error is that of the test that shows it.
    """

    def __init__(self, launch: Callable[..., list[Any]]) -> None:
        self._launch = launch
        self._returned: dict[str, dict[str, Any]] = {}

    def run(self, item: pytest.Item, name: str, call: int, main: Callable[[str], Any], apart: bool) -> list[Any]:
        """What ``main(name of a scheme)`` returns on every rank.

        Args:
            item: The test.
            name: Of its scheme.
            call: Which of the test's runs this is.
            main: The same for all schemes.
            apart: Whether to launch this test's scheme only.
        """
        key = f"{_without_scheme(item)} {call}"
        if not apart and key not in self._returned:
            same = [other for other in item.session.items if _without_scheme(other) == _without_scheme(item)]
            self._returned[key] = self._launched(main, [scheme_of(other) for other in same])
        returned = self._returned.get(key, {})
        return returned.pop(name) if name in returned else self._launch(lambda _: main(name))

    def _launched(self, main: Callable[[str], Any], names: list[str]) -> dict[str, Any]:
        try:
            ranks = self._launch(lambda _: {name: main(name) for name in names})
        except Exception:
            return {}
        return {name: [returned[name] for returned in ranks] for name in names}


def scheme_of(item: pytest.Item) -> str:
    call = getattr(item, "callspec", None)
    return call.params.get("scheme_name", "") if call is not None else ""


def _without_scheme(item: pytest.Item) -> str:
    name = scheme_of(item)
    return item.nodeid.replace(name, "*") if name else item.nodeid


@pytest.fixture(scope="session")
def together(borrow: Callable[..., list[Any]]) -> Together:
    return Together(borrow)


@pytest.fixture(scope="session")
def together_launched(launch: Callable[..., list[Any]]) -> Together:
    return Together(launch)


@pytest.fixture
def on_ranks(
    together: Together, together_launched: Together, scheme_name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[..., list[Any]]:
    """Run a user's main program on four processes, as a launcher does: ``main(trainer, rank)`` for every rank.

    ``trainer`` makes a Trainer. Returns what ``main`` returned on each rank. It runs under all schemes in one launch,
    unless ``apart=True``: for a program with more to show than what it returns.
    """
    calls = itertools.count()
    if {"monkeypatch", "compiler"} & {*request.fixturenames}:  # only ranks that are forked afterwards have what they do
        together = together_launched

    def run(main: Callable[[Callable[..., pl.Trainer], int], Any], apart: bool = False) -> list[Any]:
        def under(name: str) -> Any:
            def trainer(**arguments: Any) -> pl.Trainer:
                strategy = {"ranks_per_node": 2, **arguments.pop("strategy", {})}
                scheme = SCHEMES[name](**EXACT.get(name, {}))
                return one_trainer(tmp_path, devices=4, strategy=HierarchicalStrategy(scheme, **strategy), **arguments)

            return main(trainer, int(os.environ["LOCAL_RANK"]))

        return together.run(request.node, scheme_name, next(calls), under, apart)

    return run


@pytest.fixture
def fit_on_ranks(on_ranks: Callable[..., list[Any]]) -> Callable[..., Reports]:
    """Fit what ``make()`` gives on 2 nodes of 2 ranks; the reports of the ranks. See ``on_ranks``."""

    def run(
        make: Make, callbacks: Callable[[], list[pl.Callback]] = list, apart: bool = False, **arguments: Any
    ) -> Reports:
        def main(trainer: Callable[..., pl.Trainer], rank: int) -> dict[str, Any]:
            trainer = trainer(callbacks=callbacks(), **arguments)
            trainer.fit(make())
            return report_of(trainer)

        return on_ranks(main, apart)

    return run


@pytest.fixture(scope="session")
def on_one_device() -> dict[str, Any]:
    """Reports of one device, by the test: they are the same for all schemes."""
    return {}


@pytest.fixture
def follows_one_device(
    fit_on_ranks: Callable[..., Reports], on_one_device: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> Follows:
    """Fit what ``make()`` gives on 2 nodes of 2 ranks and on one device: the same parameters, on every rank.

    Returns the reports of the ranks and of the device. See ``on_ranks``.
    """
    calls = itertools.count()

    def run(
        make: Make,
        *,
        strategy: dict[str, Any] | None = None,
        callbacks: Callable[[], list[pl.Callback]] = list,
        apart: bool = False,
        rtol: float = 1e-5,
        atol: float = 1e-6,
        **arguments: Any,
    ) -> tuple[Reports, dict[str, Any]]:
        ours = fit_on_ranks(make, callbacks, apart, strategy=strategy or {}, **arguments)
        key = f"{request.node.nodeid if apart else _without_scheme(request.node)} {next(calls)}"
        if key not in on_one_device:
            trainer = one_trainer(tmp_path, callbacks=callbacks(), **arguments)
            trainer.fit(make())
            on_one_device[key] = report_of(trainer)
        one = on_one_device[key]
        same_bits(ours)
        for name, expected in one["state_dict"].items():
            torch.testing.assert_close(
                ours[0]["state_dict"][name], expected, rtol=rtol, atol=atol, msg=f"{{}} of {name}".format
            )
        return ours, one

    return run
