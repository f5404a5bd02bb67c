"""Checks and repairs of one optimizer's replica: non-finite values."""

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
    describe,
    is_unfit,
    reset_nonfinite_state,
    values_of,
)
from lightning_hiercomm.schemes.health.preflight import Preflight
from lightning_hiercomm.schemes.optimizer_average import OptimizerStateMean
from lightning_hiercomm.schemes.reducers.all_reduce import ShardedAllReduce, among, average_in_node
from lightning_hiercomm.schemes.reducers.base import Reducer, UpdateReference
from lightning_hiercomm.schemes.state import SchemeState

log = logging.getLogger(__name__)

_ADVICE = "Lower the learning rate, clip gradients, or look for the batch with Trainer(detect_anomaly=True)."
_SKIPPING = " on_nonfinite='skip' excludes such a node from a synchronization and gives it the others' mean."


@dataclass(frozen=True)
class Policy:
    """The user's settings for all synchronizations.

    Attributes:
        on_nonfinite: The action if values to be sent are NaN or infinite: ``"raise"``, ``"skip"``, or ``"ignore"``,
            which does not check.
        average_optimizer_state: Whether a synchronization of all parameters also averages the optimizer's state.
    """

    on_nonfinite: OnNonfinite = "ignore"
    average_optimizer_state: bool = False


