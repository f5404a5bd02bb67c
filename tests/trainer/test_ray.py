"""Runs under Ray Train, on a local Ray of two nodes of two CPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ports import free_port

JOB = Path(__file__).resolve().parents[1] / "jobs" / "ray_train.py"
SECONDS = 280  # a loaded machine starts four workers in two minutes


def run(*commands: list[str], seconds: float = SECONDS) -> None:
    """Run Python commands at the same time; all processes that they start end with them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=seconds)
            assert process.returncode == 0, output[-5000:]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    pytest.importorskip("ray.train", reason="needs the extra `ray`")
    folder, port = tmp_path_factory.mktemp("ray"), str(free_port())
    launch = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    job = ["--master-port", port, str(JOB), "--torchrun", "--out", str(folder)]
    run(*([*launch, "--node-rank", str(node), *job] for node in range(2)))
    run([str(JOB), "--out", str(folder)])
    return folder


@pytest.mark.slow
@pytest.mark.long("starts a Ray cluster, and trains three times")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["ray", "killed"])
def test_ray_trains_to_the_bits_of_torchrun(runs, name):
    """Also if a worker was killed in the second epoch: all restart from the checkpoint of the first one."""
    found, expected = (torch.load(runs / f"{each}.pt", weights_only=True) for each in (name, "torchrun"))
    assert found["nodes"] == expected["nodes"] == [[0, 1], [2, 3]]
    assert found["state_dict"].keys() == expected["state_dict"].keys()
    for key, value in expected["state_dict"].items():
        assert torch.equal(found["state_dict"][key], value), key
    began = (runs / f"{name}.epochs").read_text().split()
    assert began == (["0", "1", "2"] if name == "ray" else ["0", "1", "1", "2"])
