"""Predicted against measured: the table, and what is stored."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest

pytest.importorskip("benchmarks")

from benchmarks import prediction
from benchmarks.contenders import ROWS
from benchmarks.job import Job, Record
from lightning_hiercomm.planning.cluster import Cluster, Link, Workload
from lightning_hiercomm.planning.measure.profile import Profile

PROFILE = Profile(Cluster(2, 2, Link(math.inf), Link(1e8)), Workload(1e6, 0.1, 0.2)).to_dict()


def job(row: str) -> Job:
    return Job(f"{row}.0", row, "mlp1m", warmup=1, steps=2)


def record(row: str, rank: int, **fields) -> Record:
    return Record(f"{row}.0", rank, 0, step_ends=[1.0, 1.3, 1.6], window_processor_seconds=0.2, **fields)


def a_setting() -> prediction.Setting:
    jobs = [job("probe"), job("periodic"), job("gossip")]
    results = {
        "probe.0": [record("probe", 0, profile=PROFILE)],
        "periodic.0": [record("periodic", rank) for rank in range(4)],
        "gossip.0": [record("gossip", 0, error="it hung")],
    }
    return prediction.setting_of(jobs, results, 2, 2, 800.0, "quiet")


def test_a_session_gives_the_profile_and_what_was_measured():
    setting = a_setting()
    assert setting.profiles == [PROFILE]
    assert setting.seconds == {"periodic": [pytest.approx(0.3)]}
    assert setting.processor_seconds == {"periodic": [pytest.approx(0.1)]}


def test_a_session_without_a_probe_is_an_error():
    with pytest.raises(RuntimeError, match="probe failed"):
        prediction.setting_of([job("ddp")], {"ddp.0": [record("ddp", 0)]}, 2, 2, 800.0, "")


def test_rows_are_predicted_with_the_scheme_that_was_measured():
    (compared,) = prediction.compare(a_setting())
    # the model takes 40 ms on the link, once in 16 steps
    assert compared.predicted == pytest.approx(0.3 + 0.04 / 16)
    assert compared.ratio == pytest.approx(compared.predicted / 0.3)


def test_what_two_probes_predict_is_averaged():
    setting = a_setting()
    later = copy.deepcopy(PROFILE)
    later["workload"]["forward"] += 0.2
    (compared,) = prediction.compare(replace(setting, profiles=[PROFILE, later]))
    assert compared.predicted == pytest.approx(0.4 + 0.04 / 16)


def test_all_rows_that_are_measured_can_be_predicted():
    setting = prediction.Setting(
        "mlp1m", 2, 2, 800.0, "", [PROFILE], {row: [0.3] for row in prediction.PREDICTED_ROWS}, {}
    )
    assert len(list(prediction.compare(setting))) == len(
        [row for row in prediction.PREDICTED_ROWS if ROWS[row].module != "plain"]
    )


def test_the_table_counts_good_predictions():
    shown = prediction.table(prediction.compare(a_setting()))
    assert "| PeriodicAveraging(16) | mlp1m | 2x2 | 800 | 300.0 | 302.5 | 1.01 | training |" in shown
    assert "1 of 1 within 10 %" in shown


def test_what_is_stored_of_other_settings_stays(tmp_path):
    path = tmp_path / "prediction.json"
    first = a_setting()
    prediction.save([first], path)
    other = prediction.Setting("mlp1m", 4, 1, 800.0, "", [PROFILE], {"ddp": [1.0]}, {})
    prediction.save([other], path)
    assert prediction.load(path) == [first, other]
