"""The time that a simulated run would take on a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from lightning_hiercomm.planning.cluster import Cluster, Workload
from lightning_hiercomm.planning.predict.cost import predict
from lightning_hiercomm.planning.simulate import simulation
from lightning_hiercomm.planning.simulate.simulation import Curve, Experiment
from lightning_hiercomm.schemes import DASO, AllReduce, PeriodicAveraging, RunningScheme, Scheme


@dataclass(frozen=True)
class Site:
    """The cluster whose step times are predicted."""

    cluster: Cluster
    workload: Workload


class VirtualClock:
    """Predicts each step's time on a cluster, by the phase of the scheme."""

    def __init__(self, experiment: Experiment, site: Site) -> None:
        self._experiment = experiment
        self._cluster = replace(site.cluster, nodes=experiment.nodes, world=None)
        self._workload = site.workload
        self._known: dict[str, float] = {}

    def seconds_of_step(self, scheme: RunningScheme[Scheme]) -> float:
        """Return the predicted time of the scheme's next step."""
        like = next_step(scheme, self._experiment.steps_per_epoch)
        key = repr(like)
        if key not in self._known:
            prediction = predict(like, self._cluster, self._workload, self._experiment.wire_dtype)
            self._known[key] = prediction.seconds
        return self._known[key]


def simulate(experiment: Experiment, site: Site, evaluations: int = 10) -> Curve:
    """Simulate an experiment, with its predicted times at a site."""
    return simulation.simulate(experiment, evaluations, VirtualClock(experiment, site).seconds_of_step)


def next_step(running: RunningScheme[Scheme], steps_of_epoch: int) -> Scheme:
    """Return a scheme all of whose steps cost what the next step of a running one does."""
    config = running.config
    if isinstance(config, DASO):
        if running.phase != "cycling":
            return PeriodicAveraging(1, gradients=_in_node(config))
        scalars = running.scalars()
        return DASO(
            int(scalars["sync_every"]),
            int(scalars["staleness"]),
            merge="delta" if config.merging.needs_sent else "eq1",
            reducer="sharded" if config.reducer == "sharded" else "leader",
            gradients=_in_node(config),
            narrow_phases=config.narrow_phases,
        )
    if running.phase == "warm-up":
        return AllReduce()
    if isinstance(config, PeriodicAveraging) and (config.at_epoch_end or config.sync_every is None):
        averages = math.ceil(steps_of_epoch / (config.period or steps_of_epoch))
        every = max(1, round(steps_of_epoch / averages))
        return PeriodicAveraging(every, gradients=_in_node(config), node_sync_every=config.node_sync_every)
    return config


def _in_node(scheme: Scheme) -> Literal["node", "none"]:
    return "none" if scheme.gradients == "none" else "node"
