"""Exchanges values between ranks before the process group exists, and names missing ranks."""

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


def is_agents_store() -> bool:
    """Return whether the store is in torchrun's agent, which outlives the ranks, and not on rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def store_host() -> str:
    """Return the name, for messages, of what holds the store."""
    return f"torchrun's agent on {os.environ['MASTER_ADDR']}" if is_agents_store() else "rank 0"


def lost_store() -> str:
    """Return the message that the store's host has died; an agent does if one of its ranks fails."""
    remedy = ". See there which rank failed first" if is_agents_store() else ""
    return f"{store_host()} died, and torch's store with it{remedy}"


def connect_again(store: Store) -> Store:
    """Return a connection of its own to a store's server: a blocking call holds up all other calls of a connection."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):  # a file or memory has no connection
        return store
    return _connect(store.host, store.port, _DEFAULT_TIMEOUT)


def _connect(host: str, port: int, timeout: timedelta, is_master: bool = False) -> Store:
    return TCPStore(host, port, is_master=is_master, timeout=timeout, wait_for_workers=False, multi_tenant=True)


class Bootstrap:
    """Exchanges small values between all ranks over the store that ``torch.distributed`` uses.

    ``init_process_group`` does not report which ranks are missing; :meth:`gather` does. Rank 0 reads one key per rank
    and answers each. The store of torchrun's agent still holds the keys of earlier attempts, so rank 0 gives each
    attempt a random name, and a rank waits for an answer to its own random token.

    Args:
        host: Rank 0's address, the ``MASTER_ADDR`` of the process group.
        port: Its ``MASTER_PORT``.
        rank: This rank.
        size: Number of ranks.
        timeout: How long to wait for missing ranks. Default: 30 minutes.
    """

    def __init__(self, host: str, port: int, rank: int, size: int, timeout: timedelta | None = None) -> None:
        self._rank, self._size, self._timeout = rank, size, timeout or _DEFAULT_TIMEOUT
        self._began = time.monotonic()
        self._numbers = itertools.count()
        self._connection = _connect(host, port, self._timeout, is_master=rank == 0 and not is_agents_store())
        self._store = PrefixStore("hiercomm", self._connection)
        self._attempt = ""
        if rank == 0:
            self._attempt = secrets.token_hex(8)
            self._store.set("attempt", self._attempt)

    def store(self, purpose: str, own_connection: bool = False) -> Store:
        """Return the part of the store for a purpose in this attempt; after the first :meth:`gather`."""
        connection = connect_again(self._connection) if own_connection else self._connection
        return PrefixStore(f"hiercomm/{self._attempt}/{purpose}", connection)

    def gather(self, own: Any, among: str = "") -> list[Any]:
        """Return the values of ranks with the same ``among``, in the order of the ranks. Collective.

        Raises:
            TimeoutError: If ranks are missing, with their numbers.
            RuntimeError: If the store's host has died.
        """
        try:
            return self._gather(own, among)
        except RuntimeError as error:  # of torch's store, which names no rank
            raise RuntimeError(lost_store()) from error

    def _gather(self, own: Any, among: str) -> list[Any]:
        number, token, posted_in = next(self._numbers), secrets.token_hex(8), None
        if self._rank == 0:
            return self._answer_all(f"{self._attempt}/{number}", ["", among, own])

        def post() -> None:
            nonlocal posted_in
            if number == 0 and self._store.check(["attempt"]):  # at first it may name an earlier attempt
                self._attempt = self._store.get("attempt").decode()
            if self._attempt and self._attempt != posted_in:
                posted_in = self._attempt
                self._store.set(f"{posted_in}/{number}/{self._rank}", json.dumps([token, among, own]))

        post()
        self._wait({0: f"answer/{token}"}, post, longer=4 * self._longest_pause)  # rank 0 names missing ranks first
        error, values = json.loads(self._store.get(f"answer/{token}"))
        if error:
            raise TimeoutError(error)
        return list(values)

    def _answer_all(self, prefix: str, own: list[Any]) -> list[Any]:
        keys, error = {rank: f"{prefix}/{rank}" for rank in range(1, self._size)}, ""
        try:
            self._wait(keys)
        except TimeoutError as missing:
            error = str(missing)
        there = [key for key in keys.values() if not error or self._store.check([key])]
        messages = [own, *(json.loads(self._store.get(key)) for key in there)]
        values = {among: [each for _, other, each in messages if other == among] for _, among, _ in messages}
        for token, among, _ in messages[1:]:
            self._store.set(f"answer/{token}", json.dumps([error, values[among]]))
        if error:
            time.sleep(2 * self._longest_pause)  # other ranks must read it before the store is closed
            raise TimeoutError(error)
        return values[own[1]]

    @property
    def _longest_pause(self) -> float:
        return max(0.5, self._size / 2000)  # seconds; the store answers a few thousand requests per second

    def _wait(self, keys: dict[int, str], on_pause: Callable[[], None] = lambda: None, longer: float = 0.0) -> None:
        """Return when all ranks have written their keys; the store's own wait names no rank."""
        warn_at, patience = _WARN_SECONDS, self._timeout.total_seconds() + longer
        for key in keys.values():
            while not self._store.check([key]):
                on_pause()
                waited = time.monotonic() - self._began
                if waited > min(warn_at, patience):
                    who = names_of_ranks(rank for rank, key in keys.items() if not self._store.check([key]))
                    if waited > patience:
                        raise TimeoutError(
                            f"{who} of {self._size} did not come within the {waited:.0f} s of timeout=. Look there for"
                            " what went wrong first: a rank that ended early, or was not started."
                        )
                    log.warning("rank %d has waited %.0f s for %s of %d", self._rank, waited, who, self._size)
                    warn_at *= 2
                time.sleep(min(0.01 + waited / 20, self._longest_pause))  # short at first


def names_of_ranks(ranks: Iterable[int]) -> str:
    """Return a text such as "rank 3" or "ranks 0-3, 8"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    several = "s" if len(runs) > 1 or len(runs[0]) > 1 else ""
    return f"rank{several} {', '.join(shown[:10])}{', ...' if len(shown) > 10 else ''}"
