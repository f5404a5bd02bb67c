"""The agreed model: what validation runs on and what a checkpoint holds, while the nodes differ."""

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
from lightning_hiercomm.run.replicas import Replicas, broadcast_values, has_mean
from lightning_hiercomm.schemes import RunningScheme, Scheme
from lightning_hiercomm.schemes.health.verification import plain, print_of
from lightning_hiercomm.schemes.reducers.all_reduce import ShardedAllReduce


@dataclass
class _Own:
    """What this rank held where the module holds something agreed.

    Attributes:
        values: This rank's own.
        restore_version: Makes autograd take the tensor for unchanged, if it is the one that held them.
        agreed: Of a buffer, what the module got. A module may write to its buffers while it is looked at (the best
            score so far): what is there then is its own from now on.
    """

    values: Tensor
    restore_version: Callable[[Tensor], None]
    agreed: Tensor | None = None

    def put_back(self, tensor: Tensor) -> None:
        """Write the rank's own to where it was."""
        values = self.now(tensor)
        if values is not tensor:
            tensor.copy_(values)
            self.restore_version(tensor)

    def now(self, tensor: Tensor) -> Tensor:
        """The rank's own, after whatever was written to the tensor meanwhile."""
        if self.agreed is None or torch.equal(_bits(tensor), _bits(self.agreed)):
            return self.values
        return tensor


def _bits(tensor: Tensor) -> Tensor:
    return plain(tensor).contiguous().view(-1).view(torch.uint8)


@dataclass
class _Watched:
    """Parameters that hooks may write to while the module holds the averaged ones.

    Attributes:
        parameters: The same ones on all ranks.
        prints: Checksums of what they held at first.
        before: Where nodes come and go, copies of what they held.
    """

    parameters: Sequence[Tensor]
    prints: Tensor
    before: Sequence[Tensor]

    def are_written(self) -> Tensor:
        """Whether each parameter has other bits now, as integers."""
        return (_prints_of(self.parameters, self.prints.device) != self.prints).int()


