"""HierarchicalStrategy for workers of Ray Train (extra `ray`)."""

from __future__ import annotations

from typing import Any

try:
    import ray
    from ray.train.lightning import RayDDPStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"RayHierarchicalStrategy needs Ray Train ({error}): pip install 'lightning-hiercomm[ray]'"
    ) from error
from typing_extensions import override

from lightning_hiercomm.elastic import Elastic
from lightning_hiercomm.nodes.hosts import Place
from lightning_hiercomm.trainer.strategy import HierarchicalStrategy


class RayHierarchicalStrategy(HierarchicalStrategy, RayDDPStrategy):  # type: ignore[misc]
    """A :class:`~lightning_hiercomm.HierarchicalStrategy` in a training function of Ray Train.

    A node is a Ray node, unless ``ranks_per_node`` is given. Use it with Ray's ``RayLightningEnvironment`` and
    ``prepare_trainer``, which accepts subclasses of Ray's strategies only. Arguments are those of
    ``HierarchicalStrategy``. Ray creates the process group, so ``timeout`` and ``process_group_backend`` are set in
    Ray's ``TorchConfig``.

    Raises:
        ValueError: If ``elastic`` is given.
    """

    def __init__(self, *args: Any, elastic: Elastic | str | None = None, **kwargs: Any) -> None:
        if elastic is not None:
            raise ValueError(
                "elastic= is not supported under Ray Train: leave it out, and let FailureConfig(max_failures=...)"
                " restart the workers from the last checkpoint."
            )
        super().__init__(*args, **kwargs)

    @override
    def _place(self) -> Place:
        node = ray.get_runtime_context().get_node_id()  # Ray's node rank would count machines by their address
        return Place(int(node, 16), self.local_rank, type(self._environment).__name__)
