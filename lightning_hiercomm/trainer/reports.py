"""Descriptions of a strategy and its run: text, counters, and who joined and left."""

from __future__ import annotations

import contextlib

from lightning_hiercomm._lightning.tree import as_shown, pl
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.nodes.topology import nodes_by_count
from lightning_hiercomm.run import traffic
from lightning_hiercomm.trainer.state import StrategyState


class Reports(StrategyState):
    """Public descriptions of a strategy, which do not change it."""

    def __repr__(self) -> str:
        """The strategy as a user writes it, with the sizes of the nodes if they are known."""
        name, sizes = type(self).__name__, None
        if self.topology is not None:
            sizes = [len(ranks) for ranks in self.topology.nodes]
        elif (chosen := self._settings.ranks_per_node) is not None and self._knows_ranks:
            with contextlib.suppress(ValueError):  # they do not fit: a Trainer raises the error
                sizes = [len(ranks) for ranks in nodes_by_count(chosen, self.world_size)]
        return as_shown(f"{name}({self._settings.as_written(sizes)})")

    def _announce(self) -> None:
        topology, megabytes = self._topology, sum(scheme.replica.nbytes for scheme in self.schemes) / 1e6
        if topology.is_one_node and self.scheme.gradients != "none":
            log = pl.utilities.rank_zero_info if topology.world_size == 1 else pl.utilities.rank_zero_warn
            log(
                f"there is one node, so {self.scheme!r} is plain data-parallel training. If there are more, the cluster"
                " environment does not report them: set ranks_per_node."
            )
            return
        changed = {name: value for name, value in self._settings.changed().items() if name != "ranks_per_node"}
        written = ", ".join([repr(self.scheme), *(f"{name}={value!r}" for name, value in changed.items())])
        nodes = " ".join(str(list(ranks)) for ranks in topology.nodes[:8]) + (" ..." if topology.num_nodes > 8 else "")
        pl.utilities.rank_zero_info(
            f"{topology.num_nodes} nodes {nodes} over {self._settings.transport.inter_node}; {written};"
            f" {megabytes:.3g} MB of parameters and buffers"
        )

    @property
    def meter(self) -> Meter | None:
        """Counts this rank's traffic; None before a Trainer has started the processes."""
        return self.topology.meter if self.topology is not None else None

    @property
    def phase(self) -> str:
        """The phase of the (first) scheme, such as ``"warm-up"``."""
        return self.schemes[0].phase if self.schemes else "not training"

    def communication(self) -> dict[str, float]:
        """Return this rank's counters since the run began, and the schemes' present values, without communication.

        Returns:
            ``intra_bytes``, ``inter_bytes``, ``world_bytes`` (bytes sent by this rank), ``intra_messages``, ...,
            ``exposed_seconds`` (the time training waited) and its parts ``intra_exposed_seconds``, ...,
            ``synchronizations``, ``steps``, and the scheme's own scalars.
        """
        values = traffic.communication(self.meter, self.schemes, self.batches)
        return values if self._elastic_node is None else values | self._elastic_node.membership.history.scalars()

    def node_communication(self) -> dict[str, float]:
        """Return :meth:`communication` with counters summed over this node's ranks. Collective over the node."""
        topology = self._topology
        return traffic.summed_over(topology.intra, topology.meter, self.communication(), self.root_device)

    def total_communication(self) -> dict[str, float]:
        """Return :meth:`communication` with counters summed over all ranks. Collective."""
        topology = self._topology
        return traffic.summed_over(topology.world, topology.meter, self.communication(), self.root_device)

    def history(self) -> list[str]:
        """Return lines about the nodes that joined and left, and the time lost; empty without ``elastic``."""
        return [] if self._elastic_node is None else self._elastic_node.membership.history.lines()

    def ddp_inter_bytes(self, steps: float) -> float:
        """Return the bytes that ring DDP would have sent between nodes, with ``elastic`` those of this node."""
        return traffic.ddp_inter_bytes(self._topology, self.schemes, steps)