def _prints_of(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    prints = [print_of(local(parameter)).to(device) for parameter in parameters]
    return torch.stack(prints) if prints else torch.zeros(0, dtype=torch.int64, device=device)


class AveragedModel:
    """Puts the agreed parameters into the module, and this rank's own ones back.

    Evaluating changes nothing: a rank goes on from where it was, but for buffers that the module itself writes to then.
    All methods that say so are collective.

    No optimizer trains frozen parameters, but the user may move them: a teacher follows its student (BYOL, DINO, MoCo).
    Nor do buffers travel that were infinite when the run began: masks, and bounds that become finite. What of both
    differs between ranks, and is finite on all, is part of the agreed model by its mean. To see whether it does takes
    one read of it and a few bytes.

    Args:
        schemes: They know what is agreed, each for the parameters of its optimizer.
        replicas: The tensors of the module.
        topology: The nodes.

    Attributes:
        barrier: Called before the ranks exchange anything for a look at the averaged model. Where it waits for all
            ranks, one that looks alone exchanges nothing with ranks that train on.
        is_left_out: Whether averages that callbacks keep on this rank were sick when the run was over. What they begin
            anew from then is no average, and does not count beside those of other ranks.
        has_found_unequal: Called with the names of tensors that stay each rank's own, when there are more of them.
    """

    def __init__(self, schemes: Sequence[RunningScheme[Scheme]], replicas: Replicas, topology: Topology) -> None:
        self._schemes = schemes
        self._replicas = replicas
        self._topology = topology
        self._own: list[list[_Own] | None] = []  # of each scheme's tensors, where the module holds what is agreed
        self._own_others: list[tuple[Tensor, _Own]] = []  # of those in which no scheme has anything to do
        self._sick: list[tuple[Tensor, Tensor]] = []  # of callbacks, likewise: what something stands in for
        self._depth = 0
        self._watched: _Watched | None = None
        self.is_left_out = False
        self.barrier: Callable[[], None] = lambda: None
        self.has_found_unequal: Callable[[Collection[str]], None] = lambda names: None

    @property
    def is_in_module(self) -> bool:
        """Whether it is known, without asking other ranks, that the module holds the agreed parameters."""
        if self._depth > 0:
            return True
        if not all(scheme.is_synchronized for scheme in self._schemes) or self._replicas.of_no_scheme(self._held):
            return False
        return self._topology.may_grow or not any(scheme.replica.buffers for scheme in self._schemes)

    @property
    def _held(self) -> list[Replica]:
        return [scheme.replica for scheme in self._schemes]

    @property
    def is_asked_for(self) -> bool:
        """Whether somebody looks at it, or is about to."""
        return self._depth > 0

    @property
    def holds_own_values(self) -> bool:
        """Whether this rank's own values are kept somewhere while the module holds the agreed ones."""
        return any(own is not None for own in self._own) or bool(self._own_others)

    @outside_autocast()
    def compare_shapes(self) -> None:
        """Leave tensors whose shapes differ between ranks to their ranks; collective, except where nodes come and go.

        What schemes hold of buffers that a rank has replaced by another shape is given up, on all ranks alike.
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
        """Write the agreed parameters to the module, and remember this rank's own; may be nested. Collective."""
        self._depth += 1
        if self._depth == 1:
            if self._topology.may_grow:
                self._find_buffers()
                self._enter_together()
                return
            self.barrier()
            self.compare_shapes()
            for scheme in self._schemes:
                scheme.settle()  # may give back memory, before a copy takes some
            self._remember_own()
            self._agree()
            agreed = [s.replica.buffers for s, own in zip(self._schemes, self._own, strict=True) if own is None]
            differing = self._differing_others(moved=list(chain(*agreed)))
            self._own_others = [(t, _Own(t.detach().clone(), version_of(t))) for t in differing]
            self.average(differing)
            for tensor, own in self._own_others:
                if not isinstance(tensor, nn.Parameter):
                    own.agreed = tensor.clone()
            if self._skips_sick:  # a teacher that followed a sick student is healed
                self._own_others = [(tensor, own) for tensor, own in self._own_others if has_mean(own.values)]
            self._replicas.have_written()

    def _enter_together(self) -> None:
        """The same where nodes come and go: one agreement for all, if there is anything to agree on.

        What no scheme averages (a teacher that the program moves) stays each node's own: it would be compared at every
        validation, and a node that comes just then would be waited for.
        """
        self._remember_own()
        if any(own is not None for own in self._own):
            # who was let in by the agreement before is not healed yet, and this one sends it away
            self._topology.synchronize(self._agree, admits=all(scheme.may_be_copied for scheme in self._schemes))
        self._replicas.have_written()

    def _remember_own(self) -> None:
        """Before any scheme agrees, for two may train one parameter."""
        self._own = []
        for scheme in self._schemes:
            replica = scheme.replica
            versions = () if scheme.is_synchronized else [version_of(tensor) for tensor in replica.tensors]
            self._own.append(None if scheme.is_synchronized else [*map(_Own, replica.snapshot(), versions)])

    def _agree(self) -> None:
        for scheme, owns in zip(self._schemes, self._own, strict=True):
            scheme.synchronize()
            if owns is not None:
                for buffer, own in zip(scheme.replica.buffers, owns[len(scheme.replica.parameters) :], strict=True):
                    own.agreed = buffer.detach().clone()

    def _find_buffers(self) -> None:
        for scheme in self._schemes:
            scheme.replica.find_buffers()

    @outside_autocast()
    def average_moved(self, tensors: Sequence[Tensor]) -> None:
        """Write the mean of those in which ranks differ; collective, but where nodes come and go.

        Args:
            tensors: The same on all ranks, and none a share.
        """
        if not self._topology.may_grow:
            self.average(self._differing(tensors))

    def _differing(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those in which ranks differ; collective, if there are any."""
        if self._topology.world_size == 1 or not tensors:
            return []
        # by their values: `parameter.data = ...`, as most teachers are moved, leaves no trace
        prints = torch.stack([print_of(tensor).to(self._replicas.device) for tensor in tensors])
        bounds = torch.cat([prints, ~prints])
        self._topology.world.all_reduce(bounds, op="max").wait()
        most, least = bounds.chunk(2)
        return [t for t, is_equal in zip(tensors, (most == ~least).tolist(), strict=True) if not is_equal]

    def _differing_others(self, moved: Sequence[Tensor] = ()) -> list[Tensor]:
        """What no scheme averages, in which ranks differ, and which has a mean; collective, if there is any of it.

        Args:
            moved: Buffers that schemes have averaged, but somebody may have moved since.
        """
        # where schemes have nothing to do, buffers are DDP's
        is_alone = bool(self._schemes) and all(scheme.is_alone for scheme in self._schemes)
        others = self._replicas.of_no_scheme(self._held, with_buffers=not is_alone)
        differing = self._differing(others if is_alone else [*others, *moved])
        if not differing:
            return []
        lack = torch.tensor([int(not has_mean(tensor)) for tensor in differing], device=self._replicas.device)
        self._topology.world.all_reduce(lack, op="max").wait()
        left_out = [bool(lacks) for lacks in lack.tolist()]
        if self._skips_sick:  # the healthy ones of parameters have a mean
            left_out = [out and not isinstance(t, nn.Parameter) for out, t in zip(left_out, differing, strict=True)]
        return [tensor for tensor, out in zip(differing, left_out, strict=True) if not out]

    @property
    def _skips_sick(self) -> bool:
        return any(scheme.guard.policy.on_nonfinite == "skip" for scheme in self._schemes)

    def average(self, tensors: Sequence[Tensor], equal_in_node: bool = False) -> None:
        """Write to tensors that no scheme knows their mean (of the healthy, where schemes skip the sick); collective.

        Unit vectors get the first rank's values.

        Args:
            tensors: The same on all ranks.
            equal_in_node: Whether those of a node's ranks are known to be equal.
        """
        with_mean, directions = self._replicas.parted(tensors)
        self._average(with_mean, equal_in_node, is_nonfinite=False)
        broadcast_values(directions, self._topology.world)

    def average_kept(self, tensors: Sequence[Tensor], equal_in_node: bool = False) -> None:
        """The same for averages that callbacks keep: not of ranks on which something stands in for sick ones."""
        self._average(tensors, equal_in_node, is_nonfinite=bool(self._sick) or self.is_left_out)

    @outside_autocast()
    def _average(self, tensors: Sequence[Tensor], equal_in_node: bool, is_nonfinite: bool) -> None:
        if not tensors:
            return
        weights = self._weights_of_healthy(tensors, is_nonfinite)
        replica = Replica((), tensors, self._replicas.bucket_bytes, equal_in_node=equal_in_node)
        ShardedAllReduce(replica, self._topology, weights=None if weights is None else lambda _: weights)()

    @torch.no_grad()
    def _weights_of_healthy(self, tensors: Sequence[Tensor], is_nonfinite: bool) -> list[float] | None:
        """Weights of all ranks, with none for those that are sick: their tensors are set to zero. Collective."""
        topology = self._topology
        if not self._skips_sick:
            return None
        is_healthy = not is_nonfinite and all(bool(tensor.isfinite().all()) for tensor in tensors)
        healthy = topology.world.all_gather_object(is_healthy)
        if all(healthy) or not any(healthy):
            return None
        if not is_healthy:
            for tensor in tensors:
                tensor.zero_()
        weights = [weight * is_one for weight, is_one in zip(topology.weights, healthy, strict=True)]
        return [weight / sum(weights) for weight in weights]

    def stand_in(self, sick: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Callbacks look at other values in the place of averages that are sick: see :meth:`average_kept`.

        Args:
            sick: What holds them until :meth:`leave`, and its own.
        """
        self._sick.extend(sick)

    def leave(self, kept: Collection[Tensor] = ()) -> None:
        """Put this rank's own parameters back, at the end of the outermost :meth:`enter`.

        Args:
            kept: Those that keep what the module holds now.
        """
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._find_buffers()
            ids = {id(local(tensor)) for tensor in kept}
            with torch.no_grad():
                for tensor, own in self._all_own():
                    if id(tensor) not in ids:
                        own.put_back(tensor)
                for tensor, values in self._sick:
                    tensor.copy_(values)
            self._own, self._own_others, self._sick, self._watched = [], [], [], None
            self._replicas.have_written()

    def drop_own(self) -> None:
        """Let training go on from what the module holds now, inside of :meth:`enter`."""
        self._own, self._own_others = [None for _ in self._schemes], []

    def forget(self) -> None:
        """The run is over, perhaps while somebody was looking: what the module holds now stays in it."""
        self._depth, self._own, self._own_others, self._sick, self._watched = 0, [], [], [], None

    # ---- what is written while a validation looks at it ------------------------------------------------------------

    @property
    def is_watched(self) -> bool:
        """Whether :meth:`watch` was called since the outermost :meth:`enter`."""
        return self._watched is not None

    @torch.no_grad()
    def watch(self) -> None:
        """Store checksums of the module's parameters, to find later those that hooks have written to."""
        self._replicas.have_written()  # or they may be gathered ones
        named = self._replicas.module.named_parameters()
        parameters = [parameter for name, parameter in named if name not in self._replicas.per_rank]
        prints = _prints_of(parameters, self._replicas.device)
        before = [local(parameter).detach().clone() for parameter in parameters] if self._topology.may_grow else []
        self._watched = _Watched(parameters, prints, before)

    @torch.no_grad()
    def written(self) -> list[Tensor]:
        """The parameters that were written to, on any rank, since :meth:`watch`. Collective.

        Where nodes come and go, those of this rank; they get back what they held.
        """
        watched = self._watched
        assert watched is not None
        self._replicas.have_written()
        flags = watched.are_written()
        if not self._topology.may_grow and flags.numel():
            self._topology.world.all_reduce(flags, op="max").wait()
        written = [place for place, flag in enumerate(flags.tolist()) if flag]
        if self._topology.may_grow:
            for place in written:
                local(watched.parameters[place]).copy_(watched.before[place])
        return [watched.parameters[place] for place in written]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the module holds the agreed parameters. Collective."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def nobody_asked(self) -> Iterator[None]:
        """Inside, this rank's own parameters pass for the agreed ones."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def own_values(self) -> dict[int, Tensor]:
        """This rank's own values, by the tensor's ``id``, where the module holds the agreed ones in their place."""
        self._find_buffers()
        return {id(tensor): own.now(tensor) for tensor, own in self._all_own()}

    def _all_own(self) -> Iterator[tuple[Tensor, _Own]]:
        for scheme, owns in zip(self._schemes, self._own, strict=False):
            if owns is not None:
                yield from zip(scheme.replica.tensors, owns, strict=True)
        yield from self._own_others

    @outside_autocast()
    def average_module(self) -> None:
        """Average the module itself over all ranks, if it differs; collective.

        Callbacks like StochasticWeightAveraging put averages of their own into the module, each node another, and no
        scheme knows of them.
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
            self.average_kept(self._differing(whole.tensors))  # a mean of equals may differ from them in the last bit
        else:
            prints = self._topology.world.all_gather_object(whole.fingerprint())
            # ranks that hold parts of a model differ from their node, but not from the same ranks of other nodes
            if len({tuple(prints[rank] for rank in ranks) for ranks in self._topology.nodes}) > 1:
                ShardedAllReduce(whole, self._topology)()
                self._replicas.have_written()
        self.average(self._differing_others())
