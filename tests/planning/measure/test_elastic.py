"""What `doctor --elastic` says of a lighthouse, an address and times."""

from __future__ import annotations

import http.server
import socketserver
import threading

import pytest

from lightning_hiercomm.__main__ import main
from lightning_hiercomm.planning.measure.elastic import own, reached, silence

INTERFACES = {"lo": "127.0.0.1", "eth0": "10.0.0.2", "ib0": "192.168.7.2"}


def test_a_lighthouse_that_is_too_far_for_dead_after_fails():
    assert reached("a:1", 0.01, 5.0).level == "ok"
    far = reached("a:1", 0.2, 1.0)
    assert far.level == "FAIL"
    assert "beats of a node come every 0.12 s" in str(far)


@pytest.mark.parametrize(
    ("given", "towards", "level", "said"),
    [
        (None, "10.0.0.2", "note", "10.0.0.2 (eth0); there are also ib0 192.168.7.2: if one of those is faster, set"),
        ("192.168.7.2", "10.0.0.2", "ok", "parameters travel, at 192.168.7.2 (ib0)"),
        ("10.9.9.9", "10.0.0.2", "FAIL", "is of no interface of this machine"),
        (None, "127.0.0.1", "FAIL", "no other machine reaches it: set HIERCOMM_ADDRESS"),
    ],
)
def test_the_address_at_which_nodes_are_healed_is_the_one_that_is_meant(given, towards, level, said):
    finding = own(given, towards, "10.0.0.1:29510", INTERFACES)
    assert finding.level == level
    assert said in str(finding)


def test_on_one_machine_the_loopback_will_do():
    assert own(None, "127.0.0.1", "127.0.0.1:29510", {"lo": "127.0.0.1"}).level == "note"


def test_a_lighthouse_with_another_idea_of_silence_fails():
    assert silence(2.0, 2.3).level == "ok"
    assert "start it with --dead-after 2" in str(silence(2.0, 5.1))
    assert silence(2.0, None).level == "note"


def test_without_a_lighthouse_the_doctor_says_how_to_start_one(capsys, monkeypatch):
    pytest.importorskip("torchft", reason="needs the extra `elastic`")
    monkeypatch.delenv("HIERCOMM_LIGHTHOUSE", raising=False)
    assert main(["doctor", "--elastic"]) == 1
    assert "HIERCOMM_LIGHTHOUSE" in capsys.readouterr().out
    assert main(["doctor", "--elastic", "127.0.0.1:9"]) == 1
    assert "no lighthouse answers at 127.0.0.1:9" in capsys.readouterr().out


def test_something_else_that_answers_is_no_lighthouse(capsys):
    pytest.importorskip("torchft", reason="needs the extra `elastic`")

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert main(["doctor", "--elastic", f"127.0.0.1:{server.server_port}"]) == 1
    assert "is no lighthouse" in capsys.readouterr().out
    server.shutdown()


def test_an_address_without_a_web_page_is_no_lighthouse(capsys):
    """A secure shell, at a port that was mistaken, ended the doctor with a traceback."""
    pytest.importorskip("torchft", reason="needs the extra `elastic`")

    class Shell(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.sendall(b"SSH-2.0-OpenSSH\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Shell) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        assert main(["doctor", "--elastic", address]) == 1
        assert f"no lighthouse answers at {address}" in capsys.readouterr().out
        server.shutdown()


@pytest.mark.parametrize("dead_after", ["0", "-1", "nan"])
def test_a_dead_after_that_no_run_can_have_is_not_looked_for(capsys, dead_after):
    """To 0, 5 s were told; to a negative one, that the lighthouse is too far away."""
    pytest.importorskip("torchft", reason="needs the extra `elastic`")
    assert main(["doctor", "--elastic", "127.0.0.1:9", "--dead-after", dead_after]) == 1
    said = capsys.readouterr().out
    assert f"dead_after={float(dead_after)} must be" in said
    assert "127.0.0.1:9" not in said


def test_a_lighthouse_that_is_there_is_found_with_its_silence(capsys):
    pytest.importorskip("torchft", reason="needs the extra `elastic`")
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, quorum_tick_ms=20, heartbeat_timeout_ms=600
    )
    address = f"127.0.0.1:{server.address().rpartition(':')[2]}"
    assert main(["doctor", "--elastic", address, "--dead-after", "0.6"]) == 0
    said = capsys.readouterr().out
    assert f"the lighthouse at {address} answers" in said
    assert "as dead_after=0.6 says" in said
    assert main(["doctor", "--elastic", address, "--dead-after", "5"]) == 1
    assert "start it with --dead-after 5" in capsys.readouterr().out
    server.shutdown()
