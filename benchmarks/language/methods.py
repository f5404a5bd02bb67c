"""The methods that are compared, most interesting first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from benchmarks.language.codecs import FiveLevels, FourOfThirtyTwo, SevenLevels
from benchmarks.language.power_sgd import PowerSGD
from lightning_hiercomm.comm.codec import Codec
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, Scheme, StepsDelay
from lightning_hiercomm.schemes.gradient_path import GradientPath

MakePath = Callable[[Topology, nn.Module], GradientPath]


@dataclass(frozen=True)
class Method:
    """A method and its parameters.

    Attributes:
        title: In tables. It changes when the method does: what is stored of another title is forgotten.
        family: Its name in :mod:`benchmarks.palette`.
        make: Its scheme, given the steps of the run.
        wire: Payload type, or a codec that is tried out.
        path: Averages gradients instead of the scheme, given the steps of the run.
        packed: Bytes of a packed payload, as a factor of the bytes that the benchmark sends.
    """

    title: str
    family: str
    make: Callable[[int], Scheme] = lambda _: AllReduce()
    wire: str | Codec | None = None
    path: Callable[[int], MakePath] | None = None
    packed: float = 1.0


def _power_sgd(steps: int) -> MakePath:
    return partial(PowerSGD, rank=4, first_step=max(2, steps // 10))


METHODS = {
    "all_reduce": Method("AllReduce", "all_reduce"),
    "int4": Method("AllReduce, int4", "all_reduce", wire="int4"),
    "sparse2": Method("AllReduce, sparse2", "all_reduce", wire="sparse2"),
    "seven_levels": Method(
        "AllReduce, 7 levels (experiment)", "all_reduce", wire=SevenLevels(), packed=(3 + 1 / 16) / (4 + 1 / 16)
    ),
    "five_levels": Method("AllReduce, 5 levels (experiment)", "all_reduce", wire=FiveLevels()),
    "diloco16": Method("DiLoCo(16)", "diloco", lambda _: DiLoCo(16)),
    "periodic4": Method("PeriodicAveraging(4)", "periodic", lambda _: PeriodicAveraging(4)),
    "periodic4_sparse2": Method(
        "PeriodicAveraging(4), sparse2", "periodic", lambda _: PeriodicAveraging(4), wire="sparse2"
    ),
    "periodic2_sparse2": Method(
        "PeriodicAveraging(2), sparse2", "periodic", lambda _: PeriodicAveraging(2), wire="sparse2"
    ),
    "power_sgd": Method("DDP, PowerSGD(4) of PyTorch", "power_sgd", path=_power_sgd),
    "int8": Method("AllReduce, int8", "all_reduce", wire="int8"),
    "periodic16": Method(
        "PeriodicAveraging(16), warm-up of a quarter",
        "periodic",
        lambda steps: PeriodicAveraging(16, warmup_steps=steps // 4),
    ),
    "diloco64": Method("DiLoCo(64)", "diloco", lambda _: DiLoCo(64)),
    "daso": Method("DASO(4, 1), delta", "daso", lambda _: DASO(4, 1, merge="delta")),
    "gossip": Method("Gossip", "gossip", lambda _: Gossip()),
    "steps_delay": Method(
        "StepsDelay(4), warm-up of a quarter",
        "steps_delay",
        lambda steps: StepsDelay(4, warmup_steps=steps // 16 * 4, local_update="sgd"),
    ),
    "bfloat16": Method("AllReduce, bfloat16", "all_reduce", wire="bfloat16"),
    "four_of_32": Method("AllReduce, 4 of 32 (experiment)", "all_reduce", wire=FourOfThirtyTwo()),
}
"""By the name of their results."""
