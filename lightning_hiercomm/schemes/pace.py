"""Synchronization by the clock: when a node exchanges, and what ranks report to each other at an exchange."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lightning_hiercomm.comm import streams
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.components.schedules import EverySeconds

_MOST_NODES_SHOWN = 32


@dataclass
class NodeProgress:
    """What a node has done since the run began in this process, as of the last exchange.

    Attributes:
        steps: Optimizer steps of one of its ranks.
        samples: Samples of all its ranks.
        weight: Its weight in the last exchange.
        waited: Seconds that it waited for other nodes before exchanges, without the last one.
        delayed: The number of exchanges for which the others waited for it.
    """

    steps: int = 0
    samples: float = 0.0
    weight: float = 0.0
    waited: float = 0.0
    delayed: int = 0


class Pace:
    """The clock of a node, and what all ranks report before an exchange.

    Args:
        topology: The nodes.
        device: The device of the ranks' tensors.
        schedule: When nodes exchange.
        clock: Returns seconds.

    Attributes:
        parts: The number of exchanges in which all fragments are sent.
        has_data: Whether this rank has further batches in this epoch; its owner sets it.
        asks_to_stop: Returns whether this rank asks all to stop training.
        any_has_data: Whether any rank had further batches at the last exchange; equal on all ranks, as the next ones.
        is_asked_to_stop: Whether any rank has asked to stop at the last exchange.
        exchanges: The number of exchanges in this process.
        interval: Seconds between two exchanges.
        nodes: The progress of every node.
        waited_for: The node for which the others waited at the exchange before the last one; None if not known.
    """

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        schedule: EverySeconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._topology = topology
        self._device = device
        self._seconds = schedule.seconds
        self.clock = clock
        self.parts = 1
        self.has_data = True
        self.asks_to_stop: Callable[[], bool] = lambda: False
        self.any_has_data = True
        self.is_asked_to_stop = False
        self.exchanges = 0
        self.nodes = [NodeProgress() for _ in topology.nodes]
        self.waited_for: int | None = None
        self._began = clock()  # the wait for the next exchange
        self._steps, self._samples = 0, 0.0  # of this rank since the last exchange
        self._arrived = self._gathered = 0.0
        self._waited: float | None = None  # before it

    @property
    def interval(self) -> float:
        return self._seconds / self.parts

    @property
    def mean_steps(self) -> int:
        """The mean of the nodes' steps since the run began in this process, rounded down."""
        return sum(node.steps for node in self.nodes) // len(self.nodes)

    def begin_epoch(self) -> None:
        """Start the clock and the epoch's data."""
        self.has_data = self.any_has_data = True
        self.is_asked_to_stop = False
        self._began = self.clock()

    def count(self, samples: float) -> None:
        """Count the samples of a batch."""
        self._samples += samples

    def count_step(self) -> None:
        """Count an optimizer step."""
        self._steps += 1

    def is_due(self) -> bool:
        """Return whether this node exchanges after this step. Collective over the node."""
        is_due = self.clock() - self._began >= self.interval
        topology = self._topology
        if topology.ranks_on_node == 1:
            return is_due
        first = torch.tensor([int(is_due and topology.local_rank == 0)], device=self._device)
        topology.intra.all_reduce(first, op="max").wait()
        return bool(first.item())

    # ---- an exchange ---------------------------------------------------------------------------------------------

    def report(self) -> tuple[float, ...]:
        """Return what this rank reports to all others before an exchange."""
        streams.synchronize(self._device)
        self._arrived = self.clock()
        report = (
            float(self.has_data),
            float(self.asks_to_stop()),
            float(self._steps),
            self._samples,
            -1.0 if self._waited is None else self._waited,
        )
        self._steps, self._samples = 0, 0.0
        self._waited = None
        return report

    def receive(self, reports: Sequence[Sequence[float]]) -> None:
        """Take the reports of all ranks: each row holds a number of every rank."""
        self._gathered = self.clock()
        has_data, asks, steps, samples, waited = reports
        self.any_has_data, self.is_asked_to_stop = any(has_data), any(asks)
        ranks_of = self._topology.nodes
        for node, ranks, weight in zip(self.nodes, ranks_of, self._topology.node_weights, strict=True):
            node.steps += int(steps[ranks[0]])
            node.samples += sum(samples[rank] for rank in ranks)
            node.weight = weight
            node.waited += max(0.0, waited[ranks[0]])
        if min(waited) >= 0:
            waits = [waited[ranks[0]] for ranks in ranks_of]
            self.waited_for = waits.index(min(waits))
            self.nodes[self.waited_for].delayed += 1

    def end_exchange(self) -> None:
        """Start the clock again."""
        streams.synchronize(self._device)
        self._began = self.clock()
        self._waited = self._gathered - self._arrived
        self.exchanges += 1

    # ---- descriptions --------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """Return each node's progress, for loggers."""
        values: dict[str, float] = {"seconds_between_exchanges": self.interval}
        if self.waited_for is not None:
            values["waited_for_node"] = float(self.waited_for)
        for number, node in enumerate(self.nodes[:_MOST_NODES_SHOWN]):
            of_node = {"steps": node.steps, "samples": node.samples, "weight": node.weight, "waited": node.waited}
            values |= {f"node{number}/{name}": float(value) for name, value in of_node.items()}
        return values

    def lines(self) -> list[str]:
        """Return a table of the nodes."""
        head = f"{'':<8}{'steps':>9}{'samples':>12}{'last weight':>13}{'waited, s':>11}{'others waited for it':>22}"
        rows = [
            f"{f'node {number}':<8}{node.steps:>9}{node.samples:>12.0f}{node.weight:>13.3f}{node.waited:>11.2f}"
            f"{node.delayed:>22}"
            for number, node in enumerate(self.nodes[:_MOST_NODES_SHOWN])
        ]
        return [head, *rows]
