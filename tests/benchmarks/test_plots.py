"""Plots: one colour per method everywhere, lines that can be told apart, one scale of time."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from benchmarks import plots
from benchmarks.__main__ import make_parser
from benchmarks.contenders import BOUNDS, ROWS
from benchmarks.measure import Cell
from benchmarks.palette import COLOURS, colour_of, method_of, styles_of
from lightning_hiercomm.schemes import SCHEMES


@pytest.fixture
def figures(monkeypatch):
    """What would be saved."""
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure))
    return drawn


def test_every_scheme_has_a_colour_of_its_own():
    assert set(SCHEMES) <= COLOURS.keys()
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_variants_of_a_method_have_its_colour():
    assert colour_of("daso_stale_bf16") == colour_of("daso@8") == COLOURS["daso"]
    assert method_of("torch_hierarchical") == "torch_hierarchical"
    others = {"loop", "probe", *BOUNDS, *(f"{bound}@8" for bound in BOUNDS)}
    assert not [row for row in ROWS if row not in others and method_of(row) is None], "a peer without a colour"


def test_no_two_lines_of_one_plot_look_alike():
    rows = [row for row in ROWS if "@" not in row and row not in ("loop", "link", "probe")]
    for (one, first), (other, second) in combinations(styles_of(rows).items(), 2):
        assert first != second, (one, other)


def test_step_times_show_their_spread_and_speak_in_words(figures):
    def cell(row, mbit, spread_ms):
        return Cell(row, ROWS[row].title, "mlp11m", 2, 2, mbit, 3, step_ms=100.0 / mbit, spread_ms=spread_ms)

    settings = [[cell(row, mbit, 2.0) for row in ("ddp", "periodic", "node")] for mbit in (100.0, 1000.0)]
    plots.step_time_against_bandwidth(settings, None)
    (axes,) = figures[0].axes
    assert axes.get_title() == "Time of a training step: a perceptron of 11 M parameters, 2 nodes of 2 ranks"
    bars = [container for container in axes.containers if container.has_yerr]
    assert len(bars) == 2, "bounds have none"
    assert bars[0].lines[2][0].get_segments()[0][:, 1] == pytest.approx([0.0, 2.0])  # 1 ms, half of 2 to either side


def test_all_rows_of_a_timeline_have_one_scale(figures):
    def rank(seconds_per_step):
        ends = [seconds_per_step * (step + 1) for step in range(4)]
        compute = [[end - seconds_per_step / 2, end] for end in ends]
        traffic = [[0.1 * step, 1e6 * step] for step in range(20)]
        return {"rank": 0, "node": 0, "step_ends": ends, "compute": compute, "traffic": traffic}

    plots.timeline({"ddp": [rank(0.5)], "periodic": [rank(0.1)]}, 3, 500.0, None)
    assert [axes.get_xlim() for axes in figures[0].axes] == [(0, pytest.approx(1.5))] * 2
    assert figures[0].axes[1].get_title(loc="left") == "PeriodicAveraging(16): 100 ms per step"


@pytest.mark.parametrize("value", ["loss", "accuracy"])
def test_the_report_draws_stored_curves_of_this_version_and_earlier_ones(tmp_path, value):
    points = [{"step": step, "seconds": 0.1 * step, "bytes": 1e6 * step, value: 1 / step} for step in (1, 2)]
    stored = {"target": 0.5, "curves": {"ddp": points, "daso": points}}
    (tmp_path / "accuracy-digits-2x2-500mbit.json").write_text(json.dumps(stored))
    arguments = make_parser().parse_args(["report", "--out", str(tmp_path)])
    arguments.command(arguments)
    assert (tmp_path / "accuracy-digits-2x2-500mbit.png").stat().st_size > 10_000
