"""Measure the load that the control plane of many forked ranks puts on torch's store: heartbeats, and a failure."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.distributed import TCPStore

from lightning_hiercomm.comm.torch import raise_limit_on_open_files
from lightning_hiercomm.control import plane as control
from lightning_hiercomm.control.plane import ControlPlane

HANG_TIMEOUT = 300.0
"""The strategy's default, in seconds."""
_LIMIT = timedelta(minutes=5)


@dataclass
class Crowd:
    """The cost of a control plane.

    Attributes:
        ranks: Number of ranks that joined at once.
        joined_seconds: Time until all of them had been forked and had joined.
        failure_seconds: Time from the report of a failure until the last rank received it.
        share_of_core: Share of a processor that the store's process used during heartbeats.
        share_of_rank: The same of each rank.
        watched_seconds: Duration of the heartbeats.
    """

    ranks: int
    joined_seconds: float
    failure_seconds: float
    share_of_core: float
    share_of_rank: float
    watched_seconds: float


def measure(ranks: int, seconds: float = 20.0) -> Crowd:
    """Fork the ranks of a control plane, and the process of their store."""
    context = multiprocessing.get_context("fork")
    own, theirs = context.Pipe(duplex=False)
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    port = own.recv()
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=_LIMIT)
    began = time.perf_counter()
    members = [context.Process(target=_take_part, args=(rank, ranks, port), daemon=True) for rank in range(ranks)]
    try:
        for member in members:
            member.start()
        _until(lambda: store.add("watching", 0) == ranks)
        joined = time.perf_counter() - began
        pids = [server.pid, *(member.pid for member in members)]
        used, began = [*map(_processor_seconds, pids)], time.perf_counter()
        time.sleep(seconds)
        watched = time.perf_counter() - began
        of_store, *of_ranks = (now - before for now, before in zip(map(_processor_seconds, pids), used, strict=True))
        began = time.perf_counter()
        store.compare_set("control/failure", "", json.dumps([f"{_place(ranks - 1)} failed"]))
        _until(lambda: store.add("control/left", 0) == ranks)
        reported = time.perf_counter() - began
    finally:
        for process in (*members, server):
            process.kill()
    return Crowd(ranks, joined, reported, of_store / watched, sum(of_ranks) / ranks / watched, watched)


def _serve(parent: Connection) -> None:
    raise_limit_on_open_files()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parent.send(store.port)
    time.sleep(3600.0)


def _take_part(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=_LIMIT)
    control._GRACE = 3600.0  # seconds; nothing ends the ranks but the parent
    plane = ControlPlane(rank, size, _place(rank), HANG_TIMEOUT)
    plane.start(store, "control")
    store.add("watching", 1)
    time.sleep(3600.0)


def _place(rank: int) -> str:
    return f"rank {rank} (node {rank // 8})"


def _until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT.total_seconds()
    while not is_done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not done after {_LIMIT}")
        time.sleep(0.01)


def _processor_seconds(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
