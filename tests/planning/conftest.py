"""What planning's tests share: plain clusters and a plain workload."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_hiercomm.planning import commands
from lightning_hiercomm.planning.cluster import Cluster, Link, Workload
from lightning_hiercomm.planning.predict.candidates import Plan
from lightning_hiercomm.planning.predict.candidates import plan as make_plan


@pytest.fixture(scope="module", autouse=True)
def equal_plans_are_made_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """One takes more than a second of a processor, and several tests of a module look at the same."""
    made: dict[str, Plan] = {}

    def plan(*arguments: Any, **named: Any) -> Plan:
        key = repr((arguments, named))
        if key not in made:
            made[key] = make_plan(*arguments, **named)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((commands, "make_plan"), (request.module, "plan")):
            if getattr(module, name, None) is make_plan:
                patch.setattr(module, name, plan)
        yield


@pytest.fixture
def fast_cluster() -> Callable[..., Cluster]:
    """``fast_cluster(nodes, ranks_per_node, inter=..., latency=...)``: a node's inside costs nothing."""

    def make(nodes: int, ranks_per_node: int = 1, inter: float = 1e9, latency: float = 0.0) -> Cluster:
        return Cluster(nodes, ranks_per_node, Link(float("inf")), Link(inter, latency))

    return make


@pytest.fixture
def gigabyte() -> Workload:
    """A model of a gigabyte, three seconds per step."""
    return Workload(0.25e9, forward=1.0, backward=2.0)


@pytest.fixture
def own_task(tmp_path, monkeypatch):
    """The example ``own_task.py`` in the current folder, with a model and its examples."""
    shutil.copy(Path(__file__).parents[2] / "examples" / "own_task.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_task", None)
