"""The compatibility suite: every scheme takes every test; docs/reference/compatibility.md lists the features.

A new scheme is tested by being registered. If it deliberately leaves the trajectory of plain SGD on the mean of the
replicas, its row in ``EXACT`` says how to switch that off: then training on 2 nodes of 2 ranks must give the
parameters of training on one device. What a scheme does to the trajectory on purpose is tested in ``tests/schemes``.
"""

from __future__ import annotations

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
        "markers", "feature(name, refused=False): the row of the documentation's compatibility matrix"
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
    scheme = scheme_of(item)
    return {"test": item.nodeid.replace(scheme, "*"), "file": item.path.name, "scheme": scheme}


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


def scheme_of(item: pytest.Item) -> str:
    call = getattr(item, "callspec", None)
    return call.params.get("scheme_name", "") if call is not None else ""


@pytest.fixture
def on_ranks(scheme: Scheme, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a user's ``main(trainer)`` on four processes, where ``trainer`` makes a Trainer; returns what it returns."""
    # only ranks that are forked afterwards have what these fixtures change
    is_changed = {"monkeypatch", "compiler"} & {*request.fixturenames}
    run_on = request.getfixturevalue("launch" if is_changed else "borrow")

    def run(main: Callable[[Callable[..., pl.Trainer]], Any]) -> list[Any]:
        def on_rank(_: Path) -> Any:
            def trainer(strategy: dict[str, Any] | None = None, **arguments: Any) -> pl.Trainer:
                made = HierarchicalStrategy(scheme, **{"ranks_per_node": 2, **(strategy or {})})
                return one_trainer(tmp_path, devices=4, strategy=made, **arguments)

            return main(trainer)

        return run_on(on_rank)

    return run


@pytest.fixture
def fit_on_ranks(on_ranks: Callable[..., list[Any]]) -> Callable[..., Reports]:
    """Fit what ``make()`` gives on 2 nodes of 2 ranks; the reports of the ranks. See ``on_ranks``."""

    def run(make: Make, callbacks: Callable[[], list[pl.Callback]] = list, **arguments: Any) -> Reports:
        def main(trainer: Callable[..., pl.Trainer]) -> dict[str, Any]:
            trainer = trainer(callbacks=callbacks(), **arguments)
            trainer.fit(make())
            return report_of(trainer)

        return on_ranks(main)

    return run


@pytest.fixture
def follows_one_device(fit_on_ranks: Callable[..., Reports], tmp_path: Path) -> Follows:
    """Fit what ``make()`` gives on 2 nodes of 2 ranks and on one device: the same parameters, on every rank.

    Returns the reports of the ranks and of the device. See ``on_ranks``.
    """

    def run(
        make: Make,
        *,
        strategy: dict[str, Any] | None = None,
        callbacks: Callable[[], list[pl.Callback]] = list,
        rtol: float = 1e-5,
        atol: float = 1e-6,
        **arguments: Any,
    ) -> tuple[Reports, dict[str, Any]]:
        ours = fit_on_ranks(make, callbacks, strategy=strategy, **arguments)
        trainer = one_trainer(tmp_path, callbacks=callbacks(), **arguments)
        trainer.fit(make())
        one = report_of(trainer)
        same_bits(ours)
        torch.testing.assert_close(ours[0]["state_dict"], one["state_dict"], rtol=rtol, atol=atol)
        return ours, one

    return run
