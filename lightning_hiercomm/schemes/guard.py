"""Checks and repairs of one optimizer's replica: non-finite values, and ranks that differ."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.health.nonfinite import (
    NonfiniteError,
    OnNonfinite,
    begin_state_anew,
    describe,
    is_unfit,
    values_of,
)
from lightning_hiercomm.schemes.health.preflight import Preflight
from lightning_hiercomm.schemes.health.verification import ReplicasDiffer, VerifyReplicas, first_difference
from lightning_hiercomm.schemes.optimizer_average import OptimizerStateMean
from lightning_hiercomm.schemes.reducers.all_reduce import ShardedAllReduce, among, average_in_node
from lightning_hiercomm.schemes.reducers.base import Reducer, UpdateReference

log = logging.getLogger(__name__)

_ADVICE = "Lower the learning rate, clip gradients, or look for the batch with Trainer(detect_anomaly=True)."
_SKIPPING = " on_nonfinite='skip' excludes such a node from a synchronization and gives it the others' mean."
_WHY_RANKS_DIFFER = (
    "Ranks of a node share their gradients, so they should be equal to the bit. Look for what differs between them:"
    " parameters that are changed outside of the optimizer, an optimizer that draws random numbers without a common"
    " seed, kernels that are not deterministic, or a faulty device."
)


@dataclass(frozen=True)
class Policy:
    """The user's settings for all synchronizations.

    Attributes:
        on_nonfinite: The action if values to be sent are NaN or infinite: ``"raise"``, ``"skip"``, or ``"ignore"``,
            which does not check.
        verify_replicas: The action if ranks of a node hold different parameters before a synchronization: ``"raise"``,
            ``"warn"`` (once), or ``"off"``, which does not check.
        average_optimizer_state: Whether a synchronization of all parameters also averages the optimizer's state.
    """

    on_nonfinite: OnNonfinite = "ignore"
    verify_replicas: VerifyReplicas = "off"
    average_optimizer_state: bool = False


class NonFiniteGuard:
    """Averages the replica, and finds and repairs or reports values that are non-finite or differ inside a node.

    Args:
        replica: The parameters and buffers to synchronize.
        topology: The nodes.
        optimizer: The user's, of the replica's parameters.
        policy: The user's settings.
        can_skip: Whether a node can be excluded; error messages then recommend it.
        is_alone: Whether there is no other replica.
        wire: The encoding of parameters and optimizer state between nodes.

    Attributes:
        policy: The user's settings.
        replica: The current parameters and buffers: see :meth:`follow`.
        nonfinite: The number of synchronizations or steps from which a rank was excluded.
        has_healed: Whether this rank, perhaps non-finite, has received finite parameters; the reader clears it.
        has_warned_of_difference: Whether ranks of the node are known to differ.
    """

    def __init__(
        self,
        replica: Replica,
        topology: Topology,
        optimizer: Optimizer | None,
        policy: Policy,
        can_skip: bool,
        is_alone: bool,
        wire: Wire | None = None,
    ) -> None:
        self.replica = replica
        self._topology = topology
        self._optimizer = optimizer
        self.policy = policy
        self._advice = f"{_ADVICE}{_SKIPPING if can_skip else ''}"
        self._is_alone = is_alone
        self._state_mean: OptimizerStateMean | None = None
        if optimizer is not None and policy.average_optimizer_state:
            self._state_mean = OptimizerStateMean(optimizer, topology, wire or Wire(), policy.on_nonfinite)
        self._healthy: frozenset[int] | None = None  # of the current synchronization; None: all
        self.nonfinite = 0
        self.has_healed = False
        self.has_warned_of_difference = False

    def follow(self, replica: Replica) -> None:
        """Continue from averaged, finite values, perhaps of other parameters.

        Args:
            replica: The parameters and buffers to synchronize from now on.
        """
        self.replica = replica
        if self._state_mean is not None:
            self._state_mean.forget()
        if not self._is_alone:
            self.begin_optimizer_anew()

    def average(
        self, buckets: Sequence[Bucket], step: int, weights: Callable[[int], Sequence[float]] | None = None
    ) -> bool:
        """Write the weighted mean over all ranks to some of the replica's buckets, in their own type; blocks.

        Args:
            buckets: Which.
            step: Optimizer steps that were taken, equally many on all ranks.
            weights: Of the ranks, by the bucket's index; they sum to 1. Default: the topology's.

        Returns:
            Whether this rank was non-finite and received the others' mean: see :meth:`repair`.
        """
        if self._is_alone:
            return False
        on_nonfinite = self.policy.on_nonfinite
        average = ShardedAllReduce(
            self.replica,
            self._topology,
            buckets=buckets,
            on_nonfinite=on_nonfinite,
            checks_buffers=True,
            weights=weights,
        )
        return average(step).is_flagged() and self.repair(average, range(len(average.buckets)), step)

    def average_in_node(self, buckets: Sequence[Bucket], step: int) -> None:
        """Write the weighted mean over the ranks of this node, which train alone, to some buckets; blocks.

        Non-finite ranks are excluded, as in :meth:`repair`. If all are, the values stay unchanged until other nodes
        repair them.

        Args:
            buckets: Which.
            step: Optimizer steps that were taken, equally many on all ranks.

        Raises:
            NonfiniteError: On all ranks of the node, if that is the policy.
        """
        topology = self._topology
        if topology.ranks_on_node == 1:
            return
        if not Preflight(topology, step, self._is_unfit(buckets), between_nodes=False).is_flagged():
            average_in_node(buckets, topology)
            return
        found: list[str | None] = topology.intra.all_gather_object(describe(self.replica))
        told = dict(zip(topology.intra.ranks, found, strict=True))
        healthy = [rank for rank, what in told.items() if what is None]
        sick = [f"rank {rank} (node {topology.node}): {what}" for rank, what in told.items() if what is not None]
        trouble = f"after {step} optimizer steps these are NaN or infinite: {'; '.join(sick)}"
        if sick and self.policy.on_nonfinite == "raise":
            raise NonfiniteError(f"{trouble}. {self._advice}")
        if not healthy:
            return
        average_in_node(buckets, topology, healthy)
        if sick and topology.local_rank == 0:
            log.warning("%s. The node goes on without them (on_nonfinite='skip')", trouble)
        self.nonfinite += bool(sick)
        if topology.rank not in healthy:
            self.begin_optimizer_anew()

    def average_optimizer_state(self) -> None:
        """Average the optimizer's state if the policy asks for it; all nodes hold the same parameters."""
        healthy, self._healthy = self._healthy, None
        if not self.policy.average_optimizer_state:
            return
        if self._state_mean is None:
            raise ValueError("average_optimizer_state needs the optimizer that trains the replica")
        self._state_mean(self.replica, healthy)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for an exact resume; may be empty."""
        return {} if self._state_mean is None else self._state_mean.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` (of a run with the same topology and wire)."""
        if self._state_mean is not None:
            self._state_mean.load_state_dict(state)

    def verify(self, step: int) -> None:
        """Check that the ranks of this node hold equal parameters, unless the policy is off. Collective over the node.

        Args:
            step: Optimizer steps that were taken, for people.

        Raises:
            ReplicasDiffer: On all of them, if that is the policy.
        """
        if self.policy.verify_replicas == "off" or not self.replica.equal_in_node:
            return
        difference = first_difference(self.replica, self._topology)
        if difference is None:
            return
        message = f"after {step} optimizer steps {difference}. {_WHY_RANKS_DIFFER}"
        if self.policy.verify_replicas == "raise":
            raise ReplicasDiffer(message)
        if not self.has_warned_of_difference and self._topology.local_rank == 0:
            log.warning("%s", message)
        self.has_warned_of_difference = True

    def look(self, buckets: Sequence[Bucket], step: int) -> bool | None:
        """Return whether values that this node is about to send are non-finite, without a collective over nodes.

        Args:
            buckets: The buckets to be sent.
            step: Optimizer steps that were taken, for messages.

        Returns:
            None if the policy is not to check.

        Raises:
            NonfiniteError: On the ranks of this node, if that is the policy.
        """
        if self.policy.on_nonfinite == "ignore":
            return None
        unfit = self._is_unfit(buckets)
        if self.replica.shares:
            self._topology.intra.all_reduce(unfit, op="max").wait()
        if not unfit:
            return False
        return self.report_nonfinite(describe(self.replica) or "what another rank of the node holds", step)

    def _is_unfit(self, buckets: Sequence[Bucket]) -> Tensor:
        """Return an int64 scalar on the device: 1 if buckets are not finite, and that matters; otherwise 0."""
        looks = self.policy.on_nonfinite != "ignore"
        return is_unfit(values_of(buckets) if looks else ()).to(self.replica.device)

    def has_finite_gradients(self, step: int) -> bool:
        """Return whether this node's gradients may be used and sent; always if the policy is to ignore them.

        Args:
            step: Optimizer steps that were taken, for people.

        Raises:
            NonfiniteError: On the ranks of this node, if that is the policy.
        """
        gradients = [parameter.grad for parameter in self.replica.parameters if parameter.grad is not None]
        if self.policy.on_nonfinite == "ignore" or not is_unfit(gradients):
            return True
        return not self.report_nonfinite(str(describe(self.replica, gradients=True)), step)

    def may_step(self, mean: Tensor, wire: Wire) -> bool:
        """Return whether a shard may step with the mean of finite gradients; on CUDA a bad mean becomes zero instead.

        Args:
            mean: The mean of the gradients.
            wire: The encoding with which they were sent.

        Raises:
            NonfiniteError: On this rank, if the mean is too large for the wire and that is the policy.
        """
        policy = self.policy.on_nonfinite
        if policy == "ignore" or not wire.is_lossy:
            return True
        unfit = is_unfit([mean])
        if streams.has(mean.device) and policy == "skip":
            mean.copy_(torch.where(unfit > 0, 0.0, mean))
            return True
        if not unfit:
            return True
        message = f"the nodes' gradients are finite, but not their sum as {wire.codec}"
        if policy == "raise":
            raise NonfiniteError(f"{message}: use wire_dtype='bfloat16', clip gradients, or on_nonfinite='skip'")
        log.warning("%s: a shard leaves out this step (on_nonfinite='skip')", message)
        return False

    def report_nonfinite(self, found: str, step: int) -> bool:
        """Raise, or count and log that this node's values are not finite.

        Args:
            found: Which values.
            step: Optimizer steps that were taken, for people.

        Returns:
            True.

        Raises:
            NonfiniteError: If that is the policy.
        """
        message = (
            f"after {step} optimizer steps rank {self._topology.rank} (node {self._topology.node}) has values that"
            f" are NaN or infinite: {found}"
        )
        if self.policy.on_nonfinite == "raise":
            raise NonfiniteError(f"{message}. {self._advice}")
        log.warning("%s. The others go on without them (on_nonfinite='skip')", message)
        self.nonfinite += 1
        return True

    @torch.no_grad()
    def repair(
        self,
        spoilt: Reducer,
        indexes: Sequence[int],
        step: int,
        take: Callable[[Bucket, Tensor], None] = Bucket.unpack,
        update_reference: UpdateReference | None = None,
    ) -> bool:
        """Average the buckets of a flagged exchange without the ranks that are not finite. Collective.

        Finite ranks average their current values unencoded, and non-finite ranks receive the mean. It blocks. With H
        the finite ranks::

            mean := sum over H of w_r x_r / sum over H of w_r

        Args:
            spoilt: The reducer of the flagged exchange, which holds the reference parameters.
            indexes: Its buckets.
            step: Optimizer steps that were taken.
            take: Receives every bucket and the values to merge instead of the mean.
            update_reference: Updates the reference parameters with the mean, as for ``spoilt``.

        Returns:
            Whether this rank was non-finite and received the others' mean. If it continues training from that, its
            optimizer state is reset.

        Raises:
            NonfiniteError: On all ranks, if that is the policy, or all ranks are non-finite.
        """
        looks = self.policy.on_nonfinite != "ignore"
        own = describe(self.replica) if looks else None, self.replica.replaced_buffers
        found: list[tuple[str | None, list[int]]] = self._topology.world.all_gather_object(own)
        self._healthy = None
        replaced = set[int]().union(*(places for _, places in found))
        if replaced:  # a rank's module has replaced them by another shape, so each rank keeps its own from now on
            self.replica.give_up_buffers(replaced)
            if not any(what for what, _ in found):
                again = spoilt(step, spoilt.turn, indexes, take)
                return again.is_flagged() and self.repair(spoilt, indexes, step, take, update_reference)
        self._healthy = healthy = self._healthy_of([what for what, _ in found], step, spoilt.wire)
        is_nonfinite = self._topology.rank not in healthy
        buckets = [spoilt.buckets[index] for index in indexes]
        for index, bucket in zip(indexes, buckets, strict=True):
            known = None if update_reference is None else spoilt.whole(index, spoilt.references[index])
            if is_nonfinite:  # weighs nothing; a difference from the reference is zero
                bucket.unpack(bucket.empty().zero_() if known is None else known[: bucket.numel])

        def update_of_healthy(index: int, agreed: Tensor, difference: Tensor) -> Tensor:
            return agreed if update_reference is None else update_reference(indexes[index], agreed, difference)

        def weights_of_healthy(index: int) -> list[float]:
            return among(healthy, spoilt.weights(indexes[index]))

        places = {id(bucket): index for index, bucket in zip(indexes, buckets, strict=True)}

        def take_agreed(bucket: Bucket, agreed: Tensor) -> None:
            own = bucket.pack()
            bucket.unpack(agreed)
            spoilt.restart([places[id(bucket)]])  # from the average, not from each node's merged values
            if not is_nonfinite:  # a non-finite rank has no values to keep
                bucket.unpack(own)
                take(bucket, agreed)

        mean = ShardedAllReduce(
            self.replica,
            self._topology,
            buckets=buckets,
            update_reference=None if update_reference is None else update_of_healthy,
            weights=weights_of_healthy,
        )
        if update_reference is not None:
            mean.references = [spoilt.references[index] for index in indexes]
        mean(step, take=take_agreed)
        self.nonfinite += 1
        return is_nonfinite

    def _healthy_of(self, found: Sequence[str | None], step: int, wire: Wire) -> frozenset[int]:
        """The ranks whose values are finite.

        Ranks of a node that hold the same parameters are excluded together.

        Args:
            found: The name of each rank's non-finite values, or None.
            step: Optimizer steps that were taken, for people.
            wire: Of the flagged exchange.

        Raises:
            NonfiniteError: On all ranks, if that is the policy, or all ranks are non-finite.
        """
        topology = self._topology
        sick = {rank for rank, what in enumerate(found) if what is not None}
        where = {rank: node for node, ranks in enumerate(topology.nodes) for rank in ranks}
        said = "; ".join(f"rank {rank} (node {where[rank]}): {found[rank]}" for rank in sorted(sick)[:8])
        trouble = (
            f"after {step} optimizer steps these are NaN or infinite: {said}"
            if sick
            else f"after {step} optimizer steps all parameters are finite, but some may be too large for {wire.codec}"
        )
        if self.replica.equal_in_node:
            sick = {rank for ranks in topology.nodes if sick & set(ranks) for rank in ranks}
        healthy = frozenset(range(topology.world_size)) - sick
        if not sick and not wire.is_lossy:  # they have become finite since it was sent
            return healthy
        if not healthy:
            raise NonfiniteError(f"{trouble}. No node is left whose parameters are finite: go back to a checkpoint.")
        if self.policy.on_nonfinite == "raise":
            raise NonfiniteError(f"{trouble}. {self._advice}")
        if topology.rank == 0:
            left_out = "The synchronization excludes them" if sick else "The synchronization is repeated unencoded"
            log.warning("%s. %s (on_nonfinite='skip')", trouble, left_out)
        return healthy

    def begin_optimizer_anew(self) -> None:
        """Reset non-finite optimizer state, because this rank continues from finite parameters."""
        if self.policy.on_nonfinite == "skip":
            self.has_healed = True
            if self._optimizer is not None:
                begin_state_anew(self._optimizer)
