"""Launches of several processes on two nodes: every launcher, and how each of them says which ranks are a node.

Python itself starts only where MPICH's ranks end well: importing Lightning takes seconds. Otherwise processes are
forked; for MPI, Lightning and where multiprocessing spawns them, behind a program that stands for Python. The commands
that people type are run in examples/test_clusters.py.
"""

from __future__ import annotations

import sys

import pytest
from launches import Job
from ports import free_port


def check_nodes(job: Job, nodes: list[list[int]]) -> str:
    """Check that a run of four ranks had these nodes, and synchronized them by the oracle's table; its output."""
    codes, output = job.end()
    assert not any(codes), output
    reports = job.reports(4)
    assert [report["nodes"] for report in reports] == [nodes] * 4, output
    assert [report["trace"][1] for report in reports] == [3.0] * 4  # weighted by their ranks
    assert sorted(sample for report in reports for sample in report["samples"]) == [*range(20)]
    return output


@pytest.mark.long("starts Python for every rank, and Lightning is imported there")
@pytest.mark.parametrize(
    "launcher",
    # here MPICH's ranks import Lightning; on a push two of them train until one is lost
    ["popen", "fork", "torchrun", "slurm", "openmpi", pytest.param("mpich", marks=pytest.mark.nightly)],
)
def test_every_launcher_follows_the_table_to_the_digit(job, launcher):
    # MPICH kills a stand-in whose fork has ended well, before it can say so itself
    getattr(job, launcher)("--epochs", "2", **({"python": sys.executable} if launcher == "mpich" else {}))
    codes, output = job.end()
    assert not any(codes), output
    expected = [(0.5, 3.5), (3, 3), (2, 5), (3.75, 3.75), (3.875, 3.875), (2.4375, 5.4375), (3.96875, 3.96875)]
    reports = job.reports(4)
    for rank, report in enumerate(reports):
        assert report["nodes"] == [[0, 1], [2, 3]]
        assert report["trace"][:7] == [pair[rank // 2] for pair in expected]
        assert report["x"] == reports[0]["x"]
    assert sorted(sample for report in reports for sample in report["samples"]) == sorted([*range(20)] * 2)


def test_host_names_define_nodes_under_mpiexec(job):
    places = [("localhost", "3"), ("localhost", "3"), ("127.0.0.1", "1"), ("localhost", "3")]
    options = ["--num-nodes", "2", "--inter-node", "torch"]  # MPI starts the ranks, and gloo joins them
    job.mpiexec("openmpi", *(["--host-name", host, "--devices", devices, *options] for host, devices in places))
    check_nodes(job, [[0, 1, 3], [2]])


def test_lsf_nodes_are_hosts_of_the_rank_file(job, tmp_path):
    hosts = ["localhost", "localhost", "127.0.0.1", "127.0.0.1"]
    (tmp_path / "ranks").write_text("\n".join(["launch-node", *hosts]))
    own = {"LSB_JOBID": "7", "LSB_DJOB_RANKFILE": str(tmp_path / "ranks"), "MASTER_PORT": str(free_port())}
    own |= {"JSM_NAMESPACE_SIZE": "4"}
    places = [{**own, "JSM_NAMESPACE_RANK": str(r), "JSM_NAMESPACE_LOCAL_RANK": str(r % 2)} for r in range(4)]
    job.ranks(places, "--devices", "2", "--num-nodes", "2", hosts=hosts)
    assert "The host names are used" not in check_nodes(job, [[0, 1], [2, 3]])


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "digits", "SLURM_NTASKS": "4", "MASTER_ADDR": "127.0.0.1"}


def test_components_of_a_slurm_heterogeneous_job_are_unequal_nodes(job):
    """In a step over several components SLURM counts tasks and nodes over all of them."""
    own = {**SLURM, "SLURM_HET_SIZE": "2", "SLURM_NNODES": "2", "MASTER_PORT": str(free_port())}
    places = [("a", 0, 0, 3), ("a", 0, 1, 3), ("a", 0, 2, 3), ("b", 1, 0, 1)]
    for rank, (host, node, local_rank, devices) in enumerate(places):
        place = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local_rank)}
        place |= {"SLURM_NTASKS_PER_NODE": str(devices), "SLURM_NODELIST": host}  # those of a component
        job.oracle("--host-name", host, "--num-nodes", 2, "--devices", devices, environment={**own, **place})
    assert "The host names are used" not in check_nodes(job, [[0, 1, 2], [3]])


def test_devices_must_be_the_ranks_of_this_node(job):
    job.mpiexec("openmpi", *[["--devices", "1"]] * 2)
    codes, output = job.end()
    assert all(codes)
    assert "Trainer(devices=1), but 2 ranks were started on this node: give devices=2" in output


def test_fast_node_does_not_wait_for_a_slow_one_between_syncs(job):
    job.fork("--steps", "10", "--sync-every", "5", "--last-rank", "1", ranks=1)
    codes, output = job.end()
    assert codes == [0], output
    assert [len(report["trace"]) for report in job.reports(2)] == [10, 10]
