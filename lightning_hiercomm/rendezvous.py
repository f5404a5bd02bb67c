"""Where ranks meet before there is a process group, and find out who is missing."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

_WARN_SECONDS = 30.0
_DEFAULT_TIMEOUT = timedelta(minutes=30)
_generations = itertools.count()  # what earlier runs of this process wrote may still be there


class Rendezvous:
    """A few words between all ranks, over the store that ``torch.distributed`` meets at.

    ``init_process_group`` does not say who is missing, nor that somebody who was there has died meanwhile. Here both
    are said.

    Args:
        host: Rank 0's address, the ``MASTER_ADDR`` of the process group.
        port: Its ``MASTER_PORT``; the process group will share the store. Keep this object until there is one.
        rank: This rank.
        size: Number of ranks.
        timeout: How long to wait for missing ranks. Default: 30 minutes.

    Raises:
        RuntimeError: If nobody is at that address until the timeout.
    """

    def __init__(self, host: str, port: int, rank: int, size: int, timeout: timedelta | None = None) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timeout or _DEFAULT_TIMEOUT
        self._words = itertools.count()
        self._began = time.monotonic()
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        store = TCPStore(
            host,
            port,
            is_master=rank == 0 and not by_agent,
            timeout=self._timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"hiercomm/{attempt}/{next(_generations)}", store)

    def broadcast(self, own: Any) -> Any:
        """What rank 0 says."""
        word = next(self._words)
        if self._rank == 0:
            self._store.set(f"{word}", json.dumps(own))
        self._wait({0: f"{word}"}, lambda: None)
        return json.loads(self._store.get(f"{word}"))

    def gather(self, own: Any, alarm: Callable[[], None] = lambda: None) -> list[Any]:
        """What each rank says, in the order of the ranks.

        Args:
            own: What this one says; JSON.
            alarm: Called while waiting for others, to raise if that makes no sense any more.

        Raises:
            TimeoutError: If somebody has not come; says who.
        """
        word = next(self._words)
        keys = {rank: f"{word}/{rank}" for rank in range(self._size)}
        self._store.set(keys[self._rank], json.dumps(own))
        self._wait(keys, alarm)
        return [json.loads(value) for value in self._store.multi_get([*keys.values()])]

    def _wait(self, keys: dict[int, str], alarm: Callable[[], None]) -> None:
        warn_at = _WARN_SECONDS
        while not self._store.check([*keys.values()]):
            alarm()
            waited = time.monotonic() - self._began
            if waited > min(warn_at, self._timeout.total_seconds()):
                missing = [str(rank) for rank, key in keys.items() if not self._store.check([key])]
                who = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing[:10])}"
                if len(missing) > 10:
                    who += f" and {len(missing) - 10} more"
                if waited > self._timeout.total_seconds():
                    raise TimeoutError(
                        f"{who} of {self._size} did not come within the {waited:.0f} s of timeout=. Look there for what"
                        " went wrong first: a rank that ended early, or was not started."
                    )
                log.warning("rank %d has waited %.0f s for %s of %d", self._rank, waited, who, self._size)
                warn_at *= 2
            time.sleep(min(0.01 + waited / 20, 0.5))  # seldom for those who wait long, and soon for those who need not
