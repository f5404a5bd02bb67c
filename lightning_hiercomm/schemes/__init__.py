"""Schemes: when and how replicas synchronize, independent of Lightning.

Units of data:

- **Bucket**: consecutive tensors of one dtype that are sent together.
- **Fragment**: the buckets that are sent after the same step. Crossover-SGD calls it a *segment*.
- **Shard**: the part of a bucket, a tensor (FSDP2) or a server's bucket (``StepsDelay``) that one rank holds or sends.
"""

from typing import Literal, TypeAlias

from lightning_hiercomm.schemes.all_reduce import AllReduce
from lightning_hiercomm.schemes.base import RunningScheme, Scheme
from lightning_hiercomm.schemes.components.merges import Delta, Merge, Replace, StaleSum
from lightning_hiercomm.schemes.components.outer import OuterOptimizer
from lightning_hiercomm.schemes.components.schedules import Every, Schedule, Staggered
from lightning_hiercomm.schemes.context import Context
from lightning_hiercomm.schemes.daso import DASO
from lightning_hiercomm.schemes.diloco import DiLoCo
from lightning_hiercomm.schemes.exchange import RunningParameterSync, SyncState
from lightning_hiercomm.schemes.gossip import Gossip
from lightning_hiercomm.schemes.parameter_sync import ParameterSync
from lightning_hiercomm.schemes.periodic import PeriodicAveraging
from lightning_hiercomm.schemes.phases import Epochs
from lightning_hiercomm.schemes.plateau import Plateau
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
    "Epochs",
    "Every",
    "Full",
    "Gossip",
    "Graph",
    "Merge",
    "OuterOptimizer",
    "ParameterSync",
    "PeriodicAveraging",
    "Plateau",
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
