"""A pending exchange, which overlaps with training."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.comm.base import Handle, finished
from lightning_hiercomm.schemes.preflight import Preflight


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
        was_unfit: Whether a restored exchange was one that a rank could not send.
    """

    started: int
    due: int
    fragments: Sequence[int]
    preflight: Preflight | None = None
    buckets: deque[PendingBucket] = field(default_factory=deque)
    was_unfit: bool = False

    @property
    def staleness(self) -> int:
        """Steps between sending and merging, S."""
        return self.due - self.started

    @property
    def is_unfit(self) -> bool:
        """Whether a rank could not send it, so that the run ends; equal on all ranks. Waits for its preflight."""
        return self.was_unfit if self.preflight is None else self.preflight.is_unfit

    def wait(self) -> None:
        """Wait for all of its buckets."""
        if self.preflight is not None:
            self.preflight.wait()
        for bucket in self.buckets:
            bucket.arrived.wait()


class Pending:
    """The exchange of a scheme that was started and is not merged, if there is one; there are never two.

    Attributes:
        exchange: As above.
        device: The device of a restored exchange.
    """

    def __init__(self) -> None:
        self.exchange: PendingExchange | None = None
        self.device = torch.device("cpu")

    def __bool__(self) -> bool:
        return self.exchange is not None

    def start(
        self, started: int, due: int, fragments: Sequence[int] = (0,), preflight: Preflight | None = None
    ) -> PendingExchange:
        """Make a new exchange, without buckets."""
        assert self.exchange is None, "it would be lost"
        self.exchange = PendingExchange(started, due, fragments, preflight)
        return self.exchange

    def take(self, step: int, at_once: bool = False) -> PendingExchange | None:
        """Remove and return the exchange if it is due after ``step`` optimizer steps, or merged then ``at_once``."""
        taken = self.exchange
        if taken is None or not (at_once or taken.due == step):
            return None
        self.exchange, taken.due = None, min(taken.due, step)
        return taken

    def settle(self) -> None:
        """Wait until it has arrived."""
        if self.exchange is not None:
            self.exchange.wait()

    def drop(self) -> None:
        """Wait until it has arrived, and remove it."""
        self.settle()
        self.exchange = None

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the received values; call :meth:`settle` first."""
        exchange = self.exchange
        if exchange is None:
            return []
        saved = {
            "started": exchange.started,
            "due": exchange.due,
            "fragments": list(exchange.fragments),
            "buckets": [bucket.index for bucket in exchange.buckets],
            "arrived": [bucket.flat.clone() for bucket in exchange.buckets],
            "sent": [bucket.sent.clone() for bucket in exchange.buckets if bucket.sent is not bucket.flat],
            "is_flagged": (exchange.preflight is None or exchange.preflight.is_done()) and exchange.is_unfit,
            "nodes": [bucket.nodes for bucket in exchange.buckets],
        }
        return [saved]

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
