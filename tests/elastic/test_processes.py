"""Elastic nodes that are processes, over torchft's lighthouse and gloo: undisturbed, killed, and healed."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_cluster import Cluster, ends_equal, exact, heals_to_the_bit
from forked import ForkedPython

pytest.importorskip("torchft", reason="needs the extra `elastic`")

SCHEMES = ["periodic", "diloco"]
NEVER_EQUAL = ["fragments", "noloco", "daso"]
MOMENTS = ["before the quorum", "after the quorum", "in the exchange", "before the vote", "after the vote"]
LASTING = {"epochs": 7, "pause": 0.01}

MakeCluster = Callable[..., Cluster]


@pytest.fixture
def cluster(tmp_path: Path) -> MakeCluster:
    """Nodes that are forks of what has imported Lightning already."""
    return lambda **settings: Cluster(tmp_path, ForkedPython, notes_states=True, **settings)


def plain(tmp_path: Path, ranks: list[int], **settings: Any) -> dict[str, Any]:
    """The same run on nodes of one world, which stay."""
    folder = tmp_path / "plain"
    folder.mkdir()
    nodes = Cluster(folder, ForkedPython)
    environment = {"HIERCOMM_LIGHTHOUSE": ""}
    nodes.start(0, environment, elastic=None, ranks=sum(ranks), settings={"ranks_per_node": ranks}, **settings)
    nodes.watch(restarts=False)
    return nodes.result(0)


@pytest.mark.long("two runs of several nodes; each starts Python")
@pytest.mark.parametrize(
    ("scheme", "ranks"),
    [
        ("periodic", [2, 1]),
        pytest.param("diloco", [1, 1], marks=pytest.mark.nightly),
        pytest.param("periodic", [1, 1], marks=pytest.mark.nightly),
        pytest.param("diloco", [2, 2], marks=pytest.mark.nightly),
        pytest.param("periodic", [1, 1, 1], marks=pytest.mark.nightly),
        pytest.param("diloco", [1, 2, 1], marks=pytest.mark.nightly),
        *(pytest.param(scheme, [1, 1, 1], marks=pytest.mark.nightly) for scheme in NEVER_EQUAL),
        *(pytest.param(scheme, [2, 2], marks=pytest.mark.nightly) for scheme in NEVER_EQUAL),
    ],
)
def test_undisturbed_nodes_end_with_the_bits_of_nodes_that_stay(cluster, tmp_path, scheme, ranks):
    same = {"scheme": scheme, "validates": True, "estimates": len({*ranks}) == 1}
    with cluster(min_nodes=len(ranks), **same) as nodes:
        for node, size in enumerate(ranks):
            nodes.start(node, ranks=size)
        nodes.watch(restarts=False)
        first = ends_equal(nodes, [*range(len(ranks))])
    assert exact(first) == exact(plain(tmp_path, ranks, **same))
    assert "synchronizations between nodes: " in nodes.log(0), "the monitor's table"
    assert first["communication"]["nodes"] == len(ranks)
    assert first["communication"]["heals"] == first["communication"]["lost_seconds"] == 0


def nightly_but(*kept: tuple[str, int, str]) -> list[Any]:
    """All schemes, ranks and moments; those that are not named are left to the nightly job."""
    cases = [(scheme, ranks, moment) for scheme in SCHEMES for ranks in (1, 2) for moment in MOMENTS]
    cases += [(scheme, ranks, "in the exchange") for scheme in NEVER_EQUAL for ranks in (1, 2)]
    cases += [(scheme, 1, "before the vote") for scheme in NEVER_EQUAL]
    return [pytest.param(*case, marks=[] if case in kept else [pytest.mark.nightly]) for case in cases]


@pytest.mark.long("nodes are started, one is killed, missed, and started again")
@pytest.mark.parametrize(("scheme", "ranks", "moment"), nightly_but(("periodic", 2, "before the vote")))
def test_a_killed_node_delays_the_others_by_seconds_and_rejoins(cluster, scheme, ranks, moment):
    hold = {"40": "1.1"}
    with cluster(min_nodes=2, scheme=scheme, ranks=ranks, hold=hold, **LASTING) as nodes:
        nodes.start_all(3, f"kill:{moment}:3", at=1)
        nodes.watch()
        ends_equal(nodes, [0, 1, 2])
        assert nodes.incarnations == {"0": 0, "1": 1, "2": 0}, nodes.said()
        assert heals_to_the_bit(nodes) >= 1
        heals = {nodes.result(node)["communication"]["heals"] for node in range(3)}
        assert heals in ({1}, {2}), "with the third node, if it came when the others had begun"
        assert "node 1 has left" in nodes.log(0) + nodes.log(2)
        assert "node 1 joins" in nodes.log(0)
        table = nodes.log(1, 1).partition("Communication of")[2]
        assert "recovered; waited" in table
        assert "node 1 has left" in table, "a healed node knows the history"


@pytest.mark.parametrize("remembers", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_joining_node_takes_the_lost_data_partition_in_mid_epoch(cluster, remembers):
    """No sample is seen twice. With fewer than min_nodes the others wait."""
    epoch = {"epochs": 1, "batches": 40, "pause": 0.01, "notes_samples": True, "remembers": remembers}
    with cluster(min_nodes=3, scheme="periodic", **epoch) as nodes:
        nodes.start_all(3, "kill:in the exchange:4", at=1)
        nodes.watch()
        ends_equal(nodes, [0, 1, 2])
        seen = nodes.samples()[0]
        assert len(seen) == len({*seen}), "no sample twice"
        assert len(seen) == 8 * 3 * 40, "and all of them once"


@pytest.mark.nightly
def test_a_node_asked_to_leave_leaves_and_the_others_continue(cluster):
    with cluster(min_nodes=2, scheme="periodic", **LASTING) as nodes:
        nodes.start_all(3)
        nodes.watch_until(2, 11)
        os.kill(nodes.living["2"].pid, signal.SIGTERM)
        nodes.watch(restarts=False)
        ends_equal(nodes, [0, 1])
        assert "node 2 has left" in nodes.log(0)


@pytest.mark.nightly
def test_when_all_have_died_the_run_goes_on_from_its_newest_checkpoint(cluster, tmp_path):
    folder = str(tmp_path / "checkpoints")
    with cluster(min_nodes=2, scheme="diloco", checkpoints=folder, resume=True, **LASTING) as nodes:
        nodes.start_all(2)
        nodes.watch_until(0, 21)
        for node in range(2):
            nodes.signal(node, signal.SIGKILL)
        nodes.watch()
        ends_equal(nodes, [0, 1])
        again = [step for _, step in nodes.steps(0)]
        resumed = next(after for before, after in pairwise(again) if after <= before)
        assert resumed > 8, "it began with the checkpoint"
        assert nodes.incarnations == {"0": 1, "1": 1}


@pytest.mark.nightly
def test_run_without_checkpoint_ends_with_an_error_when_all_nodes_died(cluster):
    with cluster(min_nodes=2, scheme="diloco", **LASTING) as nodes:
        nodes.start_all(2)
        nodes.watch_until(0, 11)
        for node in range(2):
            nodes.signal(node, signal.SIGKILL)
        nodes.watch(until=lambda: min(nodes.incarnations.values()) >= 2)
        assert "would begin at step 0 again. Give fit(ckpt_path='last')" in nodes.log(0, 1)


@pytest.mark.nightly
def test_restarted_lighthouse_costs_only_its_absence(cluster):
    with cluster(min_nodes=2, scheme="periodic", **LASTING) as nodes:
        nodes.start_all(2)
        nodes.watch_until(0, 11)
        nodes.stop_lighthouse()
        time.sleep(1.0)
        nodes.start_lighthouse()
        nodes.watch(restarts=False)
        ends_equal(nodes, [0, 1])


GROWN = {"bank": True, "settings": {"average_buffers": ["net.*"]}, "validates": True}
"""Nodes have a buffer whose length changes with every step."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("scheme", "own"), [*((each, {}) for each in (*SCHEMES, *NEVER_EQUAL)), *((each, GROWN) for each in SCHEMES)]
)
def test_a_node_that_was_never_there_joins_in_the_middle(cluster, scheme, own):
    with cluster(min_nodes=2, scheme=scheme, hold={"20": "2.0"}, **own, **LASTING) as nodes:
        nodes.start_all(2)
        nodes.watch_until(0, 1)
        nodes.start(2)
        nodes.watch(restarts=False)
        first = ends_equal(nodes, [0, 1, 2])
        assert first["communication"]["heals"] == 1
        assert "node 2 joins" in nodes.log(0)


