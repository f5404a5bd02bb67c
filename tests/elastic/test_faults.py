"""Nodes that are killed, stopped and cut off at random: the run goes on, and ends with equal bits."""

from __future__ import annotations

import pytest
from elastic_cluster import Cluster
from elastic_faults import Outcome, network, parsed, play, said
from forked import ForkedPython

pytest.importorskip("torchft", reason="needs the extra `elastic`")

PACE = "--sync-every 10 --pause 0.02 --dead-after 2 --calm 1 --every 1-2"


def outcome_of(folder, arguments: str) -> Outcome:
    given = parsed(f"{PACE} {arguments}".split())
    outcome = play(given, folder)
    assert not outcome.troubles, "\n".join([said(outcome, given), *outcome.troubles])
    assert outcome.equal
    assert outcome.hangs == 0
    return outcome


@pytest.mark.nightly  # a push kills a node in test_processes.py
@pytest.mark.long("nodes are killed and restarted, one after the other")
def test_random_faults_end_with_equal_bits(tmp_path):
    outcome = outcome_of(tmp_path, "--nodes 3 --faults 12 --seed 7 --kinds kill stop")
    assert len(outcome.faults) == 12
    assert outcome.incarnations >= 6, "a stopped node may continue before the others miss it"
    assert 0 < outcome.kept_with_restarts <= outcome.kept_waits_alone


NEVER_EQUAL = ("streaming", "noloco", "daso", "gossip")  # also while something is in flight
TWO_HUNDRED = [(3 + seed % 3, 20, seed, scheme) for scheme in ("diloco", "periodic") for seed in range(5)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("nodes", "faults", "seed", "scheme"), [*TWO_HUNDRED, *((3, 12, 7, scheme) for scheme in NEVER_EQUAL)]
)
def test_random_faults_of_any_scheme_end_with_equal_bits(tmp_path, nodes, faults, seed, scheme):
    given = f"--nodes {nodes} --faults {faults} --seed {seed} --kinds kill stop --scheme {scheme}"
    assert len(outcome_of(tmp_path, given).faults) == faults


@pytest.fixture
def can_cut():
    from benchmarks.network import why_no_namespaces

    reason = why_no_namespaces()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.nightly
@pytest.mark.usefixtures("can_cut")
def test_nodes_that_are_cut_off(tmp_path):
    outcome = outcome_of(tmp_path, "--nodes 4 --faults 10 --seed 1 --kinds cut kill stop")
    assert len(outcome.faults) == 10


@pytest.mark.nightly
@pytest.mark.usefixtures("can_cut")
@pytest.mark.parametrize(("one", "other"), [(0, 2), (1, 2)])
def test_later_of_two_disconnected_nodes_is_excluded_until_they_connect(tmp_path, one, other):
    """Node 0 keeps the vote, and is where groups meet."""
    settings = {"scheme": "diloco", "every": 10, "pause": 0.02, "epochs": 10**6, "batches": 100}
    with network(3, may_cut=True) as wires:
        where = {"namespaces": wires.namespaces, "address": wires.address}
        with Cluster(tmp_path, ForkedPython, 1.0, min_nodes=1, incarnations=100, **where, **settings) as nodes:
            for node in range(3):
                nodes.start(node)

            def steps(node: int) -> int:
                return nodes.steps(node)[-1][1] if nodes.steps(node) else 0

            nodes.watch(until=lambda: min(map(steps, range(3))) > 20)
            wires.part(one, other, True)
            before = steps(one)
            nodes.watch(until=lambda: min(steps(0), steps(1)) > before + 100)
            assert steps(other) < before + 50, nodes.said()
            incarnations = nodes.incarnations[str(other)]
            wires.part(one, other, False)
            nodes.watch(until=lambda: abs(steps(other) - steps(one)) < 20)
            assert nodes.incarnations[str(other)] == incarnations, (
                "its next incarnation has waited, and has disturbed no node"
            )
            (tmp_path / "end").write_text(str((steps(one) // 10 + 8) * 10))
            nodes.watch()
            results = [nodes.result(node) for node in range(3)]
    assert len({each["parameters"] for each in results}) == 1, nodes.said()
