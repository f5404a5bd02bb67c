"""Plots: one colour per method everywhere, lines that can be told apart, one scale of time."""

from __future__ import annotations

import json
from dataclasses import replace
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
    rows = [row for row in ROWS if "@" not in row and row not in ("loop", "probe", *BOUNDS)]
    for (one, first), (other, second) in combinations(styles_of(rows).items(), 2):
        assert first != second, (one, other)


def cell(row, mbit=500.0, spread_ms=2.0, nodes=2, step_ms=None):
    step = step_ms or 1e5 / mbit
    found = Cell(row, ROWS[row].title, "mlp11m", nodes, 2, mbit, 3, step_ms=step, spread_ms=spread_ms)
    return replace(found, bound_ms=step / 2, bytes_per_step=2.1e6 * nodes, bytes_needed=2e6 * nodes)


def test_plot_of_step_times_shows_spread_and_speed_up(figures):
    rows = ("ddp", "periodic", "node", "local")
    settings = [[cell(row, mbit) for row in rows] for mbit in (1000.0, 100.0)]
    settings = [[*cells, cell("hand", cells[0].mbit, step_ms=50.0)] for cells in settings]
    plots.step_time_against_bandwidth(settings, None)
    times, speedups = figures[0].axes
    assert figures[0].get_suptitle() == "A training step of a perceptron of 11 M parameters, 2 nodes of 2 ranks"
    bars = [container for container in times.containers if container.has_yerr]
    assert len(bars) == 3, "bounds have none"
    assert bars[0].lines[2][0].get_segments()[0][:, 1] == pytest.approx([999.0, 1001.0])  # half of 2 to either side
    assert [line.get_ydata().tolist() for line in speedups.lines] == [[1, 1], [1, 1], [20, 2]]
    assert [area.get_label() for area in times.collections[:2]] != [], "bounds are areas"
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert "hand-written local SGD(16) (the best of others)" in legend


def test_the_best_peers_are_those_that_are_fastest_over_all_rates(figures):
    def at(mbit, **steps):
        return [cell(row, mbit, step_ms=step) for row, step in steps.items()]

    slow = at(100.0, ddp=900.0, hand=100.0, accelerate=80.0, post_local_hook=200.0, torch_hierarchical=300.0)
    fast = at(1000.0, ddp=90.0, hand=10.0, accelerate=20.0, post_local_hook=20.0)
    plots.step_time_against_bandwidth([slow, fast], None)
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    best = [text for text in legend if "best of others" in text]
    assert best == [f"{ROWS[row].title} (the best of others)" for row in ("post_local_hook", "hand")]


def test_rows_of_a_setting_have_their_bounds_and_the_speed_up_above(figures):
    cells = [cell("ddp", step_ms=1000.0), cell("periodic", step_ms=200.0), cell("hand", step_ms=140.0), cell("local")]
    plots.rows_of_a_setting(cells, None)
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        ROWS[row].title for row in ("ddp", "periodic", "hand")
    ]
    assert [bar.get_width() for bar in axes.patches] == [1000, 500, 200, 100, 140, 70]
    (above,) = axes.child_axes
    assert above.get_xlabel() == "times as fast as DDP"


def test_bars_of_more_and_more_nodes_stand_beside_the_formula(figures):
    settings = [[cell(row, nodes=nodes) for row in ("local", "ddp", "gossip")] for nodes in (8, 2, 4)]
    plots.scaling(settings, None)
    times, sent = figures[0].axes
    assert [label.get_text() for label in times.get_yticklabels()] == [
        "Lightning DDPStrategy\nmodels sent: 2(n-1)/n",
        "Gossip, overlapped\nmodels sent: 1",
    ]
    assert [bar.get_width() for bar in sent.patches] == pytest.approx(2 * [4.2, 4.0, 8.4, 8.0, 16.8, 16.0])
    tops = [bar.get_y() for bar in sent.patches[::2]]
    assert tops == sorted(tops), "few nodes above many"


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
