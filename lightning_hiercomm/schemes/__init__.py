"""Schemes: when and how replicas synchronize, independent of Lightning.

Units of data:

- **Bucket**: consecutive tensors of one type that are sent together. Its slice of one tensor is a *piece*.
- **Part**: the buckets that leave after the same step. Papers call it a *fragment* (Streaming DiLoCo) or a *segment*
  (Crossover-SGD), and the arguments of these schemes are named so. A rank sends its part of a
  bucket over its inter-node process group: the ranks with the same local rank on all nodes.
- **Section**: a bucket of parameters of one param group, on the server of ``StepsDelay``.
- **Shard**: of a section, what one node holds; of a tensor (FSDP2), what one rank of a node holds.
"""

from typing import Literal, TypeAlias

from lightning_hiercomm.schemes.all_reduce import AllReduce
from lightning_hiercomm.schemes.base import Context, RunningScheme, Scheme
from lightning_hiercomm.schemes.components.merges import Delta, Merge, Replace, StaleSum
from lightning_hiercomm.schemes.components.outer import OuterOptimizer
from lightning_hiercomm.schemes.components.schedules import Every, Schedule, Staggered
from lightning_hiercomm.schemes.daso import DASO
from lightning_hiercomm.schemes.diloco import DiLoCo
from lightning_hiercomm.schemes.gossip import Gossip
from lightning_hiercomm.schemes.parameter_sync import ParameterSync, RunningParameterSync, SyncState
from lightning_hiercomm.schemes.periodic import PeriodicAveraging
from lightning_hiercomm.schemes.reducers.graphs import DirectedExponential, Full, Graph, RandomPermutation, Ring
from lightning_hiercomm.schemes.steps_delay.scheme import StepsDelay

SchemeName: TypeAlias = Literal["all_reduce", "periodic", "daso", "steps_delay", "gossip", "diloco"]

SCHEMES: dict[str, type[Scheme]] = {
    "all_reduce": AllReduce,
    "periodic": PeriodicAveraging,
    "daso": DASO,
    "steps_delay": StepsDelay,
    "gossip": Gossip,
    "diloco": DiLoCo,
}
"""The schemes that have a name, for ``scheme="..."`` and for the registered strategies."""

__all__ = [
    "DASO",
    "SCHEMES",
    "AllReduce",
    "Context",
    "Delta",
    "DiLoCo",
    "DirectedExponential",
    "Every",
    "Full",
    "Gossip",
    "Graph",
    "Merge",
    "OuterOptimizer",
    "ParameterSync",
    "PeriodicAveraging",
    "RandomPermutation",
    "Replace",
    "Ring",
    "RunningParameterSync",
    "RunningScheme",
    "Schedule",
    "Scheme",
    "SchemeName",
    "Staggered",
    "StaleSum",
    "StepsDelay",
    "SyncState",
]
