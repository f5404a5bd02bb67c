"""A PyTorch Lightning strategy for nodes joined by a network much slower than the links inside them."""

import logging

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_hiercomm._lightning.command_line import say_mistakes_as_python_does
from lightning_hiercomm._lightning.other_tree import of_second_tree, when_imported
from lightning_hiercomm.batches import HeterogeneousBatches
from lightning_hiercomm.elastic import Elastic
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes import (
    DASO,
    Agreement,
    AllReduce,
    DiLoCo,
    DirectedExponential,
    Full,
    Gossip,
    Graph,
    PeriodicAveraging,
    RandomPermutation,
    Ring,
    Scheme,
    StepsDelay,
)
from lightning_hiercomm.trainer.fabric import HierarchicalFabricStrategy
from lightning_hiercomm.trainer.model_parallel import HierarchicalModelParallelStrategy
from lightning_hiercomm.trainer.monitor import CommunicationMonitor
from lightning_hiercomm.trainer.settings import register_schemes
from lightning_hiercomm.trainer.strategy import HierarchicalStrategy

__version__ = "0.1.0"

__all__ = [
    "DASO",
    "Agreement",
    "AllReduce",
    "CommunicationMonitor",
    "DiLoCo",
    "DirectedExponential",
    "Elastic",
    "Full",
    "Gossip",
    "Graph",
    "HeterogeneousBatches",
    "HierarchicalFabricStrategy",
    "HierarchicalModelParallelStrategy",
    "HierarchicalStrategy",
    "PeriodicAveraging",
    "RandomPermutation",
    "Ring",
    "Scheme",
    "StepsDelay",
    "Topology",
]

HierarchicalStrategy.register_strategies(StrategyRegistry)
HierarchicalModelParallelStrategy.register_strategies(StrategyRegistry)
HierarchicalFabricStrategy.register_strategies(STRATEGY_REGISTRY)
# the same names in the other tree, whose own classes are imported when one of them is used
when_imported(
    "pytorch_lightning.strategies",
    lambda other: register_schemes(of_second_tree("HierarchicalStrategy"), other.StrategyRegistry),
)
when_imported(
    "lightning_fabric.strategies",
    lambda other: register_schemes(of_second_tree("HierarchicalFabricStrategy"), other.STRATEGY_REGISTRY),
)

say_mistakes_as_python_does()

# Announcements are seen, as Lightning's own are, unless the program has set up logging itself.
_handler = logging.StreamHandler()
_handler.addFilter(lambda _: not logging.getLogger().hasHandlers())
logging.getLogger(__name__).setLevel(logging.INFO)
logging.getLogger(__name__).addHandler(_handler)
