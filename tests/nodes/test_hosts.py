"""The default layout of nodes: what the environment reports, unless host names contradict it."""

from __future__ import annotations

import pytest
from problems import warnings_with

from lightning_hiercomm.nodes import hosts
from lightning_hiercomm.nodes.hosts import Place, nodes_by_default, this_host, warn_once

DELIBERATE, ASSUMED = True, False


def places(kind: bool, *of_ranks: tuple[int, int, str]) -> list[Place]:
    """Of ranks with (node, local rank, host name)."""
    return [Place(node, local_rank, "Env", kind, (host, "boot")) for node, local_rank, host in of_ranks]


PLACED = {
    "one node": ((0, 0, "a"), (0, 1, "a")),
    "two hosts": ((0, 0, "a"), (0, 1, "a"), (1, 0, "b"), (1, 1, "b")),
    "a host per rank": ((0, 0, "a"), (1, 0, "b"), (2, 0, "c")),
    "nodes numbered by something else": ((7, 0, "a"), (7, 1, "a"), (3, 0, "b")),
    "equal local ranks on one node": ((0, 0, "a"), (0, 0, "a"), (0, 0, "a")),
    "two nodes of two ranks on one host": ((0, 0, "a"), (0, 1, "a"), (1, 0, "a"), (1, 1, "a")),
    "nodes of two ranks and of one on one host": ((0, 0, "a"), (0, 1, "a"), (1, 0, "a")),
}


@pytest.mark.parametrize("kind", [DELIBERATE, ASSUMED])
@pytest.mark.parametrize("name", PLACED)
def test_the_environment_decides_unless_host_names_contradict_it(name, kind):
    nodes, warning = nodes_by_default(places(kind, *PLACED[name]))
    reported: dict[int, list[int]] = {}
    for rank, (node, _, _) in enumerate(PLACED[name]):
        reported.setdefault(node, []).append(rank)
    assert nodes == [*reported.values()]
    assert warning is None


def test_deliberate_nodes_of_one_rank_on_one_host_are_kept():
    assert nodes_by_default(places(DELIBERATE, (0, 0, "a"), (1, 0, "a"))) == ([[0], [1]], None)


def test_nodes_of_one_rank_on_one_host_are_merged_with_a_warning():
    own = ((0, 0, "a"), (1, 0, "a"), (2, 0, "b"), (3, 0, "b"))
    nodes, warning = nodes_by_default(places(ASSUMED, *own))
    assert nodes == [[0, 1], [2, 3]]
    assert warning == (
        "Env reports the nodes [0] [1] [2] [3], but by host name they are [0, 1] [2, 3] (on a, b). The host names are"
        " used. Set ranks_per_node to choose the nodes, such as ranks_per_node=1 for those of the environment."
    )
    nodes, warning = nodes_by_default(places(ASSUMED, *own[:3]))
    assert nodes == [[0, 1], [2]]
    assert warning is not None


@pytest.mark.parametrize("kind", [DELIBERATE, ASSUMED])
def test_a_node_on_several_hosts_is_one_node_on_each(kind):
    nodes, warning = nodes_by_default(places(kind, (0, 0, "a"), (0, 1, "b"), (0, 2, "a"), (0, 3, "b")))
    assert nodes == [[0, 2], [1, 3]]
    assert warning is not None
    assert "reports the nodes [0, 1, 2, 3], but by host name they are [0, 2] [1, 3] (on a, b)" in warning
    assert "ranks_per_node=4" in warning


def test_long_lists_of_nodes_and_hosts_are_cut():
    _, warning = nodes_by_default(places(ASSUMED, *[(rank, 0, f"h{rank // 2}") for rank in range(64)]))
    assert warning is not None
    assert "[7] ...," in warning
    assert "[14, 15] ... (on h0, h1, h2, h3, h4, h5, h6, h7, ...)" in warning


def test_machines_that_share_a_name_are_several_hosts():
    own = [Place(rank, 0, "Env", ASSUMED, ("localhost", f"boot {rank}")) for rank in range(2)]
    assert nodes_by_default(own) == ([[0], [1]], None)


def test_a_place_has_the_name_of_its_host(monkeypatch):
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "here")
    assert Place(0, 0).host == this_host()
    assert this_host()[0] == "here"


def test_a_contradiction_is_reported_once_per_process():
    warn_once.cache_clear()
    with warnings_with("") as messages:
        for _ in range(2):
            warn_once("nodes")
    assert messages == ["nodes"]
