"""Pending exchanges, which overlap with training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.comm.base import Handle, finished
from lightning_hiercomm.schemes.preflight import Preflight

_OVERLAP = 1  # buckets of one exchange that may still be on the link when the next exchange starts


@dataclass
class PendingBucket:
    """One bucket of a pending exchange.

    Attributes:
        index: Of the bucket, among its reducer's.
        flat: The packed result, valid after :attr:`arrived`.
        sent: The packed values that this node sent, if the merge needs them; otherwise ``flat``.
        arrived: The handle to wait for.
        nodes: The number of nodes in the mean.
    """

    index: int
    flat: Tensor
    sent: Tensor
    arrived: Handle = finished
    nodes: int = 1


@dataclass
class PendingExchange:
    """Buckets that were sent after one step and are merged after another.

    Attributes:
        started: The optimizer step after which it was sent.
        due: The optimizer step after which it is merged.
        fragments: The fragments of the model that it holds.
        preflight: Its preflight; None if it was restored, or compares no ranks.
        buckets: Its buckets, in order of arrival.
        undo: Restores values that were changed asynchronously since it was sent; for elastic training.
        was_unfit: Whether a restored exchange was one that a rank could not send.
        is_lost: Whether a change of nodes has canceled it, so that nodes synchronize again when it is due.
    """

    started: int
    due: int
    fragments: Sequence[int]
    preflight: Preflight | None = None
    buckets: deque[PendingBucket] = field(default_factory=deque)
    undo: Callable[[], None] = lambda: None
    was_unfit: bool = False
    is_lost: bool = False

    @property
    def staleness(self) -> int:
        """Steps between sending and merging, S."""
        return self.due - self.started

    @property
    def is_unfit(self) -> bool:
        """Whether a rank could not send it, so that the run ends; equal on all ranks. Waits for its preflight."""
        return self.was_unfit if self.preflight is None else self.preflight.is_unfit

    def holds(self, index: int) -> bool:
        """Whether a bucket is part of it, and is not merged yet."""
        return any(bucket.index == index for bucket in self.buckets)

    def wait(self) -> None:
        """Wait for all of its buckets."""
        if self.preflight is not None:
            self.preflight.wait()
        for bucket in self.buckets:
            bucket.arrived.wait()

    def lose(self) -> None:
        """Drop its result and undo its changes; it stays due."""
        if not self.is_lost:
            self.wait()
            self.buckets.clear()
            self.undo()
            self.is_lost = True

    def is_nearly_done(self) -> bool:
        """Whether all buckets except the last ones have arrived; they arrive in order."""
        return len(self.buckets) <= _OVERLAP or self.buckets[-1 - _OVERLAP].arrived.is_done()


class PendingExchanges:
    """The exchanges of one scheme that were started and not merged, oldest first.

    Attributes:
        exchanges: As above.
        device: The device of restored exchanges.
    """

    def __init__(self) -> None:
        self.exchanges: list[PendingExchange] = []
        self.device = torch.device("cpu")

    def __bool__(self) -> bool:
        return bool(self.exchanges)

    def start(
        self, started: int, due: int, fragments: Sequence[int] = (0,), preflight: Preflight | None = None
    ) -> PendingExchange:
        """Add a new exchange, without buckets."""
        exchange = PendingExchange(started, due, fragments, preflight)
        self.exchanges.append(exchange)
        return exchange

    def take(self, step: int) -> PendingExchange | None:
        """Remove and return the exchange that is due after ``step`` optimizer steps, if there is one."""
        due = next((exchange for exchange in self.exchanges if exchange.due == step), None)
        if due is not None:
            self.exchanges.remove(due)
        return due

    def take_first(self, step: int) -> PendingExchange | None:
        """Remove and return the oldest exchange, and make it due at ``step`` at the latest."""
        if not self.exchanges:
            return None
        first = self.exchanges.pop(0)
        first.due = min(first.due, step)
        return first

    def take_all(self) -> list[PendingExchange]:
        """Remove and return all exchanges."""
        taken, self.exchanges = self.exchanges, []
        return taken

    def keep(self, exchange: PendingExchange) -> None:
        """Put an exchange back that :meth:`take` has removed."""
        self.exchanges.insert(0, exchange)

    def forget(self, exchange: PendingExchange) -> None:
        """Remove an exchange, if it is pending."""
        self.exchanges = [other for other in self.exchanges if other is not exchange]

    def lose(self) -> None:
        """Cancel all, see :meth:`PendingExchange.lose`."""
        for exchange in self.exchanges:
            exchange.lose()

    def undo_point(self) -> Callable[[], None]:
        """Return a callback after which the same exchanges are pending, but lost: see :meth:`lose`."""
        before = list(self.exchanges)

        def undo() -> None:
            self.exchanges = before
            self.lose()

        return undo

    def settle(self) -> None:
        """Wait until all have arrived."""
        for exchange in self.exchanges:
            exchange.wait()

    def drop(self) -> None:
        """Wait until all have arrived, and remove them."""
        self.settle()
        self.exchanges.clear()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the received values; call :meth:`settle` first."""
        return [
            {
                "started": exchange.started,
                "due": exchange.due,
                "fragments": list(exchange.fragments),
                "buckets": [bucket.index for bucket in exchange.buckets],
                "arrived": [bucket.flat.clone() for bucket in exchange.buckets],
                "sent": [bucket.sent.clone() for bucket in exchange.buckets if bucket.sent is not bucket.flat],
                "is_flagged": (exchange.preflight is None or exchange.preflight.is_done()) and exchange.is_unfit,
                "nodes": [bucket.nodes for bucket in exchange.buckets],
            }
            for exchange in self.exchanges
        ]

    def load_state_dict(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Restore :meth:`state_dict` (of a run with the same topology and buckets) on :attr:`device`."""
        self.drop()
        for saved in state:
            exchange = self.start(saved["started"], saved["due"], saved["fragments"])
            exchange.was_unfit = saved["is_flagged"]
            arrived = [tensor.to(self.device, copy=True) for tensor in saved["arrived"]]
            sent = [tensor.to(self.device, copy=True) for tensor in saved["sent"]] or arrived
            for index, flat, own, of in zip(saved["buckets"], arrived, sent, saved["nodes"], strict=True):
                exchange.buckets.append(PendingBucket(index, flat, own, nodes=of))
