"""What a probe found out about a cluster, as a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_hiercomm.planning.cluster import Beside, Cluster, Curve, Link, Workload, sent_bytes

_FORMAT = 1


class ProfileError(ValueError):
    """A file is not a profile that can be used."""


@dataclass(frozen=True)
class Profile:
    """A cluster, and what was trained on it.

    Attributes:
        cluster: As measured.
        workload: Of the slowest rank.
        step_seconds: Of every rank, in rank order, when all of them trained at once without communication.
        about: What a reader needs to judge it: when, versions, device, host names.
    """

    cluster: Cluster
    workload: Workload
    step_seconds: tuple[float, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As primitives that JSON knows."""
        cluster = asdict(self.cluster)
        return {
            "format": _FORMAT,
            "about": dict(self.about),
            "cluster": _without_infinity(cluster),
            "workload": asdict(self.workload),
            "step_seconds": list(self.step_seconds),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """The reverse of :meth:`to_dict`.

        Raises:
            ProfileError: For anything else.
        """
        if not isinstance(values, Mapping) or values.get("format") != _FORMAT:
            raise ProfileError("it was not written by `python -m lightning_hiercomm probe` of this version")
        try:
            cluster = dict(values["cluster"])
            unbilled = _unbilled(cluster["inter"])
            links = {name: _link(cluster.pop(name), unbilled) for name in ("intra", "inter", "world")}
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
        """Read the file.

        Raises:
            ProfileError: If there is none, or it is not a profile.
        """
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except OSError as error:
            raise ProfileError(f"cannot read {path}: {error.strerror}") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ProfileError(f"{path} is not JSON: {error}") from error
        except ProfileError as error:
            raise ProfileError(f"{path} is not a profile: {error}") from error


def _unbilled(inter: Mapping[str, Any]) -> float:
    """Of a file that still says how many times its bill, as ``work``, a move of 1 MiB between nodes takes."""
    beside = inter.get("beside", {})
    if beside.get("work", 1.0) <= 1:
        return 0.0
    link = _link({**inter, "beside": {}})
    assert link is not None
    curve = link.curves["all_reduce"]
    sent = sent_bytes("all_reduce", curve.members, 2**20)
    billed = curve.processor_seconds(sent, 1)
    return float((beside["work"] - 1) * billed / (curve.seconds(sent, 1) + beside["later"]))


def _link(values: Mapping[str, Any] | None, unbilled: float = 0.0) -> Link | None:
    if values is None:
        return None
    curves = {
        move: Curve(curve["members"], curve["sharing"], tuple(tuple(point) for point in curve["points"]))
        for move, curve in values["curves"].items()
    }
    limits = {name: math.inf if values[name] is None else values[name] for name in ("bandwidth", "stream_bandwidth")}
    beside = dict(values.get("beside", {}))
    if beside.pop("work", 1.0) > 1:
        beside["unbilled"] = unbilled
    return Link(
        latency=values["latency"], algorithm=values["algorithm"], curves=curves, beside=Beside(**beside), **limits
    )


def _without_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinity(item) for name, item in value.items()}
    return None if value == math.inf else value
