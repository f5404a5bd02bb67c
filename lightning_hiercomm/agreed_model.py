"""The agreed model: what validation runs on and what a checkpoint holds, while the nodes differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from lightning_hiercomm.replicas import Replicas
from lightning_hiercomm.schemes import Scheme
from lightning_hiercomm.schemes.averaging import Average
from lightning_hiercomm.topology import Topology


class AgreedModel:
    """Puts the agreed parameters into the module, and this rank's own ones back.

    Evaluating changes nothing: a rank goes on from where it was. All methods that say so are collective.

    Args:
        schemes: They know what is agreed, each for the parameters of its optimizer.
        replicas: The tensors of the module.
        topology: The nodes.
    """

    def __init__(self, schemes: Sequence[Scheme], replicas: Replicas, topology: Topology) -> None:
        self._schemes = schemes
        self._replicas = replicas
        self._topology = topology
        self._own: list[list[Tensor] | None] = []  # where the module holds the agreed parameters in their place
        self._depth = 0

    @property
    def is_in_module(self) -> bool:
        """Whether the module holds the agreed parameters at the moment."""
        return self._depth > 0 or all(scheme.is_agreed for scheme in self._schemes)

    def enter(self) -> None:
        """Write the agreed parameters to the module, and remember this rank's own; may be nested. Collective."""
        self._depth += 1
        if self._depth == 1:
            for scheme in self._schemes:
                scheme.settle()  # may give back memory, before a copy takes some
                self._own.append(None if scheme.is_agreed else scheme.replica.snapshot())
                scheme.agree()
            self._replicas.have_written()

    def leave(self) -> None:
        """Put this rank's own parameters back, at the end of the outermost :meth:`enter`."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            for scheme, snapshot in zip(self._schemes, self._own, strict=False):
                if snapshot is not None:
                    scheme.replica.restore(snapshot)
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

    def own_values(self) -> dict[int, Tensor]:
        """This rank's own values, by the tensor's ``id``, where the module holds the agreed ones in their place."""
        own: dict[int, Tensor] = {}
        for scheme, snapshot in zip(self._schemes, self._own, strict=False):
            if snapshot is not None:
                own.update(zip(map(id, scheme.replica.tensors), snapshot, strict=True))
        return own

    def average_module(self) -> None:
        """Average the module itself over all ranks, if it differs; collective.

        Callbacks like StochasticWeightAveraging put averages of their own into the module, each node another, and no
        scheme knows of them.
        """
        ranks_differ = not all(scheme.equal_in_node for scheme in self._schemes)
        if self._topology.num_nodes > 1 or ranks_differ:
            whole = self._replicas.whole()
            whole = whole.of_ranks_that_differ() if ranks_differ else whole
            prints = self._topology.world.all_gather_object(whole.fingerprint())
            # ranks that hold parts of a model differ from their node, but not from the same ranks of other nodes
            nodes = self._topology.nodes if whole.shares else [[rank] for rank in range(len(prints))]
            if len({tuple(prints[rank] for rank in ranks) for ranks in nodes}) > 1:
                Average(whole, self._topology)()
                self._replicas.have_written()
