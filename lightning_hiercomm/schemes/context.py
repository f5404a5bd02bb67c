"""The replica, nodes and settings with which a scheme runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.optim import Optimizer

from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.samples import SampleWeights


@dataclass(frozen=True)
class Context:
    """The replica, nodes and settings with which a scheme runs.

    Attributes:
        replica: The parameters and buffers; their values are equal on all ranks.
        topology: The nodes while the scheme runs.
        optimizer: The user's optimizer of these parameters.
        wire: The encoding of parameters between nodes. Default: unencoded.
        samples: Weighs nodes with unequal data in synchronizations. None: all ranks keep their weights.
        average_optimizer_state: Whether a synchronization of all parameters also averages the optimizer's state.
    """

    replica: Replica
    topology: Topology
    optimizer: Optimizer
    wire: Wire = field(default_factory=Wire)
    samples: SampleWeights | None = None
    average_optimizer_state: bool = False
