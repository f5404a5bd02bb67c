"""DiLoCo: many local steps, then an outer optimizer step on the averaged parameter difference."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_hiercomm.schemes.components.outer import OptimizerFactory, OuterOptimizer
from lightning_hiercomm.schemes.components.schedules import Staggered
from lightning_hiercomm.schemes.parameter_sync import ParameterSync

_FEWEST_SYNCHRONIZATIONS = 200
"""Of published runs: 226 and more, of 30 to 500 steps each. Measured: docs/howto/choose_a_scheme.md."""


class DiLoCo(ParameterSync):
    """Train nodes independently and apply an outer optimizer to their averaged progress every ``sync_every`` steps.

    Let x_m be the parameters of node m, a the outer parameters (equal on all nodes), H = ``sync_every``, P
    ``fragments`` of the model, tau = ``staleness`` and alpha = ``keep_local``, after the t-th step (t = 1, 2, ...)::

        fragment p is due if t % H == ((p + 1) H // P) % H
        if p is due at t + tau:   send d_m = a_p - x_m,p
        if p is due at t:         a_p   := outer(a_p, sum_m W_m d_m)
                                  x_m,p := alpha x_m,p + (1 - alpha) a_p

    Training waits only for the merge. ``staleness=0, fragments=1`` is DiLoCo; more fragments or staleness make it
    Streaming DiLoCo. An outer SGD with learning rate 1 and no momentum averages parameters.

    Every rank stores a and the outer optimizer's state for its own shard of the model, so each needs the memory of one
    model per *node*. Each of M nodes sends ``2 (M - 1) / M`` times the model per period, or an eighth of that with
    ``wire_dtype="int4"``.

    **The averaged model** is the mean of the current x_m, as for every scheme that averages parameters. Validation,
    checkpoints and the end of the run use it, so it includes all local steps. If alpha is 0, it equals a right after
    all fragments are synchronized (when the papers evaluate). A plain checkpoint also stores a and the outer
    optimizer's state in the layout of one process, so a run resumes on any number of nodes.

    For NoLoCo, which exchanges with one random other node instead of all nodes, see
    :class:`~lightning_hiercomm.schemes.parameter_sync.ParameterSync`.

    This example trains synchronously for 1,000 steps before DiLoCo starts::

        HierarchicalStrategy(DiLoCo(64, warmup_steps=1000), wire_dtype="int4")

    On one node this is plain data-parallel training.

    Sources: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", Algorithm 1;
    Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", Algorithm 2. Paper settings:
    ``sync_every=100`` to 500 with AdamW inside; streaming ``staleness=1`` to 5, ``keep_local=0.5``, 4-bit payloads (of
    floating point; ``"int4"`` is a linear code with a scale per block). Using the first paper's outer learning rate
    also for streaming is a choice of this package. ``warmup_steps``: the first paper trains 24,000 steps synchronously
    before; Lin et al. 2018, "Don't Use Large Mini-Batches, Use Local SGD", section 3 (post-local SGD).

    Args:
        sync_every: H, optimizer steps between two synchronizations of the same fragment.
        outer_optimizer: Function that creates the outer optimizer from parameters: any optimizer whose update is
            elementwise, which a trial on other tensors checks. Default: SGD with learning rate 0.7 and Nesterov
            momentum 0.9.
        fragments: P, the number of equal fragments of the model, or a list of module names such as ``["net.layer1",
            "net.layer2"]``: the parameters of each module form one fragment, all others the last one.
        staleness: tau, optimizer steps between sending a fragment and merging it; less than ``sync_every / fragments``.
            Default: 0, wait for it.
        keep_local: alpha, the weight of a node's own parameters when a fragment is merged, from 0 to 1. Default: 0.5
            with ``staleness`` (second paper) and 0 without (first paper).
        warmup_steps: Length of the initial phase in which gradients are averaged over all nodes, as in ``AllReduce``: a
            number of optimizer steps, or a fraction of the run (a float below 1). At its end the outer parameters are
            set to the current parameters, and t counts from 1. Default: 0, no such phase.

    Raises:
        ValueError: If an argument is out of range; when a run begins, if the outer optimizer is not elementwise.
    """

    def __init__(
        self,
        sync_every: int = 100,
        outer_optimizer: OptimizerFactory | None = None,
        fragments: int | list[str] = 1,
        staleness: int = 0,
        keep_local: float | None = None,
        warmup_steps: int | float = 0,
    ) -> None:
        if isinstance(fragments, str) or (isinstance(fragments, int) and fragments < 1) or not fragments:
            raise ValueError(f"fragments={fragments!r} must be a positive number, or a list of module names")
        kept = (0.5 if staleness else 0.0) if keep_local is None else keep_local
        super().__init__(
            schedule=_staggered(sync_every, fragments, staleness),
            fragments=fragments,
            merge=OuterOptimizer(outer_optimizer, kept),
            staleness=staleness,
        )
        self.sync_every = sync_every
        self.keep_local = keep_local
        self.warmup_steps = warmup_steps
        self._begin_synchronously(warmup_steps)

    def check_run(self, nodes: int, steps_of_epoch: float, steps: float) -> Iterator[str]:
        yield from super().check_run(nodes, steps_of_epoch, steps)
        synchronizations = (steps - self.first_phase) // self.sync_every
        if nodes > 1 and 1 <= synchronizations < _FEWEST_SYNCHRONIZATIONS:
            yield (
                f"{self!r} synchronizes nodes {synchronizations:.0f} times in this run of {steps:.0f} optimizer steps."
                f" Published runs have {_FEWEST_SYNCHRONIZATIONS} synchronizations or more, and with fewer a model"
                " learns far less than with DDP. Choose a smaller sync_every, or AllReduce with wire_dtype='int4'."
            )


def _staggered(period: int, fragments: int | list[str], staleness: int) -> Staggered:
    if period < 1:
        raise ValueError(f"sync_every={period} must be a positive number of optimizer steps")
    if isinstance(fragments, int) and fragments > period:
        raise ValueError(f"fragments={fragments} must not exceed sync_every={period}: one fragment is due after a step")
    if isinstance(fragments, int) and not 0 <= staleness < period / fragments:
        raise ValueError(
            f"staleness={staleness} must be from 0 to {-(-period // fragments) - 1}: less than sync_every /"
            f" fragments = {period / fragments:g} steps, because one fragment is pending at a time"
        )
    return Staggered(period)
