"""The command line of the benchmarks."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import __main__ as commands
from benchmarks.__main__ import make_parser
from benchmarks.contenders import IN_NODE
from benchmarks.job import Record

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command", ["speed", "latency", "one-node", "scaling", "accuracy", "timeline", "papers", "report"]
)
def test_results_are_written_to_an_ignored_folder_by_default(command):
    parser = make_parser()
    out = parser.parse_args([command]).out
    ignored = subprocess.run(["git", "check-ignore", "--quiet", "--no-index", out / "speed.json"], cwd=CHECKOUT)
    if ignored.returncode != 128:  # a source distribution is no checkout
        assert ignored.returncode == 0
    assert parser.parse_args([command, "--out", "benchmarks/results"]).out == Path("benchmarks/results")


def test_a_preset_has_rates_of_its_own_unless_some_are_named():
    parser = make_parser()
    assert parser.parse_args(["speed", "--preset", "all"]).mbit is None
    assert parser.parse_args(["latency"]).mbit == [0.0]
    assert parser.parse_args(["speed", "--preset", "2x2", "--since", "2026-11-22T19:00"]).since.tzinfo is not None


def test_an_interrupted_measurement_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    sessions = []

    def session(arguments, jobs, rates):
        sessions.append([job.row for job in jobs])
        ends = [0.1 * step for step in range(1, 200)]
        records = {
            job.id: [Record(job.id, rank, rank // 2, step_ends=ends[: job.total_steps - 1]) for rank in range(4)]
            for job in jobs
        }
        return [(rates[0], records, "a quiet network")]

    monkeypatch.setattr(commands, "_session", session)
    monkeypatch.setattr(commands, "why_no_namespaces", lambda: None)
    argv = ["speed", "--rows", "ddp", "periodic", "hand", "--workload", "mlp1m", "--repetitions", "2"]
    argv += ["--out", str(tmp_path), "--session-seconds", "1"]

    def run(*more):
        sessions.clear()
        arguments = make_parser().parse_args([*argv, *more])
        arguments.command(arguments)
        return [next(row for row in rows if row not in ("local", *IN_NODE)) for rows in sessions]

    assert run("--minutes", "0") == []
    assert "--resume goes on" in capsys.readouterr().out
    assert run() == ["link", "ddp", "periodic", "hand"]
    assert "4 of 4 sessions, about 0 minutes left" in capsys.readouterr().out
    stored = tmp_path / "mlp1m-2x2-500mbit.json"
    cells = json.loads(stored.read_text())
    assert len(cells["hand"]["step_ms_each"]) == 2
    assert run("--resume") == []
    del cells["periodic"]
    cells["ddp"]["when"] = "2020-01-01T00:00:00+00:00"
    stored.write_text(json.dumps(cells))
    assert run("--resume") == ["periodic"]
    assert run("--since", "2021-01-01") == ["ddp"]
    assert run("--resume", "--repetitions", "3") == ["link", "ddp", "periodic", "hand"]


def without_rates(monkeypatch):
    """Sessions of a machine without network namespaces: whatever rates are asked for, there is none."""

    def session(arguments, jobs, rates):
        evaluated = [{"step": 1.0, "seconds": 2.0, "bytes": 3.0, "accuracy": 0.5, "loss": 1.0}]
        return [(None, {job.id: [Record(job.id, 0, 0, evaluations=evaluated)] for job in jobs}, "loopback")]

    monkeypatch.setattr(commands, "_session", session)
    monkeypatch.setattr(commands, "why_no_namespaces", lambda: "not here")


def test_accuracy_over_a_network_without_rates_is_not_stored_as_of_one(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    without_rates(monkeypatch)
    arguments = make_parser().parse_args(["accuracy", "--rows", "ddp", "--mbit", "500", "--out", str(tmp_path)])
    arguments.command(arguments)
    assert [path.stem for path in tmp_path.glob("*.json")] == ["accuracy-digits-2x2-unlimited"]


def test_predictions_without_rates_are_stored_once(tmp_path, monkeypatch):
    without_rates(monkeypatch)
    stored = []
    fakes = {"save": lambda found, path: stored.extend(found), "load": lambda path: [], "compare": lambda found: []}
    fakes |= {"setting_of": lambda jobs, results, nodes, ranks, mbit, note: mbit, "table": lambda rows: ""}
    for name, fake in fakes.items():
        monkeypatch.setattr(commands.prediction, name, fake)
    argv = ["prediction", "--layouts", "2x2", "--mbit", "100", "500", "--rows", "ddp", "--out", str(tmp_path)]
    arguments = make_parser().parse_args(argv)
    arguments.command(arguments)
    assert stored == [0.0]


def test_accuracy_stores_every_seed_and_gives_rows_their_own_rates(tmp_path, monkeypatch, capsys):
    jobs_done = []

    def session(arguments, jobs, rates):
        jobs_done.extend(jobs)
        records = {}
        for job in jobs:
            record = Record(job.id, 0, 0)
            seconds = 4.0 if job.row == "ddp" else 1.0
            record.evaluations = [{"step": 8, "seconds": seconds, "bytes": 10, "accuracy": 0.9, "loss": 1.0}]
            records[job.id] = [record]
        return [(100.0, records, "a quiet network")]

    monkeypatch.setattr(commands, "_session", session)
    argv = ["accuracy", "--rows", "ddp", "all_reduce_int4", "--seeds", "2", "--out", str(tmp_path)]
    arguments = make_parser().parse_args([*argv, "--learning-rates", "all_reduce_int4=0.2"])
    arguments.command(arguments)
    assert {job.row: job.learning_rate for job in jobs_done} == {"ddp": None, "all_reduce_int4": 0.2}
    stored = json.loads((tmp_path / "accuracy-digits-2x2-100mbit.json").read_text())
    assert [len(curves) for curves in stored["runs"].values()] == [2, 2]
    assert "| 4.00, from 4.00 to 4.00 |" in capsys.readouterr().out
    unknown = make_parser().parse_args([*argv, "--learning-rates", "gossip=0.2"])
    with pytest.raises(SystemExit, match="names gossip, which --rows does not"):
        unknown.command(unknown)
