"""Means over all ranks of tensors that no scheme exchanges, such as a teacher's parameters or callbacks' averages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hiercomm.comm.autocast import outside_autocast
from lightning_hiercomm.nodes.checksums import print_of
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.round import Round
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import Replicas, broadcast_values, has_mean
from lightning_hiercomm.schemes import RunningScheme, Scheme
from lightning_hiercomm.schemes.reducers.sharded import ShardedAllReduce
from lightning_hiercomm.schemes.samples import SampleWeights


class RankMeans:
    """Averages tensors over all ranks."""

    def __init__(
        self,
        schemes: Sequence[RunningScheme[Scheme]],
        replicas: Replicas,
        topology: Topology,
        samples: SampleWeights | None = None,
    ) -> None:
        self._samples = samples
        self._schemes = schemes
        self._replicas = replicas
        self._topology = topology

    def differing(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that differ between ranks. Collective, if any are given."""
        if self._topology.world_size == 1 or not tensors:
            return []
        # by their values: most programs update a teacher by `parameter.data = ...`, which no version counter counts
        prints = torch.stack([print_of(tensor).to(self._replicas.device) for tensor in tensors])
        bounds = torch.cat([prints, ~prints])
        self._topology.world.all_reduce(bounds, op="max").wait()
        most, least = bounds.chunk(2)
        return [t for t, is_equal in zip(tensors, (most == ~least).tolist(), strict=True) if not is_equal]

    def differing_others(self, written: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return tensors that no scheme averages, differ between ranks and have a mean. Collective, if there are any.

        Args:
            written: Buffers that schemes have averaged, and that the module may have written to since.
        """
        # where schemes have nothing to do, DDP handles buffers
        is_alone = bool(self._schemes) and all(scheme.is_alone for scheme in self._schemes)
        held = [scheme.replica for scheme in self._schemes]
        others = self._replicas.of_no_scheme(held, with_buffers=not is_alone)
        differing = self.differing(others if is_alone else [*others, *written])
        if not differing:
            return []
        lack = torch.tensor([int(not has_mean(tensor)) for tensor in differing], device=self._replicas.device)
        self._topology.world.all_reduce(lack, op="max").wait()
        return [tensor for tensor, lacks in zip(differing, lack.tolist(), strict=True) if not lacks]

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors that are the same on all ranks; unit vectors get the first rank's values. Collective."""
        with_mean, directions = self._replicas.parted(tensors)
        self.average_kept(with_mean)
        broadcast_values(directions, self._topology.world)

    @outside_autocast()
    def average_kept(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors with a mean, such as those that callbacks keep. Collective.

        Args:
            tensors: The same on all ranks.
        """
        if tensors:
            replica = Replica((), tensors, self._replicas.bucket_bytes)
            ShardedAllReduce(replica, self._topology)(self.round)

    @property
    def round(self) -> Round:
        """A synchronization with the weights of the schemes' last one."""
        last = None if self._samples is None else self._samples.round
        return last or self._topology.new_round()
