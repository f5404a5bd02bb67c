"""A PyTorch Lightning strategy for nodes joined by a network much slower than the links inside them."""

from lightning_hiercomm._lightning.tree import fabric, pl
from lightning_hiercomm.batches import HeterogeneousBatches
from lightning_hiercomm.elastic import Elastic
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes import (
    DASO,
    AllReduce,
    DiLoCo,
    DirectedExponential,
    Epochs,
    Full,
    Gossip,
    Graph,
    ParameterSync,
    PeriodicAveraging,
    Plateau,
    RandomPermutation,
    Ring,
    Scheme,
    StepsDelay,
)
from lightning_hiercomm.trainer.fabric import HierarchicalFabricStrategy
from lightning_hiercomm.trainer.model_parallel import HierarchicalModelParallelStrategy
from lightning_hiercomm.trainer.monitor import CommunicationMonitor
from lightning_hiercomm.trainer.options import Health, Transport
from lightning_hiercomm.trainer.settings import register_schemes
from lightning_hiercomm.trainer.strategy import HierarchicalStrategy

__version__ = "0.1.0"

__all__ = [
    "DASO",
    "AllReduce",
    "CommunicationMonitor",
    "DiLoCo",
    "DirectedExponential",
    "Elastic",
    "Epochs",
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
    "Plateau",
    "RandomPermutation",
    "Ring",
    "Scheme",
    "StepsDelay",
    "Topology",
    "Transport",
]

register_schemes(HierarchicalStrategy, pl.strategies.StrategyRegistry)
register_schemes(HierarchicalFabricStrategy, fabric.strategies.STRATEGY_REGISTRY)
pl.strategies.StrategyRegistry.register(
    HierarchicalModelParallelStrategy.strategy_name,
    HierarchicalModelParallelStrategy,
    description="FSDP2 or tensor parallel nodes synchronize by a scheme",
    override=True,
)
