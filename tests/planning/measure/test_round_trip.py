"""The round trip between nodes."""

from __future__ import annotations

import socket
import time

from lightning_hiercomm.planning.measure import round_trip
from lightning_hiercomm.planning.measure.round_trip import between_nodes, connect_seconds, window


def test_the_fastest_of_several_connections_counts(monkeypatch):
    clock = iter([0.0, 5.0, 10.0, 11.0, 20.0, 25.0, 30.0, 35.0, 40.0, 45.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert connect_seconds("127.0.0.1", server.getsockname()[1]) == 1.0
    assert next(clock, None) is None


def test_only_first_ranks_of_other_nodes_count():
    assert between_nodes([[0, 3], [1, 2], [4]], [0.0, 0.1, 0.2, 0.3, None]) == [0.1]


def test_the_window_is_the_smaller_limit_of_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(round_trip, "_SYSCTL", tmp_path)
    assert window() is None
    (tmp_path / "tcp_wmem").write_text("4096\t16384\t4194304\n")
    (tmp_path / "tcp_rmem").write_text("4096\t131072\t6291456\n")
    assert window() == 4194304
