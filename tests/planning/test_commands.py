"""``python -m lightning_hiercomm`` as people call it."""

from __future__ import annotations

import json
import math
import re
import sys

import pytest

from lightning_hiercomm import __main__ as program
from lightning_hiercomm.planning import commands
from lightning_hiercomm.planning.cluster import Cluster, Link, Workload
from lightning_hiercomm.planning.measure.profile import Profile

FLAGS = [
    *("--params", "1.3e9", "--step-time", "0.4", "--nodes", "64", "--ranks-per-node", "8"),
    *("--inter", "10gbit", "--intra", "300gbyte", "--latency", "50us"),
]


def run(*arguments: str) -> int:
    try:
        return program.main(["plan", *arguments])
    except SystemExit as exit:
        return int(exit.code or 0)


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    said = capsys.readouterr().out
    assert all(command in said for command in ("doctor", "probe", "plan"))


def test_a_plan_shows_a_table_and_a_configuration(capsys):
    assert run(*FLAGS) == 0
    shown = capsys.readouterr().out
    assert "DDPStrategy" in shown
    assert "Recommended: " in shown
    assert "class_path: lightning_hiercomm.HierarchicalStrategy" in shown
    assert len([line for line in shown.splitlines() if line.startswith(">")]) == 1


def test_all_settings_are_shown_on_demand(capsys):
    run(*FLAGS)
    short = capsys.readouterr().out
    run(*FLAGS, "--all")
    assert capsys.readouterr().out.count("DASO(") > short.count("DASO(")


def test_json_holds_every_number(capsys):
    assert run(*FLAGS, "--json", "--wires", "int8", "float32") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["nodes"] == 64
    assert values["recommended"] in values["rows"]
    assert {row["wire_dtype"] for row in values["rows"]} == {None, "int8"}
    row = values["rows"][0]
    assert row["scheme"] == "DDPStrategy"
    for name in ("seconds", "exposed_seconds", "inter_bytes", "memory_bytes", "speedup", "overhead", "limit"):
        assert name in row


def test_plan_with_mtbf_prints_goodput_and_cost(capsys):
    assert run(*FLAGS, "--mtbf", "3h", "--price", "2.1", "--egress", "0.05") == 0
    shown = capsys.readouterr().out
    header, _, *rows = shown.splitlines()
    assert header.split("apart")[1].split("  ")[-4:] == [
        "kept, elastic",
        "kept, restarts",
        "cost, elastic",
        "cost, restarts",
    ]
    assert [row.split()[-2] for row in rows if row[2:].startswith("AllReduce()")] == ["-"]
    assert "Of 64 nodes that each live 3 h, one dies every 2.81 min." in shown
    assert "Take elastic nodes with " in shown
    assert run(*FLAGS, "--mtbf", "3h") == 0
    assert "cost, " not in capsys.readouterr().out


def test_where_nodes_seldom_die_or_are_back_at_once_restarts_may_do(capsys):
    assert run(*FLAGS, "--inter", "100tbit", "--mtbf", "3000d", "--restart-time", "1s", "--checkpoint-time", "1ms") == 0
    assert "Take AllReduce() and restarts" in capsys.readouterr().out


