"""One scheme of every kind, with short periods: for what holds under each of them."""

from __future__ import annotations

from typing import Any

from lightning_hiercomm.schemes import (
    DASO,
    AllReduce,
    DiLoCo,
    DirectedExponential,
    Gossip,
    OuterOptimizer,
    ParameterSync,
    PeriodicAveraging,
    RandomPermutation,
    Ring,
    Scheme,
    StepsDelay,
)

CYCLING: dict[str, Any] = {"warmup": 0, "cooldown": 0, "plateau": None}
"""Arguments of a DASO that cycles from the first step to the last."""

ZOO: dict[str, Scheme] = {
    "all_reduce": AllReduce(),
    "periodic": PeriodicAveraging(2),
    "periodic, before the step": PeriodicAveraging(2, order="before_step"),
    "daso": DASO(2, 1, **CYCLING),
    "daso, waiting": DASO(2, 0, **CYCLING),
    "daso, sharded delta": DASO(2, 2, merge="delta", reducer="sharded", **CYCLING),
    "diloco": DiLoCo(2),
    "streaming": DiLoCo(4, fragments=2, staleness=1, keep_local=0.5),
    "stale": ParameterSync(2, staleness=1),
    "ring": ParameterSync(1, reducer=Ring()),
    "exponential": ParameterSync(2, reducer=DirectedExponential(), staleness=1),
    "noloco": ParameterSync(2, reducer=RandomPermutation(), merge=OuterOptimizer()),
    "noloco, overlapped": ParameterSync(2, reducer=RandomPermutation(), staleness=1, merge=OuterOptimizer()),
    "gossip": Gossip(fragments=2),
    "gossip, overlapped": Gossip(fragments=2, overlap=True),
    "gossip, push-sum": Gossip("directed_exponential", fragments=2),
    "gossip, plain means": Gossip(Ring(), fragments=2, push_sum=False),
    "steps_delay": StepsDelay(2, warmup_steps=2),
}


def without(*names: str) -> list[str]:
    """The names of all schemes except some."""
    return [name for name in ZOO if name not in names]