@pytest.mark.nightly
def test_writes_of_elastic_nodes_in_a_validation_hook_are_undone(cluster):
    """Each validation comes between two synchronizations; right after one, writes stay (test_writes_in_hooks.py)."""
    ends = []
    for writes in (False, True):
        with cluster(min_nodes=2, scheme="diloco", batches=9, validates=True, writes=writes) as nodes:
            nodes.start_all(2)
            nodes.watch(restarts=False)
            ends.append(ends_equal(nodes, [0, 1])["parameters"])
    assert ends[0] == ends[1]


@pytest.mark.nightly
def test_a_node_that_joins_at_the_last_sync_ends_with_the_others(cluster):
    with cluster(min_nodes=2, scheme="periodic", pause=0.01, hold={"29": "2.0.heard"}) as nodes:
        nodes.start_all(2)
        nodes.watch_until(0, 29)
        nodes.start(2)
        nodes.watch(restarts=False)
        first = ends_equal(nodes, [0, 1, 2])
        assert first["global_step"] == 30
        assert not nodes.steps(2), "it has not trained"


@pytest.mark.nightly
def test_node_too_late_for_the_last_sync_reports_the_end(cluster):
    """It has asked while the others were there, and was asked to wait; it does not begin a run of its own."""
    with cluster(min_nodes=2, scheme="diloco", pause=0.01, hold={"29": "2.0.heard"}) as nodes:
        nodes.start_all(2)
        nodes.watch_until(0, 29)
        nodes.start(2)
        nodes.watch()
        ends_equal(nodes, [0, 1])
        assert ("2", 69) in [(node, code) for node, code, _ in nodes.ended], nodes.said()
        assert "node 2 ends: this run has finished" in nodes.log(2)
        assert "Traceback" not in nodes.log(2)
        assert not nodes.steps(2)
        assert nodes.incarnations["2"] == 0, "it is not started again"


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["periodic", "fragments"])
def test_another_node_writes_checkpoints_when_the_writer_dies(cluster, tmp_path, scheme):
    folder = tmp_path / "checkpoints"
    with cluster(min_nodes=2, scheme=scheme, checkpoints=str(folder), pause=0.01, epochs=6) as nodes:
        nodes.start_all(3, "kill:before the vote:5", at=0)
        nodes.watch(restarts=False)
        first = ends_equal(nodes, [1, 2])
        assert not (nodes.folder / "0.json").exists(), "it is gone for good"
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    assert saved["global_step"] == first["global_step"] == 60
    values = [value for _, value in sorted(saved["state_dict"].items()) if value.is_floating_point()]
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()
    assert digest.startswith(first["parameters"]), "a plain one, of the averaged model"


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["diloco", "fragments"])
@pytest.mark.parametrize(("who", "moment"), [(0, "while it heals"), (1, "while it is healed")])
def test_a_heal_longer_than_dead_after_loses_no_node(cluster, who, moment, scheme):
    """Others wait for who is late: it is not silent."""
    with cluster(min_nodes=2, scheme=scheme, hold={"20": "1.1"}, **LASTING) as nodes:
        for node in range(3):
            faults = {0: "slow:while it heals:1", 1: "slow:while it is healed:1"} if node == who else {}
            nodes.start(node, fault=faults.get(node, ""))
        nodes.watch_until(1, 6)
        nodes.signal(1, signal.SIGKILL)
        nodes.watch()
        ends_equal(nodes, [0, 1, 2])
        assert nodes.incarnations == {"0": 0, "1": 1, "2": 0}, nodes.said()
        assert (nodes.folder / f"{who}.struck").exists(), moment


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["close", "mute"])
@pytest.mark.parametrize("scheme", ["periodic", "diloco"])
def test_all_ranks_repeat_a_sync_when_one_process_group_is_cut(cluster, tmp_path, scheme, what):
    """No node is lost, and it ends with the bits of nodes that stay."""
    with cluster(min_nodes=2, scheme=scheme, ranks=2, **LASTING) as nodes:
        nodes.start_all(2, f"{what}:in the exchange:3", at=1)
        nodes.watch(restarts=False)
        first = ends_equal(nodes, [0, 1])
        assert (nodes.folder / "1.struck").exists()
        assert nodes.incarnations == {"0": 0, "1": 0}
        assert first["communication"]["lost_seconds"] > 0.0
    assert exact(first) == exact(plain(tmp_path, [2, 2], scheme=scheme, **LASTING))
