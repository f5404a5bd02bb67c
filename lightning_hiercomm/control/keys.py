"""The control plane's keys in torch's store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from torch.distributed import Store

from lightning_hiercomm.control.reports import Arrival, Failure, Status


class Shared(NamedTuple):
    """What a heartbeat reads."""

    failure: Failure | None
    a_collective_broke: bool
    stop: str  # the kind of the common stop that a rank has requested, or empty
    barrier: Arrival | None  # the first arrival at the last barrier
    left: str  # a rank that has left, or empty
    statuses: Sequence[Status | None]  # of the ranks that were asked for; None: it has not joined


class Keys:
    """Reads and writes the control plane's keys.

    ==================================================== ===============================================================
    key                                                  value
    ==================================================== ===============================================================
    ``status/<rank>``                                    what a rank does; written with each heartbeat
    ``failure``, ``broken``                              the first failure of any rank; whether a collective broke
    ``stop``, ``batch/<rank>``, ``held``, ``stop_at``    the common stop: its kind; the next batch of each rank, their
                                                         number, and the last of these batches
    ``arrival/<n>``, ``arrived/<n>``, ``passed/<n>``     barrier n: the first arrival; their number; set by the last
    ``arrival``, ``left``                                the last barrier, and a rank that left, for ranks that miss it
    ``aware``                                            the number of ranks that left or have read the failure
    ==================================================== ===============================================================

    Args:
        store: A new part of a store, over a connection of this object's own.
        size: Number of ranks.
    """

    def __init__(self, store: Store, size: int) -> None:
        self._store, self._size = store, size
        self._known: set[str] = set()

    def _get(self, *keys: str) -> list[str]:
        """Return values, which are empty for keys that are missing: the store itself would wait for those."""
        for key in keys:
            if key not in self._known:
                self._store.compare_set(key, "", "")
                self._known.add(key)
        return [value.decode() for value in self._store.multi_get([*keys])]

    def _write_first(self, key: str, value: str) -> str:
        """Write a value unless another rank has, and return the first."""
        return self._store.compare_set(key, "", value).decode()

    # ---- heartbeats and failures ---------------------------------------------------------------------------------

    def read(self, *ranks: int) -> Shared:
        """Return what concerns all ranks, and the statuses of some."""
        names = ("failure", "broken", "stop", "arrival", "left")
        failure, broken, stop, arrival, left, *statuses = self._get(*names, *(f"status/{rank}" for rank in ranks))
        return Shared(
            Failure(**json.loads(failure)) if failure else None,
            broken != "",
            stop,
            Arrival(**json.loads(arrival)) if arrival else None,
            left,
            [Status(**json.loads(status)) if status else None for status in statuses],
        )

    def write_status(self, status: Status) -> None:
        self._store.set(f"status/{status.rank}", json.dumps(asdict(status)))

    def write_failure(self, failure: Failure) -> Failure:
        """Write a failure unless another rank has, and return the first."""
        return Failure(**json.loads(self._write_first("failure", json.dumps(asdict(failure)))))

    def mark_broken(self) -> None:
        """Report that a collective broke."""
        self._store.set("broken", "1")

    def leave(self, place: str) -> None:
        """Report that a rank has ended its run."""
        self._store.set("left", place)

    def count_aware(self, more: int) -> int:
        """Count ranks that have left or have read the failure; return their number."""
        return self._store.add("aware", more)

    # ---- the common stop -----------------------------------------------------------------------------------------

    def request_stop(self, kind: str) -> str:
        """Request the common stop unless another rank has, and return its kind."""
        return self._write_first("stop", kind)

    def hold(self, rank: int, batch: int) -> None:
        """Write the batch before which a rank waits for the stop."""
        self._store.set(f"batch/{rank}", str(batch))
        if self._store.add("held", 1) == self._size:
            batches = self._store.multi_get([f"batch/{rank}" for rank in range(self._size)])
            self._store.set("stop_at", str(max(map(int, batches))))

    def stop_at(self) -> int | None:
        """Return the batch before which all ranks stop; None until all of them wait."""
        return int(self._store.get("stop_at")) if self._store.check(["stop_at"]) else None

    # ---- barriers ------------------------------------------------------------------------------------------------

    def arrive(self, own: Arrival) -> Arrival:
        """Report an arrival at a barrier, and return the first one there."""
        text = json.dumps(asdict(own))
        first = self._write_first(f"arrival/{own.number}", text)
        if first == text:
            self._store.set("arrival", text)
        return Arrival(**json.loads(first))

    def count_arrival(self, number: int) -> None:
        """Count a rank at a barrier; the last one lets all pass."""
        if self._store.add(f"arrived/{number}", 1) == self._size:
            self._store.set(f"passed/{number}", "")
            for name in ("arrival", "arrived", "passed") if number > 1 else ():
                self._store.delete_key(f"{name}/{number - 1}")

    def has_passed(self, number: int) -> bool | None:
        """Return True when all ranks are at a barrier, and None before."""
        return self._store.check([f"passed/{number}"]) or None
