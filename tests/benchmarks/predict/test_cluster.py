"""The cost of collectives on a link, by the alpha-beta model."""

from __future__ import annotations

import pytest

from benchmarks.predict.cluster import rounds_of


@pytest.mark.parametrize(
    ("move", "members", "ring", "halving"),
    [
        ("all_reduce", 1, 0, 0),
        ("all_reduce", 2, 2, 2),
        ("all_reduce", 8, 14, 6),
        ("all_reduce", 5, 8, 6),
        ("reduce_scatter", 8, 7, 3),
        ("all_gather", 8, 7, 3),
        ("broadcast", 8, 3, 3),
        ("exchange", 8, 1, 1),
    ],
)
def test_rounds(move, members, ring, halving):
    assert (rounds_of(move, members, "ring"), rounds_of(move, members, "halving")) == (ring, halving)
