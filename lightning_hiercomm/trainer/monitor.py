"""CommunicationMonitor: logs the traffic of a run, and how long training waits for it."""

from __future__ import annotations

import time
from typing import Any, Literal

from lightning_hiercomm._lightning.trainer import batches_that_stepped
from lightning_hiercomm._lightning.tree import check_tree, pl
from lightning_hiercomm.run import traffic
from lightning_hiercomm.trainer.hooks import HierarchicalHooks

_MB = 1e6

_LEVELS = {"intra": "inside nodes", "inter": "between nodes", "world": "over all ranks"}

# Counters of this rank's traffic; every other number of a snapshot is a present value.
_RATES = ("exposed_seconds", *(f"{level}_{unit}" for level in _LEVELS for unit in ("bytes", "exposed_seconds")))
_COUNTERS = (*_RATES, *(f"{level}_messages" for level in _LEVELS), "steps")


class CommunicationMonitor(pl.Callback):
    """Log the bytes sent between and inside nodes, and how long training waited for them.

    Works with any Lightning logger, or none. Every ``trainer.log_every_n_steps`` steps these scalars are logged, on the
    same x-axis as Lightning's own ``self.log``:

    - ``hiercomm/inter_bytes``, ``hiercomm/intra_bytes``: bytes that rank zero's node sends to other nodes, and inside
      itself, per optimizer step; the mean over the steps since the last log.
    - ``hiercomm/world_bytes``: the same for collectives over all ranks, such as the first broadcast of the parameters.
    - ``hiercomm/exposed_seconds``: seconds per optimizer step that rank zero's training waited for communication and
      for slower ranks; ``hiercomm/intra_exposed_seconds``, ``inter_...`` and ``world_...`` are its parts.
    - ``hiercomm/synchronizations``: synchronizations between nodes so far: a mean over the nodes, a merged exchange, a
      pull, one step of gossip, or an average of gradients.
    - ``hiercomm/phase``, ``hiercomm/sync_every``, ``hiercomm/staleness``, ``hiercomm/batch_size``: present values, if
      the scheme has them.
    - ``hiercomm/disagreement``: the distance of rank zero's node from the mean of the nodes in the last
      synchronization, relative to the mean; estimated from a few elements.
    - ``hiercomm/nodes``, ``hiercomm/heals``, ``hiercomm/lost_seconds``, with ``elastic``: the nodes in the last
      synchronization; the nodes that recovered so far; and the seconds that this node waited for nodes that had left.

    At the end of fit rank zero prints a table of the whole run: MB of all nodes, and per step and node; seconds that a
    rank waited; synchronizations; the MB that plain DDP would have sent between nodes; and with ``elastic`` the nodes
    that joined and left.

    With any other strategy it warns once and does nothing, so a run may return to ``"ddp"`` unchanged.

    Each log needs one small collective among the ranks of a node, and the end of fit one among all ranks. A subclass
    whose ``on_fit_end`` does nothing prints no table.

    Example::

        trainer = Trainer(strategy=HierarchicalStrategy("periodic"), callbacks=[CommunicationMonitor()])
    """

    def __init__(self) -> None:
        self._watches = False
        self._before: dict[str, float] = {}
        self._begun = 0.0
        self._first: dict[str, float] = {}
        self._report: str | None = None
        self._last: dict[str, float] = {}
        self._last_step = 0
        self._log_every = 0
        self._next_log = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start counting for the table, or warn that the strategy has nothing to report."""
        if stage != "fit":
            return
        check_tree([trainer])
        self._watches = isinstance(trainer.strategy, HierarchicalHooks)
        if not self._watches:
            pl.utilities.rank_zero_warn(
                f"CommunicationMonitor logs nothing in this run: it needs a HierarchicalStrategy, but the strategy is"
                f" {type(trainer.strategy).__name__}"
            )
        else:
            # an earlier fit of this process is counted too; the first broadcast of the parameters comes later
            self._before = _summed(_strategy(trainer), "world")
            self._begun = time.perf_counter()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting for the logs."""
        if not self._watches:
            return
        self._first = self._last = self._snapshot(trainer)
        self._last_step = trainer.global_step  # not 0 in a resumed run
        self._log_every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set, but not declared
        self._next_log = _next_log(batches_that_stepped(trainer), self._log_every)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, if that is due and an optimizer has stepped since the last log."""
        if not self._watches:
            return
        x = batches_that_stepped(trainer)
        steps = trainer.global_step - self._last_step
        if not self._log_every or x < self._next_log or not steps:
            return
        now = self._snapshot(trainer)
        scalars = {key: value for key, value in now.items() if key not in _COUNTERS}
        scalars |= {key: (now[key] - self._last[key]) / steps for key in _RATES}
        scalars["synchronizations"] -= self._first["synchronizations"]
        self._last, self._last_step = now, trainer.global_step
        self._next_log = _next_log(x + 1, self._log_every)
        for logger in trainer.loggers:
            logger.log_metrics({f"hiercomm/{key}": value for key, value in scalars.items()}, step=x)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the table, with the last synchronization."""
        if self._watches:
            self._report = self._sum_up(_strategy(trainer), trainer.world_size)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the table, after the progress bar is closed."""
        if self._report is not None and trainer.is_global_zero:
            print(self._report)
        self._report = None

    def _snapshot(self, trainer: pl.Trainer) -> dict[str, float]:
        strategy = _strategy(trainer)
        mine, node = strategy.communication(), _summed(strategy, "intra")
        return mine | {key: node[key] for key in node if key.endswith("_bytes")}

    def _sum_up(self, strategy: HierarchicalHooks, ranks: int) -> str:
        seconds, mine = time.perf_counter() - self._begun, strategy.communication()
        steps, synchronizations = (mine[key] - self._first[key] for key in ("steps", "synchronizations"))
        topology, total = strategy.topology, _summed(strategy, "world")
        assert topology is not None
        total = {key: total[key] - self._before.get(key, 0.0) for key in total}
        nodes = topology.nodes_in_world
        lines = [
            f"Communication of {steps:.0f} optimizer steps on {ranks} ranks, {nodes} nodes, in {seconds:.2f} s",
            f"  {'':<22}{'MB sent':>11}{'MB per step and node':>22}{'messages':>10}{'waited, s per rank':>20}",
        ]
        for level, where in _LEVELS.items():
            mb, waited = total[f"{level}_bytes"] / _MB, total[f"{level}_exposed_seconds"] / ranks
            lines.append(
                f"  {f'{level} ({where})':<22}{mb:>11.3f}{mb / max(steps, 1) / nodes:>22.3g}"
                f"{total[f'{level}_messages']:>10.0f}{waited:>20.2f}"
            )
        waited, ddp = total["exposed_seconds"] / ranks, traffic.ddp_inter_bytes(topology, strategy.schemes, steps)
        interval = f"{steps / synchronizations:.3g}" if synchronizations else ""
        every = ", one at every step" if interval == "1" else f", one in {interval} steps" if interval else ""
        lines.append(f"  synchronizations between nodes: {synchronizations:.0f}{every}")
        lines.append(f"  waited for communication: {waited:.2f} s per rank, {waited / seconds:.0%} of the run")
        lines.append(f"  plain DDP between nodes:  {_compared(total, ddp)}")
        lines += [f"  {line}" for line in strategy.history()]
        return "\n".join(lines)


def _strategy(trainer: pl.Trainer) -> HierarchicalHooks:
    strategy = trainer.strategy
    assert isinstance(strategy, HierarchicalHooks)
    return strategy


def _summed(strategy: HierarchicalHooks, level: Literal["intra", "world"]) -> dict[str, float]:
    """Return the strategy's report with counters summed over the ranks of a node, or all. Collective."""
    topology = strategy.topology
    assert topology is not None
    return traffic.summed_over(getattr(topology, level), topology.meter, strategy.communication(), strategy.root_device)


def _next_log(x: int, every: int) -> int:
    """Return the first step from ``x`` on that Lightning logs: ``every - 1``, ``2 * every - 1``, ..."""
    return x if not every else (x // every + 1) * every - 1


def _compared(total: dict[str, float], ddp_bytes: float) -> str:
    # traffic over the world group may stay in a node: counting all of it never overstates what is saved
    sent = total["inter_bytes"] + total["world_bytes"]
    if not ddp_bytes:
        return "nothing, there is one node only"
    megabytes = f"{ddp_bytes / _MB:.3f} MB"
    if ddp_bytes < sent:
        return f"{megabytes}; {sent / ddp_bytes:.1f} times that was sent (inter + world)"
    return f"{megabytes}, {ddp_bytes / sent:.1f} times what was sent (inter + world)" if sent else megabytes
