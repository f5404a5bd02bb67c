"""What the planner knows of each scheme: its cycle, how far nodes drift apart, and its phases that end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import singledispatch
from typing import Literal

from lightning_hiercomm.schemes import (
    DASO,
    AllReduce,
    Gossip,
    ParameterSync,
    PeriodicAveraging,
    RunningScheme,
    Scheme,
    StepsDelay,
)


@singledispatch
def period(scheme: Scheme | None) -> int | str:
    """Return the steps after which a scheme repeats itself, or why that is not known before a run."""
    return 1


@period.register
def _(scheme: ParameterSync) -> int | str:
    if scheme.schedule.auto is not None:
        return "sync_every='auto' is chosen when a run begins: give a number"
    if scheme.period is None:
        return "sync_every=None agrees at the end of epochs, whose length is not known: give a number"
    return scheme.period


@period.register
def _(scheme: StepsDelay) -> int | str:
    return scheme.delay


def cycle(scheme: Scheme | None) -> int:
    """Return the steps after which a scheme repeats itself; None is Lightning's ``DDPStrategy``.

    Raises:
        ValueError: If that is not known before a run.
    """
    steps = period(scheme)
    if isinstance(steps, str):
        raise ValueError(steps)
    return steps


def fragments_of(scheme: ParameterSync) -> int:
    """Return into how many fragments a scheme cuts a model."""
    return scheme.fragments if isinstance(scheme.fragments, int) else len(scheme.fragments) + 1


@singledispatch
def sent_after(scheme: Scheme, step: int) -> Sequence[int]:
    """Return the fragments that are sent after a step, counted from 1, of a very long epoch."""
    return (0,)


@sent_after.register
def _(scheme: ParameterSync, step: int) -> Sequence[int]:
    due = step + scheme.staleness
    return scheme.schedule.due(due, due, fragments_of(scheme))


@sent_after.register
def _(scheme: DASO, step: int) -> Sequence[int]:
    return range(fragments_of(scheme)) if (step - 1) % (scheme.period or 1) == 0 else ()


def exchanges_per_cycle(scheme: Scheme) -> int:
    """Return how often something is sent to other nodes in a cycle; raises as :func:`cycle` does."""
    return max(1, sum(bool(sent_after(scheme, step)) for step in range(1, cycle(scheme) + 1)))


@singledispatch
def drift(scheme: Scheme | None, nodes: int) -> float:
    """Return the steps that nodes train apart, with the oldest that they do not know of each other: a rough risk."""
    return 0


@drift.register
def _(scheme: ParameterSync, nodes: int) -> float:
    return (scheme.period or math.inf) + scheme.staleness


@drift.register
def _(scheme: StepsDelay, nodes: int) -> float:
    return scheme.delay + 1


@drift.register
def _(scheme: Gossip, nodes: int) -> float:
    # Random pairs halve the squared distance from the mean at each step. So in the long run nodes are as far apart as
    # averaging every third step leaves them; a step of delay doubles that. Two nodes are a pair.
    return (1 if nodes == 2 else 3) + (2 if scheme.overlap else 0)


@singledispatch
def first_phase(scheme: Scheme | None) -> str | None:
    """Return how to tell what a step takes in phases that end, given ``{seconds}`` of one; None without any."""
    return None


@first_phase.register
def _(scheme: ParameterSync) -> str | None:
    if not scheme.first_phase:
        return None
    phase = f"warmup_steps={scheme.first_phase}"
    return f"Before, in {phase}, a step takes {{seconds}}: gradients are averaged over all nodes."


@first_phase.register
def _(scheme: DASO) -> str | None:
    return (
        "In warm-up and cool-down a step takes {seconds}: nodes average and wait"
        " (warmup_epochs and cooldown_epochs: 4 each, or a quarter of a shorter run, unless you set them)."
    )


@first_phase.register
def _(scheme: StepsDelay) -> str | None:
    if not scheme.warmup_steps:
        return None
    return (
        f"Before, in warmup_steps={scheme.warmup_steps}, a step takes {{seconds}}: warm up until learning rates are"
        " low, with a cosine for 0.8 of the run."
    )


@singledispatch
def first_step(scheme: Scheme, steps_of_epoch: int) -> Scheme:
    """Return a scheme all of whose steps cost what the first of this one's does.

    Args:
        scheme: With its arguments.
        steps_of_epoch: Optimizer steps of an epoch.
    """
    return scheme


@first_step.register
def _(scheme: ParameterSync, steps_of_epoch: int) -> Scheme:
    return AllReduce() if scheme.first_phase else scheme


@first_step.register
def _(scheme: StepsDelay, steps_of_epoch: int) -> Scheme:
    return AllReduce() if scheme.warmup_steps else scheme


@first_step.register
def _(scheme: PeriodicAveraging, steps_of_epoch: int) -> Scheme:
    if scheme.first_phase:
        return AllReduce()
    if not scheme.at_epoch_end and scheme.sync_every is not None:
        return scheme
    averages = math.ceil(steps_of_epoch / (scheme.period or steps_of_epoch))
    every = max(1, round(steps_of_epoch / averages))
    return PeriodicAveraging(every, gradients=_in_node(scheme), node_sync_every=scheme.node_sync_every)


@first_step.register
def _(scheme: DASO, steps_of_epoch: int) -> Scheme:
    return PeriodicAveraging(1, gradients=_in_node(scheme))  # of warm-up


def next_step(running: RunningScheme[Scheme], steps_of_epoch: int) -> Scheme:
    """Return a scheme all of whose steps cost what the next one of a running scheme does."""
    config = running.config
    if isinstance(config, StepsDelay):
        return AllReduce() if running.phase == "warm-up" else config
    if not isinstance(config, DASO) or running.phase != "cycling":
        return first_step(config, steps_of_epoch)
    scalars = running.scalars()
    return DASO(
        int(scalars["sync_every"]),
        int(scalars["staleness"]),
        merge="delta" if config.merging.needs_sent else "eq1",
        reducer="sharded" if config.reducer == "sharded" else "leader",
        gradients=_in_node(config),
        narrow_phases=config.narrow_phases,
    )


def _in_node(scheme: Scheme) -> Literal["node", "none"]:
    return "none" if scheme.gradients == "none" else "node"
