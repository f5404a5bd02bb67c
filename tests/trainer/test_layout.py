"""Which ranks form a node where ``ranks_per_node`` is left out, as a Trainer and Fabric find it."""

from __future__ import annotations

import os
import socket
import warnings
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import KubeflowEnvironment, SLURMEnvironment
from problems import Oracle, one_trainer

from lightning_hiercomm import HierarchicalFabricStrategy, HierarchicalStrategy
from lightning_hiercomm.nodes import hosts

pytestmark = pytest.mark.pooled


def _variables(kind: str, rank: int, size: int) -> dict[str, str]:
    """What a launcher sets that gives every process a node of its own."""
    if kind == "slurm":
        job = {"SLURM_JOB_NAME": "job", "SLURM_NTASKS": str(size), "SLURM_NTASKS_PER_NODE": "1"}
        return {**job, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"}
    return {"RANK": str(rank), "WORLD_SIZE": str(size)}


ENVIRONMENTS: dict[str, Any] = {"kubeflow": KubeflowEnvironment, "slurm": SLURMEnvironment}


def _found(folder: Any, kind: str, kind_of_trainer: str) -> Any:
    """The nodes of two ranks, what was warned of them, and the device."""
    rank = int(os.environ.pop("LOCAL_RANK"))
    os.environ.update(_variables(kind, rank, 2))
    hosts.warn_once.cache_clear()
    gethostname, socket.gethostname = socket.gethostname, lambda: "a"
    arguments: dict[str, Any] = {"devices": 1, "num_nodes": 2, "plugins": [ENVIRONMENTS[kind]()]}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if kind_of_trainer == "fabric":
                strategy: Any = HierarchicalFabricStrategy("periodic")
                Fabric(accelerator="cpu", strategy=strategy, **arguments).launch()
            else:
                strategy = HierarchicalStrategy("periodic")
                trainer = one_trainer(folder, strategy=strategy, max_epochs=1, **arguments)
                trainer.fit(Oracle(2))
                trainer.validate(Validated(), verbose=False)  # connects the ranks again
        messages = [str(each.message) for each in caught if "ranks_per_node=" in str(each.message)]
        return [list(ranks) for ranks in strategy.topology.nodes], messages, str(strategy.root_device)
    finally:
        socket.gethostname = gethostname


class Validated(Oracle):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@pytest.mark.parametrize(("kind", "trainer"), [("kubeflow", "trainer"), ("kubeflow", "fabric"), ("slurm", "trainer")])
def test_ranks_of_one_host_form_one_node_with_a_warning(borrow, kind, trainer):
    (nodes, messages, device), other = borrow(lambda folder: _found(folder, kind, trainer), ranks=2)
    assert nodes == other[0] == [[0, 1]]
    assert device == other[2] == "cpu"
    assert other[1] == []
    (message,) = messages
    assert message == (
        f"{ENVIRONMENTS[kind].__name__} reports the nodes [0] [1], but by host name they are [0, 1] (on a). The host"
        " names are used. Set ranks_per_node to choose the nodes, such as ranks_per_node=1 for those of the"
        " environment."
    )