@pytest.mark.parametrize("mtbf", ["2h", "20min"])
def test_of_two_ways_to_live_with_lost_nodes_each_has_its_own_price(mtbf, capsys):
    slow_to_notice = "--mtbf", mtbf, "--restart-time", "1s", "--checkpoint-time", "0.01s", "--dead-after", "60s"
    model = "--params", "100m", "--step-time", "1s", "--inter", "1gbit", "--nodes", "2", "--ranks-per-node", "8"
    assert run(*model, *slow_to_notice, "--price", "2", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    took, other = re.findall(r"and cost ([\d.]+) instead of ([\d.]+)\.", values["advice"])[0]
    assert float(took) <= float(other)  # one price per node and hour, and it is the faster way


def test_json_says_the_same_of_every_setting_and_the_advice(capsys):
    assert run(*FLAGS, "--mtbf", "3h", "--price", "2.1", "--restart-time", "2min", "--dead-after", "2", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["faults"]["mtbf"] == 10800
    assert (values["faults"]["restart"], values["faults"]["dead_after"], values["faults"]["price"]) == (120, 2, 2.1)
    assert values["advice"].startswith("Of 64 nodes")
    kept = {row["scheme"]: row["elastic_goodput"] for row in values["rows"] if not row["arguments"].get("staleness")}
    assert kept["AllReduce"] is None
    assert 0 < kept["PeriodicAveraging"] < 1
    assert all(0 < row["restarts_goodput"] < kept["PeriodicAveraging"] for row in values["rows"])
    assert {"elastic_cost", "restarts_cost", "checkpoint_every"} <= values["rows"][0].keys()
    assert values["recommended"] in values["rows"]


def test_the_recommended_configuration_is_one_that_lightning_cli_reads(capsys, tmp_path):
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningArgumentParser
    from lightning.pytorch.strategies import Strategy

    for extra in ([], ["--inter", "1tbit"], ["--optimizer", "momentum", "--inter", "40gbit"], ["--wires", "bfloat16"]):
        run(*FLAGS, *extra)
        lines = capsys.readouterr().out.splitlines()
        path = tmp_path / "plan.yaml"
        path.write_text("\n".join(lines[lines.index("trainer:") :]))
        parser = LightningArgumentParser()
        parser.add_subclass_arguments(Strategy, "trainer.strategy")
        parser.add_argument("--trainer.num_nodes", type=int)
        parser.add_argument("--trainer.devices", type=int)
        made = parser.instantiate_classes(parser.parse_path(path))
        recommended = next(line for line in lines if line.startswith("Recommended: "))
        assert type(made.trainer.strategy.scheme).__name__ in recommended
        assert (made.trainer.num_nodes, made.trainer.devices) == (64, 8)


@pytest.mark.long("predicts all candidates, and draws them")
@pytest.mark.parametrize("more", [[], pytest.param(["--optimizer", "momentum"], marks=pytest.mark.nightly)])
def test_a_plan_is_drawn_with_labels_and_a_legend_beside_it(tmp_path, capsys, check_pictures, more):
    path = tmp_path / "plan.png"
    assert run(*FLAGS, *more, "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    check_pictures()


def test_without_matplotlib_a_plot_is_refused_before_anything_is_computed(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refuses_before_it_computes(monkeypatch, ["plan", *FLAGS, "--plot", str(tmp_path / "plan.png")])
    assert "pip install matplotlib" in capsys.readouterr().err


def refuses_before_it_computes(monkeypatch, command: list[str]) -> None:
    monkeypatch.delattr(commands, "make_plan")
    assert program.main(command) == 2


@pytest.mark.parametrize("name", ["plan.docx", "plan"])
def test_a_plot_in_an_unknown_format_is_refused(tmp_path, capsys, monkeypatch, name):
    """After all was computed; and what has no format was drawn into another file, `plan.png`."""
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    refuses_before_it_computes(monkeypatch, ["plan", *FLAGS, "--plot", str(path)])
    assert f"--plot {path} must end with one of ." in capsys.readouterr().err


def test_nodes_of_no_ranks_are_refused_in_one_line(capsys):
    assert program.main(["doctor", "--ranks-per-node", "0"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("python -m lightning_hiercomm doctor: ranks_per_node=0 does not divide the world")
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


@pytest.mark.usefixtures("own_task")
def test_an_impossible_scheme_is_refused_before_others_train(capsys, monkeypatch):
    monkeypatch.delattr(commands, "run_one")
    clock = ["--inter", "1gbit", "--step-time", "1ms"]
    task = ["--task", "own_task:task"]
    assert program.main(["simulate", *task, *clock, "--scheme", "steps_delay", "--wire", "int8"]) == 2
    assert "StepsDelay sends gradients and weights as they are or cast" in capsys.readouterr().err


def test_arguments_of_no_module_are_refused(capsys):
    """The stand-in was measured in its place."""
    assert program.main(["probe", "--module-args", '{"width": 512}']) == 2
    assert "--module-args needs --module" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dead-after", "-1"], "dead_after=-1.0 must be a number of seconds from 0.5 to 86400"),
        (["--dead-after", "1e30"], "dead_after=1e+30 must be"),  # milliseconds that torchft can count
        (["--dead-after", "nan"], "dead_after=nan must be"),
        (["--min-nodes", "0"], "min_nodes=0 must be a positive number of nodes, up to 1000000"),
        (["--min-nodes", "100000000000000000000"], "min_nodes=100000000000000000000 must be"),  # the same of nodes
        (["--bind", "here"], "--bind"),
        (["--bind", "192.0.2.1:29510"], "cannot listen at --bind='192.0.2.1:29510' ("),  # of no machine
    ],
)
def test_a_lighthouse_that_no_node_could_use_is_refused_in_one_line(arguments, message, capsys):
    assert program.main(["lighthouse", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --nodes, --params, --step-time, --inter, or --profile"),
        ([*FLAGS, "--nodes", "0"], "nodes=0 must be at least 1"),
        ([*FLAGS, "--nodes", "1"], "nothing to plan"),
        ([*FLAGS, "--nodes", "5000"], "up to 4096"),
        ([*FLAGS, "--nodes", "many"], "invalid int value: 'many'"),
        ([*FLAGS, "--ranks-per-node", "0"], "ranks_per_node=0"),
        ([*FLAGS, "--inter", "10"], "--inter: '10' has no unit"),
        ([*FLAGS, "--step-time", "0"], "--step-time: '0' must be positive"),
        ([*FLAGS, "--params", "lots"], "--params: 'lots' is not a number"),
        ([*FLAGS, "--memory", "1gbyte"], "a rank needs at least"),
        ([*FLAGS, "--target", "-1"], "--target -1.0 must be a share of the step: 0 or more"),
        ([*FLAGS, "--target", "nan"], "--target nan must be a share of the step: 0 or more"),
        ([*FLAGS, "--wires", "int2"], "invalid choice: 'int2'"),
        ([*FLAGS, "--fast"], "unrecognized arguments: --fast"),
        (["--profile", "nowhere.json"], "cannot read nowhere.json"),
        ([*FLAGS, "--plot", "/nowhere/plan.png"], "/nowhere/plan.png"),
        ([*FLAGS, "--price", "2.1"], "--price needs --mtbf"),
        ([*FLAGS, "--restart-time", "10min"], "--restart-time needs --mtbf"),
        ([*FLAGS, "--mtbf", "often"], "--mtbf: 'often' is not a duration"),
        ([*FLAGS, "--mtbf", "3h", "--price", "-1"], "--price -1.0 must be a price"),
        ([*FLAGS, "--mtbf", "3h", "--dead-after", "0"], "--dead-after: '0' must be positive"),
    ],
)
def test_wrong_flags_and_impossible_clusters_are_one_line(arguments, message, capsys):
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    cluster = Cluster(2, 4, Link(1e10), Link(1e9, 1e-4))
    Profile(cluster, Workload(1e8, 0.1, 0.2, dtype="float32")).write(path)
    return str(path)


def plan_of(capsys, *arguments: str):
    assert run(*arguments, "--json") == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_profile_is_all_a_plan_needs_and_flags_take_precedence(profile, capsys):
    measured = plan_of(capsys, "--profile", profile)
    assert (measured["nodes"], measured["ranks_per_node"]) == (2, 4)
    larger = plan_of(
        capsys, "--profile", profile, "--nodes", "64", "--params", "1e9", "--step-time", "3", "--dtype", "bfloat16"
    )
    assert (larger["nodes"], larger["workload"]["parameters"], larger["workload"]["dtype"]) == (64, 1e9, "bfloat16")
    assert larger["workload"]["forward"] == pytest.approx(1.0)
    faster = plan_of(capsys, "--profile", profile, "--inter", "100gbyte", "--optimizer", "sgd")
    assert faster["rows"][0]["seconds"] < measured["rows"][0]["seconds"]
    assert faster["workload"]["state_per_parameter"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--latency", "1ms"], "--latency: part of the profile"),
        (["--ranks-per-node", "8"], "the profile has nodes of 4 ranks"),
    ],
)
def test_flags_that_contradict_a_profile_are_refused(profile, arguments, message, capsys):
    assert run("--profile", profile, *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("own_task")
def test_a_profile_of_one_node_needs_to_be_told_of_a_network(tmp_path, capsys):
    path = str(tmp_path / "one.json")
    Profile(Cluster(1, 4, Link(1e10), Link(float("inf"))), Workload(1e8, 0.1, 0.2)).write(tmp_path / "one.json")
    assert run("--profile", path, "--nodes", "8") == 2
    assert "give --inter, too" in capsys.readouterr().err
    assert plan_of(capsys, "--profile", path, "--nodes", "8", "--inter", "10gbit")["nodes"] == 8
    simulated = ["simulate", "--task", "own_task:task", "--scheme", "periodic", "--epochs", "0.01", "--profile", path]
    assert program.main(simulated) == 2  # of four nodes
    assert "give --inter, too" in capsys.readouterr().err
    link = ["--inter", "100mbit", "--params", "1e6", "--step-time", "1ms"]
    assert program.main([*simulated, *link, "--scheme-args", '{"sync_every": 1}', "--json"]) == 0
    *_, own = json.loads(capsys.readouterr().out)
    least = own["steps"] * own["inter_bytes_per_step"] / 12.5e6
    assert least <= own["points"][-1]["seconds"] < math.inf
