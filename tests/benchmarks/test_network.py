"""What the harness does without root, and how it ends what it starts."""

import os
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("benchmarks")

from forked import stand_in_for_python

from benchmarks import launch, network
from benchmarks.job import Job


def test_without_root_it_warns_and_uses_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with network.open_network(2) as fallback:
        assert isinstance(fallback, network.LoopbackNetwork)
        assert "need root" in fallback.note
        assert not fallback.limits_rates
        assert [node.interface for node in fallback.nodes] == ["lo", "lo"]


def test_missing_iproute2_is_reported_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert "apt-get install iproute2" in str(network.why_no_namespaces())


def test_loopback_traffic_is_counted() -> None:
    assert network.transmitted_bytes("lo") >= 0
    with pytest.raises(LookupError, match="nowhere0"):
        network.transmitted_bytes("nowhere0")


def test_token_bucket_is_small_against_a_second_of_traffic() -> None:
    assert network.burst_bytes(100) == 131_072
    assert network.burst_bytes(10_000) == 1_250_000


def test_ranks_are_one_group_to_the_scheduler_while_they_are_measured(tmp_path, monkeypatch) -> None:
    setting = tmp_path / "autogroup"
    setting.write_text("1\n")
    monkeypatch.setattr(network, "AUTOGROUP", setting)
    with network.one_scheduling_group():
        assert setting.read_text() == "0"
    assert setting.read_text() == "1\n"
    monkeypatch.setattr(network, "AUTOGROUP", tmp_path / "missing")
    with network.one_scheduling_group():
        pass


@pytest.mark.slow
@pytest.mark.skipif(network.why_no_namespaces() is not None, reason="network namespaces do not work here")
def test_eight_nodes_have_a_link_each_and_reach_each_other() -> None:
    with network.NamespaceNetwork(8) as eight:
        eight.set_rate(500)
        for node in eight.nodes:
            for namespace, interface in eight.ends(node):
                assert "rate 500Mbit" in network.command("tc", "-n", namespace, "qdisc", "show", "dev", interface)
        first, last = eight.nodes[0], eight.nodes[-1]
        listening = "import socket; s = socket.create_server(('', 5000)); s.accept()[0].sendall(b'here')"
        asking = (
            f"import socket, time; time.sleep(1); print(socket.create_connection(('{first.hostname}', 5000)).recv(4))"
        )
        with open(os.devnull, "wb") as nowhere:
            eight.start(first, [sys.executable, "-c", listening], {}, nowhere)
            asked = ["ip", "netns", "exec", str(last.namespace), sys.executable, "-c", asking]
            assert network.command(*asked).strip() == "b'here'"
    assert first.namespace not in network.command("ip", "netns", "list")


def test_leaving_ends_started_exchanges(tmp_path: Path) -> None:
    with network.LoopbackNetwork(1) as loopback, open(tmp_path / "log", "wb") as log:
        sleeper = loopback.start(loopback.nodes[0], [sys.executable, "-c", "import time; time.sleep(60)"], {}, log)
        assert sleeper.poll() is None
    assert sleeper.poll() is not None


def test_a_peer_package_that_does_not_install_is_reported_in_its_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(venv: str) -> str:
        raise launch.PeerMissing("no such version")

    monkeypatch.setattr(launch, "interpreter", fail)
    job = Job("accelerate.0", "accelerate", "mlp85k", 1, 1)
    results = launch.run(network.LoopbackNetwork(1), 1, [job], tmp_path)
    assert results["accelerate.0"][0].error == "does not install: no such version"


@pytest.mark.long("two launches, of which one fails")
@pytest.mark.slow
def test_a_failing_row_does_not_take_the_next_one_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "interpreter", lambda venv: stand_in_for_python())
    monkeypatch.setenv("PYTHON_EXEC", stand_in_for_python())  # what torchrun starts
    broken = Job("broken.0", "no such row", "mlp85k", 1, 2)
    works = Job("hand.0", "hand1", "mlp85k", 1, 2)
    launch.ROWS[broken.row] = launch.ROWS["hand1"]  # known here, unknown to the worker
    began = time.monotonic()
    try:
        with network.LoopbackNetwork(2) as loopback:
            results = launch.run(loopback, 1, [broken, works], tmp_path)
    finally:
        del launch.ROWS[broken.row]
    assert "KeyError" in str(results["broken.0"][0].error)
    assert [record.error for record in results["hand.0"]] == [None, None]
    assert all(record.disagreement < 1e-6 for record in results["hand.0"] if record.disagreement is not None)
    assert time.monotonic() - began < 120
