"""Averages one optimizer's replica, and checks it for non-finite values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.round import Round
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.nonfinite import (
    NonfiniteError,
    OnNonfinite,
    find_unfit,
    is_unfit,
    values_of,
)
from lightning_hiercomm.schemes.optimizer_average import OptimizerStateMean
from lightning_hiercomm.schemes.reducers.base import Reducer
from lightning_hiercomm.schemes.reducers.sharded import ShardedAllReduce
from lightning_hiercomm.schemes.samples import SampleWeights
from lightning_hiercomm.schemes.scheme_state import SchemeState


@dataclass(frozen=True)
class Policy:
    """The user's settings for all synchronizations.

    Attributes:
        on_nonfinite: The action if values to be sent are NaN, infinite or too large for the wire: ``"raise"``, or
            ``"ignore"``, which does not check.
        average_optimizer_state: Whether a synchronization of all parameters also averages the optimizer's state.
    """

    on_nonfinite: OnNonfinite = "ignore"
    average_optimizer_state: bool = False


class NonFiniteGuard:
    """Averages the replica, and reports non-finite values.

    Args:
        replica: The parameters and buffers to synchronize.
        topology: The nodes.
        optimizer: The user's optimizer of the parameters.
        policy: The user's settings.
        state: The state of the scheme.
        is_alone: Whether there is no other replica.
        wire: The encoding of parameters, gradients and optimizer state between nodes.
        samples: Weighs nodes with unequal data. None: all ranks keep their weights.
    """

    def __init__(
        self,
        replica: Replica,
        topology: Topology,
        optimizer: Optimizer | None,
        policy: Policy,
        state: SchemeState,
        is_alone: bool,
        wire: Wire,
        samples: SampleWeights | None = None,
    ) -> None:
        self.replica = replica
        self._topology = topology
        self.policy = policy
        self._state = state
        self._is_alone = is_alone
        self._wire = wire
        self._samples = samples
        self._state_mean: OptimizerStateMean | None = None
        if optimizer is not None and policy.average_optimizer_state:
            self._state_mean = OptimizerStateMean(optimizer, topology, wire, policy.on_nonfinite)

    def follow(self, replica: Replica) -> None:
        """Continue from averaged values, perhaps of other parameters."""
        self.replica = replica
        if self._state_mean is not None:
            self._state_mean.forget()

    # ---- averages ------------------------------------------------------------------------------------------------

    def new_round(
        self,
        reducer: Reducer,
        number: int = 0,
        leaving: Sequence[Bucket] | None = None,
        fragments: Sequence[int] | None = None,
    ) -> Round:
        """Make the round of an exchange for which training waits, by its preflight. Collective.

        Args:
            reducer: Runs the exchange.
            number: The number of the exchange.
            leaving: The buckets that are about to be sent. Default: all of the reducer's.
            fragments: The fragments whose samples count. Default: all.

        Raises:
            CommunicationError: On all ranks, if they have taken unequal numbers of steps.
            NonfiniteError: On all ranks, if a rank cannot send, and that is the policy.
        """
        counts = () if self._samples is None else self._samples.since(fragments)
        preflight = reducer.checked(self._state.steps, number, leaving, counts)
        if self._samples is None:
            return preflight.round
        return self._samples.weighed(preflight.round, preflight.counts)

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
        """
        if self._is_alone:
            return
        reducer = ShardedAllReduce(self.replica, self._topology, buckets=buckets, on_nonfinite=self.policy.on_nonfinite)
        round_ = round_ or self.new_round(reducer)
        if weights is None:
            reducer(round_)
        else:
            for of_ranks, indexes in groupby(range(len(buckets)), key=weights.__getitem__):
                reducer(replace(round_, weights=of_ranks), [*indexes])

    def average_optimizer_state(self, round_: Round) -> None:
        """Average the optimizer's state if the policy asks for it; all nodes hold the same parameters."""
        if not self.policy.average_optimizer_state:
            return
        if self._state_mean is None:
            raise ValueError("average_optimizer_state needs the optimizer that trains the replica")
        self._state_mean(self.replica, round_)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for an exact resume; may be empty."""
        return {} if self._state_mean is None else self._state_mean.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` (of a run with the same topology and wire)."""
        if self._state_mean is not None:
            self._state_mean.load_state_dict(state)

    # ---- checks before an exchange -------------------------------------------------------------------------------

    def check(self, buckets: Sequence[Bucket], weight: float | None = None) -> None:
        """Check that values of this node are finite, without a collective over nodes.

        Args:
            buckets: The values.
            weight: The largest factor with which they are about to be sent. None: they are not sent.

        Raises:
            NonfiniteError: On the ranks of this node, if that is the policy.
        """
        if self.policy.on_nonfinite == "raise":
            largest = math.inf if weight is None else self._wire.codec.largest / max(1.0, weight)
            self._check(list(values_of(buckets)), largest)

    def check_gradients(self) -> None:
        """Check that this node's gradients are finite, and small enough to be sent.

        Raises:
            NonfiniteError: On the ranks of this node, if that is the policy.
        """
        if self.policy.on_nonfinite == "raise":
            gradients = [parameter.grad for parameter in self.replica.parameters if parameter.grad is not None]
            self._check(gradients, self._wire.codec.largest, are_gradients=True)

    def _check(self, values: Sequence[Tensor], largest: float, are_gradients: bool = False) -> None:
        device, wire = self.replica.device, self._wire
        narrowed = [value for value in values if wire.compresses(value.dtype)]
        others = [value for value in values if not wire.compresses(value.dtype)]
        unfit = is_unfit(narrowed, largest).to(device) | is_unfit(others).to(device)
        if self.replica.held.shares:
            self._topology.intra.all_reduce(unfit, op="max").wait()
        if not unfit:
            return
        limits = {id(p): largest for p in self.replica.parameters if wire.compresses(p.dtype)}
        found = find_unfit(self.replica, limits, are_gradients)
        if not any(found):
            found = ("values of another rank of the node", None)
        raise NonfiniteError.of({self._topology.rank: found}, self._topology, self._state.steps, wire.codec)
