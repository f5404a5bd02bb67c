"""When and how replicas agree; knows communicators and replicas, never Lightning."""

from typing import Literal, TypeAlias

from lightning_hiercomm.schemes.all_reduce import AllReduce
from lightning_hiercomm.schemes.base import Scheme
from lightning_hiercomm.schemes.daso import DASO
from lightning_hiercomm.schemes.gossip import Gossip
from lightning_hiercomm.schemes.graphs import DirectedExponential, Full, Graph, RandomPermutation, Ring
from lightning_hiercomm.schemes.periodic import PeriodicAveraging
from lightning_hiercomm.schemes.steps_delay import StepsDelay

SchemeName: TypeAlias = Literal["all_reduce", "periodic", "daso", "steps_delay", "gossip"]

SCHEMES: dict[str, type[Scheme]] = {
    "all_reduce": AllReduce,
    "periodic": PeriodicAveraging,
    "daso": DASO,
    "steps_delay": StepsDelay,
    "gossip": Gossip,
}
"""The schemes that have a name, for ``scheme="..."`` and for the registered strategies."""

__all__ = [
    "DASO",
    "SCHEMES",
    "AllReduce",
    "DirectedExponential",
    "Full",
    "Gossip",
    "Graph",
    "PeriodicAveraging",
    "RandomPermutation",
    "Ring",
    "Scheme",
    "SchemeName",
    "StepsDelay",
]
