"""Profiles are written and read without loss, and everything else is refused in one line."""

from __future__ import annotations

import json
import math

import pytest

from lightning_hiercomm.planning.cluster import Cluster, CostCurve, Link, PlanningError, Workload
from lightning_hiercomm.planning.measure.profile import Profile
from lightning_hiercomm.planning.predict.cost import predict
from lightning_hiercomm.schemes import DASO

CURVE = CostCurve(2, 2, ((8, 1e-3, 1e-4), (1e6, 2e-3, 3e-4)))


def a_profile(world: Link | None = None) -> Profile:
    intra = Link(math.inf, algorithm="ring")
    inter = Link(1e9, 1e-3, "ring", curves={"all_reduce": CURVE, "exchange": CURVE})
    cluster = Cluster(2, 2, intra, inter, world, processors=1.5, memory_bandwidth=8e9)
    return Profile(cluster, Workload(1e6, 0.1, 0.2, 0.01, threads=1.0), (0.3, 0.31), {"when": "today"})


@pytest.mark.parametrize("world", [None, Link(2e9, curves={"all_reduce": CURVE})])
def test_a_profile_survives_a_round_trip_through_json(tmp_path, world):
    profile = a_profile(world)
    profile.write(tmp_path / "profile.json")
    back = Profile.read(tmp_path / "profile.json")
    assert back == profile
    json.loads((tmp_path / "profile.json").read_text(), parse_constant=pytest.fail)  # no Infinity in the file
    assert predict(DASO(), back.cluster, back.workload) == predict(DASO(), profile.cluster, profile.workload)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("not json", "is not JSON"),
        ("[]", "was not written by"),
        ('{"format": 99}', "was not written by"),
        ('{"format": 3}', "KeyError"),
        ('{"format": 3, "cluster": {"nodes": 0}, "workload": {}}', "is not a profile"),
    ],
)
def test_other_files_are_refused_with_their_name(tmp_path, content, message):
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PlanningError, match=message) as error:
        Profile.read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_profile_with_impossible_numbers_is_refused():
    values = a_profile().to_dict()
    values["cluster"]["nodes"] = 0
    with pytest.raises(PlanningError, match="nodes=0"):
        Profile.from_dict(values)
