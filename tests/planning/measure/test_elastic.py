"""Findings of `doctor --elastic` about a lighthouse and an address."""

from __future__ import annotations

import socketserver
import threading

import pytest

from lightning_hiercomm.__main__ import main
from lightning_hiercomm.planning.measure.elastic import own

INTERFACES = {"lo": "127.0.0.1", "eth0": "10.0.0.2", "ib0": "192.168.7.2"}


@pytest.mark.parametrize(
    ("given", "towards", "level", "said"),
    [
        (None, "10.0.0.2", "note", "10.0.0.2 (eth0); there are also ib0 192.168.7.2: if one is faster, set"),
        ("192.168.7.2", "10.0.0.2", "ok", "connect to this one at 192.168.7.2 (ib0)"),
        ("10.9.9.9", "10.0.0.2", "FAIL", "is of no interface of this machine"),
        (None, "127.0.0.1", "FAIL", "which no other machine reaches: set HIERCOMM_ADDRESS"),
    ],
)
def test_the_address_for_other_nodes_is_checked(given, towards, level, said):
    finding = own(given, towards, "10.0.0.1:29510", INTERFACES)
    assert finding.level == level
    assert said in str(finding)
    assert own(None, "127.0.0.1", "127.0.0.1:29510", {"lo": "127.0.0.1"}).level == "note"


def test_a_missing_lighthouse_fails(capsys, monkeypatch):
    pytest.importorskip("torchft", reason="needs the extra `elastic`")
    monkeypatch.delenv("HIERCOMM_LIGHTHOUSE", raising=False)
    assert main(["doctor", "--elastic"]) == 1
    assert "HIERCOMM_LIGHTHOUSE" in capsys.readouterr().out
    assert main(["doctor", "--elastic", "127.0.0.1:9"]) == 1
    assert "no lighthouse answers at 127.0.0.1:9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "no lighthouse answers at {}"),
        (b"HTTP/1.0 200 OK\r\n\r\nhello", "the server at {} is not a lighthouse"),
    ],
)
def test_another_server_fails(capsys, answer, message):
    pytest.importorskip("torchft", reason="needs the extra `elastic`")

    class Other(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        assert main(["doctor", "--elastic", address]) == 1
        assert message.format(address) in capsys.readouterr().out
        server.shutdown()


def test_a_lighthouse_is_found(capsys):
    pytest.importorskip("torchft", reason="needs the extra `elastic`")
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, quorum_tick_ms=20, heartbeat_timeout_ms=600
    )
    address = f"127.0.0.1:{server.address().rpartition(':')[2]}"
    assert main(["doctor", "--elastic", address]) == 0
    assert f"the lighthouse at {address} answers" in capsys.readouterr().out
    server.shutdown()
