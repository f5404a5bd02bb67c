"""Every scheme in its forms, against one independent calculation; unmoved by looks, and resumed to the bit.

:mod:`combinations` has the calculation, and draws others at random.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from combinations import Combination, check
from pairwise import selected

from lightning_hiercomm.schemes import Epochs

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

SMALL = 40  # bytes of a bucket, so that buckets cut tensors
NODES = {"1+1": 2**20, "2x2": SMALL, "3+1": 2**20, "1+2+1": SMALL, "4 of 1": 2**20, "1 of 2": SMALL, "1 of 1": SMALL}
GRAPHS = ("ring", "full", "exponential", "permutation")
CYCLING = {"warmup": Epochs(0), "cooldown": Epochs(0), "plateau": None}


def form(scheme: str, more: dict[str, Any] | None = None, **arguments: Any) -> Combination:
    return Combination(scheme, arguments, **(more or {}))


def daso(sync_every: int, staleness: int, merge: str = "eq1", reducer: str = "leader", **phases: Any) -> Combination:
    arguments = {"sync_every": sync_every, "staleness": staleness, "merge": merge, "reducer": reducer}
    return form("daso", {"epochs": 3, "steps": 12}, **arguments, **{**CYCLING, **phases})


def sync(
    period: int, merge: str = "replace", staleness: int = 0, reducer: str = "sharded", *, of: str = "run", **more: Any
) -> Combination:
    arguments = {"schedule": (of, period), "fragments": 1, "reducer": reducer, "merge": merge, "staleness": staleness}
    return form("parameter_sync", **{**arguments, **more})


def diloco(sync_every: int, outer: str, fragments: Any = 1, staleness: int = 0, **more: Any) -> Combination:
    arguments = {"outer_optimizer": outer, "fragments": fragments, "staleness": staleness, **more}
    return form("diloco", sync_every=sync_every, **arguments)


periodic = partial(form, "periodic", at_epoch_end=True)
gossip = partial(form, "gossip", fragments=1, overlap=False, push_sum=True)
DECAY = {"optimizer": "nesterov and decay"}


def steps_delay(more: dict[str, Any] = DECAY, local_update: str = "glu", **arguments: Any) -> Combination:
    return form("steps_delay", more, local_update=local_update, **arguments)


FORMS: dict[str, Combination] = {
    "all_reduce": form("all_reduce"),
    "periodic": periodic(sync_every=3, order="after_step"),
    "periodic, before the step": periodic(sync_every=3, order="before_step"),
    "periodic, warm-up": periodic({"warmup": 4}, sync_every=3, order="after_step"),
    "periodic, before the step, warm-up": periodic({"warmup": 4}, sync_every=3, order="before_step"),
    "periodic, before the step, skipped": periodic({"skip": (3, 0)}, sync_every=2, order="before_step"),
    "periodic, within epochs": form("periodic", sync_every=4, at_epoch_end=False, order="after_step"),
    "periodic, mean of optimizers": periodic({"state": True, "optimizer": "adam"}, sync_every=2, order="after_step"),
    "periodic, mean of optimizers that have stepped": periodic(
        {"state": True, "optimizer": "momentum", "skip": (0, 0)}, sync_every=1, order="after_step"
    ),
    "mean of optimizers": replace(sync(2), state=True, optimizer="momentum"),
    **{
        f"daso, {sync_every}, {staleness}, {merge}": daso(sync_every, staleness, merge, reducer)
        for sync_every, staleness in ((1, 1), (3, 3), (4, 0), (5, 2), (7, 4), (30, 1))
        for merge, reducer in (("eq1", "leader"), ("delta", "sharded"))
    },
    "daso, phases": daso(3, 2, warmup=Epochs(1), cooldown=Epochs(1)),
    **{
        f"{merge}, {staleness}, {reducer}": sync(3, merge, staleness, reducer)
        for merge, staleness in (("replace", 0), ("replace", 1), ("replace", 3), ("eq1", 1), ("delta", 2))
        for reducer in ("sharded", "leader", *GRAPHS)
    },
    **{
        f"staggered {merge}, {staleness}": sync(6, merge, staleness, of="staggered", fragments=2)
        for merge, staleness in (("replace", 0), ("replace", 2), ("eq1", 2), ("delta", 1))
    },
    "exponential, every second step": sync(2, reducer="exponential"),
    "staggered exponential": sync(4, reducer="exponential", of="staggered", fragments=2),
    "named fragments": sync(6, "eq1", 1, "leader", of="staggered", fragments=["c", "a"]),
    "epochs, eq1": sync(4, "eq1", 3, of="epoch"),
    "epochs, outer": sync(3, "nesterov", of="epoch", keep_local=0.5),
    "keep_local": sync(3, keep_local=0.25),
    "outer, full": sync(3, "nesterov", reducer="full"),
    "noloco": sync(4, "adam", 1, "permutation"),
    **{f"diloco, {outer}": diloco(3, outer, 1, 0) for outer in ("nesterov", "sgd", "momentum", "adam")},
    "diloco, late": diloco(4, "adam", 1, 3, keep_local=0.25),
    "diloco, late, by default": diloco(4, "nesterov", 1, 3),
    "diloco, streaming": diloco(6, "momentum", 2, 0, keep_local=0.0),
    "diloco, streaming late": diloco(6, "adam", 2, 2, keep_local=0.5),
    "diloco, streaming, by default": diloco(6, "nesterov", 2, 2),
    "diloco, uneven": diloco(7, "nesterov", 3, 1, keep_local=0.3),
    "diloco, warm-up": replace(diloco(4, "momentum", 2, 1), warmup=4),
    "gossip": gossip(graph="exponential"),
    "gossip, ring": gossip(graph="ring"),
    "gossip, ring, overlapped": gossip(graph="ring", overlap=True),
    "gossip, full": gossip(graph="full"),
    "gossip, fragments": gossip(graph="permutation", fragments=3),
    "gossip, unfair": gossip(graph="unfair", fragments=2),
    "gossip, unfair, overlapped": gossip(graph="unfair", fragments=2, overlap=True),
    "gossip, plain means": gossip(graph="unfair", fragments=2, push_sum=False),
    "gossip, skipped": gossip({"skip": (2, 0)}, graph="permutation"),
    "gossip, unfair, overlapped, skipped": gossip({"skip": (2, 0)}, graph="unfair", fragments=2, overlap=True),
    **{
        f"steps_delay, {delay}, {rule}": steps_delay(delay=delay, warmup_steps=warmup, local_update=rule)
        for delay, warmup, rule in ((1, 0, "glu"), (2, 4, "glu"), (4, 0, "glu"), (2, 2, "sgd"), (2, 2, "dc_asgd"))
    },
    **{
        f"steps_delay, growing rate, {delay}": steps_delay({"grows": True, **DECAY}, delay=delay, warmup_steps=delay)
        for delay in (1, 2, 3)
    },
    "steps_delay, clamped": steps_delay({"clamp": 0.4, **DECAY}, delay=2, warmup_steps=28),
    **{  # a pull arrives in the iterations 4 and 6
        f"steps_delay, skipped at {at}": steps_delay({"skip": (at, 0), **DECAY}, delay=2, warmup_steps=2)
        for at in (1, 3, 4, 5)
    },
}


WIRED = [
    *("all_reduce", "periodic", "periodic, warm-up", "periodic, before the step, warm-up"),
    *("periodic, mean of optimizers", "daso, 4, 0, eq1", "daso, 5, 2, eq1", "daso, 7, 4, delta"),
    *("replace, 0, permutation", "replace, 1, sharded", "eq1, 1, leader", "delta, 2, leader", "staggered eq1, 2"),
    *("epochs, outer", "noloco", "diloco, nesterov", "diloco, late", "diloco, streaming late"),
    *("diloco, warm-up", "gossip, fragments", "gossip, unfair", "gossip, unfair, overlapped"),
    *("gossip, ring, overlapped", "steps_delay, 2, glu", "steps_delay, 2, sgd", "steps_delay, 2, dc_asgd"),
]


@pytest.mark.pairwise
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_follows_the_calculation_and_resumes_to_the_bit(name, nodes):
    chosen = replace(FORMS[name], nodes=nodes, bucket_bytes=NODES[nodes], looks=(1, 5, 8), resume=len(name) % 10)
    check(replace(chosen, weights=None if nodes == "4 of 1" else tuple(1.0 + rank for rank in chosen.ranks)))


@pytest.mark.parametrize(
    ("name", "wire"),
    selected(
        (name, wire)
        for name in WIRED
        for wire in ("bfloat16", "float16", "int8", "int4")
        if "float" in wire or "steps_delay" not in name  # which refuses integers
    ),
)
def test_an_encoded_form_is_unmoved_by_looks_and_resumes_to_the_bit(name, wire):
    nodes, resume = ("2x2", 4) if wire in ("bfloat16", "int8") else ("1+2+1", 5)
    optimizer = "adamw" if FORMS[name].optimizer == "sgd" else FORMS[name].optimizer
    chosen = replace(FORMS[name], nodes=nodes, wire=wire, optimizer=optimizer, bucket_bytes=SMALL)
    check(replace(chosen, looks=(0, 2, 3, 6, 9), resume=resume))


@pytest.mark.parametrize("name", WIRED)
def test_a_form_follows_the_calculation_while_parameters_are_frozen_and_unfrozen(name):
    check(replace(FORMS[name], nodes="2x2", unfreeze=3, freeze=6, again=10, bucket_bytes=SMALL))
