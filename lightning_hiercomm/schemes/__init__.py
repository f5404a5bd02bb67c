"""When and how replicas agree; knows communicators and replicas, never Lightning."""

from typing import Literal, TypeAlias

from lightning_hiercomm.schemes.agreement import Agreement, RunningAgreement
from lightning_hiercomm.schemes.all_reduce import AllReduce
from lightning_hiercomm.schemes.base import Context, RunningScheme, Scheme
from lightning_hiercomm.schemes.daso import DASO
from lightning_hiercomm.schemes.diloco import DiLoCo
from lightning_hiercomm.schemes.gossip import Gossip
from lightning_hiercomm.schemes.periodic import PeriodicAveraging
from lightning_hiercomm.schemes.steps_delay.scheme import StepsDelay
from lightning_hiercomm.schemes.words.graphs import DirectedExponential, Full, Graph, RandomPermutation, Ring
from lightning_hiercomm.schemes.words.merging import Delta, Merge, Replace, StaleSum
from lightning_hiercomm.schemes.words.outer import OuterOptimizer
from lightning_hiercomm.schemes.words.when import Every, Staggered, When

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
    "Agreement",
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
    "PeriodicAveraging",
    "RandomPermutation",
    "Replace",
    "Ring",
    "RunningAgreement",
    "RunningScheme",
    "Scheme",
    "SchemeName",
    "Staggered",
    "StaleSum",
    "StepsDelay",
    "When",
]
