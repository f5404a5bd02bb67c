"""The averaged model, which validation uses and checkpoints hold while the nodes differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from lightning_hiercomm.comm.autocast import outside_autocast
from lightning_hiercomm.comm.dtensor import local
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.nodes.versions import version_of
from lightning_hiercomm.run.checksums import Checksums
from lightning_hiercomm.run.replicas import Replicas, broadcast_values, has_mean
from lightning_hiercomm.schemes import RunningScheme, Scheme
from lightning_hiercomm.schemes.health.verification import plain, print_of
from lightning_hiercomm.schemes.reducers.all_reduce import ShardedAllReduce


@dataclass
class _Own:
    """This rank's own values of a tensor that holds averaged values now.

    Attributes:
        values: This rank's own values.
        restore_version: Restores the tensor's autograd version counter.
        averaged: The averaged values, for a buffer. A module may write to its buffers during a validation (the best
            score so far), and then keeps what it wrote.
    """

    values: Tensor
    restore_version: Callable[[Tensor], None]
    averaged: Tensor | None = None

    def put_back(self, tensor: Tensor) -> None:
        """Write this rank's own values back to the tensor."""
        values = self.now(tensor)
        if values is not tensor:
            tensor.copy_(values)
            self.restore_version(tensor)

    def now(self, tensor: Tensor) -> Tensor:
        """Return this rank's own values, or the tensor itself if the module has written to it since."""
        if self.averaged is None or torch.equal(_bits(tensor), _bits(self.averaged)):
            return self.values
        return tensor


def _bits(tensor: Tensor) -> Tensor:
    return plain(tensor).contiguous().view(-1).view(torch.uint8)


