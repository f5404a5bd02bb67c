"""Nodes that are killed, stopped and cut off at random: the run goes on, and ends with equal bits."""

from __future__ import annotations

import pytest
from elastic_faults import Outcome, parsed, play, said

pytest.importorskip("torchft", reason="needs the extra `elastic`")

PACE = "--sync-every 10 --pause 0.02 --dead-after 2 --calm 1 --every 1-2"


def outcome_of(folder, arguments: str) -> Outcome:
    given = parsed(f"{PACE} {arguments}".split())
    outcome = play(given, folder)
    assert not outcome.troubles, "\n".join([said(outcome, given), *outcome.troubles])
    assert outcome.equal
    assert outcome.hangs == 0
    return outcome


TWO_HUNDRED = [(3 + seed % 3, 20, seed, scheme) for scheme in ("diloco", "periodic") for seed in range(5)]
NEVER_EQUAL = ("fragments", "noloco", "daso")


@pytest.mark.nightly  # a push kills a node in test_processes.py
@pytest.mark.long("nodes are killed and restarted, one after the other")
@pytest.mark.parametrize(
    ("nodes", "faults", "seed", "scheme"), [*TWO_HUNDRED, *((3, 12, 7, scheme) for scheme in ("diloco", *NEVER_EQUAL))]
)
def test_random_faults_of_any_scheme_end_with_equal_bits(tmp_path, nodes, faults, seed, scheme):
    given = f"--nodes {nodes} --faults {faults} --seed {seed} --kinds kill stop --scheme {scheme}"
    outcome = outcome_of(tmp_path, given)
    assert len(outcome.faults) == faults
    assert outcome.incarnations >= faults / 4, "a stopped node may continue before the others miss it"
    assert 0 < outcome.kept_with_restarts <= outcome.kept_waits_alone


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
