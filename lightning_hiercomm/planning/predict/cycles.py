"""When a scheme sends, how long nodes train apart, and which scheme a running one costs as much as."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hiercomm.schemes import (
    DASO,
    AllReduce,
    Every,
    Gossip,
    ParameterSync,
    PeriodicAveraging,
    RunningScheme,
    Scheme,
    Staggered,
    StepsDelay,
)


def cycle(scheme: Scheme | None) -> int:
    """Return the steps after which a scheme repeats itself; None is Lightning's ``DDPStrategy``.

    Raises:
        ValueError: If the number is unknown before a run.
    """
    if isinstance(scheme, StepsDelay):
        return scheme.delay
    if not isinstance(scheme, ParameterSync):
        return 1
    if scheme.period is None:
        raise ValueError("sync_every=None synchronizes at the end of epochs of unknown length: give a number")
    return scheme.period


def by_steps(scheme: ParameterSync, period: int) -> ParameterSync:
    """Return a scheme that does every ``period`` steps what another does at its own period."""
    parts = fragments_of(scheme)
    schedule = Every(period) if parts == 1 else Staggered(max(parts, period))
    return ParameterSync(schedule, scheme.fragments, scheme.reducer, scheme.merging)


def fragments_of(scheme: ParameterSync) -> int:
    """Return into how many fragments a scheme cuts a model."""
    return scheme.fragments if isinstance(scheme.fragments, int) else len(scheme.fragments) + 1


def sent_after(scheme: ParameterSync, step: int) -> Sequence[int]:
    """Return the fragments that are sent after a step, counted from 1, of a very long epoch."""
    if isinstance(scheme, DASO):
        return range(fragments_of(scheme)) if (step - 1) % (scheme.period or 1) == 0 else ()
    due = step + scheme.staleness
    return scheme.schedule.due(due, due, fragments_of(scheme))


def drift(scheme: Scheme | None, nodes: int) -> float:
    """Return the steps that nodes train apart, including the age of what they receive: a rough risk.

    Args:
        scheme: The scheme; None is Lightning's ``DDPStrategy``.
        nodes: Number of nodes.
    """
    if isinstance(scheme, ParameterSync):
        return (scheme.period or math.inf) + scheme.staleness
    if isinstance(scheme, StepsDelay):
        return scheme.delay + 1
    if isinstance(scheme, Gossip):
        # Random pairs halve the squared distance from the mean at each step. So in the long run nodes are as far apart
        # as averaging every third step leaves them; a step of delay doubles that. Two nodes are a pair.
        return (1 if nodes == 2 else 3) + (2 if scheme.overlap else 0)
    return 0


def next_step(running: RunningScheme[Scheme], steps_of_epoch: int) -> Scheme:
    """Return a scheme all of whose steps cost what the next step of a running one does."""
    config = running.config
    if isinstance(config, DASO):
        if running.phase != "cycling":
            return PeriodicAveraging(1)
        scalars = running.scalars()
        return DASO(
            int(scalars["sync_every"]),
            int(scalars["staleness"]),
            merge="delta" if config.merging.needs_sent else "eq1",
            reducer="sharded" if config.reducer == "sharded" else "leader",
            narrow_phases=config.narrow_phases,
        )
    if running.phase == "warm-up":
        return AllReduce()
    if isinstance(config, PeriodicAveraging) and (config.at_epoch_end or config.sync_every is None):
        averages = math.ceil(steps_of_epoch / (config.period or steps_of_epoch))
        every = max(1, round(steps_of_epoch / averages))
        return PeriodicAveraging(every)
    return config