class AveragedModel:
    """Writes the averaged parameters to the module, and this rank's own ones back.

    Evaluation does not change training: afterwards a rank continues from its own values, except for buffers that the
    module has written to.

    A program may change parameters that no optimizer trains: a teacher follows its student (BYOL, DINO, MoCo). Schemes
    do not exchange these, nor buffers that were infinite when the run began. Where such tensors differ between ranks
    and are finite on all, the averaged model holds their mean.

    Args:
        schemes: One per optimizer.
        replicas: The tensors of the module.
        topology: The nodes.

    Attributes:
        barrier: Called before ranks exchange anything for the averaged model. It keeps a rank that asks for the
            averaged model alone from exchanging data with ranks that train.
        is_left_out: Whether averages that callbacks keep on this rank were non-finite at the end of the run. Then they
            are excluded from the mean over ranks.
        has_found_unequal: Called with the names of tensors that stay each rank's own, when there are more of them.
    """

    def __init__(self, schemes: Sequence[RunningScheme[Scheme]], replicas: Replicas, topology: Topology) -> None:
        self._schemes = schemes
        self._replicas = replicas
        self._topology = topology
        self._own: list[list[_Own] | None] = []  # of each scheme's tensors, where the module holds averaged ones
        self._own_others: list[tuple[Tensor, _Own]] = []  # of tensors that no scheme exchanges
        self._nonfinite: list[tuple[Tensor, Tensor]] = []  # tensors of callbacks, and their values before
        self._depth = 0
        self._watched: tuple[dict[str, Tensor], Checksums] | None = None
        self._before: dict[str, Tensor] = {}  # copies of watched parameters, with elastic nodes
        self.is_left_out = False
        self.barrier: Callable[[], None] = lambda: None
        self.has_found_unequal: Callable[[Collection[str]], None] = lambda names: None

    @property
    def is_in_module(self) -> bool:
        """Whether the module holds the averaged parameters, as far as this rank can tell alone."""
        if self._depth > 0:
            return True
        if not all(scheme.state.is_synchronized for scheme in self._schemes) or self._replicas.of_no_scheme(self._held):
            return False
        return self._topology.may_grow or not any(scheme.replica.buffers for scheme in self._schemes)

    @property
    def _held(self) -> list[Replica]:
        return [scheme.replica for scheme in self._schemes]

    @property
    def is_asked_for(self) -> bool:
        """Whether the module holds the averaged parameters now, or is about to."""
        return self._depth > 0

    @property
    def holds_own_values(self) -> bool:
        """Whether this rank's own values are stored while the module holds the averaged ones."""
        return any(own is not None for own in self._own) or bool(self._own_others)

    @outside_autocast()
    def compare_shapes(self) -> None:
        """Exclude tensors whose shapes differ between ranks; collective, except with elastic nodes.

        Schemes drop their copies of buffers that a rank has replaced by one of another shape, on all ranks alike.
        """
        if self._topology.may_grow:
            return
        self._find_buffers()
        replicas = [scheme.replica for scheme in self._schemes]
        replaced = [(which, place) for which, each in enumerate(replicas) for place in each.replaced_buffers]
        unequal, replaced_anywhere = self._replicas.compare_shapes(self._topology.world, replaced)
        for which, replica in enumerate(replicas):
            places = {place for index, place in replaced_anywhere if index == which}
            places |= {p for p, each in enumerate(replica.buffers) if replica.names.get(id(each)) in unequal}
            if places:
                replica.give_up_buffers(places)
        if unequal:
            self.has_found_unequal(self._replicas.per_rank)

    @outside_autocast()
    def enter(self) -> None:
        """Write the averaged parameters to the module, and store this rank's own; may be nested. Collective."""
        self._depth += 1
        if self._depth == 1:
            if self._topology.may_grow:
                self._find_buffers()
                self._enter_together()
                return
            self.barrier()
            self.compare_shapes()
            for scheme in self._schemes:
                scheme.state.settle()  # may give back memory, before a copy takes some
            self._remember_own()
            self._synchronize()
            averaged = [s.replica.buffers for s, own in zip(self._schemes, self._own, strict=True) if own is None]
            differing = self._differing_others(written=list(chain(*averaged)))
            self._own_others = [(t, _Own(t.detach().clone(), version_of(t))) for t in differing]
            self.average(differing)
            for tensor, own in self._own_others:
                if not isinstance(tensor, nn.Parameter):
                    own.averaged = tensor.clone()
            if self._skips_nonfinite:  # a teacher that followed a non-finite student keeps the mean
                self._own_others = [(tensor, own) for tensor, own in self._own_others if has_mean(own.values)]
            self._replicas.have_written()

    def _enter_together(self) -> None:
        """Enter with elastic nodes: one synchronization for all schemes, if any node may differ.

        Tensors that no scheme averages (a teacher) stay each node's own: comparing them would make nodes wait for a
        node that joins during a validation.
        """
        self._remember_own()
        if any(own is not None for own in self._own):
            # a node admitted by the last synchronization has no state to contribute yet, and is refused here
            self._topology.synchronize(self._synchronize, admits=all(map(_may_be_copied, self._schemes)))
        self._replicas.have_written()

    def _remember_own(self) -> None:
        """Copy this rank's own values before any scheme synchronizes, because two may train one parameter."""
        self._own = []
        for scheme in self._schemes:
            replica = scheme.replica
            versions = () if scheme.state.is_synchronized else [version_of(tensor) for tensor in replica.tensors]
            self._own.append(None if scheme.state.is_synchronized else [*map(_Own, replica.snapshot(), versions)])

    def _synchronize(self) -> None:
        for scheme, owns in zip(self._schemes, self._own, strict=True):
            scheme.synchronize()
            if owns is not None:
                for buffer, own in zip(scheme.replica.buffers, owns[len(scheme.replica.parameters) :], strict=True):
                    own.averaged = buffer.detach().clone()

    def _find_buffers(self) -> None:
        for scheme in self._schemes:
            scheme.replica.find_buffers()

    @outside_autocast()
    def average_differing(self, tensors: Sequence[Tensor]) -> None:
        """Average the tensors that differ between ranks; collective, except with elastic nodes, where it does nothing.

        Args:
            tensors: The same on all ranks, and none sharded.
        """
        if not self._topology.may_grow:
            self.average(self._differing(tensors))

    def _differing(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that differ between ranks. Collective, if any are given."""
        if self._topology.world_size == 1 or not tensors:
            return []
        # by their values: most programs update a teacher by `parameter.data = ...`, which no version counter counts
        prints = torch.stack([print_of(tensor).to(self._replicas.device) for tensor in tensors])
        bounds = torch.cat([prints, ~prints])
        self._topology.world.all_reduce(bounds, op="max").wait()
        most, least = bounds.chunk(2)
        return [t for t, is_equal in zip(tensors, (most == ~least).tolist(), strict=True) if not is_equal]

    def _differing_others(self, written: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return tensors that no scheme averages, differ between ranks and have a mean. Collective, if there are any.

        Args:
            written: Buffers that schemes have averaged, and that the module may have written to since.
        """
        # where schemes have nothing to do, DDP handles buffers
        is_alone = bool(self._schemes) and all(scheme.is_alone for scheme in self._schemes)
        others = self._replicas.of_no_scheme(self._held, with_buffers=not is_alone)
        differing = self._differing(others if is_alone else [*others, *written])
        if not differing:
            return []
        lack = torch.tensor([int(not has_mean(tensor)) for tensor in differing], device=self._replicas.device)
        self._topology.world.all_reduce(lack, op="max").wait()
        left_out = [bool(lacks) for lacks in lack.tolist()]
        if self._skips_nonfinite:  # the mean of parameters is that of the finite ones
            left_out = [out and not isinstance(t, nn.Parameter) for out, t in zip(left_out, differing, strict=True)]
        return [tensor for tensor, out in zip(differing, left_out, strict=True) if not out]

    @property
    def _skips_nonfinite(self) -> bool:
        return any(scheme.guard.policy.on_nonfinite == "skip" for scheme in self._schemes)

    def average(self, tensors: Sequence[Tensor], equal_in_node: bool = False) -> None:
        """Average tensors of no scheme over all ranks (over finite ones with ``on_nonfinite="skip"``). Collective.

        Unit vectors get the first rank's values.

        Args:
            tensors: The same on all ranks.
            equal_in_node: Whether the ranks of a node are known to hold equal values.
        """
        with_mean, directions = self._replicas.parted(tensors)
        self._average(with_mean, equal_in_node, is_nonfinite=False)
        broadcast_values(directions, self._topology.world)

    def average_kept(self, tensors: Sequence[Tensor], equal_in_node: bool = False) -> None:
        """Average what callbacks keep, without ranks whose own values are non-finite. See :meth:`average`."""
        self._average(tensors, equal_in_node, is_nonfinite=bool(self._nonfinite) or self.is_left_out)

    @outside_autocast()
    def _average(self, tensors: Sequence[Tensor], equal_in_node: bool, is_nonfinite: bool) -> None:
        if not tensors:
            return
        weights = self._weights_of_finite(tensors, is_nonfinite)
        replica = Replica((), tensors, self._replicas.bucket_bytes, equal_in_node=equal_in_node)
        ShardedAllReduce(replica, self._topology, weights=None if weights is None else lambda _: weights)()

    @torch.no_grad()
    def _weights_of_finite(self, tensors: Sequence[Tensor], is_nonfinite: bool) -> list[float] | None:
        """Return the weights of ranks, where some are non-finite: 0 for these, whose tensors are zeroed. Collective."""
        topology = self._topology
        if not self._skips_nonfinite:
            return None
        is_finite = not is_nonfinite and all(bool(tensor.isfinite().all()) for tensor in tensors)
        finite = topology.world.all_gather_object(is_finite)
        if all(finite) or not any(finite):
            return None
        if not is_finite:
            for tensor in tensors:
                tensor.zero_()
        weights = [weight * is_one for weight, is_one in zip(topology.weights, finite, strict=True)]
        return [weight / sum(weights) for weight in weights]

    def stand_in(self, replaced: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Register averages of callbacks whose non-finite values were replaced, to put them back in :meth:`leave`.

        Args:
            replaced: The tensors, each with its own values.
        """
        self._nonfinite.extend(replaced)

    def leave(self, kept: Collection[Tensor] = ()) -> None:
        """Write this rank's own parameters back, at the end of the outermost :meth:`enter`.

        Args:
            kept: Parameters that keep their present values.
        """
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._find_buffers()
            ids = {id(local(tensor)) for tensor in kept}
            with torch.no_grad():
                for tensor, own in self._all_own():
                    if id(tensor) not in ids:
                        own.put_back(tensor)
                for tensor, values in self._nonfinite:
                    tensor.copy_(values)
            self._own, self._own_others, self._nonfinite, self._watched, self._before = [], [], [], None, {}
            self._replicas.have_written()

    def drop_own(self) -> None:
        """Let training continue from what the module holds now, inside of :meth:`enter`."""
        self._own, self._own_others = [None for _ in self._schemes], []

    def forget(self) -> None:
        """End the run, perhaps inside of :meth:`enter`: the module keeps what it holds now."""
        self._depth, self._own, self._own_others, self._nonfinite, self._watched, self._before = 0, [], [], [], None, {}

    # ---- parameters that hooks write during a validation ----------------------------------------------------------

    @property
    def is_watched(self) -> bool:
        """Whether :meth:`watch` was called since the outermost :meth:`enter`."""
        return self._watched is not None

    @torch.no_grad()
    def watch(self) -> None:
        """Store checksums of the module's parameters, to find later those that hooks have written to."""
        self._replicas.have_written()  # or they may be gathered ones
        named = self._replicas.module.named_parameters()
        parameters: dict[str, Tensor] = {n: p for n, p in named if n not in self._replicas.per_rank}
        self._watched = parameters, Checksums(parameters)
        self._before = {n: local(p).detach().clone() for n, p in parameters.items()} if self._topology.may_grow else {}

    @torch.no_grad()
    def written(self) -> dict[str, Tensor]:
        """Return the parameters, by name, that any rank has written to since :meth:`watch`. Collective.

        With elastic nodes, return those that this rank has written to, after restoring their values.
        """
        assert self._watched is not None
        parameters, checksums = self._watched
        self._replicas.have_written()
        changed = Checksums(parameters).changed_since(checksums)
        if self._topology.may_grow:
            for name in changed:
                local(parameters[name]).copy_(self._before[name])
            return {name: parameters[name] for name in changed}
        self.barrier()  # or this exchange could match a collective that a validation hook calls on some ranks only
        flags = torch.tensor([int(name in changed) for name in parameters], device=self._replicas.device)
        if parameters:
            self._topology.world.all_reduce(flags, op="max").wait()
        return {name: parameters[name] for name, flag in zip(parameters, flags.tolist(), strict=True) if flag}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the module holds the averaged parameters. Collective."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def nobody_asked(self) -> Iterator[None]:
        """Inside, this rank's own parameters count as the averaged ones."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def own_values(self) -> dict[int, Tensor]:
        """Return this rank's own values, by the tensor's ``id``, where the module holds averaged ones instead."""
        self._find_buffers()
        return {id(tensor): own.now(tensor) for tensor, own in self._all_own()}

    def _all_own(self) -> Iterator[tuple[Tensor, _Own]]:
        for scheme, owns in zip(self._schemes, self._own, strict=False):
            if owns is not None:
                yield from zip(scheme.replica.tensors, owns, strict=True)
        yield from self._own_others

    @outside_autocast()
    def average_module(self) -> None:
        """Average the module itself over all ranks, if it differs. Collective.

        Callbacks like StochasticWeightAveraging write their own averages to the module, different on each node, and
        schemes do not know of them.
        """
        if not self._topology.may_grow:
            self.compare_shapes()
            self._average_module()

    def _average_module(self) -> None:
        ranks_differ = not all(scheme.replica.equal_in_node for scheme in self._schemes)
        if self._topology.num_nodes == 1 and not ranks_differ:
            return
        whole = self._replicas.whole()
        if not whole.shares:
            self.average_kept(self._differing(whole.tensors))  # the mean of equal values may differ in the last bit
        else:
            prints = self._topology.world.all_gather_object(whole.fingerprint())
            # ranks with shards of a model differ inside their node, but not from the same ranks of other nodes
            if len({tuple(prints[rank] for rank in ranks) for ranks in self._topology.nodes}) > 1:
                ShardedAllReduce(whole, self._topology)()
                self._replicas.have_written()
        self.average(self._differing_others())


def _may_be_copied(scheme: RunningScheme[Scheme]) -> bool:
    """Return whether a joining node may begin with a copy of this one's parameters: nothing is pending."""
    return scheme.config.requirements.begins_with_copy and scheme.state.is_settled
