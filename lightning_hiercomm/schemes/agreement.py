"""A scheme is a sentence of five words: when, what, through whom, as what, merged how."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.replica import Bucket, Replica
from lightning_hiercomm.schemes.averaging import Average, RotatingAverage
from lightning_hiercomm.schemes.base import Gradients, Scheme
from lightning_hiercomm.schemes.graphs import Graph
from lightning_hiercomm.schemes.in_flight import Exchange, InFlight, Move
from lightning_hiercomm.schemes.merging import MERGES, Merge, Replace
from lightning_hiercomm.schemes.outer import OuterOptimizer
from lightning_hiercomm.schemes.peers import PeerMean
from lightning_hiercomm.schemes.when import Every, When
from lightning_hiercomm.topology import Topology

Through = Literal["mean", "rotating"] | Graph
MergeName = Literal["replace", "eq1", "delta"]


class Agreement(Scheme):
    """Nodes train alone and agree on parameters every now and then; what that means is five choices.

    ============  ====================================================  =========================================
    word          question                                              argument
    ============  ====================================================  =========================================
    when          which parts leave, which are due, after this step?    ``when``, ``staleness``
    what          which part of the model?                              ``what``
    through whom  who carries it between nodes?                         ``through``
    as what       what travels?                                         the strategy's ``wire_dtype``
    merged how    what does the node make of what arrives?              ``merge``
    ============  ====================================================  =========================================

    ``PeriodicAveraging``, ``DASO`` and ``DiLoCo`` are such sentences under the names of their papers; any other is
    written with this class. Streaming fragments with plain replacing::

        Agreement(when=Staggered(100), what=4, staleness=5)

    DiLoCo by gossip (NoLoCo: Kolehmainen et al. 2025, Algorithm 1, with its alpha, beta = gamma as momentum and learning
    rate)::

        Agreement(when=50, through=RandomPermutation(), merge=OuterOptimizer())

    After step t, with x the parameters of a part that is due::

        sent after step t - staleness;  x := merge(x, what arrived)

    **The agreed model** is the mean over all nodes; with an outer optimizer, the outer parameters.

    Float buffers (BatchNorm statistics) agree when all parts do at once and training waits for it.

    Args:
        when: The schedule of the merges, or a number of optimizer steps between two of them.
        what: Into how many equal parts the model is cut, or a list of module names: the parameters below each are one
            part, all others the last one. All parts are exchanged in one go where the schedule says so.
        through: ``"mean"``: over all nodes, each rank of a node carrying its part. ``"rotating"``: the same mean, but
            one rank of each node carries everything, the next rank the next time. A
            :class:`~lightning_hiercomm.schemes.graphs.Graph`: the mean with those nodes that the graph names.
        merge: ``"replace"`` by what arrived, ``"eq1"`` (DASO's), ``"delta"`` (keeps local progress), an
            :class:`~lightning_hiercomm.schemes.outer.OuterOptimizer`, or another
            :class:`~lightning_hiercomm.schemes.merging.Merge`.
        staleness: Optimizer steps between sending and merging, in which training goes on. 0 waits.
        gradients: ``"node"``: gradients are averaged inside the node at every step. ``"none"``: every rank trains
            alone between agreements, which then average inside the node as well.

    Raises:
        ValueError: For arguments out of range, or that contradict each other.
    """

    def __init__(
        self,
        when: When | int = 100,
        what: int | list[str] = 1,
        through: Through = "mean",
        merge: Merge | MergeName = "replace",
        staleness: int = 0,
        gradients: Literal["node", "none"] = "node",
    ) -> None:
        super().__init__()
        if isinstance(when, int) and when < 1:
            raise ValueError(f"when={when} must be a positive number of optimizer steps, or a schedule such as Every(50)")
        if isinstance(what, str) or (isinstance(what, int) and what < 1) or not what:
            raise ValueError(f"what={what!r} must be a positive number of parts, or a list of module names")
        if not isinstance(through, Graph) and through not in ("mean", "rotating"):
            raise ValueError(f"through={through!r} must be 'mean', 'rotating' or a Graph such as RandomPermutation()")
        if not isinstance(merge, Merge) and merge not in MERGES:
            raise ValueError(f"merge={merge!r} must be one of {', '.join(map(repr, MERGES))}, or a Merge")
        if staleness < 0:
            raise ValueError(f"staleness={staleness} must not be negative; 0 waits for the exchange")
        self.gradients = check_gradients(gradients)
        self.when = Every(when) if isinstance(when, int) else when
        self.what = what
        self.through = through
        self.merge = merge if isinstance(merge, Merge) else MERGES[merge]()
        self.staleness = staleness
        self.synchronizations = 0
        self._in_flight = InFlight()
        if self.outer is not None and through == "rotating":
            raise ValueError(
                "through='rotating' does not go with an outer optimizer, whose state lies with the rank that carries"
                " a part: use through='mean'"
            )

    @property
    def outer(self) -> OuterOptimizer | None:
        """The outer optimizer, if the merge is one."""
        return self.merge if isinstance(self.merge, OuterOptimizer) else None

    # ---- life of a run -------------------------------------------------------------------------------------------

    def open(self) -> None:
        if self.is_alone:
            return
        # every move between nodes, waited for or not, takes the same communicators, in the order of the program
        self._beside: Topology = self.topology.twin()
        self._inbound: Background = self.background()
        self._outbound = None if self.equal_in_node else self.background()

    def follow(self, replica: Replica) -> None:
        self._in_flight.drop()
        if self.outer is not None and self.outer.is_attached:
            state = self.outer.whole_state()
        super().follow(replica)
        if self.is_alone:
            return
        whole = self.what == 1
        parts = [replica.buckets_of_parameters] if whole else replica.cut(self.what, replica.bucket_bytes)
        self.parts: list[range] = []
        buckets: list[Bucket] = []
        for part in parts:
            self.parts.append(range(len(buckets), len(buckets) + len(part)))
            buckets += part
        self._check_staleness(len(parts))
        self._carrier = self._carrier_of([*buckets, *replica.buckets_of_buffers])
