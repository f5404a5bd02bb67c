"""The measured profile of a cluster, as a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_hiercomm.planning.cluster import Cluster, Contention, CostCurve, Link, Workload

_FORMAT = 2


class ProfileError(ValueError):
    """A file is not a usable profile."""


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

    def to_dict(self) -> dict[str, Any]:
        """Return JSON's primitives."""
        return {
            "format": _FORMAT,
            "about": dict(self.about),
            "cluster": _without_infinity(asdict(self.cluster)),
            "workload": asdict(self.workload),
            "step_seconds": list(self.step_seconds),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """Reverse :meth:`to_dict`; raises ProfileError."""
        if not isinstance(values, Mapping) or values.get("format") != _FORMAT:
            raise ProfileError("it was not written by `python -m lightning_hiercomm probe` of this version")
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
            raise ProfileError(f"{type(error).__name__}: {error}") from error

    def write(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a file; raises ProfileError."""
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except OSError as error:
            raise ProfileError(f"cannot read {path}: {error.strerror}") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ProfileError(f"{path} is not JSON: {error}") from error
        except ProfileError as error:
            raise ProfileError(f"{path} is not a profile: {error}") from error


def _link(values: Mapping[str, Any] | None) -> Link | None:
    if values is None:
        return None
    curves = {
        move: CostCurve(curve["members"], curve["sharing"], tuple(tuple(point) for point in curve["points"]))
        for move, curve in values["curves"].items()
    }
    limits = {name: math.inf if values[name] is None else values[name] for name in ("bandwidth", "stream_bandwidth")}
    return Link(**{**values, **limits, "curves": curves, "contention": Contention(**values["contention"])})


def _without_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinity(item) for name, item in value.items()}
    return None if value == math.inf else value
