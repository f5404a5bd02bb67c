"""The rule, the model of a step and the recommendation, on numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from lightning_hiercomm.__main__ import main
from lightning_hiercomm.planning import plan
from lightning_hiercomm.planning.plan import RULE, Accuracy, Choice, Cluster, nearest, recommended, report, rows_of

GIGABYTE = 0.25e9  # parameters
DDP, INT8, INT4, TOP4, PERIODIC2, PERIODIC4, DILOCO = RULE


def on(nodes: int = 2, rate: float = 1e9, step: float = 1.0, latency: float = 0.0, ranks: int = 1) -> Cluster:
    """Two nodes send each other a gigabyte: one second."""
    return Cluster(nodes, rate, latency, GIGABYTE, step, ranks)


@pytest.mark.parametrize(("nodes", "seconds"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_a_synchronization_sends_twice_the_model_without_an_nth(nodes, seconds):
    assert on(nodes).synchronization == pytest.approx(seconds)
    assert on(nodes, step=0.5).ratio == pytest.approx(2 * seconds)


@pytest.mark.parametrize(
    ("choice", "step", "seconds"),
    [
        (INT8, 1.0, 1.0),  # 0.25 s hide behind 0.67 s
        (INT4, 0.15, 0.15 + 1 / 8 - 0.1),
        (TOP4, 0.03, 0.03 + 1 / 16 - 0.02),
        (PERIODIC2, 0.01, 0.01 + 1 / 32),  # nothing hides
        (PERIODIC4, 0.01, 0.01 + 1 / 64),
        (DILOCO, 0.01, 0.01 + 1 / 800),
        (DDP, 0.3, 0.3 + 1 - 0.2),
        (DDP, 6.0, 6.0),
    ],
    ids=lambda value: value.arguments if isinstance(value, Choice) else str(value),
)
def test_steps_take_what_the_page_says(choice, step, seconds):
    # the scales of the codecs' blocks add at most 2 %
    assert on(step=step).seconds(choice) == pytest.approx(seconds, rel=0.02)


def test_latency_counts_once_per_message_of_a_ring():
    far = on(4, rate=math.inf, latency=0.01)
    assert far.seconds(PERIODIC2) == pytest.approx(1 + 6 * 0.01 / 2)
    assert far.seconds(INT8) == 1.0
    assert on(4, rate=math.inf, latency=0.2).seconds(INT8) == pytest.approx(1 + 6 * 0.2 - 2 / 3)


def test_bytes_per_step_are_those_that_a_node_sends():
    assert on(4).bytes_per_step(DDP) == pytest.approx(1.5e9)
    assert on(4, ranks=8).bytes_per_step(DDP) == pytest.approx(2 * 31 / 32 * 1e9)  # a ring over all ranks
    assert on(4, ranks=8).bytes_per_step(INT8) == pytest.approx(1.5e9 / 4, rel=0.01)
    assert on(4).bytes_per_step(PERIODIC4) == pytest.approx(1.5e9 / 64, rel=0.05)


def test_speed_counts_samples_of_all_nodes():
    assert on(4, step=10.0).speed(INT8) == 4.0
    assert on(2, rate=1e6).speed(DDP) == pytest.approx(2 / 1000, rel=0.01)


@pytest.mark.parametrize(
    ("unit", "low", "high", "verdict"),
    [
        ("points", -0.4, 0.4, "no loss seen"),
        ("points", -1.0, 0.1, "no loss seen"),
        ("points", -1.05, 1.97, "not clear"),
        ("points", -0.8, -0.1, "loss seen"),
        ("points", -3.0, -2.0, "loss seen"),
        ("points", 0.1, 2.0, "no loss seen"),
        ("nats", -0.01, 0.02, "no loss seen"),
        ("nats", -0.2, -0.1, "no loss seen"),
        ("nats", -0.01, 0.04, "not clear"),
        ("nats", 0.01, 0.02, "loss seen"),
    ],
)
def test_no_loss_is_not_said_of_an_interval_that_reaches_far(unit, low, high, verdict):
    assert Accuracy("it", 8, "adamw", 744, unit, 0.0, low, high).verdict == verdict


def test_a_difference_is_shown_in_its_unit():
    assert str(Accuracy("it", 8, "adamw", 744, "points", -0.31, -0.72, 0.04)) == "-0.3 ± 0.4 points: no loss seen"
    assert str(Accuracy("it", 8, "adamw", 400, "nats", 0.174, 0.162, 0.188)) == "+0.174 ± 0.013 nats: loss seen"


@pytest.mark.parametrize(
    ("most", "found"), [(2, [(2, "nats"), (8, "points"), (32, "points")]), (8, [(2, "nats"), (8, "nats"), (8, "nats")])]
)
def test_the_language_model_counts_before_the_small_one_unless_it_ran_on_too_few_nodes(most, found, monkeypatch):
    settings = [
        (nodes, unit) for nodes in (2, 8, 32) for unit in ("nats", "points") if unit == "points" or nodes <= most
    ]
    rows = [Accuracy("AllReduce, int8", nodes, "adamw", 1, unit, 0, 0, 0) for nodes, unit in settings]
    monkeypatch.setattr(plan, "stored", lambda: rows)
    nearest_rows = [nearest(INT8, nodes, "adamw") for nodes in (2, 3, 16)]
    assert [(row.nodes, row.unit) for row in nearest_rows if row] == found


def test_the_nearest_measurement_has_the_optimizer_and_then_enough_nodes():
    found = [nearest(PERIODIC2, nodes, "adamw") for nodes in (2, 3, 8, 9, 4096)]
    assert [row.nodes for row in found if row] == [2, 8, 8, 32, 32]
    sgd = nearest(INT8, 32, "sgd")
    assert sgd is not None
    assert (sgd.nodes, sgd.optimizer) == (8, "sgd")
    assert nearest(DDP, 8, "adamw") is None


def test_diloco_is_quoted_from_the_run_with_most_synchronizations():
    for optimizer in ("adamw", "sgd"):
        row = nearest(DILOCO, 32, optimizer)
        assert row is not None
        assert row.setting == "points, 8 nodes, AdamW, 2,976 steps"


def test_every_row_of_the_rule_was_measured():
    assert {choice.measured for choice in RULE[1:]} == {row.method for row in plan.stored()}


def at(nodes: int, ratio: float) -> Cluster:
    """Return a cluster with this T / c."""
    return on(nodes, step=on(nodes).synchronization / ratio)


def ratios() -> list[Cluster]:
    return [
        on(nodes, step=1 / ratio)
        for nodes in (2, 8, 32)
        for ratio in (0.05, 0.5, 2.1, 5, 7.9, 10, 16, 21, 22, 30, 33, 60, 65, 500, 5000)
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_no_other_row_without_a_loss_is_faster(optimizer):
    for cluster in ratios():
        rows = rows_of(cluster, optimizer)
        best = recommended(cluster, rows)
        assert all(row.seconds >= best.seconds for row in rows if row.loses_nothing)


def test_the_row_that_holds_is_recommended_unless_another_without_a_loss_is_hardly_slower():
    for cluster in ratios():
        rows = rows_of(cluster)
        holds = next(row for row in rows if cluster.ratio < row.choice.below and row.applies)
        best = recommended(cluster, rows)
        limit = holds.seconds * (1 if holds.loses_nothing else 1.2)
        assert best == holds or (best.seconds < limit and best.loses_nothing)


@pytest.mark.parametrize(
    ("nodes", "before", "choice", "ratios"),
    [(2, 6.0, PERIODIC4, (6.2, 8, 21, 31, 63)), (9, 11.9, TOP4, (12.1, 15, 21)), (32, 11.9, TOP4, (12.1, 21))],
)
def test_a_later_row_without_a_loss_is_taken_from_the_ratio_on_that_the_page_names(nodes, before, choice, ratios):
    found = [recommended(cluster, rows_of(cluster)).choice for cluster in (at(nodes, each) for each in ratios)]
    assert found == [choice] * len(ratios)
    assert recommended(at(nodes, before), rows_of(at(nodes, before))).choice is INT4


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_no_short_run_is_recommended_that_loses_more_than_a_point(optimizer):
    for cluster in ratios():
        best = recommended(cluster, rows_of(cluster, optimizer)[:-1])
        assert best.accuracy is None or best.accuracy.mean > -1
        assert best.accuracy is None or best.accuracy.unit == "points" or best.accuracy.mean < 0.2  # nats


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--params 25.6e6 --nodes 4 --link 10 --ranks-per-node 8 --step-time 0.12",
            'Recommended: HierarchicalStrategy(wire_dtype="int8")',
        ),
        (
            "--params 1.3e9 --nodes 16 --link 0.1 --step-time 0.8",
            'Recommended: HierarchicalStrategy(DiLoCo(100), wire_dtype="int4")\n'
            "That is for runs of 20,000 steps or more: 200 synchronizations. In a shorter run:\n"
            "one node alone. 16 nodes are 3.89 times slower, also with",
        ),
        ("--params 1e6 --nodes 2 --link 100 --step-time 1", 'Recommended: Trainer(strategy="ddp")'),
    ],
)
def test_the_command_prints_a_table_and_the_line_to_write(flags, line, capsys):
    assert main(["plan", *flags.split()]) == 0
    shown = capsys.readouterr().out
    assert line in shown
    assert sum(row.startswith(">") for row in shown.splitlines()) == 1
    assert "by a simple model, not measured" in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_one_node_alone_is_recommended_where_it_is_faster():
    shown = report(Cluster(2, 1.25e6, 50e-6, 1.3e9, 0.8))
    assert "Recommended: one node alone. 2 nodes are 3.8 times slower, also with HierarchicalStrategy(DiLoCo" in shown
    assert "%" not in shown.split("with 95 %")[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nodes", "1", "--link", "1"], "nodes=1: give at least 2"),
        (["--nodes", "2", "--link", "1", "--ranks-per-node", "0"], "ranks_per_node=0 must be positive"),
    ],
)
def test_impossible_flags_get_one_line(flags, message, capsys):
    assert main(["plan", "--params", "1e6", "--step-time", "1", *flags]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


@pytest.mark.parametrize("value", [None, "10Gbit/s", "0", "-1", "nan", "inf"])
@pytest.mark.parametrize("flag", ["--step-time", "--params", "--link", "--latency"])
def test_missing_and_invalid_flags_are_named(flag, value, capsys):
    flags = {"--step-time": "1", "--params": "1e6", "--link": "1", "--latency": "1e-3", flag: value}
    with pytest.raises(SystemExit):
        main(["plan", "--nodes", "2", *(each for pair in flags.items() for each in pair if each is not None)])
    assert flag in capsys.readouterr().err.splitlines()[-1]
