"""The compatibility suite: every scheme takes every test; docs/compatibility.md has the results as a table.

A new scheme is tested by being registered. If it deliberately leaves the trajectory of plain SGD on the mean of the
replicas, its row in ``EXACT`` says how to switch that off: then training on 2 nodes of 2 ranks must give the
parameters of training on one device. What a scheme does to the trajectory on purpose is tested in ``tests/schemes``.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from problems import one_trainer, same_bits

from lightning_hiercomm import HierarchicalStrategy
from lightning_hiercomm.schemes import SCHEMES, Scheme

EXACT: dict[str, dict[str, Any]] = {
    "periodic": {"sync_every": 4},
    "daso": {"sync_every": 2, "warmup_epochs": 0, "cooldown_epochs": 0, "merge": "delta"},
    "steps_delay": {"delay": 2, "warmup_steps": 0, "local_update": "sgd", "local_lr_scale": 1.0},
    "gossip": {"segments": 2},
    "diloco": {"sync_every": 1, "outer_optimizer": partial(torch.optim.SGD, lr=1.0)},
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "feature(name, note='', refused=False): the row of the documentation's compatibility matrix"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


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
Follows = Callable[..., tuple[Reports, dict[str, Any]]]


@pytest.fixture
def follows_one_device(fit: Callable[..., Reports], scheme: Scheme) -> Follows:
    """Fit what ``make()`` gives on 2 nodes of 2 ranks and on one device: the same parameters, on every rank.

    Returns the reports of the ranks and of the device.
    """

    def run(
        make: Callable[[], pl.LightningModule],
        *,
        strategy: dict[str, Any] | None = None,
        callbacks: Callable[[], list[pl.Callback]] = list,
        rtol: float = 1e-5,
        atol: float = 1e-6,
        **trainer: Any,
    ) -> tuple[Reports, dict[str, Any]]:
        trainer = {"max_epochs": 2, "num_sanity_val_steps": 0, **trainer}
        ours = fit(make(), {"scheme": scheme, **(strategy or {})}, callbacks=callbacks(), **trainer)
        (one,) = fit(make(), "auto", devices=1, callbacks=callbacks(), **trainer)
        same_bits(ours)
        for name, expected in one["state_dict"].items():
            torch.testing.assert_close(
                ours[0]["state_dict"][name], expected, rtol=rtol, atol=atol, msg=f"{{}} of {name}".format
            )
        return ours, one

    return run


@pytest.fixture
def on_ranks(tmp_path: Path, scheme: Scheme) -> Callable[..., list[Any]]:
    """Run a user's main program on four processes, as a launcher does: ``main(trainer, rank)`` for every rank.

    ``trainer`` makes a Trainer. Returns what ``main`` returned on each rank.
    """

    def run(main: Callable[[Callable[..., pl.Trainer], int], Any]) -> list[Any]:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(find_free_network_port()))
        torch.multiprocessing.start_processes(_main, args=(main, scheme, tmp_path), nprocs=4, start_method="fork")
        return [torch.load(tmp_path / f"returned-{rank}.pt", weights_only=False) for rank in range(4)]

    return run


def _main(rank: int, main: Callable[..., Any], scheme: Scheme, folder: Path) -> None:
    os.environ["LOCAL_RANK"] = str(rank)

    def trainer(**arguments: Any) -> pl.Trainer:
        return one_trainer(
            folder, devices=4, strategy=HierarchicalStrategy(copy.deepcopy(scheme), ranks_per_node=2), **arguments
        )

    torch.save(main(trainer, rank), folder / f"returned-{rank}.pt")
