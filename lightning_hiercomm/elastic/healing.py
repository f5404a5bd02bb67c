"""Healing: a newcomer gets the run's state from a member, out of that member's store."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.elastic.groups import Transport, packed, unpacked
from lightning_hiercomm.elastic.quorum import Member, NodeRefused
from lightning_hiercomm.elastic.signature import Signer

log = logging.getLogger(__name__)

_CHUNK = 4 * 2**20
_AGAIN = "again"


class Healing:
    """Gives a node's state to newcomers, and gets another node's.

    What travels is a checkpoint, through ``torch.save`` and ``weights_only`` loading. The member puts it into its own
    store beside training; the newcomer takes it out of there.

    Args:
        intra: The ranks of the node.
        transport: To other nodes.
        store: On the node's first rank, its own.
        dead_after: Seconds of silence after which another node counts as gone.
        signer: Signs what travels, and names it.
        device: On which the node's ranks talk to each other. Default: the CPU.
    """

    def __init__(
        self,
        intra: Communicator,
        transport: Transport,
        store: Store | None,
        dead_after: float,
        signer: Signer | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._signer = signer or Signer()
        self._intra = intra
        self._transport = transport
        self._store = store
        self._dead_after = dead_after
        self._expected: list[Member] = []
        self._given: dict[str, int] = {}
        self._giving: list[threading.Thread] = []

    # ---- the member's side ---------------------------------------------------------------------------------------

    def expect(self, recovering_node: Member) -> None:
        """A newcomer waits for this node's state."""
        self._expected.append(recovering_node)

    @property
    def is_expected(self) -> bool:
        """Whether newcomers wait for this node's state."""
        return bool(self._expected)

    def note_asking(self, me: Member) -> None:
        """This node asks who is there: what it did not begin to give by now it does not give."""
        if self._store is not None:
            self._store.set(self._signer.key("requests"), str(me.requests))

    def forget_given(self) -> None:
        """Nobody takes what was given: all that live are together again, and who was healed is among them."""
        if self._store is not None:
            for thread in self._giving:
                thread.join()
            for key, chunks in self._given.items():
                self._store.delete_key(f"{key}/coming")
                if self._store.check([f"{key}/ready"]):
                    for name in ("ready", *map(str, range(chunks))):
                        self._store.delete_key(f"{key}/{name}")
        self._given, self._giving = {}, []

    def give(self, state: Callable[[], dict[str, Any] | None], about: dict[str, Any]) -> None:
        """Give all that wait what ``state`` returns; it is called if there are any. Collective over the node."""
        if not self._expected:
            return
        recovering, self._expected = self._expected, []
        whole = state()
        if self._store is None:
            return
        if whole is None:
            self.send_away(recovering)
            return
        data = packed({**whole, "node": about})
        for recovering_node in recovering:
            chunks = data.split(_CHUNK)
            self._given[self._key(recovering_node)] = len(chunks)
            self._store.set(f"{self._key(recovering_node)}/coming", "")
            ready = f"{len(chunks)} {self._signer.sign(data.numpy().tobytes())}"
            put = partial(self._put, self._key(recovering_node), chunks, ready)
            thread = threading.Thread(target=put, daemon=True, name="healing")
            self._giving.append(thread)
            thread.start()

    def send_away(self, recovering: Sequence[Member]) -> None:
        """Let newcomers ask again: the agreement after which they were to be healed did not come about."""
        if self._store is not None:
            for recovering_node in recovering:
                self._store.set(f"{self._key(recovering_node)}/ready", _AGAIN)

    def send_away_expected(self) -> None:
        """Let those ask again whom this node was to heal before it came to the next agreement, but could not."""
        self.send_away(self._expected)
        self._expected = []

    def _put(self, key: str, chunks: Sequence[Any], ready: str) -> None:
        assert self._store is not None
        with contextlib.suppress(RuntimeError):  # the run is over, and the store with it
            for index, chunk in enumerate(chunks):
                self._store.set(f"{key}/{index}", chunk.numpy().tobytes())
            self._store.set(f"{key}/ready", ready)

    def linger(self) -> None:
        """Stay until newcomers have what they were given, as long as they take any of it."""
        if self._store is None:
            return
        self.send_away(self._expected)
        for thread in self._giving:
            thread.join()
        deadline = time.monotonic() + self._dead_after
        waiting, left = list(self._given), -1
        with contextlib.suppress(RuntimeError):
            while waiting and time.monotonic() < deadline:
                waiting = [key for key in waiting if self._store.check([f"{key}/ready"])]
                keys = self._store.num_keys()
                if keys != left:
                    left, deadline = keys, time.monotonic() + self._dead_after
                time.sleep(0.02)

    def close(self) -> None:
        """Keep nothing for others any more."""
        self._store = None

    def _key(self, recovering_node: Member) -> str:
        return self._signer.key(f"heal/{recovering_node.replica_id}/{recovering_node.requests}")

    # ---- the newcomer's side -------------------------------------------------------------------------------------

    def fetch(self, source: Member, me: Member) -> dict[str, Any] | None:
        """The state of a member, or None if that did not get so far. Collective over the node; waits for it."""
        data: Tensor | None = None
        while True:
            said: int | None = None  # nothing yet
            if self._intra.rank == 0:
                data, said = self._look(source, self._key(me))
                if said is None and self._has_gone_on(source, self._key(me)):
                    said = 0
            said = self._intra.all_gather_object(said)[0]
            if said is not None:
                break
        if said == 0:
            return None
        if data is None:
            data = torch.empty(said, dtype=torch.uint8)
        there = data.to(self._device)  # nccl moves nothing that is not
        self._intra.broadcast(there, 0).wait()
        try:
            state: dict[str, Any] = unpacked(there.cpu())
        except pickle.UnpicklingError as error:
            raise NodeRefused(
                f"the state of node {source.node!r} holds what `weights_only` loading refuses: {error}"
            ) from error
        return state

    def _has_gone_on(self, source: Member, key: str) -> bool:
        """Whether the member has met others since, without giving anything: perhaps it never heard of this node."""
        asks = self._signer.key("requests")

        def look(store: Store) -> bool:
            asked_again = store.check([asks]) and int(store.get(asks)) > source.requests
            return asked_again and not (store.check([f"{key}/coming"]) or store.check([f"{key}/ready"]))

        try:
            return self._transport.ask(source.store, look)
        except RuntimeError:
            return True

    def _look(self, source: Member, key: str, patience: float = 1.0) -> tuple[Tensor | None, int | None]:
        """What the member has put into its store, and how many bytes; 0 if there will be none, None if not yet."""
        until = time.monotonic() + patience
        ask = partial(self._transport.ask, source.store)
        try:
            while not ask(lambda store: store.check([f"{key}/ready"])):
                if time.monotonic() > until:
                    return None, None
                time.sleep(0.02)
            ready = ask(lambda store: store.get(f"{key}/ready"))
            if ready == _AGAIN.encode():
                ask(lambda store: store.delete_key(f"{key}/ready"))
                return None, 0
            chunks = []
            number, _, signer = ready.decode().partition(" ")
            for index in range(int(number)):
                chunk = ask(partial(_taken, key=f"{key}/{index}"), self._dead_after)
                chunks.append(torch.frombuffer(bytearray(chunk), dtype=torch.uint8))
            ask(lambda store: store.delete_key(f"{key}/ready"))
            data = torch.cat(chunks)
            if signer != self._signer.sign(data.numpy().tobytes()):
                log.warning("what is said to be the state of node %s bears no seal of HIERCOMM_TOKEN", source.node)
                return None, 0
            return data, data.numel()
        except RuntimeError as error:
            log.info("node %s, which was to heal this one, is gone (%s)", source.node, str(error).splitlines()[0][:80])
            return None, 0


def _taken(store: Store, key: str) -> bytes:
    value: bytes = store.get(key)
    store.delete_key(key)
    return value
