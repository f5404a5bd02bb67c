"""Measure the control plane's hub with thousands of ranks that one process simulates: joins, heartbeats, a failure."""

from __future__ import annotations

import os
import resource
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_hiercomm.control import hub
from lightning_hiercomm.control.plane import ControlPlane

HANG_TIMEOUT = 300.0
"""The strategy's default, in seconds."""


@dataclass
class Crowd:
    """The cost of a hub.

    Attributes:
        ranks: Number of ranks that joined at once.
        joined_seconds: Time until all of them were members.
        failure_seconds: Time from one rank's report of a failure until the last rank received it.
        share_of_core: Share of a processor during heartbeats only.
        megabytes: Peak memory.
        watched_seconds: Duration of the heartbeats.
    """

    ranks: int
    joined_seconds: float
    failure_seconds: float
    share_of_core: float
    megabytes: float
    watched_seconds: float


def measure(ranks: int, seconds: float = 20.0) -> Crowd:
    """Simulate the ranks of a hub, which is a real process, with some seconds of heartbeats."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    plane = ControlPlane(0, ranks, "rank 0 (node 0)", hang_timeout=HANG_TIMEOUT)
    invitation = plane.link.invite("127.0.0.1")
    assert plane.link.process is not None
    began = time.perf_counter()
    crowd = _Ranks(ranks, invitation.port, invitation.token)
    try:
        crowd.until(lambda: crowd.received["welcome"] == ranks)
        joined = time.perf_counter() - began
        used, began = _processor_seconds(plane.link.process.pid), time.perf_counter()
        crowd.beat(seconds)
        watched = time.perf_counter() - began
        used = _processor_seconds(plane.link.process.pid) - used
        began = time.perf_counter()
        crowd.channels[-1].send({"kind": "failed", "message": "the last rank failed"})
        crowd.until(lambda: crowd.received["failed"] == ranks)
        reported = time.perf_counter() - began
        megabytes = _megabytes(plane.link.process.pid)
    finally:
        crowd.close()
        plane.close()
    return Crowd(ranks, joined, reported, used / watched, megabytes, watched)


class _Ranks:
    def __init__(self, ranks: int, port: int, token: str) -> None:
        self.received = {"welcome": 0, "failed": 0}
        self.channels: list[hub.Channel] = []
        self._token = token
        self._number: dict[hub.Channel, int] = {}
        self._selector = selectors.DefaultSelector()
        for rank in range(ranks):
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
            channel = hub.Channel(connection)
            self.channels.append(channel)
            self._number[channel] = rank
            self._selector.register(channel, selectors.EVENT_READ)
            if rank % 64 == 0:  # answer the ranks whose challenge arrived
                self._listen(0.0)

    def until(self, is_done: Callable[[], bool], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not is_done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done after {seconds:g} s: {self.received}")
            self._listen(0.1)

    def beat(self, seconds: float) -> None:
        """Send heartbeats of all ranks in turn, each as often as a real rank does."""
        pause = hub.seconds_between_beats(len(self.channels), HANG_TIMEOUT) / len(self.channels)
        began, sent = time.monotonic(), 0
        while time.monotonic() < began + seconds:
            while sent * pause < time.monotonic() - began:
                beat = {"doing": "training batch 7 of epoch 0, after 7 steps", "progress": sent, "stuck": ["", 0.0]}
                count = {"batches": 7, "wait": None, "line": ""}
                self.channels[sent % len(self.channels)].send({"kind": "beat", **beat, **count})
                sent += 1
            self._listen(0.01)

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            channel = key.fileobj
            assert isinstance(channel, hub.Channel)
            rank = self._number[channel]
            for message in channel.receive():
                if message["kind"] == "challenge":
                    proof = hub.proof(self._token, message["nonce"], rank)
                    about = {"rank": rank, "place": f"rank {rank} (node {rank // 8})"}
                    channel.send({"kind": "hello", **about, "proof": proof})
                elif message["kind"] in self.received:
                    self.received[message["kind"]] += 1

    def close(self) -> None:
        self._selector.close()
        for channel in self.channels:
            channel.close()


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _megabytes(pid: int) -> float:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
