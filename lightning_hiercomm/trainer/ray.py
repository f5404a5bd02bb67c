"""HierarchicalStrategy for workers of Ray Train (extra `ray`)."""

from __future__ import annotations

import os

try:
    import ray
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"RayHierarchicalStrategy needs Ray Train ({error}): pip install 'ray[train]'") from error
import torch.distributed as dist
from typing_extensions import override

from lightning_hiercomm.nodes.hosts import Place
from lightning_hiercomm.trainer.strategy import HierarchicalStrategy

WORKER_IS_NODE = "HIERCOMM_RAY_WORKER_IS_NODE"


class RayHierarchicalStrategy(HierarchicalStrategy, RayDDPStrategy):  # type: ignore[misc]
    """A :class:`~lightning_hiercomm.HierarchicalStrategy` in a training function of Ray Train.

    A node is a Ray node, unless ``ranks_per_node`` is given. With ``elastic`` and
    :class:`~lightning_hiercomm.trainer.ray_elastic.ElasticTorchConfig`, a node is a worker. Use it with Ray's
    ``RayLightningEnvironment`` and ``prepare_trainer``, which accepts subclasses of Ray's strategies only. Arguments
    are those of ``HierarchicalStrategy``. Ray creates the process group, so ``timeout`` and ``process_group_backend``
    are set in the ``torch_config`` of Ray's ``TorchTrainer``.

    Raises:
        ValueError: At the start of ``fit``, if ``elastic`` and ``torch_config`` do not fit.
    """

    @override
    def _configure_launcher(self) -> None:
        if is_node_of_its_own() and isinstance(self.cluster_environment, RayLightningEnvironment):
            self.cluster_environment = _OwnWorld()
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        check_torch_config(self._settings.elastic is not None, ray.train.get_context().get_world_size())
        super().setup_environment()

    @override
    def _place(self) -> Place:
        node = ray.get_runtime_context().get_node_id()  # Ray's node rank would count machines by their address
        return Place(int(node, 16), self.local_rank, type(self._environment).__name__)


class _OwnWorld(RayLightningEnvironment):  # type: ignore[misc]
    """The environment of an elastic node: Ray gives each worker a process group of its own, but counts all workers."""

    def world_size(self) -> int:
        return 1

    def global_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0


def check_torch_config(is_elastic: bool, workers: int) -> None:
    """Raise a ``ValueError`` if ``elastic`` and the ``torch_config`` of Ray's ``TorchTrainer`` do not fit."""
    if is_elastic and not is_node_of_its_own():
        raise ValueError(
            "elastic= under Ray Train needs TorchTrainer(torch_config=ElasticTorchConfig(...)), from"
            " lightning_hiercomm.trainer.ray_elastic, which makes every worker a node"
        )
    if not is_elastic and workers > 1 and dist.is_initialized() and dist.get_world_size() == 1:
        raise ValueError(
            "this torch_config of Ray's TorchTrainer gives every worker a process group of its own, so each would"
            " train alone: give the strategy elastic=, or use TorchConfig"
        )


def is_node_of_its_own() -> bool:
    """Return whether ``ElasticTorchConfig`` has made this worker an elastic node."""
    return os.environ.get(WORKER_IS_NODE) == "1"
