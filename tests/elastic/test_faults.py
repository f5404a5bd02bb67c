"""Nodes that are killed, stopped and cut off at random: the run goes on, and ends with equal bits."""

from __future__ import annotations

import pytest
from elastic_faults import Outcome, parsed, play, said

pytest.importorskip("torchft", reason="needs the extra `elastic`")

PACE = "--sync-every 10 --pause 0.02 --dead-after 1 --calm 2 --every 1-2"


def outcome_of(folder, arguments: str) -> Outcome:
    given = parsed(f"{PACE} {arguments}".split())
    outcome = play(given, folder)
    assert not outcome.troubles, "\n".join([said(outcome, given), *outcome.troubles])
    assert outcome.equal
    assert outcome.hangs == 0
    return outcome


@pytest.mark.long("twelve nodes are started again, one after the other")
def test_a_dozen_faults(tmp_path):
    outcome = outcome_of(tmp_path, "--nodes 3 --faults 12 --seed 7 --kinds kill stop")
    assert len(outcome.faults) == 12
    assert outcome.lives >= 6, "but for those that were stopped and not missed"
    assert 0 < outcome.kept_with_restarts <= outcome.kept_waits_alone


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scheme", ["diloco", "periodic"])
def test_two_hundred_faults(tmp_path, scheme, seed):
    nodes = 3 + seed % 3
    outcome = outcome_of(tmp_path, f"--nodes {nodes} --faults 20 --seed {seed} --kinds kill stop --scheme {scheme}")
    assert len(outcome.faults) == 20


@pytest.mark.nightly
def test_nodes_that_are_cut_off(tmp_path):
    from benchmarks.network import why_no_namespaces

    reason = why_no_namespaces()
    if reason is not None:
        pytest.skip(reason)
    outcome = outcome_of(tmp_path, "--nodes 4 --faults 10 --seed 1 --kinds cut kill stop")
    assert len(outcome.faults) == 10
