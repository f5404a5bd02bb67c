"""The clusters of the papers: what the virtual clock of their experiments goes by. Numbers that are ours are named."""

from __future__ import annotations

from benchmarks.predict.cluster import Cluster, Link, Workload
from benchmarks.simulate.simulation import Site

_RESNET50 = 25.6e6
_GBIT = 1e9 / 8


def _site(ranks_per_node: int, inter: float, step: float, intra: float = 300e9) -> Site:
    links = Link(intra, 5e-6), Link(inter, 20e-6)
    return Site(Cluster(2, ranks_per_node, *links), Workload.of_step(_RESNET50, step))


SITES = {
    # node-based communication, sections IV and V: one V100, 100 Gbit/s; ours: 80 ms, and the 10 Gbit/s of TCP over that
    "000": _site(1, 10 * _GBIT, 0.08),
    # SSD-SGD, Fig. 4 and section 4: nodes of 4 V100, 56 Gbit/s, ResNet-50; ours: 100 ms
    "001": _site(4, 56 * _GBIT, 0.1, intra=10e9),
    # DASO, Table 2: nodes of 4 A100, ResNet-50, 200 Gbit/s for each GPU; ours: 75 ms
    "002": _site(4, 800 * _GBIT, 0.075),
    # Crossover-SGD, Fig. 8 to 10: ResNet-50; ours: 10 Gbit/s, 200 ms
    "003": _site(1, 10 * _GBIT, 0.2),
}
"""By the paper's number."""
