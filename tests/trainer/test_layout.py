"""Which ranks form a node where ``ranks_per_node`` is left out, as a Trainer and Fabric find it."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import KubeflowEnvironment
from problems import Oracle, one_trainer, warnings_with

from lightning_hiercomm import HierarchicalFabricStrategy, HierarchicalStrategy
from lightning_hiercomm.nodes import hosts

pytestmark = pytest.mark.pooled


def _found(folder: Any, kind: str) -> Any:
    """The nodes of two ranks, what was warned of them, and the device."""
    os.environ.update(RANK=os.environ.pop("LOCAL_RANK"), WORLD_SIZE="2")
    hosts.warn_once.cache_clear()
    arguments: dict[str, Any] = {"devices": 1, "num_nodes": 2, "plugins": [KubeflowEnvironment()]}
    with warnings_with("ranks_per_node=") as messages, mock.patch("socket.gethostname", return_value="a"):
        if kind == "fabric":
            strategy: Any = HierarchicalFabricStrategy("periodic")
            Fabric(accelerator="cpu", strategy=strategy, **arguments).launch()
        else:
            strategy = HierarchicalStrategy("periodic")
            one_trainer(folder, strategy=strategy, max_epochs=1, **arguments).fit(Oracle(2))
    return [list(ranks) for ranks in strategy.topology.nodes], messages, str(strategy.root_device)


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_ranks_of_one_host_form_one_node_with_a_warning(borrow, kind):
    (nodes, messages, device), other = borrow(lambda folder: _found(folder, kind), ranks=2)
    assert nodes == other[0] == [[0, 1]]
    assert device == other[2] == "cpu"
    assert other[1] == []
    assert messages == [
        "KubeflowEnvironment reports the nodes [0] [1], but by host name they are [0, 1] (on a). The host names are"
        " used. Set ranks_per_node to choose the nodes, such as ranks_per_node=1 for those of the environment."
    ]
