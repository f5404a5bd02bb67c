"""The front's time comes from the cost model and stored curves, and its accuracy from the ladder."""

from __future__ import annotations

import json

import pytest

from benchmarks.papers import front, tuned
from benchmarks.papers.many import Arena
from benchmarks.papers.paired import Difference
from benchmarks.papers.tuned import TUNING_SEEDS, Climb
from lightning_hiercomm.schemes import DASO, PeriodicAveraging

pytest.importorskip("mnist1d")

NAME = "8-sgd-short-cnn"
SHORT = front.SETTINGS[NAME]
WAYS = {way.name: way for way in front.WAYS}


def climb_of(*curve, seeds=SHORT.seeds, rung=-5):
    """A judged method whose every seed has the same curve."""
    curve = list(curve)
    judged = dict.fromkeys(seeds, curve[-1])
    tuning = {rung + offset: {100: 80.0 - abs(offset)} for offset in (-1, 0, 1)}
    return Climb(tuning, {rung: judged}, 60.0, {rung: dict.fromkeys(seeds, curve)})


def straight(end, reaches=1.0):
    """A curve that rises to its end, and is there after this share of the evaluations."""
    return [end * min(1.0, (look + 1) / (reaches * front.LOOKS)) for look in range(front.LOOKS)]


# ---- bytes and time --------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_formula():
    whole = 2 * 7 / 8 * 100e6
    assert front.bytes_per_step(WAYS["AllReduce"], SHORT.arena) == pytest.approx(whole)
    int8 = (256 + 2) / (256 * 4)  # a byte per element, and two for the scale of a block
    assert front.bytes_per_step(WAYS["AllReduce, int8"], SHORT.arena) == pytest.approx(whole * int8, rel=1e-3)
    # 15 means within an epoch of 62 steps, and one at its end
    assert front.bytes_per_step(WAYS["PeriodicAveraging(4)"], SHORT.arena) == pytest.approx(whole * 16 / 62)
    assert front.bytes_per_step(WAYS["PeriodicAveraging(64)"], SHORT.arena) == pytest.approx(whole / 62)
    assert front.bytes_per_step(WAYS["DiLoCo(64)"], SHORT.arena) == pytest.approx(whole / 64)


def test_a_first_phase_sends_gradients_and_then_parameters_with_state():
    phase, with_state = (
        WAYS[f"PeriodicAveraging(4, warmup_steps=0.25){state}, int4"] for state in ("", ", with optimizer state")
    )
    gradients = front.bytes_per_step(WAYS["AllReduce, int4"], SHORT.arena)
    # 744 steps in epochs of 62, nodes average 16 times in each; 186 steps send gradients
    exchanges = 9 * 16 / 744
    assert front.bytes_per_step(phase, SHORT.arena) == pytest.approx(gradients * (0.25 + exchanges), rel=1e-3)
    assert front.bytes_per_step(with_state, SHORT.arena) == pytest.approx(gradients * (0.25 + 2 * exchanges), rel=1e-3)
    adamw = front.SETTINGS["8-adamw-short-cnn"].arena
    assert front.bytes_per_step(with_state, adamw) == pytest.approx(gradients * (0.25 + 3 * exchanges), rel=1e-3)


def test_a_step_of_ddp_takes_as_long_as_its_bytes_on_a_slow_link():
    one, *others = front.seconds_by_step(None, SHORT.arena, 100e6)
    on_the_link = 2 * 7 / 8 * 100e6 * 8 / 100e6
    assert on_the_link < one < on_the_link + front.WORKLOAD.seconds
    assert others[-1] == pytest.approx(744 * one)


@pytest.mark.parametrize(
    ("model", "epochs", "phase"), [("cnn", 12, 3 * 62), ("cnn", 48, 4 * 62), ("characters", 1, 175)]
)
def test_daso_pays_for_its_phases(model, epochs, phase):
    arena = Arena("it", 8, 32 if model == "characters" else 8, epochs, "sgd", model)
    schemes = [WAYS["DASO(4, 1), delta"].scheme_at(arena, step) for step in range(arena.steps)]
    waits = [isinstance(scheme, PeriodicAveraging) for scheme in schemes]
    assert all(waits[:phase])
    assert all(waits[-phase:])
    assert isinstance(schemes[phase], DASO)
    between = range(phase, arena.steps - phase)
    assert sum(waits[phase:-phase]) == sum((step + 1) % arena.steps_per_epoch == 0 for step in between)


# ---- time to the target ----------------------------------------------------------------------------------------------


def test_the_time_to_the_target_is_relative_to_ddp():
    known = {
        "AllReduce": climb_of(*straight(90.0)),
        "AllReduce, int4": climb_of(*straight(90.0, reaches=0.5)),
        "PeriodicAveraging(4)": climb_of(*straight(88.0)),
    }
    reduced, int4, periodic = front.rows(SHORT, known)
    assert front.target_of(SHORT, known) == 89.0
    assert reduced.step == SHORT.arena.steps  # straight to 90 at the end: 89 is passed between the last two
    assert int4.step == SHORT.steps_of_looks[12]
    per_step = [front.seconds_by_step(way, SHORT.arena, 1e9)[0] for way in (WAYS["AllReduce, int4"], None)]
    expected = int4.step * per_step[0] / (reduced.step * per_step[1])
    assert int4.times["1 Gbit/s"] == pytest.approx(expected)
    assert (periodic.step, periodic.times) == (None, {})
    assert periodic.apart == Difference(-2.0, 0.0, 20)
    text = front.table(SHORT, known)
    assert text.splitlines()[-1].count("never") == 3
    assert text.startswith("**Not complete: 26 of 29 methods are missing.**")


def test_a_run_that_diverged_counts_as_none_right_on_the_way():
    found = climb_of(50.0, 80.0, seeds=(0, 1))
    found.curves[-5][1] = [None, None]
    assert front.median_curve(found) == [25.0, 40.0]


# ---- settings and files ----------------------------------------------------------------------------------------------


def test_settings_see_as_many_examples_per_step_on_any_number_of_nodes():
    for comparison in front.SETTINGS.values():
        arena = comparison.arena
        assert arena.nodes * arena.batch == (256 if arena.model == "characters" else 64)
        assert set(comparison.seeds).isdisjoint(TUNING_SEEDS)
    assert len(front.SETTINGS) == 36


def test_stored_results_of_the_front_belong_to_its_methods():
    for name, comparison in front.SETTINGS.items():
        path = front.STORED / f"{name}.json"
        stored = json.loads(path.read_text())["contenders"] if path.exists() else {}
        assert set(stored) == set(tuned.load(comparison, front.STORED)), name


@pytest.mark.nightly
def test_the_stored_page_equals_the_reports_output():
    assert (front.STORED / "README.md").read_text() == front.page(front.STORED)
