"""The middle of the control plane with thousands of ranks, which one process plays: joins, beats, a failure."""

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
    """What a hub needed for its ranks.

    Attributes:
        ranks: How many came at once.
        joined_seconds: Until all of them were members.
        failure_seconds: From one rank's report until the last one had heard of it.
        share_of_core: Of a processor, while nothing happened but heartbeats.
        megabytes: Of memory, at its most.
        watched_seconds: How long nothing happened.
    """

    ranks: int
    joined_seconds: float
    failure_seconds: float
    share_of_core: float
    megabytes: float
    watched_seconds: float


def measure(ranks: int, seconds: float = 20.0) -> Crowd:
    """Play ``ranks`` ranks of one hub, which is a process as ever; watch it for some seconds."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    plane = ControlPlane(0, ranks, "rank 0 (node 0)", hang_timeout=HANG_TIMEOUT)
    invitation = plane.invite("127.0.0.1")
    assert plane.hub_process is not None
    began = time.perf_counter()
    crowd = _Ranks(ranks, invitation.port, invitation.token)
    try:
        crowd.until(lambda: crowd.heard["welcome"] == ranks)
        joined = time.perf_counter() - began
        used, began = _processor_seconds(plane.hub_process.pid), time.perf_counter()
        crowd.beat(seconds)
        watched = time.perf_counter() - began
        used = _processor_seconds(plane.hub_process.pid) - used
        began = time.perf_counter()
        crowd.channels[-1].send({"kind": "failed", "message": "the last rank failed"})
        crowd.until(lambda: crowd.heard["failed"] == ranks)
        told = time.perf_counter() - began
        megabytes = _megabytes(plane.hub_process.pid)
    finally:
        crowd.close()
        plane.close()
    return Crowd(ranks, joined, told, used / watched, megabytes, watched)


class _Ranks:
    def __init__(self, ranks: int, port: int, token: str) -> None:
        self.heard = {"welcome": 0, "failed": 0}
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
            if rank % 64 == 0:  # so that nobody is kept waiting whose word is there
                self._listen(0.0)

    def until(self, is_done: Callable[[], bool], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not is_done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done after {seconds:g} s: {self.heard}")
            self._listen(0.1)

    def beat(self, seconds: float) -> None:
        """Each rank says that it lives as often as a rank does, one after another."""
        pause = hub.seconds_between_beats(len(self.channels), HANG_TIMEOUT) / len(self.channels)
        began, said = time.monotonic(), 0
        while time.monotonic() < began + seconds:
            while said * pause < time.monotonic() - began:
                beat = {"doing": "training batch 7 of epoch 0, after 7 steps", "progress": said, "stuck": ["", 0.0]}
                count = {"batches": 7, "ended": [0, 0], "wait": None, "line": ""}
                self.channels[said % len(self.channels)].send({"kind": "beat", **beat, **count})
                said += 1
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
                elif message["kind"] in self.heard:
                    self.heard[message["kind"]] += 1

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
