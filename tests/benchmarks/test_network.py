"""What the harness does without root, and how it ends what it starts."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
from forked import stand_in_for_python
from packaging.version import Version

from benchmarks import launch, network
from benchmarks.job import Job


def test_without_root_it_warns_and_uses_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with network.open_network(2) as fallback:
        assert isinstance(fallback, network.LoopbackNetwork)
        assert "need root" in fallback.note
        assert not fallback.limits_rates
        assert [node.interface for node in fallback.nodes] == ["lo", "lo"]


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


@pytest.mark.long("two launches, one of them fails")
@pytest.mark.slow
@pytest.mark.skipif(Version(torch.__version__) < Version("2.8"), reason="this gloo has no mean, which the row needs")
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
