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


class Healing:
    """Sends this node's state to recovering nodes, and fetches that of another node.

    The state is a checkpoint for ``weights_only`` loading. The member writes a header and chunks of it into its own
    store while it continues training, and the recovering node takes them from there. A member that sends none declines
    its request, and the recovering node asks for another quorum.
    """

    def __init__(self, around: Surroundings, device: torch.device | None = None) -> None:
        self._around = around
        self._device = device or torch.device("cpu")
        self._waiting: list[Request] = []
        self._sent: dict[str, int] = {}  # the number of chunks by key
        self._threads: list[threading.Thread] = []

    @property
    def is_expected(self) -> bool:
        """Whether nodes wait for this node's state."""
        return bool(self._waiting)

    def decline(self, me: Request) -> None:
        """Send this node's state to no node that was admitted by its last request, or by an earlier one."""
        self._waiting = []
        if self._around.store is not None:
            self._around.store.set("declined", str(me.number))

    def commit(self, recovering: Sequence[Request]) -> None:
        """Expect these nodes after a synchronization, and delete the states that earlier ones have fetched."""
        if self._around.store is not None:
            for thread in self._threads:
                thread.join()
            for key, chunks in self._sent.items():
                if self._around.store.check([f"{key}/header"]):
                    for name in ("header", *map(str, range(chunks))):
                        self._around.store.delete_key(f"{key}/{name}")
        self._sent, self._threads = {}, []
        self._waiting += recovering

    def send(self, me: Request, state: Callable[[], dict[str, Any] | None], about: dict[str, Any]) -> None:
        """Send ``state()`` to the nodes that wait, if any; None declines. Collective over the node."""
        if not self._waiting:
            return
        whole, waiting, store = state(), self._waiting, self._around.store
        if whole is not None and store is not None:
            data = packed({**whole, "node": about})
            chunks = data.split(_CHUNK_BYTES)
            for key in map(_key, waiting):
                self._sent[key] = len(chunks)
                store.set(f"{key}/header", str(len(chunks)))
                thread = threading.Thread(target=self._put, args=(store, key, chunks), daemon=True, name="healing")
                self._threads.append(thread)
                thread.start()
        self.decline(me)

    def _put(self, store: Store, key: str, chunks: Sequence[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the run has finished, and closed the store
            for index, chunk in enumerate(chunks):
                store.set(f"{key}/{index}", chunk.numpy().tobytes())

    def finish(self) -> None:
        """Wait until nodes have fetched the states, as long as they make progress."""
        if self._around.store is None:
            return
        for thread in self._threads:
            thread.join()
        deadline = time.monotonic() + self._around.elastic.dead_after
        left, keys_left = list(self._sent), -1
        with contextlib.suppress(RuntimeError):
            while left and time.monotonic() < deadline:
                left = [key for key in left if self._around.store.check([f"{key}/header"])]
                keys = self._around.store.num_keys()
                if keys != keys_left:
                    keys_left, deadline = keys, time.monotonic() + self._around.elastic.dead_after
                time.sleep(0.02)

    def fetch(self, source: Request, me: Request) -> dict[str, Any] | None:
        """Wait for the state of a member; None if it sends none. Collective over the node."""
        around = self._around
        data: Tensor | None = None
        size: int | None = None
        while size is None:
            if around.is_first:
                data = self._poll(source, _key(me))
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
            while (header := ask(partial(_header, source, key))) == "":
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.02)
            if header is None:
                return nothing
            chunks = []
            for index in range(int(header)):
                chunk = ask(partial(_taken, key=f"{key}/{index}"), self._around.elastic.dead_after)
                chunks.append(torch.frombuffer(bytearray(chunk), dtype=torch.uint8))
            ask(lambda store: store.delete_key(f"{key}/header"))
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:80]
            log.info("node %s, the source of this node's recovery, is lost: %s", source.node, reason)
            return nothing
        return torch.cat([nothing, *chunks])


def _key(node: Request) -> str:
    return f"heal/{node.replica_id}/{node.number}"


def _header(source: Request, key: str, store: Store) -> str | None:
    """Return the header of a state: empty if it is not there yet, None if the member has declined."""
    has_declined = store.check(["declined"]) and int(store.get("declined")) >= source.number  # before a header is read
    if store.check([f"{key}/header"]):
        return store.get(f"{key}/header").decode()
    return None if has_declined else ""


def _taken(store: Store, key: str) -> bytes:
    value: bytes = store.get(key)
    store.delete_key(key)
    return value
