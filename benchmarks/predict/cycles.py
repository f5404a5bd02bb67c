"""When a scheme sends, and which scheme a running one costs as much as."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hiercomm.schemes import (
    DASO,
    AllReduce,
    ParameterSync,
    PeriodicAveraging,
    RunningScheme,
    Scheme,
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


def fragments_of(scheme: ParameterSync) -> int:
    """Return into how many fragments a scheme cuts a model."""
    return scheme.fragments if isinstance(scheme.fragments, int) else len(scheme.fragments) + 1


def sent_after(scheme: ParameterSync, step: int) -> Sequence[int]:
    """Return the fragments that are sent after a step, counted from 1, of a very long epoch."""
    if isinstance(scheme, DASO):
        return range(fragments_of(scheme)) if (step - 1) % (scheme.period or 1) == 0 else ()
    due = step + scheme.staleness
    return scheme.schedule.due(due, due, fragments_of(scheme))


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
            compressed_phases=config.compressed_phases,
        )
    if running.phase == "warm-up":
        return AllReduce()
    if isinstance(config, PeriodicAveraging) and (config.at_epoch_end or config.sync_every is None):
        averages = math.ceil(steps_of_epoch / (config.period or steps_of_epoch))
        every = max(1, round(steps_of_epoch / averages))
        return PeriodicAveraging(every)
    return config
