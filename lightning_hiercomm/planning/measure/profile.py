"""The measured profile of a cluster, as a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_hiercomm.planning.cluster import Cluster, CostCurve, Link, PlanningError, Workload

_FORMAT = 3


@dataclass(frozen=True)
class Profile:
    """A measured cluster, and what was trained on it.

    Attributes:
        cluster: Its links and processors.
        workload: Of the slowest rank.
        step_seconds: Of every rank, in rank order, while all trained without communication.
        about: Date, versions, device and host names.
    """

    cluster: Cluster
    workload: Workload
    step_seconds: tuple[float, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def speeds(self, nodes: int) -> list[float]:
        """Return the nodes' measured speeds relative to the slowest; equal ones if so many nodes were not measured."""
        if nodes != self.cluster.nodes or len(self.step_seconds) != self.cluster.ranks:
            return [1.0] * nodes
        of_nodes = [max(each) for each in zip(*[iter(self.step_seconds)] * self.cluster.ranks_per_node, strict=True)]
        return [max(of_nodes) / seconds for seconds in of_nodes]

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON."""
        return {
            "format": _FORMAT,
            "about": dict(self.about),
            "cluster": _without_infinity(asdict(self.cluster)),
            "workload": asdict(self.workload),
            "step_seconds": list(self.step_seconds),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """Reverse :meth:`to_dict`; raises PlanningError."""
        if not isinstance(values, Mapping) or values.get("format") != _FORMAT:
            raise PlanningError(
                "it was not written by `python -m lightning_hiercomm probe` of this version: run it again"
            )
        try:
            cluster = dict(values["cluster"])
            links = {name: _link(cluster.pop(name)) for name in ("intra", "inter", "world")}
            return cls(
                Cluster(**cluster, **links),  # type: ignore[arg-type]
                Workload(**values["workload"]),
                tuple(values.get("step_seconds", ())),
                values.get("about", {}),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanningError(f"{type(error).__name__}: {error}") from error

    def write(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a file; raises PlanningError."""
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except OSError as error:
            raise PlanningError(f"cannot read {path}: {error.strerror}") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise PlanningError(f"{path} is not JSON: {error}") from error
        except PlanningError as error:
            raise PlanningError(f"{path} is not a profile: {error}") from error


def _link(values: Mapping[str, Any] | None) -> Link | None:
    if values is None:
        return None
    curves = {
        kind: CostCurve(curve["members"], curve["sharing"], tuple(tuple(point) for point in curve["points"]))
        for kind, curve in values["curves"].items()
    }
    bandwidth = math.inf if values["bandwidth"] is None else values["bandwidth"]
    return Link(bandwidth, values["latency"], values["algorithm"], curves)


def _without_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinity(item) for name, item in value.items()}
    return None if value == math.inf else value
