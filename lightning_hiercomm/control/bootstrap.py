"""Exchanges values between ranks before the process group exists, and reports missing ranks."""

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

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_hiercomm.control.hub import names_of_ranks

log = logging.getLogger(__name__)

_WARN_SECONDS = 30.0
_DEFAULT_TIMEOUT = timedelta(minutes=30)
_generations = itertools.count()  # keys of earlier runs of this process may still exist


class Bootstrap:
    """Exchanges small values between all ranks over the store that ``torch.distributed`` uses.

    ``init_process_group`` reports neither which ranks are missing nor that a rank has died; this class reports both.

    Each rank writes one key and reads one answer; rank 0 reads all keys and writes the answers. So the number of
    requests is proportional to the ranks.

    The store of torchrun's agent outlives the ranks and still holds keys of the previous attempt. So rank 0 gives each
    attempt a random name, which prefixes its keys, and answers ranks that ask for it.

    Args:
        host: Rank 0's address, the ``MASTER_ADDR`` of the process group.
        port: Its ``MASTER_PORT``.
        rank: This rank.
        size: Number of ranks.
        timeout: How long to wait for missing ranks. Default: 30 minutes.

    Raises:
        RuntimeError: If no store answers at that address until the timeout.
    """

    def __init__(self, host: str, port: int, rank: int, size: int, timeout: timedelta | None = None) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timeout or _DEFAULT_TIMEOUT
        self._exchanges = itertools.count()
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
        self._asked = 0
        self._unanswered: set[int] = set()
        self._attempt: str | None
        if by_agent:
            self._attempt = secrets.token_hex(8) if rank == 0 else None
        else:
            self._attempt = f"{next(_generations)}"

    @property
    def store(self) -> Store:
        """The store for this attempt's process group, after the first :meth:`broadcast` or :meth:`gather`."""
        return PrefixStore(f"{self._attempt}/process group", self._store)

    def broadcast(self, own: Any) -> Any:
        """Return rank 0's value. Rank 0 must call :meth:`gather` next."""
        key = self._next_key()
        if self._rank == 0:
            self._store.set(key, json.dumps(own))
        return self._receive(key)

    def gather(
        self, own: Any, alarm: Callable[[], None] = lambda: None, among: str = "", aloud: bool = False
    ) -> list[Any]:
        """Return the values of ranks that have one, in the order of the ranks.

        Args:
            own: This rank's value, as JSON; None for no value.
            alarm: Called while waiting for other ranks; may raise to end the wait.
            among: The key of a group of ranks: only values of ranks with the same key are returned.
            aloud: Whether all ranks receive this value, whatever their key.

        Raises:
            TimeoutError: If ranks are missing, with their numbers.
        """
        key = self._next_key()
        own_answer = f"{key}/answer/{among}"
        self._store.set(f"{key}/{self._rank}", json.dumps([own_answer, own, aloud]))
        if self._rank != 0:
            error, values = self._receive(own_answer, alarm)
            if error:
                raise TimeoutError(error)
            return list(values)
        keys = {rank: f"{key}/{rank}" for rank in range(self._size)}
        try:
            self._wait(keys, alarm)
        except TimeoutError as error:
            present = self._store.multi_get([key for key in keys.values() if self._store.check([key])])
            for answer in {json.loads(message)[0] for message in present}:
                self._store.set(answer, json.dumps([str(error), []]))
            time.sleep(2 * self._longest_pause)  # other ranks must read it before the store is closed
            raise
        messages = [json.loads(message) for message in self._store.multi_get([*keys.values()])]
        answers = {
            answer: [value for group, value, aloud in messages if (group == answer or aloud) and value is not None]
            for answer in {answer for answer, _, _ in messages}
        }
        for answer, values in answers.items():
            self._store.set(answer, json.dumps(["", values]))
        return answers[own_answer]

    def _receive(self, key: str, alarm: Callable[[], None] = lambda: None) -> Any:
        self._wait({0: key}, alarm, longer=4 * self._longest_pause)  # rank 0 gives up first, and reports missing ranks
        return json.loads(self._store.get(key))

    @property
    def _longest_pause(self) -> float:
        return max(0.5, self._size / 2000)  # seconds; the store answers a few thousand requests per second

    def _next_key(self) -> str:
        if self._attempt is None:
            own = secrets.token_hex(8)
            self._store.set(f"asks/{self._store.add('asking', 1)}", own)
            self._wait({0: f"answers/{own}"}, lambda: None)
            self._attempt = self._store.get(f"answers/{own}").decode()
        return f"{self._attempt}/{next(self._exchanges)}"

    def _answer(self) -> None:
        """Answer requests for the name of this attempt."""
        if not self._by_agent or self._rank != 0 or self._attempt is None:
            return
        asked = self._store.add("asking", 0)
        self._unanswered |= {*range(self._asked + 1, asked + 1)}
        self._asked = asked
        for number in sorted(self._unanswered):
            if self._store.check([f"asks/{number}"]):  # otherwise the rank died before its request
                self._store.set(f"answers/{self._store.get(f'asks/{number}').decode()}", self._attempt)
                self._unanswered.remove(number)

    def _wait(self, keys: dict[int, str], alarm: Callable[[], None], longer: float = 0.0) -> None:
        """Return when all ranks in ``keys`` have written theirs; polls less often over time.

        The store's own wait cannot be interrupted by an alarm, and prints a warning whenever it ends without success.
        """
        warn_at, patience = _WARN_SECONDS, self._timeout.total_seconds() + longer
        for key in keys.values():
            while not self._store.check([key]):
                alarm()
                self._answer()
                waited = time.monotonic() - self._began
                if waited > min(warn_at, patience):
                    who = names_of_ranks(rank for rank, key in keys.items() if not self._store.check([key]))
                    if waited > patience:
                        raise TimeoutError(
                            f"{who} of {self._size} did not come within the {waited:.0f} s of timeout=. Look there for"
                            " what went wrong first: a rank that ended early, or was not started."
                        )
                    if longer:
                        who += ", which reports missing ranks,"
                    log.warning("rank %d has waited %.0f s for %s of %d", self._rank, waited, who, self._size)
                    warn_at *= 2
                time.sleep(min(0.01 + waited / 20, self._longest_pause))  # short at first
