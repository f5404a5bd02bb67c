"""Recovery: a joining node gets the run's state from a member, through that member's store."""

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
from torch.distributed import Store

from lightning_hiercomm.elastic.quorum import NodeRefused, Request
from lightning_hiercomm.elastic.surroundings import Surroundings
from lightning_hiercomm.elastic.transport import packed, unpacked

log = logging.getLogger(__name__)

_CHUNK_BYTES = 4 * 2**20
_REJECTED = "rejected"


class Healing:
    """Sends this node's state to recovering nodes, and fetches that of another node.

    The state is a checkpoint for ``weights_only`` loading. The member writes it into its own store while it continues
    training; the recovering node reads it from there.
    """

    def __init__(self, around: Surroundings, device: torch.device | None = None) -> None:
        self._around = around
        self._device = device or torch.device("cpu")
        self._waiting: list[Request] = []
        self._sent: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    @property
    def is_expected(self) -> bool:
        """Whether nodes wait for this node's state."""
        return bool(self._waiting)

    def begin_request(self, me: Request) -> None:
        """Let nodes that still wait for this node's state ask again, and publish the number of its new request."""
        self._reject_waiting()
        if self._around.store is not None:
            self._around.store.set(self._around.signer.key("requests"), str(me.number))

    def commit(self, recovering: Sequence[Request]) -> None:
        """Expect these nodes after a synchronization, and delete the states that earlier ones have fetched."""
        if self._around.store is not None:
            for thread in self._threads:
                thread.join()
            for key, chunks in self._sent.items():
                self._around.store.delete_key(f"{key}/coming")
                if self._around.store.check([f"{key}/ready"]):
                    for name in ("ready", *map(str, range(chunks))):
                        self._around.store.delete_key(f"{key}/{name}")
        self._sent, self._threads = {}, []
        self._waiting += recovering

    def send(self, state: Callable[[], dict[str, Any] | None], about: dict[str, Any]) -> None:
        """Send ``state()`` to the nodes that wait, if any; None rejects them. Collective over the node."""
        if not self._waiting:
            return
        whole = state()
        if whole is None or self._around.store is None:
            self._reject_waiting()
            return
        waiting, self._waiting = self._waiting, []
        data = packed({**whole, "node": about})
        for node in waiting:
            key, chunks = self._key(node), data.split(_CHUNK_BYTES)
            self._sent[key] = len(chunks)
            self._around.store.set(f"{key}/coming", "")
            ready = f"{len(chunks)} {self._around.signer.sign(data.numpy().tobytes())}"
            thread = threading.Thread(target=self._put, args=(key, chunks, ready), daemon=True, name="healing")
            self._threads.append(thread)
            thread.start()

    def _put(self, key: str, chunks: Sequence[Any], ready: str) -> None:
        store = self._around.store
        assert store is not None
        with contextlib.suppress(RuntimeError):  # the run has finished, and closed the store
            for index, chunk in enumerate(chunks):
                store.set(f"{key}/{index}", chunk.numpy().tobytes())
            store.set(f"{key}/ready", ready)

    def reject(self, recovering: Sequence[Request]) -> None:
        """Let nodes ask again, because this node cannot send them its state."""
        if self._around.store is not None:
            for node in recovering:
                self._around.store.set(f"{self._key(node)}/ready", _REJECTED)

    def _reject_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        self.reject(waiting)

    def finish(self) -> None:
        """Wait until nodes have fetched the states, as long as they make progress."""
        if self._around.store is None:
            return
        self._reject_waiting()
        for thread in self._threads:
            thread.join()
        deadline = time.monotonic() + self._around.elastic.dead_after
        left, keys_left = list(self._sent), -1
        with contextlib.suppress(RuntimeError):
            while left and time.monotonic() < deadline:
                left = [key for key in left if self._around.store.check([f"{key}/ready"])]
                keys = self._around.store.num_keys()
                if keys != keys_left:
                    keys_left, deadline = keys, time.monotonic() + self._around.elastic.dead_after
                time.sleep(0.02)

    def _key(self, node: Request) -> str:
        return self._around.signer.key(f"heal/{node.replica_id}/{node.number}")

    def fetch(self, source: Request, me: Request) -> dict[str, Any] | None:
        """Wait for the state of a member; None if it sends none. Collective over the node."""
        around = self._around
        data: Tensor | None = None
        size: int | None = None
        while size is None:
            if around.is_first:
                data = self._poll(source, self._key(me))
                size = None if data is None else data.numel()
            size = around.shared(size)
        if size == 0:
            return None
        on_device = (torch.empty(size, dtype=torch.uint8) if data is None else data).to(self._device)
        around.topology.intra.broadcast(on_device, 0).wait()
        try:
            state: dict[str, Any] = unpacked(on_device.cpu())
        except pickle.UnpicklingError as error:
            raise NodeRefused(f"`weights_only` loading refuses the state of node {source.node!r}: {error}") from error
        return state

    def _poll(self, source: Request, key: str) -> Tensor | None:
        """Return a state: an empty tensor if there will be none, None if it is not ready within a second."""
        nothing = torch.empty(0, dtype=torch.uint8)
        deadline = time.monotonic() + 1.0
        ask = partial(self._around.transport.ask, source.store)
        try:
            while not ask(lambda store: store.check([f"{key}/ready"])):
                if time.monotonic() > deadline:
                    return nothing if ask(partial(self._has_gone_on, source, key)) else None
                time.sleep(0.02)
            ready = ask(lambda store: store.get(f"{key}/ready")).decode()
            chunks = []
            if ready != _REJECTED:
                number, _, signature = ready.partition(" ")
                for index in range(int(number)):
                    chunk = ask(partial(_taken, key=f"{key}/{index}"), self._around.elastic.dead_after)
                    chunks.append(torch.frombuffer(bytearray(chunk), dtype=torch.uint8))
            ask(lambda store: store.delete_key(f"{key}/ready"))
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:80]
            log.info("node %s, the source of this node's recovery, is lost: %s", source.node, reason)
            return nothing
        data = torch.cat([nothing, *chunks])
        if chunks and signature != self._around.signer.sign(data.numpy().tobytes()):
            log.warning("state from node %s failed HMAC verification (check HIERCOMM_TOKEN)", source.node)
            return nothing
        return data

    def _has_gone_on(self, source: Request, key: str, store: Store) -> bool:
        """Return whether the member has asked for a later quorum without sending its state."""
        requests = self._around.signer.key("requests")
        asked_again = store.check([requests]) and int(store.get(requests)) > source.number
        return asked_again and not (store.check([f"{key}/coming"]) or store.check([f"{key}/ready"]))


def _taken(store: Store, key: str) -> bytes:
    value: bytes = store.get(key)
    store.delete_key(key)
    return value