class NonFiniteGuard:
    """Averages the replica, and finds and repairs or reports non-finite values.

    Args:
        replica: The parameters and buffers to synchronize.
        topology: The nodes.
        optimizer: The user's optimizer of the parameters.
        policy: The user's settings.
        state: The state of the scheme, in which exclusions are counted.
        can_skip: Whether a node can be excluded; error messages then recommend it.
        is_alone: Whether there is no other replica.
        wire: The encoding of parameters and optimizer state between nodes.

    Attributes:
        has_healed: Whether this rank, perhaps non-finite, has received finite parameters; the reader clears it.
    """

    def __init__(
        self,
        replica: Replica,
        topology: Topology,
        optimizer: Optimizer | None,
        policy: Policy,
        state: SchemeState,
        can_skip: bool,
        is_alone: bool,
        wire: Wire,
    ) -> None:
        self.replica = replica
        self._topology = topology
        self._optimizer = optimizer
        self.policy = policy
        self._state = state
        self._advice = f"{_ADVICE}{_SKIPPING if can_skip else ''}"
        self._is_alone = is_alone
        self._state_mean: OptimizerStateMean | None = None
        if optimizer is not None and policy.average_optimizer_state:
            self._state_mean = OptimizerStateMean(optimizer, topology, wire, policy.on_nonfinite)
        self._finite_ranks: frozenset[int] | None = None  # of the current synchronization; None: all
        self.has_healed = False

    def follow(self, replica: Replica) -> None:
        """Continue from averaged, finite values, perhaps of other parameters."""
        self.replica = replica
        if self._state_mean is not None:
            self._state_mean.forget()
        if not self._is_alone:
            self.reset_optimizer_state()

    # ---- averages ------------------------------------------------------------------------------------------------

    def average(self, buckets: Sequence[Bucket], weights: Callable[[int], Sequence[float]] | None = None) -> bool:
        """Write the weighted mean over all ranks to some of the replica's buckets, in their own type; blocks.

        Args:
            buckets: The buckets.
            weights: The ranks' weights by the bucket's index; they sum to 1. Default: the topology's.

        Returns:
            Whether this rank was non-finite and received the others' mean: see :meth:`repair`.
        """
        if self._is_alone:
            return False
        average = ShardedAllReduce(
            self.replica,
            self._topology,
            buckets=buckets,
            on_nonfinite=self.policy.on_nonfinite,
            checks_buffers=True,
            weights=weights,
        )
        return average(self._state.steps).is_flagged() and self.repair(average, range(len(average.buckets)))

    def average_in_node(self, buckets: Sequence[Bucket]) -> None:
        """Write the weighted mean over the ranks of this node, which train alone, to some buckets; blocks.

        Non-finite ranks are excluded, as in :meth:`repair`. If all are, the values stay unchanged until other nodes
        repair them.

        Raises:
            NonfiniteError: On all ranks of the node, if that is the policy.
        """
        topology = self._topology
        if topology.ranks_on_node == 1:
            return
        if not Preflight(topology, self._state.steps, self._is_unfit(buckets), between_nodes=False).is_flagged():
            average_in_node(buckets, topology)
            return
        found: list[str | None] = topology.intra.all_gather_object(describe(self.replica))
        finite = [rank for rank, what in zip(topology.intra.ranks, found, strict=True) if what is None]
        nonfinite = [
            f"rank {rank} (node {topology.node}): {what}"
            for rank, what in zip(topology.intra.ranks, found, strict=True)
            if what is not None
        ]
        if nonfinite:
            self._raise_or_warn(
                f"{self._when} these are NaN or infinite: {'; '.join(nonfinite)}",
                "The node averages without them",
                warns=bool(finite) and topology.local_rank == 0,
            )
        if not finite:
            return
        average_in_node(buckets, topology, finite)
        self._state.nonfinite += bool(nonfinite)
        if topology.rank not in finite:
            self.reset_optimizer_state()

    def average_optimizer_state(self) -> None:
        """Average the optimizer's state if the policy asks for it; all nodes hold the same parameters."""
        finite, self._finite_ranks = self._finite_ranks, None
        if not self.policy.average_optimizer_state:
            return
        if self._state_mean is None:
            raise ValueError("average_optimizer_state needs the optimizer that trains the replica")
        self._state_mean(self.replica, finite)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for an exact resume; may be empty."""
        return {} if self._state_mean is None else self._state_mean.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` (of a run with the same topology and wire)."""
        if self._state_mean is not None:
            self._state_mean.load_state_dict(state)

    # ---- checks before an exchange -------------------------------------------------------------------------------

    def check(self, buckets: Sequence[Bucket]) -> bool | None:
        """Return whether values that this node is about to send are non-finite, without a collective over nodes.

        Returns:
            None if the policy is not to check.

        Raises:
            NonfiniteError: On the ranks of this node, if that is the policy.
        """
        if self.policy.on_nonfinite == "ignore":
            return None
        unfit = self._is_unfit(buckets)
        if self.replica.held.shares:
            self._topology.intra.all_reduce(unfit, op="max").wait()
        if not unfit:
            return False
        self._exclude_this_rank(describe(self.replica) or "values of another rank of the node")
        return True

    def has_finite_gradients(self) -> bool:
        """Return whether this node's gradients may be used and sent; always if the policy is to ignore them.

        Raises:
            NonfiniteError: On the ranks of this node, if that is the policy.
        """
        gradients = [parameter.grad for parameter in self.replica.parameters if parameter.grad is not None]
        if self.policy.on_nonfinite == "ignore" or not is_unfit(gradients):
            return True
        self._exclude_this_rank(str(describe(self.replica, gradients=True)))
        return False

    def may_step(self, mean: Tensor, wire: Wire) -> bool:
        """Return whether a shard may step with the mean of finite gradients; on CUDA a bad mean becomes zero instead.

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

    def _is_unfit(self, buckets: Sequence[Bucket]) -> Tensor:
        """Return an int64 scalar on the device: 1 if the policy is to check and buckets are non-finite, otherwise 0."""
        checked = () if self.policy.on_nonfinite == "ignore" else values_of(buckets)
        return is_unfit(checked).to(self.replica.device)

    def _exclude_this_rank(self, found: str) -> None:
        topology = self._topology
        self._raise_or_warn(
            f"{self._when} rank {topology.rank} (node {topology.node}) has values that are NaN or infinite: {found}",
            "The others continue without them",
        )
        self._state.nonfinite += 1

    def _raise_or_warn(self, problem: str, consequence: str, warns: bool = True) -> None:
        if self.policy.on_nonfinite == "raise":
            raise NonfiniteError(f"{problem}. {self._advice}")
        if warns:
            log.warning("%s. %s (on_nonfinite='skip')", problem, consequence)

    @property
    def _when(self) -> str:
        return f"after {self._state.steps} optimizer steps"

    # ---- repairs -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def repair(
        self,
        flagged: Reducer,
        indexes: Sequence[int],
        take: Callable[[Bucket, Tensor], None] = Bucket.unpack,
        update_reference: UpdateReference | None = None,
    ) -> bool:
        """Average the buckets of a flagged exchange without the ranks that are non-finite. Collective.

        Finite ranks average their current values unencoded, and non-finite ranks receive the mean. It blocks. With F
        the finite ranks::

            mean := sum over F of w_r x_r / sum over F of w_r

        Args:
            flagged: The reducer of the flagged exchange, which holds the reference parameters.
            indexes: Its buckets.
            take: Receives every bucket and the values to merge instead of the mean.
            update_reference: Updates the reference parameters with the mean, as for ``flagged``.

        Returns:
            Whether this rank was non-finite and received the others' mean. If it continues training from that, its
            optimizer state is reset.

        Raises:
            NonfiniteError: On all ranks, if that is the policy, or all ranks are non-finite.
        """
        nonfinite = None if self.policy.on_nonfinite == "ignore" else describe(self.replica)
        found: list[tuple[str | None, list[int]]] = self._topology.world.all_gather_object(
            (nonfinite, self.replica.replaced_buffers)
        )
        self._finite_ranks = None
        replaced = {place for _, places in found for place in places}
        if replaced:  # a rank's module has replaced them by another shape, so each rank keeps its own from now on
            self.replica.give_up_buffers(replaced)
            if not any(what for what, _ in found):
                again = flagged(self._state.steps, flagged.turn, indexes, take)
                return again.is_flagged() and self.repair(flagged, indexes, take, update_reference)
        self._finite_ranks = finite = self._find_finite_ranks([what for what, _ in found], flagged.wire)
        is_excluded = self._topology.rank not in finite
        buckets = [flagged.buckets[index] for index in indexes]
        for index, bucket in zip(indexes, buckets, strict=True):
            reference = None if update_reference is None else flagged.whole(index, flagged.references[index])
            if is_excluded:  # its weight is 0, and its difference from the reference must be finite, too
                bucket.unpack(bucket.empty().zero_() if reference is None else reference[: bucket.numel])

        def update(index: int, reference: Tensor, difference: Tensor) -> Tensor:
            return reference if update_reference is None else update_reference(indexes[index], reference, difference)

        index_of = {id(bucket): index for index, bucket in zip(indexes, buckets, strict=True)}

        def take_mean(bucket: Bucket, mean: Tensor) -> None:
            own = bucket.pack()
            bucket.unpack(mean)
            flagged.restart([index_of[id(bucket)]])  # from the average, not from each node's merged values
            if not is_excluded:  # an excluded rank has no values to merge
                bucket.unpack(own)
                take(bucket, mean)

        repaired = ShardedAllReduce(
            self.replica,
            self._topology,
            buckets=buckets,
            update_reference=None if update_reference is None else update,
            weights=lambda index: among(finite, flagged.weights(indexes[index])),
        )
        if update_reference is not None:
            repaired.references = [flagged.references[index] for index in indexes]
        repaired(self._state.steps, take=take_mean)
        self._state.nonfinite += 1
        return is_excluded

    def _find_finite_ranks(self, found: Sequence[str | None], wire: Wire) -> frozenset[int]:
        """Return the ranks whose values are finite; ranks of a node that hold the same are excluded together.

        Raises:
            NonfiniteError: On all ranks, if that is the policy, or all ranks are non-finite.
        """
        topology = self._topology
        nonfinite = {rank for rank, what in enumerate(found) if what is not None}
        node_of = {rank: node for node, ranks in enumerate(topology.nodes) for rank in ranks}
        listed = "; ".join(f"rank {rank} (node {node_of[rank]}): {found[rank]}" for rank in sorted(nonfinite)[:8])
        if self.replica.equal_in_node:
            nonfinite = {rank for ranks in topology.nodes if nonfinite & set(ranks) for rank in ranks}
        finite = frozenset(range(topology.world_size)) - nonfinite
        if nonfinite:
            problem = f"{self._when} these are NaN or infinite: {listed}"
            consequence = "The synchronization excludes them"
        elif wire.is_lossy:
            problem = f"{self._when} all parameters are finite, but some may be too large for {wire.codec}"
            consequence = "The synchronization is repeated unencoded"
        else:
            return finite  # they have become finite since the exchange was started
        if not finite:
            raise NonfiniteError(f"{problem}. No node is left whose parameters are finite: go back to a checkpoint.")
        self._raise_or_warn(problem, consequence, warns=topology.rank == 0)
        return finite

    def reset_optimizer_state(self) -> None:
        """Reset non-finite optimizer state, because this rank continues from finite parameters."""
        if self.policy.on_nonfinite == "skip":
            self.has_healed = True
            if self._optimizer is not None:
                reset_nonfinite_state(self._optimizer)
