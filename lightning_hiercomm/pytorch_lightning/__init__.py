"""The package for programs that import ``pytorch_lightning`` instead of ``lightning.pytorch``.

``HierarchicalStrategy`` and ``CommunicationMonitor`` belong to the class tree of ``pytorch_lightning`` here, and the
names of strategies are also registered there. Everything else is the same object as in :mod:`lightning_hiercomm`.
"""

import sys
from typing import TYPE_CHECKING

import pytorch_lightning
from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry

import lightning_hiercomm
from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    DirectedExponential,
    Elastic,
    Full,
    Gossip,
    Graph,
    Health,
    HeterogeneousBatches,
    ParameterSync,
    PeriodicAveraging,
    RandomPermutation,
    Ring,
    Scheme,
    StepsDelay,
    Topology,
    Transport,
    UnequalData,
)
from lightning_hiercomm.pytorch_lightning._second_tree import SecondTreeFinder

if TYPE_CHECKING:
    # for type checkers: the classes of the else branch have the same source, and bases of the other tree
    class CommunicationMonitor(  # type: ignore[misc]
        lightning_hiercomm.CommunicationMonitor, pytorch_lightning.Callback
    ):
        """See :class:`lightning_hiercomm.CommunicationMonitor`."""

    class HierarchicalStrategy(lightning_hiercomm.HierarchicalStrategy, DDPStrategy):  # type: ignore[misc]
        """See :class:`lightning_hiercomm.HierarchicalStrategy`."""

    class HierarchicalFabricStrategy(  # type: ignore[misc]
        lightning_hiercomm.HierarchicalFabricStrategy, FabricDDPStrategy
    ):
        """See :class:`lightning_hiercomm.HierarchicalFabricStrategy`."""

    class HierarchicalModelParallelStrategy(  # type: ignore[misc]
        lightning_hiercomm.HierarchicalModelParallelStrategy, ModelParallelStrategy
    ):
        """See :class:`lightning_hiercomm.HierarchicalModelParallelStrategy`."""
else:
    sys.meta_path.append(SecondTreeFinder())
    from lightning_hiercomm.pytorch_lightning.trainer.fabric import HierarchicalFabricStrategy
    from lightning_hiercomm.pytorch_lightning.trainer.model_parallel import HierarchicalModelParallelStrategy
    from lightning_hiercomm.pytorch_lightning.trainer.monitor import CommunicationMonitor
    from lightning_hiercomm.pytorch_lightning.trainer.strategy import HierarchicalStrategy

__all__ = [
    "DASO",
    "AllReduce",
    "CommunicationMonitor",
    "DiLoCo",
    "DirectedExponential",
    "Elastic",
    "Full",
    "Gossip",
    "Graph",
    "Health",
    "HeterogeneousBatches",
    "HierarchicalFabricStrategy",
    "HierarchicalModelParallelStrategy",
    "HierarchicalStrategy",
    "ParameterSync",
    "PeriodicAveraging",
    "RandomPermutation",
    "Ring",
    "Scheme",
    "StepsDelay",
    "Topology",
    "Transport",
    "UnequalData",
]

HierarchicalStrategy.register_strategies(StrategyRegistry)
HierarchicalModelParallelStrategy.register_strategies(StrategyRegistry)
HierarchicalFabricStrategy.register_strategies(STRATEGY_REGISTRY)
