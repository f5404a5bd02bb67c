"""The averaged model, which validation uses and checkpoints hold while the nodes differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from lightning_hiercomm.comm.autocast import outside_autocast
from lightning_hiercomm.comm.dtensor import local
from lightning_hiercomm.nodes.checksums import print_of
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.nodes.versions import version_of
from lightning_hiercomm.run.means import RankMeans
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.schemes import RunningScheme, Scheme
from lightning_hiercomm.schemes.reducers.sharded import ShardedAllReduce
from lightning_hiercomm.schemes.samples import SampleWeights


@dataclass
class _Own:
    """This rank's own values of a tensor that holds averaged values now.

    Attributes:
        values: This rank's own values.
        restore_version: Restores the tensor's autograd version counter.
    """

    values: Tensor
    restore_version: Callable[[Tensor], None]

    def put_back(self, tensor: Tensor) -> None:
        tensor.copy_(self.values)
        self.restore_version(tensor)


class AveragedModel:
    """Writes the averaged parameters to the module, and this rank's own ones back.

    Evaluation does not change training: afterwards a rank continues from its own values. So what hooks have written
    over the averaged ones is undone. Rank 0 warns once, unless a callback has put the averaged values back itself.

    A program may change parameters that no optimizer trains: a teacher follows its student (BYOL, DINO, MoCo). Schemes
    do not exchange these, nor buffers that were infinite when the run began. Where such tensors differ between ranks
    and are finite on all, the averaged model holds their mean.

    Attributes:
        barrier: Called before ranks exchange anything for the averaged model. It keeps a rank that asks for the
            averaged model alone from exchanging data with ranks that train.
    """

    def __init__(
        self,
        schemes: Sequence[RunningScheme[Scheme]],
        replicas: Replicas,
        topology: Topology,
        samples: SampleWeights | None = None,
    ) -> None:
        self._schemes = schemes
        self._replicas = replicas
        self._topology = topology
        self.means = RankMeans(schemes, replicas, topology, samples)
        self._own: list[list[_Own] | None] = []  # of each scheme's tensors, where the module holds averaged ones
        self._own_others: list[tuple[Tensor, _Own]] = []  # of tensors that no scheme exchanges
        self._averaged: dict[str, int] = {}  # checksums of averaged values that replace this rank's own ones
        self._has_warned = False
        self._depth = 0
        self.barrier: Callable[[], None] = lambda: None

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
    def check_shapes(self) -> None:
        """Check that ranks hold equal shapes of what they exchange; collective, except with elastic nodes.

        Raises:
            ValueError: On all ranks, if they do not.
        """
        if not self._topology.may_grow:
            self._find_buffers()
            self._replicas.check_shapes(self._topology.world)

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
            self.check_shapes()
            for scheme in self._schemes:
                scheme.state.settle()  # may give back memory, before a copy takes some
            self._remember_own()
            self._synchronize()
            averaged = [s.replica.buffers for s, own in zip(self._schemes, self._own, strict=True) if own is None]
            differing = self.means.differing_others(written=list(chain(*averaged)))
            self._own_others = [(t, _Own(t.detach().clone(), version_of(t))) for t in differing]
            self.means.average(differing)
            self._replicas.have_written()
            self._averaged = self._checksums()

    @outside_autocast()
    def average_differing(self, tensors: Sequence[Tensor]) -> None:
        """Average the tensors that differ between ranks, except elastic nodes. Collective."""
        if not self._topology.may_grow:
            self.means.average(self.means.differing(tensors))

    def _enter_together(self) -> None:
        """Enter with elastic nodes: one synchronization for all schemes, if any node may differ.

        Tensors that no scheme averages (a teacher) stay each node's own: comparing them would make nodes wait for a
        node that joins during a validation.
        """
        self._remember_own()
        if any(own is not None for own in self._own):
            begin_with_copy = [scheme.config.requirements.begins_with_copy for scheme in self._schemes]
            # a node admitted by the last synchronization has no state to contribute yet, and is refused here
            self._topology.synchronize(self._synchronize, admits=all(begin_with_copy))
        self._replicas.have_written()
        self._averaged = self._checksums()

    def _remember_own(self) -> None:
        """Copy this rank's own values before any scheme synchronizes, because two may train one parameter."""
        self._own = []
        for scheme in self._schemes:
            replica = scheme.replica
            versions = () if scheme.state.is_synchronized else [version_of(tensor) for tensor in replica.tensors]
            self._own.append(None if scheme.state.is_synchronized else [*map(_Own, replica.snapshot(), versions)])

    def _synchronize(self) -> None:
        for scheme in self._schemes:
            scheme.synchronize()

    def _find_buffers(self) -> None:
        for scheme in self._schemes:
            scheme.replica.find_buffers()

    def leave(self) -> None:
        """Write this rank's own parameters back, at the end of the outermost :meth:`enter`."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._find_buffers()
            self._warn_of_writes()
            with torch.no_grad():
                for tensor, own in self._all_own():
                    own.put_back(tensor)
            self._own, self._own_others = [], []
            self._replicas.have_written()

    @torch.no_grad()
    def _checksums(self) -> dict[str, int]:
        """Return checksums of the tensors whose own values are stored; none where no warning is due."""
        if self._topology.rank != 0 or self._has_warned:
            return {}
        replaced = {id(tensor) for tensor, _ in self._all_own()}
        module = self._replicas.module
        named = [(name, local(tensor)) for name, tensor in (*module.named_parameters(), *module.named_buffers())]
        return {name: int(print_of(tensor)) for name, tensor in named if id(tensor) in replaced}

    def _warn_of_writes(self) -> None:
        """Warn once of averaged values that were written to, because this rank's own values replace them."""
        if not self._averaged:
            return
        self._replicas.have_written()  # or the module's parameters may be gathered ones
        now, before = self._checksums(), self._averaged
        written = [name for name, checksum in now.items() if before.get(name, checksum) != checksum]
        if written:
            self._has_warned = True
            more = f" and {len(written) - 5} more" if len(written) > 5 else ""
            warnings.warn(
                f"{', '.join(written[:5])}{more}: what was written to the averaged model, in a hook of a validation or"
                " a save, is undone, because training continues from each node's own values. Write in a training hook,"
                " such as on_train_batch_start; leave buffers out of average_buffers",
                stacklevel=3,
            )

    def forget(self) -> None:
        """End the run, perhaps inside of :meth:`enter`: the module keeps what it holds now."""
        self._depth, self._own, self._own_others, self._averaged = 0, [], [], {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the module holds the averaged parameters. Collective."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def own_as_averaged(self) -> Iterator[None]:
        """Inside, this rank's own parameters count as the averaged ones."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def own_values(self) -> dict[int, Tensor]:
        """Return this rank's own values, by the tensor's ``id``, where the module holds averaged ones instead."""
        self._find_buffers()
        return {id(tensor): own.values for tensor, own in self._all_own()}

    def _all_own(self) -> Iterator[tuple[Tensor, _Own]]:
        for scheme, owns in zip(self._schemes, self._own, strict=False):
            if owns is not None:
                yield from zip(scheme.replica.tensors, owns, strict=True)
        yield from self._own_others

    @outside_autocast()
    def average_module(self) -> None:
        """Average the module itself over all ranks, if it differs. Collective.

        Callbacks like StochasticWeightAveraging write their own averages to the module, which differ between nodes.
        """
        if self._topology.may_grow:
            return
        self.check_shapes()
        if self._topology.num_nodes == 1:
            return
        whole = self._replicas.whole()
        if not whole.held.shares:
            # the mean of equal values may differ in the last bit
            self.means.average_kept(self.means.differing(whole.tensors))
        else:
            own = [int(print_of(tensor)) for tensor in whole.tensors]
            prints = self._topology.world.all_gather_object(tuple(own))
            # ranks with shards of a model differ inside their node, but not from the same ranks of other nodes
            if len({tuple(prints[rank] for rank in ranks) for ranks in self._topology.nodes}) > 1:
                ShardedAllReduce(whole, self._topology)(self.means.round)
                self._replicas.have_written()
        self.means.average(self.means.differing_others())
