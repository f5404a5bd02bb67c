"""Averages one optimizer's replica, and checks it for non-finite values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from torch import Tensor

from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.round import Round
from lightning_hiercomm.schemes.context import Context
from lightning_hiercomm.schemes.nonfinite import NonfiniteError, find_unfit, is_unfit, values_of
from lightning_hiercomm.schemes.reducers.sharded import ShardedAllReduce
from lightning_hiercomm.schemes.scheme_state import SchemeState


class NonFiniteGuard:
    """Averages the replica, and reports non-finite values.

    Args:
        context: The replica, the nodes and the user's settings.
        state: The state of the scheme.

    Attributes:
        replica: The replica.
    """

    def __init__(self, context: Context, state: SchemeState) -> None:
        self.replica = context.replica
        self._context = context
        self._state = state

    def average(
        self,
        buckets: Sequence[Bucket],
        round_: Round | None = None,
        weights: Sequence[tuple[float, ...]] | None = None,
    ) -> None:
        """Write the weighted mean over all ranks to some of the replica's buckets, in their own type; blocks.

        Args:
            buckets: The buckets.
            round_: The synchronization, whose preflight has checked them. Default: a new one.
            weights: The ranks' weights for each bucket; they sum to 1. Default: the round's.

        Raises:
            CommunicationError: On all ranks, if they have taken unequal numbers of steps.
            NonfiniteError: On all ranks, if a rank cannot send.
        """
        if self._context.topology.is_one_node:
            return
        reducer = ShardedAllReduce(self.replica, self._context.topology, buckets=buckets)
        round_ = round_ or reducer.begin(self._state.steps, samples=self._context.samples).round
        if weights is None:
            reducer(round_)
        else:
            for of_ranks, indexes in groupby(range(len(buckets)), key=weights.__getitem__):
                reducer(replace(round_, weights=of_ranks), [*indexes])

    def check(self, buckets: Sequence[Bucket], weight: float | None = None) -> None:
        """Check that values of this node are finite, without a collective over nodes.

        Args:
            buckets: The values.
            weight: The largest factor with which they are about to be sent. None: they are not sent.

        Raises:
            NonfiniteError: On the ranks of this node.
        """
        largest = math.inf if weight is None else self._context.wire.codec.largest / max(1.0, weight)
        self._check(list(values_of(buckets)), largest)

    def check_gradients(self) -> None:
        """Check that this node's gradients are finite, and small enough to be sent.

        Raises:
            NonfiniteError: On the ranks of this node.
        """
        gradients = [parameter.grad for parameter in self.replica.parameters if parameter.grad is not None]
        self._check(gradients, self._context.wire.codec.largest, are_gradients=True)

    def _check(self, values: Sequence[Tensor], largest: float, are_gradients: bool = False) -> None:
        device, wire, topology = self.replica.device, self._context.wire, self._context.topology
        narrowed = [value for value in values if wire.codec.narrows(value.dtype)]
        others = [value for value in values if not wire.codec.narrows(value.dtype)]
        unfit = is_unfit(narrowed, largest).to(device) | is_unfit(others).to(device)
        if self.replica.held.shares:
            topology.intra.all_reduce(unfit, op="max").wait()
        if not unfit:
            return
        limits = {id(p): largest for p in self.replica.parameters if wire.codec.narrows(p.dtype)}
        found = find_unfit(self.replica, limits, are_gradients)
        if not any(found):
            found = ("values of another rank of the node", None)
        raise NonfiniteError.of({topology.rank: found}, topology, self._state.steps, wire.codec)
