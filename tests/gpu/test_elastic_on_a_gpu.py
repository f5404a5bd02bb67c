"""Elastic nodes that share a GPU: what they exchange passes through pinned memory, and a killed node comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from elastic_cluster import Cluster, ends_equal, heals_to_the_bit, not_forked

pytest.importorskip("torchft", reason="needs the extra `elastic`")


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.nightly), pytest.param("gpu", marks=pytest.mark.gpu)])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Nodes of one rank; on the CPU to see that the test itself is right."""
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("there is no GPU that torch can use")
    settings = {"accelerator": request.param, "notes_states": True, "epochs": 7, "pause": 0.01}
    with Cluster(tmp_path, not_forked, dead_after=3.0, **settings) as nodes:
        yield nodes


pytestmark = pytest.mark.long("each node starts Python and imports torch")


@pytest.mark.parametrize("scheme", ["periodic", "diloco", "fragments", "daso"])
def test_a_killed_node_is_healed_to_the_bit_and_ends_with_the_others(scheme, cluster):
    for node in range(3):
        fault = "kill:in the exchange:3" if node == 1 else ""
        cluster.start(node, scheme=scheme, hold={"40": "1.1"}, fault=fault)
    cluster.watch()
    assert ends_equal(cluster, [0, 1, 2])["loss"] < 0.7
    assert cluster.incarnations == {"0": 0, "1": 1, "2": 0}, cluster.said()
    assert heals_to_the_bit(cluster) >= 1
