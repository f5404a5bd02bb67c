"""The agreed model: what validation runs on and what a checkpoint holds, while the nodes differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_hiercomm.comm.autocast import outside_autocast
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import Replicas, has_mean
from lightning_hiercomm.schemes import RunningScheme, Scheme
from lightning_hiercomm.schemes.carriers.mean import Average
from lightning_hiercomm.schemes.health.verification import print_of


class AgreedModel:
    """Puts the agreed parameters into the module, and this rank's own ones back.

    Evaluating changes nothing: a rank goes on from where it was. All methods that say so are collective.

    No optimizer trains frozen parameters, but the user may move them: a teacher follows its student (BYOL, DINO, MoCo).
    Nor do buffers travel that were infinite when the run began: masks, and bounds that become finite. What of both
    differs between ranks, and is finite on all, is part of the agreed model by its mean. To see whether it does takes
    one read of it and a few bytes.

    Args:
        schemes: They know what is agreed, each for the parameters of its optimizer.
        replicas: The tensors of the module.
        topology: The nodes.

    Attributes:
        is_left_out: Whether averages that callbacks keep on this rank were sick when the run was over. What they begin
            anew from then is no average, and does not count beside those of other ranks.
    """

    def __init__(self, schemes: Sequence[RunningScheme[Scheme]], replicas: Replicas, topology: Topology) -> None:
        self._schemes = schemes
        self._replicas = replicas
        self._topology = topology
        self._own: list[list[Tensor] | None] = []  # where the module holds the agreed parameters in their place
        self._own_others: dict[int, tuple[Tensor, Tensor]] = {}  # of no scheme, likewise, by the tensor's id
        self._sick: list[tuple[Tensor, Tensor]] = []  # of callbacks, likewise: what something stands in for
        self._depth = 0
        self.is_left_out = False

    @property
    def is_in_module(self) -> bool:
        """Whether it is known, without asking other ranks, that the module holds the agreed parameters."""
        return self._depth > 0 or (
            all(scheme.is_agreed for scheme in self._schemes) and not self._replicas.of_no_scheme()
        )

    @property
    def is_asked_for(self) -> bool:
        """Whether somebody looks at it, or is about to."""
        return self._depth > 0

    @property
    def holds_own_values(self) -> bool:
        """Whether this rank's own values are kept somewhere while the module holds the agreed ones."""
        return any(snapshot is not None for snapshot in self._own) or bool(self._own_others)

    @outside_autocast()
    def enter(self) -> None:
        """Write the agreed parameters to the module, and remember this rank's own; may be nested. Collective."""
        self._depth += 1
        if self._depth == 1:
            self._find_buffers()
            if self._topology.may_grow:
                self._enter_together()
                return
            for scheme in self._schemes:
                scheme.settle()  # may give back memory, before a copy takes some
                self._own.append(None if scheme.is_agreed else scheme.replica.snapshot())
                scheme.agree()
            differing = self._differing_others()
            self._own_others = {id(tensor): (tensor, tensor.detach().clone()) for tensor in differing}
            self.average(differing)
            if self._skips_sick:  # a teacher that followed a sick student is healed
                own = self._own_others.items()
                self._own_others = {key: (tensor, values) for key, (tensor, values) in own if has_mean(values)}
            self._replicas.have_written()

    def _enter_together(self) -> None:
        """The same where nodes come and go: one agreement for all, if there is anything to agree on.

        What no scheme averages (a teacher that the program moves) stays each node's own: it would be compared at every
        validation, and a node that comes just then would be waited for.
        """
        self._own = [None if scheme.is_agreed else scheme.replica.snapshot() for scheme in self._schemes]
        if any(own is not None for own in self._own):
            self._topology.agreement(self._agree)
        self._replicas.have_written()

    def _find_buffers(self) -> None:
        for scheme in self._schemes:
            scheme.replica.find_buffers()

    def _agree(self) -> None:
        for scheme in self._schemes:
            scheme.agree()

    @outside_autocast()
    def average_buffers(self, scheme: RunningScheme[Scheme]) -> None:
        """Write the mean of those buffers in which ranks differ: forward passes move them between steps. Collective."""
        if not self._topology.may_grow:
            self.average(self._differing(scheme.replica.buffers))

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

    def _differing_others(self) -> list[Tensor]:
        """What no scheme averages, in which ranks differ, and which has a mean; collective, if there is any of it."""
        # where schemes have nothing to do, buffers are DDP's
        others = self._replicas.of_no_scheme(with_buffers=not all(scheme.is_alone for scheme in self._schemes))
        differing = self._differing(others)
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
        return any(scheme.care.policy.on_nonfinite == "skip" for scheme in self._schemes)

    def average(self, tensors: Sequence[Tensor], equal_in_node: bool = False) -> None:
        """Write to tensors that no scheme knows their mean (of the healthy, where schemes skip the sick); collective.

        Args:
            tensors: The same on all ranks.
            equal_in_node: Whether those of a node's ranks are known to be equal.
        """
        self._average(tensors, equal_in_node, is_sick=False)

    def average_kept(self, tensors: Sequence[Tensor], equal_in_node: bool = False) -> None:
        """The same for averages that callbacks keep: not of ranks on which something stands in for sick ones."""
        self._average(tensors, equal_in_node, is_sick=bool(self._sick) or self.is_left_out)

    @outside_autocast()
    def _average(self, tensors: Sequence[Tensor], equal_in_node: bool, is_sick: bool) -> None:
        if not tensors:
            return
        weights = self._weights_of_healthy(tensors, is_sick)
        replica = Replica((), tensors, self._replicas.bucket_bytes, equal_in_node=equal_in_node)
        Average(replica, self._topology, weights=None if weights is None else lambda _: weights)()

    @torch.no_grad()
    def _weights_of_healthy(self, tensors: Sequence[Tensor], is_sick: bool) -> list[float] | None:
        """Weights of all ranks, with none for those that are sick: their tensors are set to zero. Collective."""
        topology = self._topology
        if not self._skips_sick:
            return None
        is_healthy = not is_sick and all(bool(tensor.isfinite().all()) for tensor in tensors)
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

    def leave(self) -> None:
        """Put this rank's own parameters back, at the end of the outermost :meth:`enter`."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._find_buffers()
            for scheme, snapshot in zip(self._schemes, self._own, strict=False):
                if snapshot is not None:
                    scheme.replica.restore(snapshot)
            with torch.no_grad():
                for tensor, values in (*self._own_others.values(), *self._sick):
                    tensor.copy_(values)
            self._own_others, self._sick = {}, []
            self._replicas.have_written()
            self._own = []

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
        own: dict[int, Tensor] = {}
        for scheme, snapshot in zip(self._schemes, self._own, strict=False):
            if snapshot is not None:
                own.update(zip(map(id, scheme.replica.tensors), snapshot, strict=True))
        return {**own, **{key: values for key, (_, values) in self._own_others.items()}}

    @outside_autocast()
    def average_module(self) -> None:
        """Average the module itself over all ranks, if it differs; collective.

        Callbacks like StochasticWeightAveraging put averages of their own into the module, each node another, and no
        scheme knows of them.
        """
        if not self._topology.may_grow:
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
                Average(whole, self._topology)()
                self._replicas.have_written()
        self.average(self._differing_others())
