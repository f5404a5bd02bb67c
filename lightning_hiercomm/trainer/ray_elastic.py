"""Elastic nodes as replica groups of Ray Train (extras `ray` and `elastic`)."""

from __future__ import annotations

import contextlib
import os
from types import TracebackType
from typing import Any

try:
    import ray
    from ray.train.v2._internal.constants import is_v2_enabled
    from ray.train.v2._internal.execution.worker_group import ReplicaGroup
    from ray.train.v2.torch.torchft_config import TorchftConfig, _TorchftBackend
except ImportError as error:
    raise ImportError(
        f"ElasticTorchConfig needs Ray Train with TorchftConfig, as in Ray 2.60 ({error}): pip install --upgrade"
        " 'ray[train]'"
    ) from error
from ray.train.torch.config import TorchConfigContextManager
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typing_extensions import override

from lightning_hiercomm.elastic import Elastic
from lightning_hiercomm.elastic.configuration import check_torchft
from lightning_hiercomm.elastic.lighthouse import lighthouse
from lightning_hiercomm.elastic.quorum import NodeRefused, RunFinished
from lightning_hiercomm.trainer.ray import WORKER_IS_NODE

_lighthouse: Any = None
"""The actor of this worker's run."""


class ElasticTorchConfig(TorchftConfig):  # type: ignore[misc]
    """Ray's ``torch_config`` for :class:`~lightning_hiercomm.trainer.ray.RayHierarchicalStrategy` with ``elastic``.

    Every worker is a replica group of Ray and an elastic node: if it dies, Ray starts it again on its place, and the
    others train on. The lighthouse is an actor on the node of Ray's controller, and ends with the run.

    Example::

        elastic = Elastic(min_nodes=2)
        TorchTrainer(
            train,  # with RayHierarchicalStrategy(DiLoCo(sync_every=100), elastic=elastic)
            scaling_config=ScalingConfig(num_workers=4),
            torch_config=ElasticTorchConfig(elastic),
            run_config=RunConfig(failure_config=FailureConfig(max_failures=100)),
        ).fit()

    Source: Ray's ``TorchftConfig`` (ray-project/ray#61156, #61475).

    Args:
        elastic: The one that the strategy gets. Its ``lighthouse``, if given, is used instead of an actor.
        **kwargs: Arguments of Ray's ``TorchConfig``.

    Raises:
        TypeError: If ``elastic`` is no ``Elastic``.
        ValueError: If Ray Train V2 is switched off.
        ModuleNotFoundError: If torchft is not installed.
    """

    def __init__(self, elastic: Elastic, **kwargs: Any) -> None:
        if not isinstance(elastic, Elastic):
            raise TypeError(f"elastic={elastic!r} must be the Elastic that the strategy gets")
        if not is_v2_enabled():
            raise ValueError("ElasticTorchConfig needs Ray Train V2: unset RAY_TRAIN_V2_ENABLED")
        check_torchft()
        super().__init__(lighthouse_kwargs={}, **kwargs)
        self.elastic = elastic

    @property
    @override
    def backend_cls(self) -> type[_ElasticBackend]:
        return _ElasticBackend

    @property
    @override
    def train_func_context(self) -> type[_UntilFinished]:
        return _UntilFinished


class _UntilFinished(TorchConfigContextManager):  # type: ignore[misc]
    """Lets the training function of a worker succeed that starts again after the others have finished."""

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None and _lighthouse is not None:
            ray.get(_lighthouse.finish.remote())
        return isinstance(error, RunFinished) or (
            isinstance(error, NodeRefused) and _lighthouse is not None and ray.get(_lighthouse.has_finished.remote())
        )


class _Lighthouse:
    """Serves the lighthouse, unless there is one, and stores whether a worker has finished."""

    def __init__(self, address: str | None, dead_after: float) -> None:
        host = ray.util.get_node_ip_address()
        bind = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._running = contextlib.ExitStack()
        self._address = address or self._running.enter_context(lighthouse(bind, dead_after))
        self._has_finished = False

    def address(self) -> str:
        return self._address

    def finish(self) -> None:
        self._has_finished = True

    def has_finished(self) -> bool:
        return self._has_finished


class _ElasticBackend(_TorchftBackend):  # type: ignore[misc]
    """Starts our lighthouse instead of Ray's, and makes every worker a node."""

    _actor: Any = None

    @override
    def _maybe_create_lighthouse_actor(self, backend_config: ElasticTorchConfig) -> str:
        return f"http://{ray.get(self._lighthouse(backend_config).address.remote())}"

    def _lighthouse(self, config: ElasticTorchConfig) -> Any:
        if self._actor is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            actor = ray.remote(_Lighthouse).options(num_cpus=0, scheduling_strategy=here)  # workers may use all CPUs
            self._actor = actor.remote(config.elastic.lighthouse, config.elastic.dead_after)
        return self._actor

    @override
    def on_start(self, worker_group: Any, backend_config: ElasticTorchConfig) -> None:
        super().on_start(worker_group, backend_config)
        is_again = isinstance(worker_group, ReplicaGroup)
        worker_group.execute(_begin, self._lighthouse(backend_config), is_again)


def _begin(lighthouse: Any, is_again: bool) -> None:
    """Set what torchrun would set for a node of one rank; Ray's are those of a world of all workers."""
    global _lighthouse
    _lighthouse = lighthouse
    worker = ray.train.get_context().get_world_rank()
    os.environ.update(
        {
            WORKER_IS_NODE: "1",
            "HIERCOMM_LIGHTHOUSE": ray.get(lighthouse.address.remote()),
            "HIERCOMM_NODE": f"worker-{worker}",  # also on another machine, where it replaces the lost one
            "RANK": "0",
            "WORLD_SIZE": "1",
            "TORCHELASTIC_RESTART_COUNT": str(int(is_again)),
        }
    )
