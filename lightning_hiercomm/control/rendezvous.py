"""Where ranks meet before there is a process group, and find out who is missing."""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import time
from collections import defaultdict
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

    Everything goes through one store, in rank 0's process or beside it. So a rank writes a word, asks for one, and
    knows nothing of the others' words; rank 0 reads them all, and writes one answer. Ranks that each ask for
    everybody's words give the store the square of that to do.

    Args:
        host: Rank 0's address, the ``MASTER_ADDR`` of the process group.
        port: Its ``MASTER_PORT``.
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
    def store(self) -> Store:
        """Where this attempt's process group can meet, over this rank's one connection. After a word."""
        return PrefixStore(f"{self._attempt}/process group", self._store)

    def broadcast(self, own: Any) -> Any:
        """What rank 0 says, who has to :meth:`gather` next."""
        key = self._next_word()
        if self._rank == 0:
            self._store.set(key, json.dumps(own))
        return self._hear(key)

    def gather(
        self, own: Any, alarm: Callable[[], None] = lambda: None, among: str = "", aloud: bool = False
    ) -> list[Any]:
        """What those ranks say that have something to say, in the order of the ranks.

        Args:
            own: What this one says; JSON. None: nothing.
            alarm: Called while waiting for others, to raise if that makes no sense any more.
            among: Only what those say is of interest that give the same here.
            aloud: Whether this is for all to hear, whatever they give.

        Raises:
            TimeoutError: If somebody has not come; says who.
        """
        word = self._next_word()
        answer = f"{word}/answer/{among}"
        self._store.set(f"{word}/{self._rank}", json.dumps([answer, own, aloud]))
        if self._rank != 0:
            trouble, said = self._hear(answer, alarm)
            if trouble:
                raise TimeoutError(trouble)
            return list(said)
        keys = {rank: f"{word}/{rank}" for rank in range(self._size)}
        try:
            self._wait(keys, alarm)
        except TimeoutError as error:
            came = self._store.multi_get([key for key in keys.values() if self._store.check([key])])
            for asked in {json.loads(words)[0] for words in came}:
                self._store.set(asked, json.dumps([str(error), []]))
            time.sleep(2 * self._longest_pause)  # or others find the store gone before they hear it
            raise
        heard = [json.loads(words) for words in self._store.multi_get([*keys.values()])]
        by_all = {rank: said for rank, (_, said, aloud) in enumerate(heard) if aloud}
        answers: dict[str, dict[int, Any]] = defaultdict(lambda: dict(by_all))
        for rank, (asked, said, _) in enumerate(heard):
            answers[asked] |= {} if said is None else {rank: said}
        in_order = {asked: [said[rank] for rank in sorted(said)] for asked, said in answers.items()}
        for asked, everyone in in_order.items():
            self._store.set(asked, json.dumps(["", everyone]))
        return in_order[answer]

    def _hear(self, key: str, alarm: Callable[[], None] = lambda: None) -> Any:
        """What rank 0 says."""
        self._wait({0: key}, alarm, longer=4 * self._longest_pause)  # it is to give up first, and to say on whom
        return json.loads(self._store.get(key))

    @property
    def _longest_pause(self) -> float:
        return max(0.5, self._size / 2000)  # seconds; the store answers thousands of questions a second, not more

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

    def _wait(self, keys: dict[int, str], alarm: Callable[[], None], longer: float = 0.0) -> None:
        """Return when all ranks in ``keys`` have written there; asks for one at a time, ever less often.

        (The store's own wait cannot be broken off by an alarm, and prints a warning whenever it ends without success.)
        """
        warn_at, patience = _WARN_SECONDS, self._timeout.total_seconds() + longer
        for key in keys.values():
            while not self._store.check([key]):
                alarm()
                self._answer()
                waited = time.monotonic() - self._began
                if waited > min(warn_at, patience):
                    missing = [str(rank) for rank, key in keys.items() if not self._store.check([key])]
                    who = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing[:10])}"
                    if len(missing) > 10:
                        who += f" and {len(missing) - 10} more"
                    if waited > patience:
                        raise TimeoutError(
                            f"{who} of {self._size} did not come within the {waited:.0f} s of timeout=. Look there for"
                            " what went wrong first: a rank that ended early, or was not started."
                        )
                    if longer:
                        who += ", which says who is missing,"
                    log.warning("rank %d has waited %.0f s for %s of %d", self._rank, waited, who, self._size)
                    warn_at *= 2
                time.sleep(min(0.01 + waited / 20, self._longest_pause))  # soon for those who need not wait long
