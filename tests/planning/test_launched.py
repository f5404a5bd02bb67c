"""`doctor` on several ranks, as launchers start them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from forked import ForkedPython, stand_in_for_python
from launches import slurm, torchrun

SECONDS = 60


def run_ranks(folder: Path, environments: list[dict[str, str]], *arguments: str) -> list[str]:
    """Start one process for each environment; returns what they said."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        ForkedPython(["-m", "lightning_hiercomm", *arguments], {**common, **own}, folder / f"rank-{rank}", folder)
        for rank, own in enumerate(environments)
    ]
    said = []
    for process in processes:
        text, _ = process.communicate(timeout=SECONDS)
        said.append(re.sub(r"^\[W.*\n", "", text, flags=re.MULTILINE))  # torch warns where the host's name is not known
        assert process.returncode == 0, said
    return said


def test_doctor_names_missing_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("HIERCOMM_TEST", "1")
    first, *_ = torchrun(2, 1)
    process = ForkedPython(
        [
            "-c",
            "from datetime import timedelta; from lightning_hiercomm.planning import doctor;"
            "doctor._PATIENCE = timedelta(seconds=2); raise SystemExit(doctor.examine())",
        ],
        {**os.environ, **first, "OMP_NUM_THREADS": "1"},
        tmp_path / "alone",
        tmp_path,
    )
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "not all ranks reached 127.0.0.1" in said
    assert "rank 1 of 2 did not answer" in said
    assert "python 3" in said


def test_doctor_under_slurm_finds_nodes(tmp_path):
    first, *others = run_ranks(tmp_path, slurm(2, 2), "doctor")
    assert "4 ranks connected over gloo by SLURMEnvironment" in first
    assert "ranks 0-1; node 1" in first
    assert "several nodes are one machine" in first
    assert "a node sends " in first
    assert [said.startswith("waiting at most 60 s for 4 ranks at ") for said in others] == [False, True, False]
    assert [said.count("\n") for said in others] == [0, 1, 0]


@pytest.mark.slow
def test_doctor_under_mpiexec_finds_one_node(mpiexec, tmp_path):
    command, environment = mpiexec("openmpi", 2)
    done = subprocess.run(
        [*command, stand_in_for_python(), "-m", "lightning_hiercomm", "doctor"],
        env={**environment, "GLOO_SOCKET_IFNAME": "lo"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks connected over gloo by MPIEnvironment" in done.stdout
    assert "all ranks are one node" in done.stdout
