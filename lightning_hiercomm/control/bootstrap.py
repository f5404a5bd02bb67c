"""Lets ranks meet in torch's store before the process group exists, and names those that are missing."""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

log = logging.getLogger(__name__)

_WARN_SECONDS = 30.0
_DEFAULT_TIMEOUT = timedelta(minutes=30)
LOST_STORE = "rank 0, or torchrun's agent there, died, and torch's store with it. See there which rank failed first"


def connect_again(store: Store) -> Store:
    """Return a new connection to the whole store of which this may be a part; a file or memory has none."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return _connect(store.host, store.port, _DEFAULT_TIMEOUT) if isinstance(store, TCPStore) else store


def _connect(host: str, port: int, timeout: timedelta, is_master: bool = False) -> Store:
    return TCPStore(host, port, is_master=is_master, timeout=timeout, wait_for_workers=False, multi_tenant=True)


class Bootstrap:
    """A new part of the store that ``torch.distributed`` uses, in which all ranks exchange small values.

    ``init_process_group`` does not report which ranks are missing; here rank 0 does. The store of torchrun's agent has
    the keys of earlier attempts, too: rank 0 gives each a random name, and answers each rank by its random token.
    """

    def __init__(self, host: str, port: int, rank: int, size: int, timeout: timedelta | None = None) -> None:
        self._rank, self._size, self._timeout = rank, size, timeout or _DEFAULT_TIMEOUT
        self._began, self._numbers = time.monotonic(), itertools.count()
        has_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        self._connection = _connect(host, port, self._timeout, is_master=has_store)
        self._store, self.attempt = PrefixStore("hiercomm", self._connection), ""
        if rank == 0:
            self.attempt = secrets.token_hex(8)
            self._store.set("attempt", self.attempt)

    def store(self, purpose: str) -> Store:
        """Return the part of the store for a purpose, after the first :meth:`gather`."""
        return PrefixStore(f"hiercomm/{self.attempt}/{purpose}", self._connection)

    def gather(self, own: Any) -> list[Any]:
        """Return the values of all ranks, in their order. Collective."""
        number = next(self._numbers)
        try:
            return self._answer_all(number, own) if self._rank == 0 else self._ask(number, own)
        except RuntimeError as lost:  # of torch's store, which names no rank
            raise RuntimeError(LOST_STORE) from lost

    def _ask(self, number: int, own: Any) -> list[Any]:
        token, asked_in = secrets.token_hex(8), ""

        def ask() -> None:
            nonlocal asked_in
            if number == 0 and self._store.check(["attempt"]):  # at first it may name an earlier attempt
                self.attempt = self._store.get("attempt").decode()
            if self.attempt != asked_in:
                asked_in = self.attempt
                self._store.set(f"{asked_in}/{number}/{self._rank}", json.dumps([token, own]))

        self._wait({0: token}, ask)
        return list(json.loads(self._store.get(token)))

    def _answer_all(self, number: int, own: Any) -> list[Any]:
        keys = {rank: f"{self.attempt}/{number}/{rank}" for rank in range(1, self._size)}
        self._wait(keys, lambda: None)
        said = [json.loads(each) for each in self._store.multi_get([*keys.values()])]
        values = [own, *(value for _, value in said)]
        for token, _ in said:
            self._store.set(token, json.dumps(values))
        return values

    def _wait(self, keys: dict[int, str], on_pause: Callable[[], object]) -> None:
        """Wait until all ranks have written their keys; the store's own wait names no rank."""
        warn_at, patience = _WARN_SECONDS, self._timeout.total_seconds() + 2.0 * (self._rank > 0)  # rank 0 names them
        for key in keys.values():
            while on_pause() or not self._store.check([key]):
                waited = time.monotonic() - self._began
                if waited > min(warn_at, patience):
                    late = names_of_ranks(rank for rank, key in keys.items() if not self._store.check([key]))
                    text = f"{late} of {self._size} did not answer within {waited:.0f} s"
                    if waited > patience:
                        raise TimeoutError(
                            f"{text} (timeout=). Look there for what went wrong: it ended, or was not started"
                        )
                    log.warning(text)
                    warn_at *= 2
                time.sleep(max(self._size / 5000, min(0.01 + waited / 100, 0.5)))  # a store answers 5,000 per second


def names_of_ranks(ranks: Iterable[int]) -> str:
    """Return a text such as "rank 3" or "ranks 0-3, 8"."""
    runs = [[*run] for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda each: each[1] - each[0])]
    shown = ", ".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else f"{run[0][1]}" for run in runs[:10])
    return f"rank{'s' if '-' in shown or ',' in shown else ''} {shown}{', ...' if len(runs) > 10 else ''}"
