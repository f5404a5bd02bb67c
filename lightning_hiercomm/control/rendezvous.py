"""Where ranks meet before there is a process group, and find out who is missing."""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

_WARN_SECONDS = 30.0
_DEFAULT_TIMEOUT = timedelta(minutes=30)
_generations = itertools.count()  # what earlier runs of this process wrote may still be there


class Rendezvous:
    """A few words between all ranks, over the store that ``torch.distributed`` meets at.

    ``init_process_group`` does not say who is missing, nor that somebody who was there has died meanwhile. Here both
    are said.

    A store of torchrun's agent outlives the ranks, and what an earlier attempt wrote is still there after a restart;
    which attempt this is, ranks cannot know, for every agent counts its own. So rank 0 gives each attempt a name, under
    which all its words stand, and tells it to whoever asks with a word of his own that nobody used before.

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
        self._by_agent = by_agent
        self._store = PrefixStore("hiercomm", store)
        self._attempt: str | None = f"{next(_generations)}"
        self._asked = 0
        self._unanswered: set[int] = set()
        if by_agent:
            self._attempt = secrets.token_hex(8) if rank == 0 else None

    @property
    def fresh_store(self) -> Store | None:
        """Where this attempt's process group can meet; None if nobody met at the usual place before. After a word."""
        return PrefixStore(f"{self._attempt}/process group", self._store) if self._by_agent else None

    def broadcast(self, own: Any) -> Any:
        """What rank 0 says, who has to :meth:`gather` next."""
        key = self._next_word()
        if self._rank == 0:
            self._store.set(key, json.dumps(own))
        self._wait({0: key}, lambda: None)
        return json.loads(self._store.get(key))

    def gather(self, own: Any, alarm: Callable[[], None] = lambda: None) -> list[Any]:
        """What each rank says, in the order of the ranks.

        Args:
            own: What this one says; JSON.
            alarm: Called while waiting for others, to raise if that makes no sense any more.

        Raises:
            TimeoutError: If somebody has not come; says who.
        """
        word = self._next_word()
        keys = {rank: f"{word}/{rank}" for rank in range(self._size)}
        self._store.set(keys[self._rank], json.dumps(own))
        self._wait(keys, alarm)
        return [json.loads(value) for value in self._store.multi_get([*keys.values()])]

    def _next_word(self) -> str:
        if self._attempt is None:
            own = secrets.token_hex(8)
            self._store.set(f"asks/{self._store.add('asking', 1)}", own)
            self._wait({0: f"answers/{own}"}, lambda: None)
            self._attempt = self._store.get(f"answers/{own}").decode()
        return f"{self._attempt}/{next(self._words)}"

    def _answer(self) -> None:
        """Tell those who ask what this attempt is called; those of earlier ones hear it no more."""
        if not self._by_agent or self._rank != 0 or self._attempt is None:
            return
        asked = self._store.add("asking", 0)
        self._unanswered |= {*range(self._asked + 1, asked + 1)}
        self._asked = asked
        for number in sorted(self._unanswered):
            if self._store.check([f"asks/{number}"]):  # or it has died before it could ask
                self._store.set(f"answers/{self._store.get(f'asks/{number}').decode()}", self._attempt)
                self._unanswered.remove(number)

    def _wait(self, keys: dict[int, str], alarm: Callable[[], None]) -> None:
        warn_at = _WARN_SECONDS
        while not self._store.check([*keys.values()]):
            alarm()
            self._answer()
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
