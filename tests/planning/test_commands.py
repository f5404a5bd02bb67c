"""``python -m lightning_hiercomm`` as people call it."""

from __future__ import annotations

import json
import math

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


def test_lightning_cli_reads_the_recommended_configuration(capsys, tmp_path):
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


def test_module_args_need_a_module(capsys):
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
def test_invalid_lighthouse_arguments_are_refused(arguments, message, capsys):
    assert program.main(["lighthouse", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --nodes, --params, --step-time, --inter, or --profile"),
        ([*FLAGS, "--nodes", "0"], "nodes=0 must be at least 1"),
        ([*FLAGS, "--nodes", "1"], "give at least 2"),
        ([*FLAGS, "--nodes", "5000"], "must be at most 4096"),
        ([*FLAGS, "--nodes", "many"], "invalid int value: 'many'"),
        ([*FLAGS, "--ranks-per-node", "0"], "ranks_per_node=0"),
        ([*FLAGS, "--inter", "10"], "--inter: '10' is not a bandwidth such as 10gbit"),
        ([*FLAGS, "--step-time", "0"], "--step-time: '0' must be positive"),
        ([*FLAGS, "--params", "lots"], "--params: 'lots' is not a number"),
        ([*FLAGS, "--memory", "1gbyte"], "a rank needs at least"),
        ([*FLAGS, "--target", "-1"], "--target -1.0 must be a share of the step: 0 or more"),
        ([*FLAGS, "--target", "nan"], "--target nan must be a share of the step: 0 or more"),
        ([*FLAGS, "--wires", "int2"], "invalid choice: 'int2'"),
        ([*FLAGS, "--fast"], "unrecognized arguments: --fast"),
        (["--profile", "nowhere.json"], "cannot read nowhere.json"),
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


def test_flags_override_a_profile(profile, capsys):
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
def test_a_profile_of_one_node_needs_inter(tmp_path, capsys):
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
